"""A cache before anyone writes it, measured on a few samples: bytes, time and error of every form and codec.

Then the heads: the residual of the attention output with its heads merged, by a few plans, as precompute tells it.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Attention, CodecError, Errors, Extent, LogitsError, RowError, SampleRecord
from shd_ref.cache.documents import sample_order
from shd_ref.cache.forms.form import F32, Form
from shd_ref.errors import ShdError, need
from shd_ref.merging.plans import MergePlan, merge_plan
from shd_ref.teacher.options import CODECS_OF, MATCHED, NO_FORM, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.compare import Comparison, compare_layers
from shd_ref.teacher.precompute.forms import check_company, describe_forms, make_records, measure_errors
from shd_ref.teacher.run.inputs import Batch, run_batch
from shd_ref.teacher.run.outputs import check_finite
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.session import open_session
from shd_ref.teacher.sources import Arrays, ArraySource, IndexedSource, Row, Source
from shd_ref.teacher.study.intervals import half_width

READ_SAMPLES: Final = 1000
"""Samples whose lengths are read: spread over the data set where any row is at hand, else the first."""
ROUNDS: Final = 3
"""Timed runs of every batch, after one that warms up; the median counts."""
COMPARED_SAMPLES: Final = 16
"""Samples on which plans are compared; with less than half as many held out, those of matching too."""
MAX_ERROR: Final = 0.01
"""Largest mean share of a row's probability that coding may move, a convention: on 256 tokens ``sqrt8-row`` moves
less than half of it, and ``u4`` several times as much."""
MOST_BYTES: Final = 2**29
"""Whole maps of a layer, in float32, of all samples that a plan may be matched on without being asked for."""
MOST_LOST: Final = 0.6
"""Residual beyond which no gain in training is promised: students of the study gained at .52, none at .56,
and nothing was measured beyond."""

_REFUSALS: Final = ("argument-value", "graph-unsupported", "inputs-invalid")
"""Why a form or a codec may not be able to hold what a teacher gives."""


@dataclass(frozen=True)
class FormForecast:
    """A way to store supervision, asked for by the fields ``asks``; ``error`` is of the maps, else the logits.

    A reader slower than ``break_even`` bytes per second waits longer than the teacher would take.
    """

    form: str
    codec: str
    asks: dict[str, str]
    bytes_per_sample: float
    bytes_per_token: float
    total_bytes: float
    break_even: float
    error: CodecError

    @property
    def title(self) -> str:
        return f"{self.form} {self.codec}" if self.form != NO_FORM else f"{self.codec} alone"


@dataclass(frozen=True)
class TargetForecast:
    """Logits, hidden states or embeddings of all records; ``error`` is of the sampled rows."""

    subject: str
    codec: str
    total_bytes: float
    error: RowError


@dataclass(frozen=True)
class Fidelity:
    """What one way to merge heads keeps of the attention output.

    Attributes:
        plan, strategy: in the words of ``PrecomputeOptions``; ``given`` for rounds.
        residual: relative error of the merged attention output, a mean over layers and samples.
        margin: half of its 95% interval, Student's t over samples; None of a single sample.
        plans: the rounds of every layer.
    """

    plan: str
    strategy: str
    residual: float
    margin: float | None
    plans: tuple[MergePlan, ...] = field(repr=False)


@dataclass(frozen=True)
class Forecast:
    """What ``shd plan`` shows; seconds are per sample, of the teacher and of the advised way's graph.

    Lengths of ``read_samples`` are known, ``measured_samples`` were run; ``beside`` is held next to attention in all
    ways; ``fidelity`` is of the asked plan and a few others. Unless the way ``taken`` ``pays``, run the teacher while
    training.
    """

    num_samples: int
    read_samples: int
    measured_samples: int
    mean_length: float
    max_length: int
    support: str
    teacher_seconds: float
    squeeze_seconds: float
    ways: tuple[FormForecast, ...]
    taken: FormForecast
    pays: bool
    beside: tuple[TargetForecast, ...]
    refused: tuple[str, ...]
    remarks: tuple[str, ...]
    fidelity: tuple[Fidelity, ...]


def forecast_cache(
    teacher: str | Path,
    inputs: Source | Arrays,
    options: PrecomputeOptions,
    run: RunOptions | None = None,
    *,
    samples: int = 8,
    read_bandwidth: float = 500.0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Forecast:
    """Measure a few samples and say what the cache of the whole data set would cost, in every form and codec.

    Arguments are those of ``precompute``, whose form and codec do not matter here. The teacher runs on so many
    ``samples``; a training device reads ``read_bandwidth`` MB a second; ``on_progress`` is called with plans compared
    and in all. Raises what ``TeacherRun`` does, and ``argument-value``, ``graph-unsupported``, ``not-finite``.
    """
    need(samples >= 1, "argument-value", "samples", "be at least 1", samples)
    is_rate = 0 < read_bandwidth < math.inf
    need(is_rate, "argument-value", "read_bandwidth", "be above 0 MB a second", read_bandwidth)
    source = inputs if isinstance(inputs, Source) else ArraySource(inputs)
    # Every codec codes the same maps, as the graph gives them for this one.
    uncoded = replace(options, form="maps", codec="float32") if options.has_attention else options
    work = TeacherRun.open(Path(teacher), _SampledSource(source, READ_SAMPLES), uncoded, run or RunOptions())
    check_company(work)
    chosen, count = _spread(work.inputs.lengths, samples), len(source)
    teacher_seconds = _time(_plain_runner(work), work.batches(chosen)) / len(chosen)
    choices: list[dict[str, str]] = [{"form": NO_FORM}]
    if options.has_attention:
        choices = [{"form": form, name: codec} for form, (name, codecs) in CODECS_OF.items() for codec in codecs]
    measured, refused = [], []
    for asks in choices:
        try:
            measured.append(_measure_way(work.storing(**asks), asks, chosen, count, teacher_seconds))
        except ShdError as error:
            if error.code not in _REFUSALS:
                raise
            refused.append(f"{asks['form']}: {error}")
    ways, last = tuple(way.forecast for way in measured), measured[-1]
    taken = advise(ways)
    return Forecast(
        num_samples=count,
        read_samples=len(work.inputs),
        measured_samples=len(chosen),
        mean_length=float(last.lengths.mean()),
        max_length=int(last.lengths.max()),
        support=last.support,
        teacher_seconds=teacher_seconds,
        squeeze_seconds=_time(work.storing(**taken.asks).squeeze, work.batches(chosen)) / len(chosen),
        ways=ways,
        taken=taken,
        pays=taken.break_even <= 1e6 * read_bandwidth,
        beside=last.beside,
        refused=tuple(dict.fromkeys(refused)),
        remarks=work.remarks,
        fidelity=compare_plans(work, on_progress),
    )


def advise(ways: Sequence[FormForecast]) -> FormForecast:
    """The smallest way that is exact enough, of equal ones the most exact; where none is, the most exact."""
    exact = [way for way in ways if way.error.tv_mean <= MAX_ERROR]
    if not exact:
        return min(ways, key=lambda way: (way.error.tv_mean, way.bytes_per_sample))
    return min(exact, key=lambda way: (way.bytes_per_sample, way.error.tv_mean))


class _Way(NamedTuple):
    """One form and codec, what is held next to attention, and all known lengths."""

    forecast: FormForecast
    beside: tuple[TargetForecast, ...]
    support: str
    lengths: NDArray[np.int64]


def _measure_way(
    work: TeacherRun, asks: dict[str, str], chosen: Sequence[int], count: int, teacher_seconds: float
) -> _Way:
    """Run some samples as they would be stored, and count the bytes of records of all known lengths."""
    inputs = work.inputs
    parts: list[Errors] = []
    extents: list[Extent] = []
    for batch in work.checked_batches(chosen):
        outputs = work.squeeze(batch, checked=True)
        check_finite(work, outputs)
        stored = describe_forms(work, outputs)
        records = make_records(outputs, stored, inputs.seed)
        parts.append(measure_errors(outputs, records, stored))
        extents += [record.extent for record in records]
    # Padding in front counts for no form, though maps keep its rows.
    lengths, counted = inputs.lengths, inputs.lengths - inputs.firsts
    if not lengths.any():  # images have no lengths among their inputs: those of their maps
        lengths = counted = np.array([extent.length for extent in extents])
    elif not records[0].shapes:
        sizes = zip(lengths.tolist(), inputs.firsts.tolist(), inputs.decoder_lengths.tolist(), strict=True)
        extents = [stored.extent_of(Extent(length, first, decoder=decoder)) for length, first, decoder in sizes]
    bytes_of = {form.SUBJECT: statistics.fmean(record_sizes(form, records[0], extents)) for form in stored.forms}
    errors, attention, mean = Errors.merged(parts), stored.find(Attention), sum(bytes_of.values())
    moved = next((error for error in errors.values() if isinstance(error, CodecError | LogitsError)), None)
    forecast = FormForecast(
        form=asks["form"],
        codec=" and ".join(form.codec for form in stored.forms) if attention is None else attention.codec,
        asks=asks,
        bytes_per_sample=mean,
        bytes_per_token=mean / float(counted.mean()),
        total_bytes=mean * count,
        break_even=mean / teacher_seconds,
        error=CodecError(0.0, 0.0, 0.0, 0)
        if moved is None
        else CodecError(moved.kl_mean, moved.kl_max, moved.tv_mean, moved.rows),
    )
    beside = tuple(
        TargetForecast(form.SUBJECT, form.codec, count * bytes_of[form.SUBJECT], errors[form.SUBJECT])
        for form in stored.forms
        if not isinstance(form, Attention)
    )
    return _Way(forecast, beside, "" if attention is None else attention.support, lengths)


def record_sizes(form: Form, record: SampleRecord, extents: Sequence[Extent]) -> Iterator[int]:
    """Bytes of records of some extents; one of them tells whether optional parts are there."""
    widths = [
        (4 if part.dtype == F32 else 1) if not part.optional or part.name in record.parts else 0
        for part in form.parts
    ]
    for extent in extents:
        yield sum(width * math.prod(shape) for width, shape in zip(widths, form.part_shapes(extent), strict=True))


def compare_plans(work: TeacherRun, on_progress: Callable[[int, int], None] | None = None) -> tuple[Fidelity, ...]:
    """The residual of a few plans, by the strategy that was asked for and by a constant 1/2; none without attention.

    Samples that plans are matched on are held out where enough others are left.
    """
    if not work.graph.layers:
        return ()
    order = [int(index) for index in sample_order(len(work.inputs), work.run.seed)]
    held_out = order[work.options.calibration_samples :]
    chosen = (held_out if 2 * len(held_out) >= COMPARED_SAMPLES else order)[:COMPARED_SAMPLES]
    plans, results = list(_plans(work, order)), []
    for number, (plan, rounds) in enumerate(plans, 1):
        residuals = _residuals(replace(work, plans=rounds), chosen)
        by_strategy = dict(zip((work.options.strategy, "constant"), residuals.T, strict=True))
        results += [
            Fidelity(plan, strategy, float(of_samples.mean()), half_width(of_samples), rounds)
            for strategy, of_samples in by_strategy.items()
        ]
        if on_progress is not None:
            on_progress(number, len(plans))
    return tuple(results)


def _plans(work: TeacherRun, order: Sequence[int]) -> Iterator[tuple[str, tuple[MergePlan, ...]]]:
    """The plan that was asked for, the progressive one, and a matched one: with networkx, on samples not too long."""
    options, graph = work.options, work.graph
    first = str(options.plan) if options.plans is None and isinstance(options.plan, str) else "given"
    yield first, work.plans
    if first != "progressive":
        yield "progressive", (merge_plan(graph.num_heads, options.num_student_heads),) * len(graph.layers)
    calibrating = order[: options.calibration_samples]
    entries = sum(graph.num_heads * work.inputs.longest_axis((index,)) ** 2 for index in calibrating)
    if first != MATCHED and 4 * entries <= MOST_BYTES:
        try:
            yield MATCHED, work.match_plans()
        except ShdError as error:
            if error.code != "dependency-missing":
                raise


def _residuals(work: TeacherRun, chosen: Sequence[int]) -> NDArray[np.float64]:
    """Of each sample ``(n, 2)``: a mean over layers, by the strategy and by a constant 1/2."""
    compared: dict[int, list[Comparison]] = {index: [] for index in chosen}
    for batch in work.checked_batches(chosen):
        for outputs in work.squeeze_parts(batch):
            check_finite(work, outputs)
            for number, index in enumerate(outputs.indices):
                compared[index] += compare_layers(outputs[[number]].layers, work.callers)
    means = [Comparison.merged(layers) for layers in compared.values()]
    return np.array([[mean.residual, mean.constant_residual] for mean in means])


def _spread(lengths: NDArray[np.int64], count: int) -> list[int]:
    """Samples at even steps of the order of their lengths: few that stand for all."""
    count = min(count, len(lengths))
    places = ((np.arange(count) + 0.5) * len(lengths) / count).astype(int)
    chosen: list[int] = np.argsort(lengths, kind="stable")[places].tolist()
    return chosen


class _SampledSource(Source):
    """A few rows of a source: spread evenly where any is at hand, else the first."""

    def __init__(self, source: Source, count: int) -> None:
        self.name, self.columns, self.ragged = source.name, source.columns, source.ragged
        self._source = source
        self._count = min(count, len(source))

    def __len__(self) -> int:
        return self._count

    def rows(self, columns: Sequence[str]) -> Iterator[Row]:
        if isinstance(self._source, IndexedSource):
            for index in np.linspace(0, len(self._source) - 1, self._count).astype(int).tolist():
                yield self._source.row(index, columns)
        else:
            yield from islice(self._source.rows(columns), self._count)


def _plain_runner(work: TeacherRun) -> Callable[[Batch], Any]:
    run, graph = work.run, work.graph
    session = open_session(graph.bare, provider=run.provider, num_threads=run.num_threads, weights=graph.weights)
    names = [output.name for output in session.get_outputs()]
    return functools.partial(run_batch, session, names)


def _time(run: Callable[[Batch], Any], batches: Iterable[Batch]) -> float:
    """Seconds for all batches: medians of some rounds, after one that warms up."""
    prepared, seconds = list(batches), []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        for batch in prepared:
            run(batch)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
