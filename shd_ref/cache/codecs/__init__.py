"""Numbers of a record as bytes and back, and what that costs in nats or shares of a norm. Imports ``storage``.

``codecs.py`` has maps (``encode``, ``decode``, ``pack``) and the roundings that vectors share; ``factored.py`` has
queries and keys from which maps are rebuilt, ``logits.py`` rows of classes. Which codec a record has, and of what
rows, ``forms`` say. All bytes are little-endian.
"""
