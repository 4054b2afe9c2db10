"""A student that starts as its squeezed teacher (specs/shrink.md): ``shrink`` takes and gives a Hugging Face model.

``families`` alone knows names of modules; ``calibration`` runs a model layer by layer; ``merges``, ``heads``,
``width`` and ``align`` are the mathematics, written independently of ``shd_ref.shrink``; ``layer`` joins them, and
``student`` the layers.
Imports ``maps``.
"""

from shd_torch.shrink.folders import load_student, load_teacher
from shd_torch.shrink.student import Shrunk, shrink

__all__ = ["Shrunk", "load_student", "load_teacher", "shrink"]
