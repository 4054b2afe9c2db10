"""Merging: many heads to fewer (``specs/shd.md``, chapters PLAN to ORACLE).

``plans.py`` says which heads merge in which round, or ``matching.py`` where their maps decide. ``alpha.py`` solves
for the weights of a pair, from maps and value outputs or from the tensor of ``gram.py``, and ``mixing.py`` applies
them round by round to maps ``(B, H, L, S)``; a strategy is added there. ``oracles.py`` finds the best map that any
merge could give, by scipy.
"""
