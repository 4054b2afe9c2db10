"""Maps and factors as bytes and back: codecs, packing, compression, and what they cost.

Start with ``codecs.py``, where a new codec goes; its error goes into ``distortion.py``. Imports ``storage``.
"""
