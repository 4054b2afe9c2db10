"""What a student is taught with: dense maps, codes of a cache, or the teacher's queries and keys.

``supervision.py`` is the interface; bytes become maps in ``coded.py`` and ``factored.py``; ``mask.py`` decides who
may attend. A whole batch of a cache, with logits and hidden states, is in ``cached.py``. Imports ``maps``.
"""

from shd_torch.supervision.cached import FactoredCodes
from shd_torch.supervision.coded import Coded
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.mask import AttentionRule
from shd_torch.supervision.supervision import Dense, Supervision
from shd_torch.supervision.taught import TaughtLayers

__all__ = ["AttentionRule", "Coded", "Dense", "Factored", "FactoredCodes", "Supervision", "TaughtLayers"]
