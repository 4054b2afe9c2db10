"""A live teacher, squeezed at every step without its maps.

``OnlineTeacher`` (``online.py``) runs the teacher under a capture and hands each layer's queries, keys, values and
output projection to ``squeeze.py``, which solves the mixing on gram tensors; ``layer_kls`` compares a captured
student with what came out. Imports ``capture``, ``supervision``, ``maps`` and ``kl``.
"""

from shd_torch.live.online import OnlineSupervision, OnlineTeacher, layer_kls
from shd_torch.live.squeeze import FactoredSqueeze, squeeze_factored

__all__ = ["FactoredSqueeze", "OnlineSupervision", "OnlineTeacher", "layer_kls", "squeeze_factored"]
