"""Where a student starts: random weights, weights that were trained before without the teacher, heads and channels
of the teacher that are kept, or the squeezed teacher.

Kept heads are aligned as squeezed ones are, so that the two differ in merging alone; ``unaligned kept`` are not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from benchmarks.shrink.rivals import RIVALS, shrink
from benchmarks.study.origin import fingerprint

OWN = ("random", "pretrained")
STARTS = (*OWN, "kept", "unaligned kept", "squeezed")


def start_student(
    start: str, teacher: Any, calibration: Mapping[str, Tensor], make_own: Callable[[], Any], **sizes: Any
) -> Any:
    """A student of these sizes, ready to train; all parameters learn.

    Args:
        start: one of ``STARTS``.
        teacher: a Hugging Face model of a family that ``shrink`` knows.
        calibration: its inputs.
        make_own: makes the student of ``OWN``, which has nothing of the teacher's.
        **sizes: of ``shrink``.
    """
    if start in OWN:
        return make_own()
    rival: dict[str, Any] = dict(RIVALS["kept heads"]) if "kept" in start else {}
    if start == "unaligned kept":
        rival["align"] = False
    asked = f"{start} {sizes} {fingerprint(*calibration.values(), teacher)}"
    if asked not in _made:  # arms and seeds of one start follow each other
        _made.clear()
        _made[asked] = shrink(teacher, dict(calibration), **sizes, **rival).student.requires_grad_(True)
    return copy.deepcopy(_made[asked])


_made: dict[str, Any] = {}
