"""The cases of every operation: one chapter of the specification a file, each a table of inputs.

Functions here are long because they are tables; answers come from the oracles beside this folder. Add an operation
in a file of its chapter and name it in ``make_vectors.py``.
"""
