"""A teacher over a data set: checked inputs, batches of similar length, the squeezed graph in a session.

``teacher.py`` is what ``precompute`` and ``study`` share. Imports ``sources``, ``graph`` and ``rewrite``; writes
nothing. Start with ``teacher.py``.
"""
