"""Maps and factors as bytes and back: codecs, packing, compression, and what they cost.

A new codec goes into ``codecs.py``, its error into ``distortion.py``. Imports ``storage``.
"""
