"""A teacher over a data set: checked inputs, batches of similar length, the squeezed graph in a session.

Start with ``teacher.py``, shared by ``precompute`` and ``study``. Imports ``sources``, ``graph`` and ``rewrite``;
writes nothing.
"""
