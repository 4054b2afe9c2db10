"""Which students are tried: what their parts cost, what these are worth, and the best within the limits of a target.

Costs are measured on students with random weights in onnxruntime and added up; worths are rises of the loss where one
part is smaller and what is left refitted. An integer programme chooses, and the chosen are timed themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from shd_ref.errors import ShdError
from shd_torch.checks import without_autocast
from shd_torch.compress.options import FASTEST, Target
from shd_torch.compress.space import NONE, Design, Space
from shd_torch.compress.stages import TEACHER, TEACHER_INT8, Run
from shd_torch.compress.task import model_run
from shd_torch.export import computes_first
from shd_torch.shrink.calibration import rotary_frequencies, run_layer, start_batches
from shd_torch.shrink.folders import padding_of
from shd_torch.shrink.layer import AttentionStatistics, Work, make_layer
from shd_torch.shrink.options import ShrinkOptions
from shd_torch.shrink.sizes import make_student
from shd_torch.shrink.student import plan_student


@dataclass(frozen=True)
class Costs:
    """Seconds of a run, a row for each batch and length, and last bytes; a student takes the sum of its parts.

    Attributes:
        base: of what is outside the layers.
        heads: of a layer's attention, beyond the smallest's, by its number of heads ``(settings, options)``.
        neurons: of a layer with the smallest attention, by its number of neurons ``(settings, options)``.
        teacher: of the teacher, fused and in float.
        reads_first: the head reads the first position alone, so that the last layer takes almost no time.
    """

    base: list[float]
    heads: list[list[float]]
    neurons: list[list[float]]
    teacher: list[float]
    teacher_int8: list[float] | None
    reads_first: bool = False

    def predict(self, design: Design, space: Space) -> list[float]:
        """Of a student: seconds at each setting, and bytes."""
        costs = list(self.base)
        for row, (heads, neurons) in enumerate(zip(self.heads, self.neurons, strict=True)):
            costly = slice(len(design.kept) - self.is_free(row))
            costs[row] += sum(heads[space.heads.index(count)] for count in design.heads[costly])
            costs[row] += sum(neurons[space.neurons.index(count)] for count in design.neurons[costly])
        return costs

    def is_free(self, row: int) -> bool:
        """Whether the last layer costs nothing beyond the base, in one row."""
        return self.reads_first and row < len(self.base) - 1


def random_student(run: Run, design: Design) -> Any:
    """A student's model, its weights random: also its biases, as a graph holds equal tensors once."""
    sizes, sources = plan_student(run.model, run.family, ShrinkOptions(**design.options(run.space)))
    student = make_student(run.model, run.family, sizes, sources)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.normal_(0.0, 0.02)
    return student


def price_designs(run: Run, designs: Sequence[Design]) -> list[list[float]]:
    """Costs of students with random weights."""
    graphs = _write_random(
        run, {str(number): design for number, design in enumerate(designs)}, "candidates are exported"
    )
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
    if space.num_layers == 1:
        del designs["half"]
    graphs = run.teacher_graphs | _write_random(run, designs, "graphs to time are written")
    reads_first = space.num_layers > 1 and computes_first(graphs[TEACHER])
    return fit_costs(run.price(graphs), designs, space, reads_first=reads_first)


def fit_costs(
    prices: Mapping[str, Sequence[float]], designs: Mapping[str, Design], space: Space, *, reads_first: bool = False
) -> Costs:
    """Least squares of relative errors over students that differ in one thing, in steps from each size to the next.

    No step costs less than 0. Small parts are faster than their share, as they fit into the processor's caches: with
    free steps a layer that loses both its attention and neurons would cost less than nothing, and be chosen.
    """
    from scipy.optimize import nnls

    rows, settings = [], len(prices["whole"]) - 1
    for row in range(settings + 1):
        free = int(reads_first and row < settings)
        relative = [
            np.array(_count_steps(design, space, free)) / prices[name][row] for name, design in designs.items()
        ]
        base, *steps = np.split(nnls(np.array(relative), np.ones(len(relative)))[0], [1, len(space.heads)])
        of_heads, of_neurons = (np.cumsum(sizes[::-1])[::-1].tolist() for sizes in steps)
        rows.append((float(base[0]), [*of_heads, 0.0], of_neurons))
    int8 = list(prices[TEACHER_INT8]) if TEACHER_INT8 in prices else None
    bases, heads, neurons = map(list, zip(*rows, strict=True))
    return Costs(bases, heads, neurons, list(prices[TEACHER]), int8, reads_first)


def _count_steps(design: Design, space: Space, free: int) -> list[int]:
    """Once what is outside the layers, and how many but the last ``free`` have each size or a larger one."""
    costly = slice(len(design.kept) - free)
    heads = [sum(count >= size for count in design.heads[costly]) for size in space.heads[:-1]]
    return [1, *heads, *(sum(count >= size for count in design.neurons[costly]) for size in space.neurons)]


@dataclass(frozen=True)
class Worths:
    """Rises of the loss over the teacher's, never below 0.

    Attributes:
        heads: where a layer has another number of heads ``(layers, options)``.
        neurons: where its FFN is smaller, likewise.
        layers: where it is left out ``(layers,)``.
    """

    heads: list[list[float]]
    neurons: list[list[float]]
    layers: list[float]

    def predict(self, design: Design, space: Space) -> float:
        """The sum over what a student lacks."""
        total = sum(worth for layer, worth in enumerate(self.layers) if layer not in design.kept)
        for layer, heads, neurons in zip(design.kept, design.heads, design.neurons, strict=True):
            total += self.heads[layer][space.heads.index(heads)]
            total += self.neurons[layer][space.neurons.index(neurons)]
        return total


@torch.no_grad()
@without_autocast
def measure_worths(run: Run) -> Worths:
    """Replace one part of one layer at a time, refitted on the teacher's stream, and read the loss."""
    teacher, family, space, judge = run.model, run.family, run.space, run.judge("choices", run.search.judged)
    calibration = run.samples.calibration(run.search.judged, padding_of(teacher.config))
    layers = family.layers_of(teacher)
    teacher.eval()
    batches = start_batches(teacher, family, calibration, ShrinkOptions().batch_size)
    streams = [[batch.stream for batch in batches]]
    for number, layer in enumerate(layers):
        streams.append([stream for stream, _ in run_layer(layer, streams[-1], batches, number)])
    frequencies = rotary_frequencies(teacher, family)
    studies: dict[int, AttentionStatistics] = {}  # gathered once, for all parts
    whole_model = model_run(teacher)
    base = judge.measure(whole_model).loss
    whole = space.whole
    options = [("heads", count, space.uniform(count, whole.neurons[0])) for count in space.heads[1:]]
    options += [("neurons", count, space.uniform(whole.heads[0], count)) for count in space.neurons[1:]]
    rises: dict[tuple[str, int, int], float] = {}
    total, done = space.num_layers * (len(options) + 1), 0

    def read(number: int, replacement: Sequence[nn.Module]) -> float:
        nonlocal done
        with replaced(layers, number, replacement):
            loss = judge.measure(whole_model).loss
        done += 1
        run.progress(done, total, "parts are weighed")
        return max(loss - base, 0.0)

    def work_of(design: Design) -> Work:
        shrink_options = ShrinkOptions(**design.options(space))
        sizes, sources = plan_student(teacher, family, shrink_options)
        return Work(
            teacher=teacher,
            student=random_student(run, design),
            family=family,
            batches=batches,
            sources=sources,
            sizes=sizes,
            options=shrink_options,
            frequencies=frequencies,
            tell=lambda *_: None,
            studies=studies,
        )

    def remake(work: Work, number: int, following: int) -> nn.Module:
        stream = streams[number]
        make_layer(work, number, number, following, stream, stream)
        return family.layers_of(work.student)[number]

    run.progress(0, total, "parts are weighed")
    for kind, count, design in options:
        works = [work_of(design)]
        if count == NONE and kind == "heads":  # some layer must attend: the first is weighed where the last does
            works.append(work_of(space.uniform(count, whole.neurons[0], attending=-1)))
        for number in range(space.num_layers):
            work = works[-1] if number == 0 else works[0]
            rises[kind, number, count] = read(number, [remake(work, number, number + 1)])
    work = work_of(whole)
    skipped = []
    for number in range(space.num_layers):
        if number == 0:
            skipped.append(read(0, []) if not space.keeps_first and space.num_layers > 1 else float("inf"))
            continue
        before = remake(work, number - 1, number + 1)
        with replaced(layers, number, []):
            skipped.append(read(number - 1, [before]))

    def table(kind: str, counts: Sequence[int]) -> list[list[float]]:
        """By layer, then by size: at least what a larger size costs."""
        rows = ([rises[kind, number, count] for count in counts[1:]] for number in range(space.num_layers))
        return [list(accumulate([0.0, *row], max)) for row in rows]

    return Worths(table("heads", space.heads), table("neurons", space.neurons), skipped)


@contextmanager
def replaced(layers: nn.ModuleList, number: int, modules: Sequence[nn.Module]) -> Iterator[None]:
    """One layer of a model in another form, or none in its place."""
    modules_before = layers._modules
    others = list(layers)
    layers._modules = dict(nn.ModuleList([*others[:number], *modules, *others[number + 1 :]]).named_children())
    try:
        yield
    finally:
        layers._modules = modules_before


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
    skipped = np.minimum(np.array(worths.layers), 1e6)  # a layer that must stay has inf, which no solver takes
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
    for setting, (limit, base, *sizes) in enumerate(zip(limits, costs.base, costs.heads, costs.neurons, strict=True)):
        costly = np.ones(layers) - per_layer[-1] * costs.is_free(setting)
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
    kept = [layer for layer in range(layers) if table[layer, :heads].any()]
    return Design(
        tuple(kept),
        tuple(space.heads[int(table[layer, :heads].argmax())] for layer in kept),
        tuple(space.neurons[int(table[layer, heads:].argmax())] for layer in kept),
    )


def keep_layers(space: Space, costs: Costs, worths: Worths, limits: Sequence[float]) -> Design | None:
    """As many whole layers of the teacher as the limits allow, and which: what one would try without a search."""
    counts = range(space.num_layers - 1, 0, -1)
    designs = (choose_design(space, costs, worths, limits, count, whole=True) for count in counts)
    return next((design for design in designs if design is not None), None)


_REPEATS: Final = 3  # students that were slower than predicted give way to others within tighter limits
_TOLERANCE: Final = 0.01  # of a limit: two runs of one graph differ by as much
_SPEEDS: Final = 5
"""That are tried where only a quality is asked for."""


def find_candidates(run: Run, costs: Costs, worths: Worths, target: Target) -> list[dict[str, Any]]:
    """The best students, or one for each of several speeds; those that are too slow when timed are chosen again.

    Raises:
        ShdError: ``argument-value`` where no student is small enough.
    """
    space, most = run.space, run.options.most_candidates
    is_ladder = target.name == FASTEST
    pending = [
        (design, limits)
        for limits in (_ladder(space, costs) if is_ladder else [target.limits])
        for design in choose_designs(space, costs, worths, limits)[: 1 if is_ladder else most]
    ]
    whole_layers = None if is_ladder else keep_layers(space, costs, worths, target.limits)
    if whole_layers is not None and (whole_layers, target.limits) not in pending:
        pending.append((whole_layers, target.limits))
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
        raise ShdError("argument-value", f"the target must be met by some student; got {target.text}: {smallest}")
    return sorted(candidates.values(), key=lambda row: float(row["predicted_loss"]))


def _ladder(space: Space, costs: Costs) -> list[list[float]]:
    """Limits from the teacher as it would be deployed to the fastest student."""
    slow, fast = costs.teacher_int8 or costs.teacher, costs.predict(_smallest(space), space)
    shares = [step / (_SPEEDS + 1) for step in range(1, _SPEEDS + 1)]
    return [
        [*(a ** (1 - share) * b**share for a, b in zip(slow[:-1], fast[:-1], strict=True)), math.inf]
        for share in shares
    ]


def _smallest(space: Space) -> Design:
    return Design((0,), (min(count for count in space.heads if count),), (min(space.neurons),))
