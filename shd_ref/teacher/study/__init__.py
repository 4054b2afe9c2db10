"""Measuring before or after a cache is written: fidelity, what a cache would cost, records run again."""
