"""Precompute for one student, or for several numbers of heads, as most tests ask for it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shd_ref.teacher.precompute.engine as engine
from shd_ref.teacher import PrecomputeOptions, PrecomputeSummary, RunOptions


def precompute(
    teacher: str | Path,
    inputs: Any,
    out: str | os.PathLike[str],
    options: PrecomputeOptions,
    run: RunOptions | None = None,
    **told: Any,
) -> PrecomputeSummary:
    (summary,) = engine.precompute(teacher, inputs, [(out, options)], run, **told)
    return summary


def precompute_heads(
    teacher: str | Path,
    inputs: Any,
    out: str | os.PathLike[str],
    options: PrecomputeOptions,
    student_heads: Sequence[int],
    run: RunOptions | None = None,
    **told: Any,
) -> list[PrecomputeSummary]:
    return engine.precompute(teacher, inputs, engine.students_of(out, options, student_heads), run, **told)
