"""Following data from a softmax to the values and on to W_o, through any operators that attention is written with.

``walk.py`` is the way in; ``tracing.py`` goes back to queries and keys, ``projection.py`` forward to the output
projection, ``variants.py`` reads a softmax that is written out and finds maps that are not one.
Imports ``nodes``, ``inputs`` and ``opening``.
"""
