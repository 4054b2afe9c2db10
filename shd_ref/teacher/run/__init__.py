"""A teacher over a data set: checked inputs, batches of similar length, the squeezed graph in a session."""
