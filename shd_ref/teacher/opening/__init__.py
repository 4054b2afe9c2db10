"""Opening a teacher's file, which is untrusted; no operator library is loaded.

1. ``load``: wiring, sizes and nodes are checked before anything is computed, then weights are read.
2. ``body``: products by equation become MatMul; old operator sets become newer.
3. ``model``: the graph in the order of its data, with constants known, and its weights apart from it.
"""
