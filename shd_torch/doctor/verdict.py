"""One answer: will attention supervision work for this pair?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shd_ref.teacher.study.fidelity import Fidelity
from shd_torch.doctor.differences import BLOCKS, HURTS, Difference
from shd_torch.doctor.probe import Probe

YES: Final = "yes"
UNLIKELY: Final = "probably not"
NO: Final = "no"

MOST_LOST: Final = 0.6
"""Relative error of the attention output beyond which nothing is promised. In the study students gained at .52, at
.56 no gain was shown, and nothing was measured beyond."""


@dataclass(frozen=True)
class Verdict:
    """The answer and its reason.

    Attributes:
        answer: ``yes``, ``probably not`` or ``no``.
        because: in a sentence.
        rests_on: ``probe``, ``measurement`` or ``configuration``: the strongest evidence.
    """

    answer: str
    because: str
    rests_on: str


def judge(
    differences: Sequence[Difference],
    squeezed: Fidelity | None,
    probe: Probe | None,
    *,
    heads: int,
    is_squeezed_start: bool,
    failure: str | None = None,
    is_measurable: bool = True,
) -> Verdict:
    """What was measured decides before what is known of other pairs; what makes it impossible decides before all.

    ``is_measurable`` is False where data was there and the teacher's graph could not be made.
    """
    blocking = [one for one in differences if one.effect == BLOCKS]
    hurting = [one for one in differences if one.effect == HURTS]
    rests_on = "configuration" if squeezed is None else "measurement"
    if blocking:
        return Verdict(NO, f"{_say(blocking)}: {blocking[0].remedy}", "configuration")
    if failure is not None:
        return Verdict(NO, f"the pair cannot be run together: {failure}", rests_on)
    if probe is not None:
        return Verdict(*_of_probe(probe), "probe")
    if hurting:
        return Verdict(UNLIKELY, f"{_say(hurting)}: {hurting[0].remedy}", rests_on)
    if squeezed is not None and squeezed.attention_error > MOST_LOST:
        lost = f"merged to {heads} heads, the teacher's attention output is off by "
        return Verdict(UNLIKELY, f"{lost}{squeezed.attention_error:.0%}: give the student more heads", rests_on)
    if is_squeezed_start:
        return Verdict(UNLIKELY, "a squeezed start already has most of the benefit of SHD: see --probe", rests_on)
    if squeezed is None:
        more = "; --data measures more" if is_measurable else ", though fidelity could not be measured"
        return Verdict(YES, f"no obstacle in the configurations{more}", rests_on)
    return Verdict(YES, "no known obstacle, and merged heads preserve the teacher's attention output", rests_on)


def _of_probe(probe: Probe) -> tuple[str, str]:
    steps = f"{probe.options.probe} steps and {probe.options.seeds} seeds"
    if not probe.is_distinguishable:
        needed = probe.seeds_needed
        more = "" if needed is None else f"; --seeds {needed} would detect a gain of this size"
        return UNLIKELY, f"what it gains in {steps} is not significant{more}"
    if probe.gain > 0:
        return YES, f"it lowers the held-out {probe.measure} by more than the interval over {steps}"
    return NO, f"it raises the held-out {probe.measure} by more than the interval over {steps}"


def _say(differences: Sequence[Difference]) -> str:
    first = differences[0]
    more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
    return f"they differ in {first.part}{more} (teacher {first.teacher}, student {first.student})"
