"""What a cache would cost, before anyone writes it: bytes, time and error, measured on a few samples."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import (
    VECTOR_CODECS,
    Attention,
    CodecError,
    Errors,
    Exact,
    Extent,
    Forms,
    Logits,
    LogitsError,
    RowError,
    SampleRecord,
    TeacherHead,
)
from shd_ref.cache.codecs.logits import logits_error
from shd_ref.cache.forms.form import F32, Form
from shd_ref.errors import ShdError
from shd_ref.teacher.graph.targets import find_head
from shd_ref.teacher.options import CODECS_OF, NO_FORM, PlanOptions, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.forms import describe_forms, make_records, measure_errors
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
        """For people."""
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
    ways; ``offers`` are ways to store what KD on logits learns from; ``fidelity`` is of the asked plan and a few
    others. Unless the way ``taken`` ``pays``, run the teacher while training.
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
    offers: tuple[TargetOffer, ...]
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
    work.check_samples()
    chosen = _spread(work.inputs.lengths, plan.samples)
    teacher_seconds = _time(_plain_runner(work), work.batches(chosen)) / len(chosen)
    asked: list[dict[str, str]] = [{"form": NO_FORM}]
    if options.has_attention:
        asked = [{"form": form, name: codec} for form, (name, codecs) in CODECS_OF.items() for codec in codecs]
    measured, refused = [], []
    for asks in asked:
        try:
            measured.append(_measure_way(work, asks, chosen))
        except ShdError as error:
            if error.code not in _REFUSALS:
                raise
            refused.append(f"{asks['form']}: {error}")
    ways = tuple(_forecast_way(way, len(source), teacher_seconds) for way in measured)
    taken = advise(ways, plan.max_error)
    last = measured[-1]
    held = last.forms.find(Attention)
    return Forecast(
        num_samples=len(source),
        read_samples=len(work.inputs),
        measured_samples=len(chosen),
        mean_length=float(last.lengths.mean()),
        max_length=int(last.lengths.max()),
        support="" if held is None else held.support,
        teacher_seconds=teacher_seconds,
        squeeze_seconds=_time(work.storing(**taken.asks).squeeze, work.batches(chosen)) / len(chosen),
        ways=ways,
        taken=taken,
        pays=taken.break_even <= plan.bandwidth,
        beside=tuple(
            TargetForecast(
                subject=form.SUBJECT,
                codec=form.codec,
                unit=form.unit,
                bytes_per_row=float(last.sizes(form).mean()) / last.num_rows(form),
                total_bytes=float(last.sizes(form).mean()) * len(source),
                error=last.errors[form.SUBJECT],
            )
            for form in last.beside
        ),
        refused=tuple(dict.fromkeys(refused)),
        remarks=work.remarks,
        supplied=work.inputs.supply,
        offers=offer_targets(work, chosen[-1]),
        fidelity=compare_plans(work, plan.fidelity_samples, on_progress),
    )


def advise(ways: Sequence[FormForecast], max_error: float) -> FormForecast:
    """The smallest way that is exact enough, of equal ones the most exact; where none is, the most exact."""
    exact = [way for way in ways if way.error.tv_mean <= max_error]
    if not exact:
        return min(ways, key=lambda way: (way.error.tv_mean, way.bytes_per_sample))
    return min(exact, key=lambda way: (way.bytes_per_sample, way.error.tv_mean))


@dataclass(frozen=True)
class _Way:
    asks: dict[str, str]
    forms: Forms
    record: SampleRecord  # one of them
    errors: Errors
    extents: Sequence[Extent]  # of the samples that were read, where lengths decide them, else that were run
    lengths: NDArray[np.int64]
    counted: NDArray[np.int64]  # lengths without padding in front

    @property
    def beside(self) -> tuple[Form, ...]:
        return tuple(form for form in self.forms.forms if not isinstance(form, Attention))

    def sizes(self, form: Form) -> NDArray[np.float64]:
        return record_sizes(form, self.record, self.extents)

    def num_rows(self, form: Form) -> float:
        """Rows of a record, a mean; padding in front counts for no form, though maps keep its rows."""
        if form.unit == "position" and not self.extents[0].shapes:
            return float(self.counted.mean())
        return float(np.mean([form.num_rows(extent) for extent in self.extents]))


def _measure_way(work: TeacherRun, asks: dict[str, str], chosen: Sequence[int]) -> _Way:
    own, inputs = work.storing(**asks), work.inputs
    errors: list[Errors] = []
    extents: list[Extent] = []
    for batch in own.checked_batches(chosen):
        (outputs,) = own.squeeze(batch, checked=True)
        for fault in find_faults(own, outputs):
            raise fault.error()
        forms = describe_forms(own, outputs)
        records = make_records(outputs, set(outputs.indices), forms, own.inputs.seed)
        errors.append(measure_errors(outputs, records, forms))
        extents += [record.extent for record in records]
    lengths: NDArray[np.int64] = inputs.lengths
    if not lengths.any():  # images have no lengths among their inputs: those of their maps
        lengths = np.array([extent.length for extent in extents])
    elif not records[0].shapes:
        sizes = zip(lengths.tolist(), inputs.firsts.tolist(), inputs.decoder_lengths.tolist(), strict=True)
        extents = [forms.extent_of(Extent(length, first, decoder=decoder)) for length, first, decoder in sizes]
    counted = lengths - (inputs.firsts if len(lengths) == len(inputs) else 0)
    return _Way(asks, forms, records[0], Errors.merged(errors), extents, lengths, counted)


def _forecast_way(way: _Way, num_samples: int, teacher_seconds: float) -> FormForecast:
    first = way.forms.forms[0]
    mean = float(np.sum([way.sizes(form) for form in way.forms.forms], axis=0).mean())
    rows = float(way.counted.mean()) if first.unit == "sample" else way.num_rows(first)
    measures = (
        (error.kl_mean, error.kl_max, error.tv_mean, error.rows)
        for error in way.errors.values()
        if isinstance(error, CodecError | LogitsError)
    )
    return FormForecast(
        form=way.asks["form"],
        codec=first.codec if isinstance(first, Attention) else " and ".join(form.codec for form in way.beside),
        asks=way.asks,
        bytes_per_sample=mean,
        bytes_per_token=mean / rows,
        total_bytes=mean * num_samples,
        break_even=mean / teacher_seconds,
        error=CodecError(*next(measures, (0.0, 0.0, 0.0, 0))),
    )


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


@dataclass(frozen=True)
class TargetOffer:
    """A way to store what KD on logits learns from.

    Attributes:
        way: ``"exact"``, ``"topk"`` or ``"whole"``, with its codec.
        asks: the options of precompute.
        bytes_per_token: of a record.
        head_bytes: of the head, once in the cache and in the device's memory.
        gradient_error: of the gradient of KL by the logits, relative to the teacher's part of it (CACHE-170).
    """

    way: str
    asks: str
    bytes_per_token: int
    head_bytes: int
    gradient_error: float


def offer_targets(work: TeacherRun, index: int) -> tuple[TargetOffer, ...]:
    """What a language model's graph allows; nothing where it has no head that is known, or several teachers."""
    options = work.options
    if work.others:
        return ()
    try:
        head = find_head(work.graph.model, options.logits_output)
        states, logits = work.run_head(index, head)
        return tuple(_offers(states, logits, head.head.cut(logits.shape[-1]), work))
    except ShdError:
        return ()


def _offers(
    states: NDArray[np.float32], logits: NDArray[np.float32], head: TeacherHead, work: TeacherRun
) -> Iterator[TargetOffer]:
    form, (_, *tensors) = Exact.of_head(head, VECTOR_CODECS[0], "positions", "states")
    size = sum(tensor.nbytes for tensor in tensors)
    for codec in VECTOR_CODECS:
        coded = replace(form, codec=codec)
        logits_made = head.logits(coded.decode_rows(coded.encode(states)))
        error = logits_error(logits, 1.0, lambda rows, logits_made=logits_made: logits_made[rows])  # type: ignore[misc]
        asks = f"--hidden last --hidden-codec {codec}"
        yield TargetOffer(f"exact {codec}", asks, coded.row_sizes[0], size, error.gradient_mean)
    options, top = work.options, min(work.options.logits_top or 1, len(head.weight))
    whole = Logits(codec="float16", rows="positions", tensor="logits", vocab_size=len(head.weight))
    softened, bits = options.logits_temperature, options.logits_bits
    likeliest = replace(whole, codec="topk", head=top, value_bits=bits, temperature=softened)
    for way, asks, rows in (
        (f"top {top}", f"--logits topk --logits-top {top}", likeliest),
        ("whole float16", "--logits float16", whole),
    ):
        cost: Any = rows.measure(logits, rows.encode(logits))
        yield TargetOffer(way, asks, rows.row_sizes[0], 0, cost.gradient_mean)
