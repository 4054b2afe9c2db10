"""Measuring before or after a cache is written, each on a teacher that is ready to run.

``forecast.py`` measures on a few samples what a cache would cost in every form and codec, and the residual of merged
heads with the interval of ``intervals.py``; ``recheck.py`` runs records of a cache again.
"""
