"""Finding the attention of a graph: which tensors are maps, values, logits and output projections.

``find.py`` is the way in; ``flow`` follows data from a softmax, ``measure.py`` reads heads from shapes,
``factors.py`` finds queries, keys and the mask, ``targets.py`` hidden states and the head's logits. Nothing here
changes a graph. Imports ``opening`` and ``session`` (for probe runs).
"""
