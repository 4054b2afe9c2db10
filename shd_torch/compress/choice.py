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
    from scipy.optimize import Bounds, LinearConstraint, milp

    heads, neurons, layers = len(space.heads), len(space.neurons), space.num_layers
    width = heads + neurons
    skipped = np.minimum(np.array(worths.layers), 1e6)
    # A kept layer saves what leaving it out would cost.
    loss = np.concatenate(
        [[*(np.array(worths.heads[at]) - skipped[at]), *worths.neurons[at]] for at in range(layers)]
    )
    rows: list[Any] = []
    bounds: list[tuple[float, float]] = []

    def demand(row: Any, low: float, high: float) -> None:
        rows.append(np.ravel(row))
        bounds.append((low, high))

    for at in range(layers):  # an attention for every FFN
        row = np.zeros((layers, width))
        row[at, :heads], row[at, heads:] = 1, -1
        demand(row, 0, 0)
        row = np.zeros((layers, width))
        row[at, :heads] = 1
        demand(row, 1 if at == 0 and space.keeps_first else 0, 1)
    attends = np.zeros((layers, width))
    attends[:, [at for at, count in enumerate(space.heads) if count != NONE]] = 1
    demand(attends, 1, layers)
    counted = np.zeros((layers, width))
    counted[:, :heads] = 1
    demand(counted, num_layers, num_layers)
    for number, limit in enumerate(limits):
        row = np.tile([*costs.heads[number], *costs.neurons[number]], (layers, 1))
        demand(row / limit, 0, max(1 - costs.base[number] / limit, 0))
    low, high = np.array(bounds).T
    solution = milp(
        loss,
        integrality=np.ones(layers * width),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(np.array(rows), low, high),
        options={"mip_rel_gap": 1e-6},
    )
    if solution.x is None:
        return None
    table = solution.x.reshape(layers, width) > 0.5
    kept = [at for at in range(layers) if table[at, :heads].any()]
    return Design(
        tuple(kept),
        tuple(space.heads[int(table[at, :heads].argmax())] for at in kept),
        tuple(space.neurons[int(table[at, heads:].argmax())] for at in kept),
    )
