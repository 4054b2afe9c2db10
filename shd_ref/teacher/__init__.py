"""Teacher graphs: find their attention, squeeze it in the graph, run it offline."""
