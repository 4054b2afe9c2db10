"""Forms: what a record can hold of a sample, and everything about it that the rest of the cache has to know.

``form.py`` is the interface: a form names its tensors, says how many bytes each has, checks and packs what a writer
is given, and decodes what a reader found. ``attention.py`` is what both forms of attention share (who teaches whom,
by which plan, with which weights); ``maps.py`` stores merged maps, ``factors.py`` the teacher's queries and keys.
``rows.py`` is what logits and hidden states share, ``logits.py`` and ``hidden.py`` are these. ``table.py`` has a row
for each, and is where a new form is entered; everything else goes through ``Manifest.forms``.
Imports ``codecs`` and ``storage``.
"""
