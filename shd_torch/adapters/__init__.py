"""``attention_kl`` and the losses of ``kd`` as the judge calls them; the adapter of the maps is ``maps/judged.py``.

Modules for ``python -m shd_ref.conformance --impl``: ``kl.py`` judges one backend at a time, ``kernels.py`` the
Triton programs, ``kd.py`` the losses on logits, ``recipes.py`` the losses beside SHD, ``shrink.py`` the closed forms
of a student. Imports these rooms; imported by nothing.
"""
