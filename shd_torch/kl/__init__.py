"""The loss from queries and keys: one request, several backends, no student map that outlives its tile."""
