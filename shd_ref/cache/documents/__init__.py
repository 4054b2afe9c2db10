"""Manifest, receipts, seal and sample keys. Imports ``storage``, ``codecs`` and ``forms``."""
