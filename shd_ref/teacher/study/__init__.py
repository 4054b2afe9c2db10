"""Measuring before or after a cache is written: fidelity, what a cache would cost, records run again.

Imports ``run`` and what ``precompute`` knows of manifests and records. Start with ``fidelity.py`` or
``forecast.py``; what they advise is decided in ``ranking.py`` and ``advice.py``.
"""
