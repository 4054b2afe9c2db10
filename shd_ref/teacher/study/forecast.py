"""A cache before anyone writes it, measured on a few samples: bytes, time and error of every form and codec.

Then the heads: the residual of the attention output with its heads merged, as precompute reports it.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Attention, CodecError, Errors, Extent, LogitsError, RowError, SampleRecord
from shd_ref.cache.forms.form import F32, Form
from shd_ref.errors import ShdError, need
from shd_ref.teacher.options import CODECS_OF, NO_FORM, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.compare import Comparison, compare_layers
from shd_ref.teacher.precompute.forms import describe_forms, make_records, measure_errors
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
MAX_ERROR: Final = 0.01
"""Largest mean share of a row's probability that coding may move, a convention: on 256 tokens ``sqrt8-row`` moves
less than half of it, and ``u4`` several times as much."""
MOST_LOST: Final = 0.6
"""Residual beyond which no gain in training is promised: students of the study gained at .52, none at .56,
and nothing was measured beyond."""

_REFUSALS: Final = ("argument-value", "graph-unsupported", "inputs-invalid")
"""Why a form or a codec may not fit a teacher."""


@dataclass(frozen=True)
class FormForecast:
    """A way to store supervision, by ``options`` of precompute; ``error`` is of the maps, else the logits.

    A reader slower than ``break_even`` bytes per second waits longer than the teacher would take.
    """

    form: str
    codec: str
    options: dict[str, str]
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
class Forecast:
    """The result of ``shd plan``; seconds are per sample, of the teacher and of the advised way's graph.

    Lengths of ``read_samples`` are known, ``measured_samples`` were run; ``targets`` are stored next to attention in
    all ways. ``residual`` is the relative error of the merged attention output, a mean over layers and samples, with
    half of its 95% interval (None of a single sample), ``constant_residual`` that of weights 1/2; None without
    attention. Unless the way ``taken`` ``pays``, run the teacher while training.
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
    targets: tuple[TargetForecast, ...]
    refused: tuple[str, ...]
    remarks: tuple[str, ...]
    residual: float | None
    margin: float | None
    constant_residual: float | None


def forecast_cache(
    teacher: str | Path,
    inputs: Source | Arrays,
    options: PrecomputeOptions,
    run: RunOptions | None = None,
    *,
    samples: int = 8,
    read_bandwidth: float = 500.0,
) -> Forecast:
    """Measure a few samples and forecast the cost of a cache of the whole data set, in every form and codec.

    Arguments are those of ``precompute``, whose form and codec do not matter here. The teacher runs on so many
    ``samples``; a training device reads ``read_bandwidth`` MB a second. Raises what ``TeacherRun`` does, and
    ``argument-value``, ``graph-unsupported``, ``not-finite``.
    """
    need(samples >= 1, "argument-value", "samples", "be at least 1", samples)
    is_rate = 0 < read_bandwidth < math.inf
    need(is_rate, "argument-value", "read_bandwidth", "be above 0 MB a second", read_bandwidth)
    source = inputs if isinstance(inputs, Source) else ArraySource(inputs)
    # Every codec codes the same maps, as the graph gives them for this one.
    uncoded = replace(options, form="maps", codec="float32") if options.has_attention else options
    work = TeacherRun.open(Path(teacher), _SampledSource(source, READ_SAMPLES), uncoded, run or RunOptions())
    chosen, count = _spread(work.inputs.lengths, samples), len(source)
    batches = [work.inputs.batch(group) for group in work.groups(chosen)]
    session = open_session(
        work.graph.bare, provider=work.run.provider, num_threads=work.run.num_threads, weights=work.graph.weights
    )
    outputs = [output.name for output in session.get_outputs()]
    teacher_seconds = _time(functools.partial(run_batch, session, outputs), batches) / len(chosen)
    choices: list[dict[str, str]] = [{"form": NO_FORM}]
    if options.has_attention:
        choices = [{"form": form, name: codec} for form, (name, codecs) in CODECS_OF.items() for codec in codecs]
    measured, refused = [], []
    for choice in choices:
        try:
            measured.append(_measure_way(work.storing(**choice), choice, chosen, count, teacher_seconds))
        except ShdError as error:
            if error.code not in _REFUSALS:
                raise
            refused.append(f"{choice['form']}: {error}")
    ways, last = tuple(way.forecast for way in measured), measured[-1]
    taken, residuals = advise(ways), _residuals(work, chosen)
    return Forecast(
        num_samples=count,
        read_samples=len(work.inputs),
        measured_samples=len(chosen),
        mean_length=float(last.lengths.mean()),
        max_length=int(last.lengths.max()),
        support=last.support,
        teacher_seconds=teacher_seconds,
        squeeze_seconds=_time(work.storing(**taken.options).squeeze, batches) / len(chosen),
        ways=ways,
        taken=taken,
        pays=taken.break_even <= 1e6 * read_bandwidth,
        targets=last.targets,
        refused=tuple(dict.fromkeys(refused)),
        remarks=work.remarks,
        residual=float(residuals[:, 0].mean()) if work.graph.layers else None,
        margin=half_width(residuals[:, 0]) if work.graph.layers else None,
        constant_residual=float(residuals[:, 1].mean()) if work.graph.layers else None,
    )


def advise(ways: Sequence[FormForecast]) -> FormForecast:
    """The smallest way that is exact enough, of equal ones the most exact; where none is, the most exact."""
    exact = [way for way in ways if way.error.tv_mean <= MAX_ERROR]
    if not exact:
        return min(ways, key=lambda way: (way.error.tv_mean, way.bytes_per_sample))
    return min(exact, key=lambda way: (way.bytes_per_sample, way.error.tv_mean))


class _Way(NamedTuple):
    """One form and codec, the targets stored next to attention, and all known lengths."""

    forecast: FormForecast
    targets: tuple[TargetForecast, ...]
    support: str
    lengths: NDArray[np.int64]


def _measure_way(
    work: TeacherRun, choice: dict[str, str], chosen: Sequence[int], count: int, teacher_seconds: float
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
        form=choice["form"],
        codec=" and ".join(form.codec for form in stored.forms) if attention is None else attention.codec,
        options=choice,
        bytes_per_sample=mean,
        bytes_per_token=mean / float(counted.mean()),
        total_bytes=mean * count,
        break_even=mean / teacher_seconds,
        error=CodecError(0.0, 0.0, 0.0, 0)
        if moved is None
        else CodecError(moved.kl_mean, moved.kl_max, moved.tv_mean, moved.rows),
    )
    targets = tuple(
        TargetForecast(form.SUBJECT, form.codec, count * bytes_of[form.SUBJECT], errors[form.SUBJECT])
        for form in stored.forms
        if not isinstance(form, Attention)
    )
    return _Way(forecast, targets, "" if attention is None else attention.support, lengths)


def record_sizes(form: Form, record: SampleRecord, extents: Sequence[Extent]) -> Iterator[int]:
    """Bytes of records of some extents; one of them shows whether optional parts are there."""
    widths = [
        (4 if part.dtype == F32 else 1) if not part.optional or part.name in record.parts else 0
        for part in form.parts
    ]
    for extent in extents:
        yield sum(width * math.prod(shape) for width, shape in zip(widths, form.part_shapes(extent), strict=True))


def _residuals(work: TeacherRun, chosen: Sequence[int]) -> NDArray[np.float64]:
    """Of each sample ``(n, 2)``: a mean over layers, by the strategy and by weights 1/2; no row without attention."""
    if not work.graph.layers:
        return np.empty((0, 2))
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


def _time(run: Callable[[Batch], Any], batches: Sequence[Batch]) -> float:
    """Seconds for all batches: medians of some rounds, after one that warms up."""
    seconds = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        for batch in batches:
            run(batch)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
