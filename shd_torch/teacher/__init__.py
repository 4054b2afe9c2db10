"""A live teacher, squeezed at every step without its maps: ``online.py``.

Imports ``capture``, ``supervision``, ``maps`` and ``kl``.
"""
