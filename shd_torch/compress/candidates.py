"""Students within the limits of a wish: chosen by an integer programme over the parts of every layer, then timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from shd_ref.errors import ShdError
from shd_torch.compress.costs import Costs, price_designs
from shd_torch.compress.options import FASTEST, Wish
from shd_torch.compress.space import NONE, Design, Space
from shd_torch.compress.stages import Run
from shd_torch.compress.worth import Worths


def choose_designs(space: Space, costs: Costs, worths: Worths, limits: Sequence[float]) -> list[Design]:
    """The best student of each number of layers within the limits on each row of costs, best first."""
    designs = [choose_design(space, costs, worths, limits, count) for count in range(1, space.num_layers + 1)]
    chosen = [design for design in designs if design is not None]
    return sorted(chosen, key=lambda design: worths.predict(design, space))


def choose_design(
    space: Space, costs: Costs, worths: Worths, limits: Sequence[float], num_layers: int, *, whole: bool = False
) -> Design | None:
    """The student of so many layers with the least predicted loss; None where none is fast enough.

    ``whole``: its layers are those of the teacher, with all heads and neurons.

    Unknowns are 0 or 1: for each layer one a size of its attention, then one a size of its FFN. A layer is left out
    where it has neither.
    """
    from scipy.optimize import Bounds, milp

    heads, neurons, layers = len(space.heads), len(space.neurons), space.num_layers
    skipped = np.minimum(np.array(worths.layers), 1e6)
    # A kept layer saves what leaving it out would cost.
    loss = np.hstack([np.array(worths.heads) - skipped[:, None], worths.neurons])
    has_heads = np.arange(heads + neurons) < heads
    attends = np.pad(np.array(space.heads) != NONE, (0, neurons))
    per_layer = np.eye(layers)
    constraints: list[Any] = [
        (np.kron(per_layer, np.where(has_heads, 1, -1)), 0, 0),  # an attention for every FFN
        (np.kron(per_layer, has_heads), per_layer[0] * space.keeps_first, 1),
        (np.tile(attends, layers), 1, layers),
        (np.tile(has_heads, layers), num_layers, num_layers),
    ]
    if costs.reads_first:  # the last layer stays, which the head was trained on and which takes almost no time
        constraints.append((np.kron(per_layer[-1], has_heads), 1, 1))
    for at, (limit, base, *sizes) in enumerate(zip(limits, costs.base, costs.heads, costs.neurons, strict=True)):
        costly = np.ones(layers) - per_layer[-1] * costs.is_free(at)
        row = np.kron(costly, np.concatenate(sizes)) / limit
        constraints.append((row, 0, max(1 - base / limit, 0)))
    is_largest = np.isin(np.arange(heads + neurons), (0, heads))
    allowed = np.tile(is_largest | (not whole), layers)
    solution = milp(
        loss.ravel(),
        integrality=np.ones(loss.size),
        bounds=Bounds(0, allowed.astype(float)),
        constraints=constraints,
        options={"mip_rel_gap": 1e-6},
    )
    if solution.x is None:
        return None
    table = solution.x.reshape(loss.shape) > 0.5
    kept = [at for at in range(layers) if table[at, :heads].any()]
    return Design(
        tuple(kept),
        tuple(space.heads[int(table[at, :heads].argmax())] for at in kept),
        tuple(space.neurons[int(table[at, heads:].argmax())] for at in kept),
    )


def keep_layers(space: Space, costs: Costs, worths: Worths, limits: Sequence[float]) -> Design | None:
    """As many whole layers of the teacher as the limits allow, and which: what one would try without a search."""
    counts = range(space.num_layers - 1, 0, -1)
    designs = (choose_design(space, costs, worths, limits, count, whole=True) for count in counts)
    return next((design for design in designs if design is not None), None)


_REPEATS: Final = 3
_TOLERANCE: Final = 0.01  # of a limit: two runs of one graph differ by as much
_SPEEDS: Final = 5
"""That are tried where only a quality is asked for."""


def find_candidates(run: Run, costs: Costs, worths: Worths, wish: Wish) -> list[dict[str, Any]]:
    """The best students, or one for each of several speeds; those that are too slow when timed are chosen again.

    Raises:
        ShdError: ``argument-value`` where no student is small enough.
    """
    space, most = run.space, run.options.most_candidates
    is_ladder = wish.name == FASTEST
    pending = [
        (design, limits)
        for limits in (_ladder(space, costs) if is_ladder else [wish.limits])
        for design in choose_designs(space, costs, worths, limits)[: 1 if is_ladder else most]
    ]
    kept = None if is_ladder else keep_layers(space, costs, worths, wish.limits)
    if kept is not None and (kept, wish.limits) not in pending:
        pending.append((kept, wish.limits))
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
                    "keeps_layers": design.keeps_layers(space),
                    "seconds": row[:-1],
                    "bytes": row[-1],
                    "predicted_seconds": expected[:-1],
                    "predicted_loss": worths.predict(design, space),
                }
                continue
            tighter = [limit * min(sums / cost, 1.0) for limit, sums, cost in zip(limits, expected, row, strict=True)]
            smaller = (
                keep_layers(space, costs, worths, tighter)
                if design.keeps_layers(space)
                else choose_design(space, costs, worths, tighter, len(design.kept))
            )
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
