"""Following data from a softmax, whatever operators a graph spells attention with: to the values, and on to W_o.

``walk.py`` is the way in; ``tracing.py`` goes back to queries and keys, ``projection.py`` forward to the output
projection, ``quotients.py`` reads a softmax that is written out, ``remade.py`` finds maps that are not one.
Imports ``nodes``, ``inputs`` and ``opening``.
"""
