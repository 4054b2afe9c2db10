"""What the JSON documents of a cache say: manifest and its members, receipts, the seal, sample keys.

Imports ``storage``, ``codecs`` and ``forms``. Start with ``manifest.py``.
"""
