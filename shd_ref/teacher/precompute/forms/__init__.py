"""How each form of a record is made from a run of the teacher, measured, and compared when the teacher runs again.

``maker.py`` is the interface, and the way from a form of the manifest to its maker; ``maps.py`` and ``factors.py``
are the makers of ``shd_ref.cache.forms``, and ``nothing.py`` stands where there is no attention; ``targets.py`` makes
rows of logits and hidden states; ``masks.py`` holds a teacher's mask against what a manifest says of it.
Imports ``run`` and ``shd_ref.cache.forms``.
"""
