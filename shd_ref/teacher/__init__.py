"""Teacher graphs: find their attention, squeeze it in the graph, run it offline.

The rooms, from the ground up; each imports only from rooms above it in this list, from the reference and from
``shd_ref.cache``: ``body`` makes nodes, ``opening`` reads an untrusted file, ``session`` runs a graph, ``graph``
finds the attention, ``rewrite`` puts the merge into the graph, ``sources`` reads data sets, ``run`` brings graph and
data together, ``precompute`` writes caches, ``study`` measures without writing. Start with ``graph/find.py``.
"""
