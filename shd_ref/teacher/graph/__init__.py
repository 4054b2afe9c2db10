"""Finding the attention of a graph: maps, values, logits and output projections; nothing here changes a graph."""
