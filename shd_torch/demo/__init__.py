"""The demo: the whole path on handwritten digits, with a table and pictures. Start with ``run.py``.

May import everything; imported by ``commands`` alone.
"""
