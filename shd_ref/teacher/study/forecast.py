"""What a cache would cost, before anyone writes it: bytes, time and error, measured on a few samples."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Attention, CodecError, Errors, Extent, LogitsError, RowError, SampleRecord
from shd_ref.cache.forms.form import F32, Form
from shd_ref.errors import ShdError
from shd_ref.teacher.options import CODECS_OF, NO_FORM, PlanOptions, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.forms import check_company, describe_forms, make_records, measure_errors
from shd_ref.teacher.run.inputs import Batch, run_batch
from shd_ref.teacher.run.outputs import find_faults
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.session import open_session
from shd_ref.teacher.sources import Arrays, ArraySource, IndexedSource, Row, Source
from shd_ref.teacher.study.fidelity import Fidelity, compare_plans

READ_SAMPLES: Final = 1000
"""Samples whose lengths are read: spread over the data set where any row is at hand, else the first."""
ROUNDS: Final = 3
"""Timed runs of every batch, after one that warms up; the median counts."""

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
    supplied: str
    fidelity: tuple[Fidelity, ...]


def forecast_cache(
    teacher: str | Path,
    inputs: Source | Arrays,
    options: PrecomputeOptions,
    run: RunOptions | None = None,
    plan: PlanOptions | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Forecast:
    """Measure a few samples and say what the cache of the whole data set would cost, in every form and codec.

    Arguments are those of ``precompute``, whose form and codec do not matter here; ``plan`` says what is measured,
    ``on_progress`` is of the comparison of plans. Raises what ``TeacherRun`` does, and ``argument-value``,
    ``graph-unsupported``, ``not-finite``.
    """
    plan = plan or PlanOptions()
    plan.check()
    source = inputs if isinstance(inputs, Source) else ArraySource(inputs)
    # Every codec codes the same maps, as the graph gives them for this one.
    uncoded = replace(options, form="maps", codec="float32") if options.has_attention else options
    work = TeacherRun.open(Path(teacher), _SampledSource(source, READ_SAMPLES), [uncoded], run or RunOptions())
    check_company(work)
    chosen = _spread(work.inputs.lengths, plan.samples)
    teacher_seconds = _time(_plain_runner(work), work.batches(chosen)) / len(chosen)
    asked: list[dict[str, str]] = [{"form": NO_FORM}]
    if options.has_attention:
        asked = [{"form": form, name: codec} for form, (name, codecs) in CODECS_OF.items() for codec in codecs]
    measured, refused = [], []
    for asks in asked:
        try:
            measured.append(_measure_way(work, asks, chosen, len(source), teacher_seconds))
        except ShdError as error:
            if error.code not in _REFUSALS:
                raise
            refused.append(f"{asks['form']}: {error}")
    ways = tuple(way.forecast for way in measured)
    taken, last = advise(ways, plan.max_error), measured[-1]
    return Forecast(
        num_samples=len(source),
        read_samples=len(work.inputs),
        measured_samples=len(chosen),
        mean_length=float(last.lengths.mean()),
        max_length=int(last.lengths.max()),
        support=last.support,
        teacher_seconds=teacher_seconds,
        squeeze_seconds=_time(work.storing(**taken.asks).squeeze, work.batches(chosen)) / len(chosen),
        ways=ways,
        taken=taken,
        pays=taken.break_even <= plan.bandwidth,
        beside=last.beside,
        refused=tuple(dict.fromkeys(refused)),
        remarks=work.remarks,
        supplied=work.inputs.supply,
        fidelity=compare_plans(work, plan.fidelity_samples, on_progress),
    )


def advise(ways: Sequence[FormForecast], max_error: float) -> FormForecast:
    """The smallest way that is exact enough, of equal ones the most exact; where none is, the most exact."""
    exact = [way for way in ways if way.error.tv_mean <= max_error]
    if not exact:
        return min(ways, key=lambda way: (way.error.tv_mean, way.bytes_per_sample))
    return min(exact, key=lambda way: (way.bytes_per_sample, way.error.tv_mean))


class _Way(NamedTuple):
    forecast: FormForecast
    beside: tuple[TargetForecast, ...]
    lengths: NDArray[np.int64]
    support: str


def _measure_way(
    work: TeacherRun, asks: dict[str, str], chosen: Sequence[int], num_samples: int, teacher_seconds: float
) -> _Way:
    """Run some samples as they would be stored; sizes follow from the lengths of all that were read."""
    own, inputs = work.storing(**asks), work.inputs
    parts: list[Errors] = []
    extents: list[Extent] = []
    for batch in own.checked_batches(chosen):
        (outputs,) = own.squeeze(batch, checked=True)
        find_faults(own, outputs, stop=True)
        forms = describe_forms(own, outputs)
        records = make_records(outputs, set(outputs.indices), forms, own.inputs.seed)
        parts.append(measure_errors(outputs, records, forms))
        extents += [record.extent for record in records]
    errors, has_shapes = Errors.merged(parts), bool(records[0].shapes)
    lengths, counted = inputs.lengths, inputs.lengths - inputs.firsts
    if not lengths.any():  # images have no lengths among their inputs: those of their maps
        lengths = counted = np.array([extent.length for extent in extents])
    elif not has_shapes:
        sizes = zip(lengths.tolist(), inputs.firsts.tolist(), inputs.decoder_lengths.tolist(), strict=True)
        extents = [forms.extent_of(Extent(length, first, decoder=decoder)) for length, first, decoder in sizes]

    def num_rows(form: Form) -> float:
        """Rows of a record, a mean; padding in front counts for no form, though maps keep its rows."""
        if form.unit == "position" and not has_shapes:
            return float(counted.mean())
        return float(np.mean([form.num_rows(extent) for extent in extents]))

    means = {form.SUBJECT: float(record_sizes(form, records[0], extents).mean()) for form in forms.forms}
    beside = tuple(
        TargetForecast(
            subject=form.SUBJECT,
            codec=form.codec,
            unit=form.unit,
            bytes_per_row=means[form.SUBJECT] / num_rows(form),
            total_bytes=means[form.SUBJECT] * num_samples,
            error=errors[form.SUBJECT],
        )
        for form in forms.forms
        if not isinstance(form, Attention)
    )
    first, attention, mean = forms.forms[0], forms.find(Attention), sum(means.values())
    moved = next((error for error in errors.values() if isinstance(error, CodecError | LogitsError)), None)
    forecast = FormForecast(
        form=asks["form"],
        codec=" and ".join(target.codec for target in beside) if attention is None else attention.codec,
        asks=asks,
        bytes_per_sample=mean,
        bytes_per_token=mean / (float(counted.mean()) if first.unit == "sample" else num_rows(first)),
        total_bytes=mean * num_samples,
        break_even=mean / teacher_seconds,
        error=CodecError(0.0, 0.0, 0.0, 0)
        if moved is None
        else CodecError(moved.kl_mean, moved.kl_max, moved.tv_mean, moved.rows),
    )
    return _Way(forecast, beside, lengths, "" if attention is None else attention.support)


def record_sizes(form: Form, record: SampleRecord, extents: Sequence[Extent]) -> NDArray[np.float64]:
    """Bytes of records of some extents; one of them tells whether optional parts are there."""
    held = [not part.optional or part.name in record.parts for part in form.parts]
    widths = [(4 if part.dtype == F32 else 1) * is_held for part, is_held in zip(form.parts, held, strict=True)]
    sizes = [
        sum(width * math.prod(shape) for width, shape in zip(widths, form.part_shapes(extent), strict=True))
        for extent in extents
    ]
    return np.array(sizes, dtype=np.float64)


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
