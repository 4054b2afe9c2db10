"""Will attention supervision work for a pair of models? Looked up, measured, and tried.

``diagnose`` reads two models, lists the differences that are known to hurt, measures the teacher at the student's
number of heads, finds a recipe with its range of beta, and may train pairs of students with and without SHD.
Imports ``recipes``, ``teacher``, ``training``, ``shrink`` and the studies of ``shd_ref``. Start with
``diagnosis.py``.
"""

from shd_torch.doctor.diagnosis import Diagnosis, diagnose
from shd_torch.doctor.differences import Difference
from shd_torch.doctor.probe import Probe, Wishes
from shd_torch.doctor.verdict import Verdict

__all__ = ["Diagnosis", "Difference", "Probe", "Verdict", "Wishes", "diagnose"]
