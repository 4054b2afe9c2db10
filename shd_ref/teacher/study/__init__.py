"""Measuring before or after a cache is written, each on a teacher that is ready to run.

``forecast.py`` says what a cache would cost in every form and codec, ``fidelity.py`` what the teacher loses with its
heads merged, by the intervals of ``intervals.py``; ``recheck.py`` runs records of a cache again.
"""
