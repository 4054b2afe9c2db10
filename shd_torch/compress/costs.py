"""What parts of a student cost in onnxruntime: measured on students with random weights, added up for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from shd_torch.compress.space import Design, Space
from shd_torch.compress.stages import TEACHER, TEACHER_INT8, Run
from shd_torch.export import computes_first
from shd_torch.shrink.options import ShrinkOptions
from shd_torch.shrink.sizes import make_student
from shd_torch.shrink.student import plan_student

_CHECKED: Final = 3
"""Students of mixed sizes that the sums are compared with."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a run, a row for each batch and length, and last bytes; a student takes the sum of its parts.

    Attributes:
        base: of what is outside the layers.
        heads: of a layer's attention, beyond the smallest's, by its number of heads ``(settings, options)``.
        neurons: of a layer with the smallest attention, by its number of neurons ``(settings, options)``.
        teacher: of the teacher, fused and in float.
        errors: of students of mixed sizes, the sum over the measured time, less 1.
        reads_first: the head reads the first position alone, so that the last layer takes almost no time.
    """

    base: list[float]
    heads: list[list[float]]
    neurons: list[list[float]]
    teacher: list[float]
    teacher_int8: list[float] | None
    errors: list[float]
    reads_first: bool = False

    def predict(self, design: Design, space: Space) -> list[float]:
        """Of a student: seconds at each setting, and bytes."""
        costs = list(self.base)
        for at, (heads, neurons) in enumerate(zip(self.heads, self.neurons, strict=True)):
            costly = slice(len(design.kept) - self.is_free(at))
            costs[at] += sum(heads[space.heads.index(count)] for count in design.heads[costly])
            costs[at] += sum(neurons[space.neurons.index(count)] for count in design.neurons[costly])
        return costs

    def is_free(self, row: int) -> bool:
        """Whether the last layer costs nothing beyond the base, in one row."""
        return self.reads_first and row < len(self.base) - 1


def random_student(run: Run, design: Design) -> Any:
    """A student's model, its weights random: also its biases, as a graph holds equal tensors once."""
    sizes, kept = plan_student(run.model, run.family, ShrinkOptions(**design.options(run.space)))
    student = make_student(run.model, run.family, sizes, kept)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.normal_(0.0, 0.02)
    return student


def price_designs(run: Run, designs: Sequence[Design]) -> list[list[float]]:
    """Costs of students with random weights."""
    graphs = _write_random(run, {str(at): design for at, design in enumerate(designs)}, "candidates are exported")
    return list(run.price(graphs).values())


def _write_random(run: Run, designs: Mapping[str, Design], what: str) -> dict[str, Path]:
    graphs = {}
    for number, (name, design) in enumerate(designs.items()):
        run.progress(number, len(designs), what)
        *_, graphs[name] = run.write_graphs(random_student(run, design), f"random-{number}").values()
    return graphs


def measure_costs(run: Run) -> Costs:
    """Time a student for each size of each part, by turns, and fit what the parts cost."""
    space, whole, half = run.space, run.space.whole, max(1, run.space.num_layers // 2)
    designs = {"whole": whole, "half": space.uniform(whole.heads[0], whole.neurons[0], half)}
    designs |= {f"heads {count}": space.uniform(count, whole.neurons[0]) for count in space.heads[1:]}
    designs |= {f"neurons {count}": space.uniform(whole.heads[0], count) for count in space.neurons[1:]}
    designs |= {f"mixed {number}": design for number, design in enumerate(mixed_designs(space))}
    if space.num_layers == 1:
        del designs["half"]
    graphs = run.teacher_graphs | _write_random(run, designs, "graphs to time are written")
    reads_first = space.num_layers > 1 and computes_first(graphs[TEACHER])
    return fit_costs(run.price(graphs), designs, space, reads_first=reads_first)


def mixed_designs(space: Space) -> list[Design]:
    """Students of mixed sizes, for a check: drawn with a fixed seed."""
    generator = np.random.default_rng(0)
    designs = []
    for _ in range(_CHECKED):
        count = int(generator.integers(max(1, space.num_layers // 2), space.num_layers + 1))
        heads = [int(generator.choice(space.heads)) for _ in range(count)]
        heads[0] = heads[0] or space.heads[0]
        neurons = tuple(int(generator.choice(space.neurons)) for _ in range(count))
        designs.append(Design(tuple(range(count)), tuple(heads), neurons))
    return designs


def fit_costs(
    prices: Mapping[str, Sequence[float]], designs: Mapping[str, Design], space: Space, *, reads_first: bool = False
) -> Costs:
    """Least squares of relative errors over students that differ in one thing, in steps from each size to the next.

    No step costs less than 0. Small parts are faster than their share, as they fit into the processor's caches: with
    free steps a layer that loses both its attention and neurons would cost less than nothing, and be chosen.
    """
    from scipy.optimize import nnls

    names = [name for name in designs if not name.startswith("mixed")]
    rows, settings = [], len(prices["whole"]) - 1
    for at in range(settings + 1):
        free = int(reads_first and at < settings)
        relative = [np.array(_count_steps(designs[name], space, free)) / prices[name][at] for name in names]
        base, *steps = np.split(nnls(np.array(relative), np.ones(len(names)))[0], [1, len(space.heads)])
        of_heads, of_neurons = (np.cumsum(sizes[::-1])[::-1].tolist() for sizes in steps)
        rows.append((float(base[0]), [*of_heads, 0.0], of_neurons))
    int8 = list(prices[TEACHER_INT8]) if TEACHER_INT8 in prices else None
    bases, heads, neurons = map(list, zip(*rows, strict=True))
    fitted = Costs(bases, heads, neurons, list(prices[TEACHER]), int8, [], reads_first)
    for name in sorted(designs.keys() - set(names)):
        pairs = list(zip(fitted.predict(designs[name], space), prices[name], strict=True))
        fitted.errors.extend(predicted / measured - 1 for predicted, measured in pairs[:-1])  # of times
    return fitted


def _count_steps(design: Design, space: Space, free: int) -> list[int]:
    """Once what is outside the layers, and how many but the last ``free`` have each size or a larger one."""
    costly = slice(len(design.kept) - free)
    heads = [sum(count >= size for count in design.heads[costly]) for size in space.heads[:-1]]
    return [1, *heads, *(sum(count >= size for count in design.neurons[costly]) for size in space.neurons)]
