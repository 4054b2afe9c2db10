"""What a student is taught with: dense maps, codes of a cache, or the teacher's queries and keys.

``mask.py`` decides who may attend, and how queries and keys become logits. ``supervision.py`` is the interface of
maps, and of all that teaches a batch; bytes become maps a tile at a time in ``coded.py``, and ``factored.py``
multiplies with maps that are never formed. A batch of a cache, with logits and hidden states, is in ``cached.py``.
"""

from shd_torch.supervision.cached import FactoredCodes
from shd_torch.supervision.coded import Coded
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.mask import AttentionRule
from shd_torch.supervision.supervision import Dense, Supervision, TaughtLayers

__all__ = ["AttentionRule", "Coded", "Dense", "Factored", "FactoredCodes", "Supervision", "TaughtLayers"]
