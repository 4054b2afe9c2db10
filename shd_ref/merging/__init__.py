"""Merging (``specs/shd.md``, chapters PLAN, ALPHA, GRAM, MIX and ORACLE): many heads to fewer.

Which heads merge, by how much, and how far that is from the best map of any merge. Imports the attention maps of
``shd_ref`` and nothing above; start with ``mixing.py``, where a strategy of merging is added.
"""
