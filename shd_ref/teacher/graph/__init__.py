"""The attention of a graph, in this order.

1. ``inputs``: the inputs of a graph, and tiny runs on it, within bounds of time and memory.
2. ``walk``: from a map, in any spelling of a softmax, to its product with values and on to W_o
   (``projection``), and back to queries and keys; ``measure``: heads and W_o by the sizes of what was walked.
3. ``find``: the sites and their kinds, and those that teach the student's layers.
4. Of sites: ``factors`` (queries, keys, masks), ``targets`` (what else the graph gives).
"""
