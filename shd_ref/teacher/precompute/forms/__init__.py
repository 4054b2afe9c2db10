"""How each form of a record is made from a run of the teacher, measured, and compared when the teacher runs again.

``maker.py`` is the interface, and the way from outputs to records through all makers; ``attention.py`` (maps),
``factors.py`` and ``rows.py`` (logits and hidden states) are the makers that the table of ``shd_ref.cache.forms``
names. Imports ``run`` and ``shd_ref.cache.forms``.
"""
