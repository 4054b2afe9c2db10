"""The algebra of a smaller student, in float64, and what ``shrink.json`` says of one.

``heads.py`` merges heads and gives their weights, ``kept.py`` chooses layers, axes, channels and neurons, and
``align.py`` refits what reads or writes them: pure functions of arrays that ``shd_torch.shrink`` has checked. Inputs
are rows, so a projection is ``x @ W``. ``predictor.py`` is MAP's, ``student.py`` reads a finished student's report.
"""

from shd_ref.shrink.predictor import (
    Predictor,
    best_split,
    choose_degree,
    cross_validate,
    fit_predictor,
    split_stability,
)
from shd_ref.shrink.student import read_student

__all__ = [
    "Predictor",
    "best_split",
    "choose_degree",
    "cross_validate",
    "fit_predictor",
    "read_student",
    "split_stability",
]
