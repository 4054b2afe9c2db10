"""The mathematics on attention maps, under the names of ``shd_ref``: one file a chapter of the specification.

Written independently of ``shd_ref``, from which only shape arithmetic and errors come. Start with ``mixing.py``.
"""
