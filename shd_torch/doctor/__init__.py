"""Will attention supervision work for a pair of models? Looked up, measured, and tried.

Imports ``recipes``, ``teacher``, ``training``, ``shrink`` and the studies of ``shd_ref``. Start with
``diagnosis.py``.
"""

from shd_torch.doctor.diagnosis import Diagnosis, diagnose
from shd_torch.doctor.differences import Difference, compare_parts, compare_tokenizers
from shd_torch.doctor.pair import Parts, parts_of
from shd_torch.doctor.probe import DiagnosisOptions, Probe
from shd_torch.doctor.verdict import Verdict

__all__ = [
    "Diagnosis",
    "DiagnosisOptions",
    "Difference",
    "Parts",
    "Probe",
    "Verdict",
    "compare_parts",
    "compare_tokenizers",
    "diagnose",
    "parts_of",
]
