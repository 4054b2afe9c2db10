"""Where a cache lies and in which bytes: folders and object stores, file names, checksums, canonical documents.

The ground floor: imports nothing of the cache's other rooms. Start with ``storage.py``, the interface of a place.
"""
