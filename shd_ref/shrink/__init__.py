"""A smaller student in closed form (specs/shrink.md): merged heads, linear FFNs, fewer axes, and how deep to cut.

Pure functions on arrays, float64: ``heads`` with ``factors`` and ``align``, ``ffn``, ``width``, ``predictor``. Inputs
are rows, so a projection is ``x @ W``; ``torch.nn.Linear`` stores the transpose, as the FFN's chapter does.
Imports the reference; start with ``heads.py``.
"""
