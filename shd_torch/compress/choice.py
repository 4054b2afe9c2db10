"""The students that lose least within a time: an integer programme over the parts of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shd_torch.compress.costs import Costs
from shd_torch.compress.space import NONE, Design, Space
from shd_torch.compress.worth import Worths


def choose_designs(space: Space, costs: Costs, worths: Worths, limits: Sequence[float]) -> list[Design]:
    """The best student of each number of layers within the limits on each row of costs, best first."""
    designs = [choose_design(space, costs, worths, limits, count) for count in range(1, space.num_layers + 1)]
    chosen = [design for design in designs if design is not None]
    return sorted(chosen, key=lambda design: worths.predict(design, space))


def choose_design(
    space: Space, costs: Costs, worths: Worths, limits: Sequence[float], num_layers: int
) -> Design | None:
    """The student of so many layers with the least predicted loss; None where none is fast enough.

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
    for limit, base, *sizes in zip(limits, costs.base, costs.heads, costs.neurons, strict=True):
        row = np.tile(np.concatenate(sizes), layers) / limit
        constraints.append((row, 0, max(1 - base / limit, 0)))
    solution = milp(
        loss.ravel(),
        integrality=np.ones(loss.size),
        bounds=Bounds(0, 1),
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
