"""``attention_kl`` as the judge calls it; the adapter of the maps is ``maps/judged.py``.

Modules for ``python -m shd_ref.conformance --impl``: ``kl.py`` judges one backend at a time, ``kernels.py`` the
Triton programs. Imported by nothing.
"""
