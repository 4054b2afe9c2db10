"""What a cache would cost, before anyone writes it: bytes, time and error, measured on a few samples."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Attention, CodecError, Errors, Extent, Forms, LogitsError, RowError, SampleRecord
from shd_ref.cache.forms.form import F32, Form
from shd_ref.errors import ShdError
from shd_ref.teacher.options import CODECS_OF, NO_FORM, PlanOptions, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.forms import describe_forms, make_records, measure_errors
from shd_ref.teacher.run.inputs import Batch, run_batch
from shd_ref.teacher.run.outputs import StudentOutputs, find_faults
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.session import open_session
from shd_ref.teacher.sources import Arrays, ArraySource, IndexedSource, Row, Source
from shd_ref.teacher.study.advice import Advice, FormForecast, TrainingMemory, advise, forecast_memory
from shd_ref.teacher.study.offers import TargetOffer, offer_targets

READ_SAMPLES: Final = 1000
"""Samples whose lengths are read: spread over the data set where any row is at hand, else the first."""
ROUNDS: Final = 3
"""Timed runs of every batch, after one that warms up; the median counts."""

_REFUSALS: Final = ("argument-value", "graph-unsupported", "inputs-invalid")
"""Why a form or a codec may not be able to hold what a teacher gives."""


@dataclass(frozen=True)
class TargetForecast:
    """Logits or hidden states of a record; ``unit`` is what a row belongs to, ``error`` is of the sampled rows."""

    subject: str
    codec: str
    unit: str
    bytes_per_row: float
    total_bytes: float
    error: RowError


@dataclass(frozen=True)
class Forecast:
    """What ``shd plan`` shows; seconds are per sample, of the teacher and of the advised way's graph.

    Lengths of ``read_samples`` are known, ``measured_samples`` were run; ``beside`` is held beside attention in all
    ways; ``offers`` are ways to store what KD on logits learns from.
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
    beside: tuple[TargetForecast, ...]
    refused: tuple[str, ...]
    advice: Advice
    memory: TrainingMemory
    remarks: tuple[str, ...]
    supplied: str
    offers: tuple[TargetOffer, ...] = ()

    @property
    def taken(self) -> FormForecast:
        """The way that is advised."""
        return self.ways[self.advice.form]


def forecast_cache(
    teacher: str | Path,
    inputs: Source | Arrays,
    options: PrecomputeOptions,
    run: RunOptions | None = None,
    plan: PlanOptions | None = None,
) -> Forecast:
    """Measure a few samples and say what the cache of the whole data set would cost, in every form and codec.

    Arguments are those of ``precompute``, whose form and codec do not matter here; ``plan`` says what is measured.
    Raises what ``TeacherRun`` does, and ``argument-value``, ``graph-unsupported``, ``not-finite``.
    """
    plan = plan or PlanOptions()
    plan.check()
    source = inputs if isinstance(inputs, Source) else ArraySource(inputs)
    # Every codec codes the same maps, as the graph gives them for this one.
    uncoded = replace(options, form="maps", codec="float32") if options.has_attention else options
    work = TeacherRun.open(Path(teacher), _SampledSource(source, READ_SAMPLES), [uncoded], run or RunOptions())
    work.check_samples()
    chosen = _spread(work.inputs.lengths, plan.samples)
    teacher_seconds = _time(_plain_runner(work), work.batches(chosen)) / len(chosen)
    refused: list[str] = []
    measured = [
        way
        for form in (CODECS_OF if options.has_attention else (NO_FORM,))
        for way in _measure_form(work, form, chosen, refused)
    ]
    forecasts = [_forecast_way(way, work, len(source), teacher_seconds) for way in measured]
    ways = [forecast for forecast, _ in forecasts]
    default = PrecomputeOptions(1)
    usual = next((way for way in ways if (way.form, way.codec) == (default.form, default.stored_codec)), None)
    advice = advise(ways, usual, plan.bandwidth, plan.max_error)
    taken = ways[advice.form]
    # Images have no lengths among their inputs: those of their maps.
    lengths = _lengths_of(measured[0], work)
    longest = int(lengths.max())
    held = measured[-1].forms.find(Attention)
    return Forecast(
        num_samples=len(source),
        read_samples=len(work.inputs),
        measured_samples=len(chosen),
        mean_length=float(lengths.mean()),
        max_length=longest,
        support="" if held is None else held.support,
        teacher_seconds=teacher_seconds,
        squeeze_seconds=_time(work.storing(**taken.asks).squeeze, work.batches(chosen)) / len(chosen),
        ways=tuple(ways),
        beside=forecasts[-1][1],
        refused=tuple(dict.fromkeys(refused)),
        advice=advice,
        memory=forecast_memory(work, taken.bytes_longest, longest, plan.train_batch, plan.num_student_parameters),
        remarks=work.remarks,
        supplied=work.inputs.supply,
        offers=offer_targets(work, chosen[-1]),
    )


class _Way:
    def __init__(self, work: TeacherRun, asks: dict[str, str], outputs: StudentOutputs) -> None:
        self.work, self.asks = work, asks
        forms = [  # the outputs are of the first codec
            replace(form, codec=work.options.stored_codec) if isinstance(form, Attention) else form
            for form in describe_forms(work, outputs).forms
        ]
        self.forms = Forms(*forms)
        self.held = self.forms.forms
        self.beside = tuple(form for form in self.held if not isinstance(form, Attention))
        self._errors: list[Errors] = []
        self._extents: list[Extent] = []

    def add(self, outputs: StudentOutputs) -> None:
        records = make_records(self.work, outputs, set(outputs.indices), self.forms)
        self._errors.append(measure_errors(self.work, outputs, records, self.forms))
        self._extents += [record.extent for record in records]
        self.record = records[0]

    @property
    def errors(self) -> Errors:
        return Errors.merged(self._errors)

    @property
    def extents(self) -> list[Extent]:
        """Of the records of all samples that were read; where lengths do not decide them, of those that were run."""
        inputs = self.work.inputs
        if self.record.shapes or not inputs.lengths.any():
            return self._extents
        sizes = zip(inputs.lengths.tolist(), inputs.firsts.tolist(), inputs.decoder_lengths.tolist(), strict=True)
        extents = [Extent(length, first, decoder=decoder) for length, first, decoder in sizes]
        return [self.forms.extent_of(extent) for extent in extents]


def _measure_form(work: TeacherRun, form: str, chosen: Sequence[int], refused: list[str]) -> list[_Way]:
    """The codecs that can hold what the teacher gives, from one run; why others cannot is added to ``refused``."""
    name, codecs = CODECS_OF.get(form, ("form", (form,)))
    works: dict[str, TeacherRun] = {}
    ways: dict[str, _Way] = {}

    @contextmanager
    def noted(codec: str) -> Iterator[None]:
        try:
            yield
        except ShdError as error:
            if error.code not in _REFUSALS:
                raise
            refused.append(f"{form}: {error}")
            works.pop(codec, None)
            ways.pop(codec, None)

    for codec in codecs:
        with noted(codec):
            works[codec] = work.storing(**{"form": form, name: codec})
    for batch in work.checked_batches(chosen):
        outputs: StudentOutputs | None = None
        for codec, one in list(works.items()):
            with noted(codec):
                if outputs is None:
                    (outputs,) = one.squeeze(batch, checked=True)
                    for fault in find_faults(one, outputs):
                        raise fault.error()
                if codec not in ways:
                    ways[codec] = _Way(one, {"form": form, name: codec}, outputs)
                ways[codec].add(outputs)
    return list(ways.values())


def _lengths_of(way: _Way, work: TeacherRun) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = work.inputs.lengths
    return lengths if lengths.any() else np.array([extent.length for extent in way.extents])


def _forecast_way(
    way: _Way, work: TeacherRun, num_samples: int, teacher_seconds: float
) -> tuple[FormForecast, tuple[TargetForecast, ...]]:
    extents, errors = way.extents, way.errors
    sizes_of = {form.SUBJECT: record_sizes(form, way.record, extents) for form in way.held}
    sizes: NDArray[np.float64] = np.sum(list(sizes_of.values()), axis=0)
    lengths = _lengths_of(way, work)
    counted = lengths - (work.inputs.firsts if len(lengths) == len(work.inputs) else 0)
    rows_of = {
        # Padding in front counts for no form, though maps keep its rows.
        form.SUBJECT: float(counted.mean())
        if form.unit == "position" and not extents[0].shapes
        else float(np.mean([form.num_rows(extent) for extent in extents]))
        for form in way.held
    }
    mean, first = float(sizes.mean()), way.held[0]
    beside = tuple(
        TargetForecast(
            subject=form.SUBJECT,
            codec=form.codec,
            unit=form.unit,
            bytes_per_row=float(sizes_of[form.SUBJECT].mean()) / rows_of[form.SUBJECT],
            total_bytes=float(sizes_of[form.SUBJECT].mean()) * num_samples,
            error=errors[form.SUBJECT],
        )
        for form in way.beside
    )
    measures = (
        (error.kl_mean, error.kl_max, error.tv_mean, error.rows)
        for error in errors.values()
        if isinstance(error, CodecError | LogitsError)
    )
    forecast = FormForecast(
        form=way.asks["form"],
        codec=first.codec if way.held != way.beside else " and ".join(form.codec for form in way.beside),
        asks=way.asks,
        bytes_per_sample=mean,
        bytes_per_token=mean / (float(counted.mean()) if first.unit == "sample" else rows_of[first.SUBJECT]),
        bytes_longest=float(sizes.max()),
        total_bytes=mean * num_samples,
        break_even=mean / teacher_seconds,
        error=CodecError(*next(measures, (0.0, 0.0, 0.0, 0))),
    )
    return forecast, beside


def record_sizes(form: Form, record: SampleRecord, extents: Sequence[Extent]) -> NDArray[np.float64]:
    """Bytes of records of some extents; one of them tells whether optional parts are there."""
    floats = iter(form.floats(record))
    there = [tensor.dtype != F32 or next(floats) is not None for tensor in form.parts]
    widths = [(4 if tensor.dtype == F32 else 1) * held for tensor, held in zip(form.parts, there, strict=True)]
    return np.array(
        [
            sum(width * math.prod(shape) for width, shape in zip(widths, form.part_shapes(extent), strict=True))
            for extent in extents
        ],
        dtype=np.float64,
    )


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
    run = work.run
    graph = work.graph
    session = open_session(graph.bare, provider=run.provider, num_threads=run.num_threads, weights=graph.weights)
    names = [output.name for output in session.get_outputs()]

    def run_all(batch: Batch) -> None:
        run_batch(session, names, batch)
        for other in work.others:
            other.run(batch)

    return run_all


def _time(run: Callable[[Batch], Any], batches: Iterable[Batch]) -> float:
    """Seconds for all batches: medians of some rounds, after one that warms up."""
    held, seconds = list(batches), []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        for batch in held:
            run(batch)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
