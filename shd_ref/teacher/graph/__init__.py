"""The attention of a graph, in this order.

1. ``inputs``: what a graph takes, and tiny runs on it, within bounds of time and memory.
2. ``walk``: from a map, in any of the ``spellings`` of a softmax, to its product with values and on to W_o
   (``projection``), and back to queries and keys; ``measure``: heads and W_o by the sizes of what was walked.
3. ``find``: the sites, judged by whether samples stay apart (``independence``), and their kinds.
4. Of sites: ``factors`` (queries, keys, masks), ``tiles`` (some rows at a time), ``targets`` (what is beside them).
"""
