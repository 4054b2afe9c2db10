"""The judge: does an implementation of ``specs/shd.md`` compute what the text says?

Calls are drawn by seed, and the reference answers each (``generator.py``, ``sessions.py``); an answer is compared
with the reference's within the published tolerance (``comparison.py``). ``specs/conformance.md`` shows the ways in:
``judge`` in your own tests, ``python -m shd_ref.conformance --impl`` for a module in a process of its own, and
``--program`` for other languages (``doors.py``). Needs NumPy alone.
"""

from shd_ref.conformance.doors import Program, ProgramError
from shd_ref.conformance.generator import OUTPUTS, OwnDtype
from shd_ref.conformance.judging import judge
from shd_ref.conformance.report import Finding, OperationResult, Report
from shd_ref.tolerances import load_tolerances

__all__ = [
    "OUTPUTS",
    "Finding",
    "OperationResult",
    "OwnDtype",
    "Program",
    "ProgramError",
    "Report",
    "judge",
    "load_tolerances",
]
