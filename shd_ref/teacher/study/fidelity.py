"""What a teacher loses when its own layers work with merged heads, by plan and strategy, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.documents import sample_order
from shd_ref.errors import ShdError
from shd_ref.merging.plans import MergePlan, merge_plan
from shd_ref.teacher.graph.find import AttentionSite, projection_of
from shd_ref.teacher.opening.model import onnx
from shd_ref.teacher.options import MATCHED, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.forms import check_company
from shd_ref.teacher.rewrite.function import MergeRule
from shd_ref.teacher.rewrite.squeeze import replace_attention
from shd_ref.teacher.run.inputs import Batch, run_batch
from shd_ref.teacher.run.reading import match_plans
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.session import open_session
from shd_ref.teacher.sources import Arrays, Source
from shd_ref.teacher.study.intervals import half_width
from shd_ref.tolerances import tie_width

SAMPLES: Final = 32
"""Samples that plans are compared on, besides those that they are matched on."""
LEAST_SAMPLES: Final = 8
"""Fewer tell hardly anything apart: then samples that plans were matched on are compared too."""
MOST_BYTES: Final = 2**29
"""Whole maps of a layer, in float32, that a sample may have to be compared on, and all samples of matching together:
precompute runs longer ones in tiles, which no replaced attention is computed in."""
MOST_LOST: Final = 0.6
"""Attention error beyond which no gain in training is promised. In the study students gained at .52, at .56 no gain
was shown, and nothing was measured beyond."""
GIVEN: Final = "given"
"""The plan of rounds that were given one by one."""

RowMask = NDArray[np.bool_]


@dataclass(frozen=True)
class Fidelity:
    """What the teacher loses with one way to merge.

    Attributes:
        plan, strategy: in the words of ``PrecomputeOptions``; ``given`` for rounds.
        cost: mean over samples of 1 - cosine of the output (of its mean over counted rows).
        margin: half of its 95% interval, Student's t over samples; None of a single sample.
        excess, excess_margin: by how much ``cost`` is above the lowest, and half of its interval on the same samples;
            all of a table hold at once.
        attention_error: mean over layers of the relative error of the attention output.
        plans: the rounds of every layer.
    """

    plan: str
    strategy: str
    cost: float
    margin: float | None
    excess: float
    excess_margin: float | None
    attention_error: float
    plans: tuple[MergePlan, ...] = field(repr=False)

    @property
    def is_tied(self) -> bool:
        """Whether these samples cannot tell it from the lowest; what rounding parts is equal on any processor."""
        rounding = tie_width() * max(self.cost, tie_width())
        return self.excess_margin is None or self.excess <= max(self.excess_margin, rounding)


def recommend(results: Sequence[Fidelity]) -> Fidelity:
    """The first, which has the fewest options, of those that cannot be told from the lowest."""
    return next(one for one in results if one.is_tied)


def measure_fidelity(
    teacher: str | Path,
    inputs: Source | Arrays,
    options: PrecomputeOptions,
    run: RunOptions | None = None,
    *,
    samples: int = SAMPLES,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Fidelity, ...]:
    """Run a teacher with its heads merged in every chosen layer at once, by a few plans and strategies.

    Args:
        inputs: model inputs: a source (``open_source``), or arrays by graph input name with first axis N.
        options: heads, layers, and the plan and strategy that come first; the progressive and a matched plan (which
            needs networkx) with the strategies ``shd`` and ``constant`` follow.
        samples: the most to compare on.
        on_progress: called after every batch, with batches done and in all.

    Raises:
        ShdError: what ``precompute`` raises before it writes; ``not-finite``.
    """
    work = TeacherRun.open(Path(teacher), inputs, [options], run or RunOptions())
    check_company(work)
    return compare_plans(work, samples, on_progress)


def compare_plans(
    work: TeacherRun, samples: int = SAMPLES, on_progress: Callable[[int, int], None] | None = None
) -> tuple[Fidelity, ...]:
    """The same of a teacher that is ready to run, on samples that are not too long for whole maps.

    Nothing without attention, without an output of floats, or where all samples are too long; a matched plan that was
    not asked for is left out without networkx, or where its samples are too long together.
    """
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
    outputs = [value.name for value in work.graph.model.graph.output if value.type.tensor_type.elem_type in floats]
    if not work.graph.layers or not outputs or not samples:
        return ()
    options = work.options
    strategies = tuple(dict.fromkeys((options.strategy, "shd", "constant")))
    order = [int(index) for index in sample_order(len(work.inputs), work.run.seed)]
    sizes = [4 * work.graph.num_heads * work.inputs.longest_axis((index,)) ** 2 for index in order]
    short = [index for index, size in zip(order, sizes, strict=True) if size <= MOST_BYTES]
    calibrating = order[: options.calibration_samples]
    held_out = [index for index in short if index not in calibrating]
    chosen = (held_out if len(held_out) >= LEAST_SAMPLES else short)[:samples]
    if not chosen:
        return ()
    can_match = sum(sizes[: len(calibrating)]) <= MOST_BYTES
    ways = [(plan, strategy, rounds) for plan, rounds in _plans(work, can_match) for strategy in strategies]
    # In batches that are small enough for whole maps of all layers.
    groups = [batch.indices for batch in work.checked_batches(chosen)]
    costs, errors, done = [], [], 0
    for _, strategy, rounds in ways:
        distances: list[NDArray[np.float64]] = []
        squares = np.zeros((2, len(work.graph.layers)))
        for distance, square in _losses(work, outputs[0], strategy, rounds, groups):
            distances.append(distance)
            squares += square
            done += 1
            if on_progress:
                on_progress(done, len(ways) * len(groups))
        costs.append(np.concatenate(distances))
        errors.append(np.sqrt(squares[0] / np.where(squares[1] == 0, 1, squares[1])).mean())
    least = costs[int(np.argmin([cost.mean() for cost in costs]))]
    return tuple(
        Fidelity(
            plan=plan,
            strategy=strategy,
            cost=float(cost.mean()),
            margin=half_width(cost),
            excess=float(cost.mean() - least.mean()),
            excess_margin=half_width(cost - least, len(ways) - 1),
            attention_error=float(error),
            plans=rounds,
        )
        for (plan, strategy, rounds), cost, error in zip(ways, costs, errors, strict=True)
    )


def _plans(work: TeacherRun, can_match: bool) -> Iterator[tuple[str, tuple[MergePlan, ...]]]:
    """The plan that was asked for, the progressive one and, if it can be, a matched one."""
    options = work.options
    is_named = options.plans is None and isinstance(options.plan, str)
    asked = str(options.plan) if is_named else GIVEN
    yield asked, work.students[0].plans
    if asked != "progressive":
        yield "progressive", (merge_plan(work.graph.num_heads, options.num_student_heads),) * len(work.graph.layers)
    if asked != MATCHED and can_match:
        try:
            yield MATCHED, match_plans(work.graph, work.inputs, work.graph.masks_of(work.inputs), options, work.run)
        except ShdError as error:
            if error.code != "dependency-missing":
                raise


def _losses(
    work: TeacherRun, output: str, strategy: str, plans: Sequence[MergePlan], groups: Sequence[Sequence[int]]
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Of every batch: 1 - cosine ``(B,)`` of the output; squares ``(2, layers)`` of attention's error and norm."""
    sites = [site for _, site in work.graph.layers]
    projections = [projection_of(site).astype(np.float32) for site in sites]
    rules = [
        MergeRule(site.num_heads or 0, site.d_v or 0, plan, strategy) for site, plan in zip(sites, plans, strict=True)
    ]
    run_squeezed, run_plain = (_runner(work, sites, output, given) for given in (rules, None))
    for group in groups:
        batch = work.inputs.batch(group)
        squeezed, plain = run_squeezed(batch), run_plain(batch)
        kept = np.full(len(plain[0]), True)
        if work.options.on_error == "skip":  # as precompute leaves out such samples
            kept = np.array([np.isfinite(one).all() for one in plain[0]])
        if not np.isfinite(squeezed[0][kept]).all():
            rule = f"output {output!r} must be finite; got NaN or infinity in the batch of sample {batch.indices[0]}"
            raise ShdError("not-finite", f"{rule}: check its inputs", "MAP-5")
        squares = []
        masks = work.row_masks(batch).values()
        for mask, projection, *contexts in zip(masks, projections, squeezed[1:], plain[1:], strict=True):
            merged, own = (_project(context[kept], projection) for context in contexts)
            rows: Any = slice(None) if mask is None else mask[kept]
            squares.append([float((one[rows] ** 2).sum()) for one in (merged - own, own)])
        mask = work.target_mask(batch)
        counted = None if mask is None else mask[kept]
        yield cosine_distances(squeezed[0][kept], plain[0][kept], counted), np.array(squares).T


def _runner(
    work: TeacherRun, sites: Sequence[AttentionSite], output: str, rules: Sequence[MergeRule] | None
) -> Callable[[Batch], list[NDArray[Any]]]:
    """Output, then maps times values of every site, of a batch."""
    names_of = work.graph.masks_of(work.inputs)
    masks = [names_of[site.layer][0] for site in sites]
    graph = replace_attention(work.graph.bare, sites, rules, output=output, row_mask_input=masks)
    run, names = work.run, [output, *graph.contexts]
    session = open_session(
        graph.model, provider=run.provider, num_threads=run.num_threads, weights=work.graph.weights
    )

    def run_graph(batch: Batch) -> list[NDArray[Any]]:
        values = run_batch(session, names, batch)
        return [values[name][: len(batch.indices)] for name in names]  # a fixed batch may have been filled up

    return run_graph


def _project(context: NDArray[Any], projection: NDArray[np.float32]) -> NDArray[np.float64]:
    batch, heads, rows, width = context.shape
    joined: NDArray[np.float32] = context.transpose(0, 2, 1, 3).reshape(batch, rows, heads * width) @ projection
    return joined.astype(np.float64)


def cosine_distances(got: NDArray[Any], own: NDArray[Any], row_mask: RowMask | None = None) -> NDArray[np.float64]:
    """1 - cosine of each sample's outputs, at least 0; ``(B, L, D)`` is first averaged over counted rows."""
    a, b = (_pooled(array, row_mask) for array in (got, own))
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosine = (a * b).sum(axis=1) / np.where(norms == 0.0, 1.0, norms)
    equal_zeros = ~a.any(axis=1) & ~b.any(axis=1)
    distances: NDArray[np.float64] = np.where(equal_zeros, 0.0, np.maximum(1.0 - cosine, 0.0))
    return distances


def _pooled(array: NDArray[Any], row_mask: RowMask | None) -> NDArray[np.float64]:
    wide = array.astype(np.float64)
    if wide.ndim < 3:
        return wide.reshape(len(wide), -1)
    wide = wide.reshape(*wide.shape[:2], -1)
    fits = row_mask is not None and row_mask.shape == wide.shape[:2]
    weight = np.asarray(row_mask if fits else np.ones(wide.shape[:2]), dtype=np.float64)
    mean: NDArray[np.float64] = np.einsum("bl,bld->bd", weight, wide) / np.maximum(weight.sum(1), 1.0)[:, None]
    return mean
