"""Will attention supervision work for a pair of models? Looked up, and tried.

``diagnosis.py`` reads what both models are made of, says what differs and what that does, and judges; where there are
data, ``training.py`` chooses an objective, finds beta by the gradients, and trains a few students with and without.
Imports ``recipes``, ``live``, ``training`` and ``shrink``.
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
