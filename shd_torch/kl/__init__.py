"""The loss from queries and keys: one request, several backends, no student map that outlives its tile.

``backends.py`` holds ``attention_kl`` and chooses who computes it, ``request.py`` is what every backend reads, and
``dense.py`` is the plain one, next to ``sdpa.py`` and ``triton.py``. Meaning: ``shd_torch.maps.loss``. Imports
``supervision``, ``maps`` and ``kernels``.
"""

from shd_torch.kl.backends import BackendChoice, attention_kl, explain_backend

__all__ = ["BackendChoice", "attention_kl", "explain_backend"]
