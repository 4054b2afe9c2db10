"""Rows as bytes and back, and what that costs: start with ``codecs.py``. Imports ``storage``."""
