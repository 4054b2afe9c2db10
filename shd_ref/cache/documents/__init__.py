"""What the JSON documents of a cache say: manifest and its members, receipts, the seal, sample keys.

Imports ``storage`` and ``codecs``. Start with ``manifest.py``.
"""
