"""The judge: does an implementation of ``specs/shd.md`` compute what the text says?

Calls are drawn by seed, and the reference answers each (``generator.py``, ``sessions.py``); an answer is compared
with the reference's within the published tolerance (``comparison.py``). ``specs/conformance.md`` shows the ways in:
``cases`` and ``check`` in your own tests, ``python -m shd_ref.conformance --impl`` for a module in a process of its
own, and ``--program`` for other languages (``doors.py``). Needs NumPy alone.
"""

from shd_ref.conformance.doors import Adapter, Program, ProgramError
from shd_ref.conformance.generator import OUTPUTS, OwnDtype
from shd_ref.conformance.judging import Case, ConformanceError, Missing, cases, check, judge
from shd_ref.conformance.report import Finding, OperationResult, Report
from shd_ref.tolerances import load_tolerances

__all__ = [
    "OUTPUTS",
    "Adapter",
    "Case",
    "ConformanceError",
    "Finding",
    "Missing",
    "OperationResult",
    "OwnDtype",
    "Program",
    "ProgramError",
    "Report",
    "cases",
    "check",
    "judge",
    "load_tolerances",
]
