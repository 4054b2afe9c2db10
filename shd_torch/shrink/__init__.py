"""A student that starts as its squeezed teacher: ``shrink`` takes and gives a Hugging Face model.

``families`` alone knows names of modules; ``heads`` and ``width`` call the algebra of ``shd_ref.shrink``, ``layer``
joins them, and ``student`` the layers. ``custom`` holds what no stock configuration can express. Imports ``maps``.
"""

from shd_torch.shrink.folders import load_student, load_teacher
from shd_torch.shrink.gates import Ranking, choose_splits, gate_layers, measure_splits, rank_layers
from shd_torch.shrink.sizes import ShrinkOptions
from shd_torch.shrink.student import Shrunk, shrink
from shd_torch.shrink.vocabulary import cut_vocabulary

__all__ = [
    "Ranking",
    "ShrinkOptions",
    "Shrunk",
    "choose_splits",
    "cut_vocabulary",
    "gate_layers",
    "load_student",
    "load_teacher",
    "measure_splits",
    "rank_layers",
    "shrink",
]
