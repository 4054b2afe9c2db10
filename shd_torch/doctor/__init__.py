"""Will attention supervision work for a pair of models? Looked up, and tried.

Imports ``recipes``, ``live``, ``training`` and ``shrink``. Start with ``diagnosis.py``.
"""

from shd_torch.doctor.diagnosis import (
    Diagnosis,
    Difference,
    Parts,
    Verdict,
    compare_parts,
    compare_tokenizers,
    diagnose,
    parts_of,
)
from shd_torch.doctor.training import DiagnosisOptions, Probe

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
