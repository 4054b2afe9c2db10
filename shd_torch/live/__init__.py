"""A live teacher, squeezed at every step without its maps.

Imports ``capture``, ``supervision``, ``maps``, ``kl`` and ``kd``.
"""

from shd_torch.live.online import OnlineSupervision, OnlineTeacher, layer_kls
from shd_torch.live.squeeze import FactoredSqueeze, squeeze_factored

__all__ = ["FactoredSqueeze", "OnlineSupervision", "OnlineTeacher", "layer_kls", "squeeze_factored"]
