"""The judge: does an implementation of ``specs/shd.md`` compute what the text says?

Plain functions on NumPy alone. ``specs/conformance.md`` shows the three ways in: ``cases`` and ``check`` in your own
tests, ``python -m shd_ref.conformance --impl``, and ``--program`` for other languages. Start reading with
``runner.py``; ``laws`` are facts to check, ``vectors.py`` the cases to compare. Imports tolerances and NumPy, and the
reference only to name a mistake.
"""

from shd_ref.conformance.adapter import OUTPUTS, Adapter, Missing, OwnDtype
from shd_ref.conformance.program import Program, ProgramError
from shd_ref.conformance.report import KnownFailures, Report, Result, Status
from shd_ref.conformance.runner import ConformanceError, cases, check, judge
from shd_ref.tolerances import load_tolerances

__all__ = [
    "OUTPUTS",
    "Adapter",
    "ConformanceError",
    "KnownFailures",
    "Missing",
    "OwnDtype",
    "Program",
    "ProgramError",
    "Report",
    "Result",
    "Status",
    "cases",
    "check",
    "judge",
    "load_tolerances",
]
