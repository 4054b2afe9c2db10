"""A live teacher, squeezed at every step without its maps: ``online.py``; what is asked of it: ``arguments.py``.

Imports ``capture``, ``supervision``, ``maps``, ``kl`` and ``kd``.
"""

from shd_torch.live.arguments import LiveTargets
from shd_torch.live.online import OnlineSupervision, OnlineTeacher, layer_kls
from shd_torch.live.squeeze import FactoredSqueeze, squeeze_factored

__all__ = ["FactoredSqueeze", "LiveTargets", "OnlineSupervision", "OnlineTeacher", "layer_kls", "squeeze_factored"]
