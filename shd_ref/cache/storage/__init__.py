"""Files, below everything else in the cache.

``storage.py`` says where a cache lies, how its files are named and hashed, and what a place must do; ``local.py``
does it in a folder, ``remote.py`` in an object store. ``documents.py`` reads and writes JSON. ``drafts.py`` writes
all other outputs, whole or not at all.
"""
