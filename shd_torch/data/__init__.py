"""A user's data joined with a cache by sample key: a map-style data set and a stream. Imports ``supervision``."""
