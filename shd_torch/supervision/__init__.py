"""The supervision of a student: dense maps, codes of a cache, or the teacher's queries and keys.

``mask.py`` decides who may attend, and how queries and keys become logits. ``supervision.py`` is the interface of
maps, and of all that teaches a batch; bytes become maps a tile at a time in ``coded.py``, and ``factored.py``
multiplies with maps that are never formed. ``cached.py`` holds a batch of a cache, with its logits and hidden states.
"""

from shd_torch.supervision.cached import CachedSupervision
from shd_torch.supervision.coded import Coded
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.mask import AttentionRule
from shd_torch.supervision.supervision import Dense, Supervision, TaughtLayers

__all__ = ["AttentionRule", "CachedSupervision", "Coded", "Dense", "Factored", "Supervision", "TaughtLayers"]
