"""The last fidelity test of a teacher, kept beside it, so that later commands know which merge was found best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shd_ref.cache.storage.documents import build, encode_document, parse_members, read_document
from shd_ref.cache.storage.drafts import drafting
from shd_ref.cache.storage.local import LocalStorage
from shd_ref.teacher.opening.model import DecodeError, check_external_data, hash_teacher, onnx
from shd_ref.teacher.options import MATCHED, PrecomputeOptions
from shd_ref.teacher.study.ranking import WEIGHED, FidelityReport, Setting

SUFFIX: Final = ".fidelity.json"


@dataclass(frozen=True)
class _Kept:
    """The document: SHA-256 of the teacher (``hash_teacher``), and what was found."""

    teacher: str
    report: FidelityReport


def kept_path(teacher: Path) -> Path:
    """``teacher.onnx`` -> ``teacher.fidelity.json``, in the same folder."""
    return teacher.with_suffix(SUFFIX)


def keep_report(teacher: Path, report: FidelityReport) -> Path | None:
    """Keep a report beside its teacher, in place of an earlier one; None where that cannot be written."""
    path = kept_path(teacher)
    try:
        data = encode_document(_Kept(hash_teacher(teacher), report))
        with drafting(path) as draft:  # a link in its place is replaced, never followed
            draft.write_bytes(data)
    except (OSError, ValueError):  # the second also for a ShdError
        return None
    return path


def advise_plan(teacher: Path, options: PrecomputeOptions) -> str | None:
    """What to say before a teacher is squeezed otherwise than its fidelity test found best; None: nothing known."""
    path = kept_path(teacher)
    try:
        kept = build(_Kept, parse_members(read_document(LocalStorage(path.parent), path.name), path), path)
        text = _compare(kept.report, options)
        if text is None:
            return None
        # The teacher is read last, and only where there is something to say.
        check_external_data(onnx.load(teacher, load_external_data=False), teacher)
        return f"{text} ({path.name})" if kept.teacher == hash_teacher(teacher) else None
    except (OSError, ValueError, DecodeError):  # no such file or another one, or what the run itself will refuse
        return None


def _compare(report: FidelityReport, options: PrecomputeOptions) -> str | None:
    heads = options.num_student_heads
    offered = [one for one in report.results if one.setting.num_student_heads == heads]
    if options.is_factored:  # which hold one weight per map
        offered = [one for one in offered if one.setting.alpha_per == "map"]
    if not offered:
        return None
    best = report.recommended()[heads]
    best = best if best in offered else offered[0]
    setting = None
    if options.plans is None and isinstance(options.plan, str):  # no test measures rounds that were given one by one
        matched_by = options.matched_by if options.plan == MATCHED else None
        alpha_per = options.alpha_per if options.strategy in WEIGHED else "map"
        setting = Setting(heads, options.plan, matched_by, options.strategy, alpha_per)
    used = next((one for one in offered if one.setting == setting), None)
    title = f"{best.setting.title}: {report.measure} {max(best.cost, 0.0):.4g}"
    if used is None:
        return (
            f"{heads} heads are merged in a way that shd fidelity has not measured; the best that it found on "
            f"{report.samples} samples is {title}"
        )
    excess = used.excess - best.excess
    margin = sum(math.inf if one.excess_margin is None else one.excess_margin for one in (used, best))
    if used is best or excess <= margin:
        return None
    return (
        f"{heads} heads are merged by {used.setting.title}: {report.measure} {used.cost:.4g} in shd fidelity; better "
        f"is {title}, lower by {excess:.2g} ± {margin:.1g} on {report.samples} samples"
    )
