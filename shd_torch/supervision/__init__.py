"""What a student is taught with: dense maps, codes of a cache, or the teacher's queries and keys.

``supervision.py`` is the interface; bytes become maps in ``coded.py`` and ``factored_codes.py``; ``mask.py`` holds
``AttentionRule``: how queries and keys become logits, and who may attend. Logits and hidden states that a cache holds
beside attention are in ``stored_rows.py`` and ``row_codes.py``. Imports ``maps``.
"""

from shd_torch.supervision.coded import Coded
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.factored_codes import FactoredCodes
from shd_torch.supervision.mask import AttentionRule
from shd_torch.supervision.supervision import Dense, Supervision

__all__ = ["AttentionRule", "Coded", "Dense", "Factored", "FactoredCodes", "Supervision"]
