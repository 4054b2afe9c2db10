"""Merging: many heads to fewer (``specs/shd.md``, chapters PLAN to ORACLE). A strategy is added in ``mixing.py``."""
