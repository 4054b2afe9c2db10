"""Students within the limits of a wish: chosen by the sums of costs, then timed."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Final

from shd_ref.errors import ShdError
from shd_torch.compress.choice import choose_design, choose_designs
from shd_torch.compress.costs import Costs, price_designs
from shd_torch.compress.options import FASTEST, Wish
from shd_torch.compress.space import Design, Space
from shd_torch.compress.stages import Run
from shd_torch.compress.worth import Worths

_REPEATS: Final = 3
_TOLERANCE: Final = 0.01  # of a limit: two runs of one graph differ by as much
_SPEEDS: Final = 5
"""That are tried where only a quality is asked for."""


def find_candidates(run: Run, costs: Costs, worths: Worths, wish: Wish) -> list[dict[str, Any]]:
    """The best students, or one for each of several speeds; those that are too slow when timed are chosen again.

    Raises:
        ShdError: ``argument-value`` where no student is small enough.
    """
    space, most = run.space, run.options.candidates
    is_ladder = wish.name == FASTEST
    pending = [
        (design, limits)
        for limits in (_ladder(space, costs) if is_ladder else [wish.limits])
        for design in choose_designs(space, costs, worths, limits)[: 1 if is_ladder else most]
    ]
    candidates: dict[Design, dict[str, Any]] = {}
    for _ in range(_REPEATS):
        if not pending:
            break
        prices = price_designs(run, [design for design, _ in pending])
        again = []
        for (design, limits), row in zip(pending, prices, strict=True):
            expected = costs.predict(design, space)
            if all(cost <= (1 + _TOLERANCE) * limit for cost, limit in zip(row, limits, strict=True)):
                candidates[design] = {
                    "design": asdict(design),
                    "text": design.describe(space),
                    "seconds": row[:-1],
                    "bytes": row[-1],
                    "predicted_seconds": expected[:-1],
                    "predicted_loss": worths.predict(design, space),
                }
                continue
            tighter = [limit * min(sums / cost, 1.0) for limit, sums, cost in zip(limits, expected, row, strict=True)]
            smaller = choose_design(space, costs, worths, tighter, len(design.kept))
            if smaller not in (None, design) and smaller not in candidates:
                again.append((smaller, limits))
        pending = again
    if not candidates:
        fastest = costs.predict(_smallest(space), space)
        speed = min(before / after for before, after in zip(costs.teacher[:-1], fastest[:-1], strict=True))
        smallest = f"the smallest student is about {speed:.2g} times faster, with {fastest[-1] / 1e6:.3g} MB"
        raise ShdError("argument-value", f"the target must be met by some student; got {wish.text}: {smallest}")
    return sorted(candidates.values(), key=lambda row: float(row["predicted_loss"]))


def _ladder(space: Space, costs: Costs) -> list[list[float]]:
    """Limits from the teacher as it would be deployed to the fastest student."""
    slow, fast = costs.teacher_int8 or costs.teacher, costs.predict(_smallest(space), space)
    shares = [(at + 1) / (_SPEEDS + 1) for at in range(_SPEEDS)]
    return [
        [*(a ** (1 - share) * b**share for a, b in zip(slow[:-1], fast[:-1], strict=True)), math.inf]
        for share in shares
    ]


def _smallest(space: Space) -> Design:
    return Design((0,), (min(count for count in space.heads if count),), (min(space.neurons),))
