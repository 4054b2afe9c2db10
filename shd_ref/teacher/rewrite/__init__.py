"""Writing the merge into a graph: one ONNX function per plan, new outputs, and what is not needed pruned.

Start with ``squeeze.py``; ``function.py`` is the merge itself, where a new strategy or in-graph codec would go.
Imports ``graph``, and from the reference only what decides about arguments, never its results.
"""
