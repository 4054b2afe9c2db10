"""What parts of a student cost in onnxruntime: measured on students with random weights, added up for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from shd_ref.errors import import_package
from shd_torch.compress.space import Design, Space
from shd_torch.deploy import GraphTime, quantize_graph, time_graphs
from shd_torch.export import example_inputs, export_student
from shd_torch.shrink.families import Family
from shd_torch.shrink.sizes import ShrinkOptions, make_student
from shd_torch.shrink.student import plan_student

Progress = Callable[[int, int, str], None]
ROUNDS: Final = 9
TEACHER: Final = "teacher"
TEACHER_INT8: Final = "teacher, int8"
_CHECKED: Final = 3
"""Students of mixed sizes that the sums are compared with."""


@dataclass(frozen=True)
class Setting:
    """How students will be run: samples per run, tokens per sample (None for images) and threads."""

    batch: tuple[int, ...] | None
    length: tuple[int, ...] | None
    threads: int
    int8: bool

    def time(self, graphs: Mapping[str, Path], progress: Progress, rounds: int = ROUNDS) -> list[GraphTime]:
        """Graphs by turns, the first being the reference."""
        return time_graphs(
            graphs,
            batch=self.batch,
            length=self.length,
            threads=(self.threads,),
            rounds=rounds,
            progress=lambda done, total: progress(done, total, "graphs are timed"),
        )

    def price(self, graphs: Mapping[str, Path], progress: Progress) -> dict[str, list[float]]:
        """Median seconds of a run of each graph, one for each batch and length, in order; then its bytes."""
        prices: dict[str, list[float]] = {name: [] for name in graphs}
        for entry in self.time(graphs, progress):
            prices[entry.graph].append(entry.wall.median)
        for name, path in graphs.items():
            prices[name].append(float(count_bytes(path)))
        return prices


@dataclass(frozen=True)
class Costs:
    """Seconds of a run, a row for each batch and length, and last bytes; a student takes the sum of its parts.

    Attributes:
        base: of what is outside the layers.
        heads: of a layer's attention, less the teacher's, by its number of heads ``(settings, options)``.
        neurons: of a layer with the teacher's attention, by its number of neurons, likewise.
        teacher: of the teacher, fused and in float.
        errors: of students of mixed sizes, the sum over the measured time, less 1.
    """

    base: list[float]
    heads: list[list[float]]
    neurons: list[list[float]]
    teacher: list[float]
    teacher_int8: list[float] | None
    errors: list[float]

    def predict(self, design: Design, space: Space) -> list[float]:
        """Of a student: seconds at each setting, and bytes."""
        return [
            base
            + sum(heads[space.heads.index(count)] for count in design.heads)
            + sum(neurons[space.neurons.index(count)] for count in design.neurons)
            for base, heads, neurons in zip(self.base, self.heads, self.neurons, strict=True)
        ]


def count_bytes(graph: Path) -> int:
    """Of a graph with its weights, which may lie beside it."""
    return sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*"))


def write_graphs(model: Any, path: Path, *, int8: bool) -> dict[str, Path]:
    """A model as it is deployed: ``float``, and ``int8`` if asked for, the last being the one to run."""
    export_student(model, example_inputs(model), path)
    if not int8:
        return {"float": path}
    quantised = path.with_suffix(".int8.onnx")
    quantize_graph(path, quantised)
    return {"float": path, "int8": quantised}


def random_student(teacher: Any, family: Family, design: Design, space: Space) -> Any:
    """A student's model, its weights random: also its biases, as a graph holds equal tensors once."""
    sizes, kept, dropped = plan_student(teacher, family, ShrinkOptions(**design.options(space)))
    student = make_student(teacher, family, sizes, kept, dropped.among(kept))
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.normal_(0.0, 0.02)
    return student


def measure_costs(
    teacher: Any,
    family: Family,
    space: Space,
    setting: Setting,
    teacher_graphs: Mapping[str, Path],
    folder: Path,
    progress: Progress,
) -> Costs:
    """Time a student for each size of each part, by turns, and fit what the parts cost.

    ``teacher_graphs`` hold ``TEACHER`` and perhaps ``TEACHER_INT8``; ``folder`` is for graphs that are forgotten.
    """
    whole = space.whole
    half = max(1, space.num_layers // 2)
    designs = {"whole": whole, "half": space.uniform(whole.heads[0], whole.neurons[0], half)}
    designs |= {f"heads {count}": space.uniform(count, whole.neurons[0]) for count in space.heads[1:]}
    designs |= {f"neurons {count}": space.uniform(whole.heads[0], count) for count in space.neurons[1:]}
    designs |= {f"mixed {number}": design for number, design in enumerate(mixed_designs(space))}
    if space.num_layers == 1:
        del designs["half"]
    graphs = dict(teacher_graphs)
    for number, (name, design) in enumerate(designs.items()):
        progress(number, len(designs), "graphs to time are written")
        student = random_student(teacher, family, design, space)
        *_, graphs[name] = write_graphs(student, folder / f"{number}.onnx", int8=setting.int8).values()
    return fit_costs(setting.price(graphs, progress), designs, space)


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


def fit_costs(prices: Mapping[str, Sequence[float]], designs: Mapping[str, Design], space: Space) -> Costs:
    """What each size saves of a layer, and what a layer costs, from students that differ in one thing."""
    whole, num_layers = designs["whole"], space.num_layers
    base, heads, neurons = [], [], []
    for costs in (dict(zip(prices, row, strict=True)) for row in zip(*prices.values(), strict=True)):
        layer = costs["whole"]
        if "half" in designs:
            layer = (costs["whole"] - costs["half"]) / (num_layers - len(designs["half"].kept))
        saved = {}
        for name, design in designs.items():
            pairs = zip(whole.heads + whole.neurons, design.heads + design.neurons, strict=False)
            changed = sum(before != after for before, after in pairs)
            saved[name] = (costs["whole"] - costs[name]) / max(changed, 1)
        base.append(costs["whole"] - num_layers * layer)
        heads.append([0.0, *(-saved[f"heads {count}"] for count in space.heads[1:])])
        neurons.append([layer, *(layer - saved[f"neurons {count}"] for count in space.neurons[1:])])
    int8 = list(prices[TEACHER_INT8]) if TEACHER_INT8 in prices else None
    fitted = Costs(base, heads, neurons, list(prices[TEACHER]), int8, [])
    for name, design in designs.items():
        if name.startswith("mixed"):
            pairs_of_costs = list(zip(fitted.predict(design, space), prices[name], strict=True))
            fitted.errors.extend(predicted / measured - 1 for predicted, measured in pairs_of_costs[:-1])  # of times
    return fitted


def require_scipy() -> None:
    """``dependency-missing`` where SciPy is not installed."""
    import_package("scipy", "compress needs the package scipy: pip install 'squeezing-heads[compress]'")
