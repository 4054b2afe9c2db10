"""The loss from queries and keys: one request, several backends, no student map that outlives its tile.

``loss.py`` holds ``attention_kl``; ``request.py`` is what every backend reads; ``dense.py`` is the plain one beside
``sdpa.py`` and ``triton.py``. Meaning: ``shd_torch.maps.loss``. Imports
``supervision``, ``maps`` and ``kernels``.
"""

from shd_torch.kl.loss import BackendChoice, attention_kl, explain_backend

__all__ = ["BackendChoice", "attention_kl", "explain_backend"]
