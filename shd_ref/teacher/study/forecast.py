"""What a cache would cost, before anyone writes it: bytes, time and error, measured on a few samples."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import NO_ATTENTION, CodecError, Errors, Extent, HiddenError, LogitsError, NewRecord
from shd_ref.cache.codecs.compression import compress_blob
from shd_ref.cache.forms.form import F32, Form
from shd_ref.errors import ShdError
from shd_ref.teacher.precompute.forms.targets import Forms, describe_hidden, describe_logits
from shd_ref.teacher.precompute.manifest import describe_attention
from shd_ref.teacher.precompute.records import extent_of, make_records, measure_errors
from shd_ref.teacher.run.faults import find_faults
from shd_ref.teacher.run.inputs import Batch
from shd_ref.teacher.run.options import CODECS_OF, NO_FORM, PrecomputeOptions, RunOptions
from shd_ref.teacher.run.outputs import SampleOutputs, StudentOutputs, TargetOutputs
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.session import open_session
from shd_ref.teacher.sources import Arrays, ArraySource, IndexedSource, Row, Source
from shd_ref.teacher.study.advice import Advice, FormForecast, advise
from shd_ref.teacher.study.memory import TrainingMemory, forecast_memory
from shd_ref.teacher.study.options import PlanOptions

READ_SAMPLES: Final = 1000
"""Samples whose lengths are read: spread over the data set where any row is at hand, else the first."""
ROUNDS: Final = 3
"""Timed runs of every batch, after one that warms up; the median counts."""

_REFUSALS: Final = ("argument-value", "graph-unsupported", "inputs-invalid")
"""Why a form or a codec may not be able to hold what a teacher gives."""


@dataclass(frozen=True)
class TargetForecast:
    """What a record holds of another subject than attention.

    Attributes:
        subject: ``SUBJECT`` of its form.
        codec: of its form.
        unit: what a row of it belongs to, such as a position of the decoder.
        bytes_per_row: of each that counts.
        total_bytes: of the whole data set.
        error: measured on the sampled rows.
    """

    subject: str
    codec: str
    unit: str
    bytes_per_row: float
    total_bytes: float
    error: CodecError | LogitsError | HiddenError


@dataclass(frozen=True)
class Forecast:
    """What ``shd plan`` shows.

    Attributes:
        num_samples: in the data set.
        read_samples: of how many the lengths are known; the rest is extrapolated.
        measured_samples: on how many the teacher ran: evenly spread over the lengths.
        mean_length, max_length: positions.
        support: ``"full"`` or ``"causal"``; empty without attention.
        teacher_seconds: a sample, of the teacher as it is, in batches as asked for.
        squeeze_seconds: a sample, of the squeezed graph of the way that is advised.
        ways: all forms and codecs of attention that can hold what the teacher gives.
        beside: what the same records hold beside attention, where it is asked for; ``ways`` count its bytes.
        refused: those that cannot, and why.
        advice: which to take.
        memory: of a training step with it.
        remarks: see ``TeacherRun.remarks``.
        supplied: what is fed beside the data, in a line; empty for nothing.
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

    Args:
        teacher: an ``.onnx`` file.
        inputs: as for ``precompute``.
        options: what to make of the teacher; form and codec do not matter.
        run: how to run it.
        plan: what is measured, and what for.

    Raises:
        ShdError: as ``TeacherRun``; ``argument-value``, ``graph-unsupported``, ``not-finite``.
    """
    plan = plan or PlanOptions()
    plan.check()
    source = inputs if isinstance(inputs, Source) else ArraySource(inputs)
    # Every codec codes the same maps, as the graph gives them for this one.
    uncoded = replace(options, form="maps", codec="float32") if options.has_attention else options
    work = TeacherRun(Path(teacher), _SampledSource(source, READ_SAMPLES), [uncoded], run or RunOptions())
    work.check_samples()
    chosen = _spread(work.inputs.lengths, plan.samples)
    study = _Study(work, list(work.checked_batches(chosen)), len(source))
    batches = list(work.batches(chosen))
    study.teacher_seconds = _time(_plain_runner(work), batches) / len(chosen)
    ways = [way for form in (CODECS_OF if options.has_attention else (NO_FORM,)) for way in study.forecast(form)]
    default = PrecomputeOptions(1)
    usual = next((way for way in ways if (way.form, way.codec) == (default.form, default.stored_codec)), None)
    advice = advise(ways, usual, plan.bandwidth, plan.max_error)
    taken = ways[advice.form]
    longest = int(study.lengths.max())
    return Forecast(
        num_samples=len(source),
        read_samples=len(work.inputs),
        measured_samples=len(chosen),
        mean_length=float(study.lengths.mean()),
        max_length=longest,
        support=study.support,
        teacher_seconds=study.teacher_seconds,
        squeeze_seconds=_time(work.storing(**taken.asks).squeeze, batches) / len(chosen),
        ways=tuple(ways),
        beside=study.beside,
        refused=tuple(dict.fromkeys(study.refused)),
        advice=advice,
        memory=forecast_memory(work, taken.bytes_longest, longest, plan.train_batch, plan.num_student_parameters),
        remarks=work.remarks,
        supplied=work.inputs.supply,
    )


class _Study:
    """A few samples of a teacher, to be stored in every way.

    Args:
        work: gives maps before coding.
        batches: small enough for check outputs.
        num_samples: of the whole data set.
    """

    def __init__(self, work: TeacherRun, batches: Sequence[Batch], num_samples: int) -> None:
        self._work, self._batches, self._num_samples = work, batches, num_samples
        self.refused: list[str] = []
        self.teacher_seconds = 1.0
        self.support = "full"
        self.beside: tuple[TargetForecast, ...] = ()
        # Images have no lengths among their inputs: those of their maps.
        self.lengths: NDArray[np.int64] = work.inputs.lengths

    def forecast(self, form: str) -> Iterator[FormForecast]:
        """The codecs of a form that can hold what the teacher gives; what cannot is noted in ``refused``.

        Raises:
            ShdError: ``not-finite``.
        """
        field, codecs = CODECS_OF.get(form, ("form", (form,)))
        outputs: list[StudentOutputs] = []
        for codec in codecs:
            asks = {"form": form, field: codec}
            try:
                work = self._work.storing(**asks)
                outputs = outputs or self._run(work)
                yield self._measure(work, outputs, asks)
            except ShdError as error:
                if error.code not in _REFUSALS:
                    raise
                self.refused.append(f"{form}: {error}")

    def _run(self, work: TeacherRun) -> list[StudentOutputs]:
        outputs = []
        for batch in self._batches:
            (output,) = work.squeeze(batch, checked=True)
            for fault in find_faults(work, output):
                raise fault.error()
            outputs.append(output)
        return outputs

    def _measure(self, work: TeacherRun, outputs: Sequence[StudentOutputs], asks: dict[str, str]) -> FormForecast:
        form = describe_attention(work, outputs[0])
        if form is not NO_ATTENTION:
            form = replace(form, codec=work.options.stored_codec)
        forms = Forms(form, describe_logits(work, outputs[0]), describe_hidden(work, outputs[0]))
        rows: list[Form] = [each for each in forms[1:] if each is not None]
        held = rows if form is NO_ATTENTION else [form, *rows]
        records: list[NewRecord] = []
        parts: list[Errors] = []
        for output in outputs:
            made = make_records(work, output, set(output.batch.indices), forms)
            parts.append(measure_errors(work, output, made, forms))
            records += made
        errors = Errors.merged(parts)
        extents = self._extents(work, forms, records)
        sizes_of = {each.SUBJECT: record_sizes(each, records[0], extents) for each in held}
        sizes: NDArray[np.float64] = np.sum(list(sizes_of.values()), axis=0)
        self.support = "" if form is NO_ATTENTION else form.support
        if not self.lengths.any():
            self.lengths = np.array([extent.length for extent in extents])
        counted = self.lengths - (work.inputs.firsts if len(self.lengths) == len(work.inputs) else 0)
        rows_of = {
            # Padding in front counts for no form, though maps keep its rows.
            each.SUBJECT: float(counted.mean())
            if each.unit == "position" and not extents[0].shapes
            else float(np.mean([each.num_rows(extent) for extent in extents]))
            for each in held
        }
        mean = float(sizes.mean())
        tokens = float(counted.mean()) if held[0].unit == "sample" else rows_of[held[0].SUBJECT]
        self.beside = tuple(
            TargetForecast(
                subject=each.SUBJECT,
                codec=each.codec,
                unit=each.unit,
                bytes_per_row=float(sizes_of[each.SUBJECT].mean()) / rows_of[each.SUBJECT],
                total_bytes=float(sizes_of[each.SUBJECT].mean()) * self._num_samples,
                error=errors.measured()[each.SUBJECT],
            )
            for each in rows
        )
        return FormForecast(
            form=asks["form"],
            codec=" and ".join(each.codec for each in (rows if form is NO_ATTENTION else [form])),
            asks=asks,
            bytes_per_sample=mean,
            bytes_per_token=mean / tokens,
            bytes_longest=float(sizes.max()),
            total_bytes=mean * self._num_samples,
            zstd_ratio=_zstd_ratio([blob for record in records for each in held for blob in each.pack(record)]),
            break_even=mean / self.teacher_seconds,
            error=_error_of(errors),
        )

    def _extents(self, work: TeacherRun, forms: Forms, records: Sequence[NewRecord]) -> list[Extent]:
        """Of the records of all samples that were read; where lengths do not decide them, of those that were run."""
        if records[0].shapes or not work.inputs.lengths.any():
            return [record.extent for record in records]
        given, none = work.inputs, TargetOutputs(None, {})
        sizes = zip(given.lengths.tolist(), given.firsts.tolist(), given.decoder_lengths.tolist(), strict=True)
        extents = [Extent(length, first, decoder=decoder) for length, first, decoder in sizes]
        return [extent_of(forms, SampleOutputs(0, "", extent, (), none)) for extent in extents]


def _error_of(errors: Errors) -> CodecError:
    """Of the maps; where there are none, of the rows of logits."""
    if errors.attention is not NO_ATTENTION:
        return errors.attention
    found = errors.logits
    if found is None:
        return CodecError(0.0, 0.0, 0.0, 0)
    return CodecError(found.kl_mean, found.kl_max, found.tv_mean, found.rows)


def record_sizes(form: Form, record: NewRecord, extents: Sequence[Extent]) -> NDArray[np.float64]:
    """Bytes of records of some extents, as the form says, before compression.

    Args:
        form: any.
        record: one of them, which tells whether optional parts are there.
        extents: of the records.
    """
    floats = iter(form.floats(record))
    there = [part.dtype != F32 or next(floats) is not None for part in form.parts]
    widths = [(4 if part.dtype == F32 else 1) * held for part, held in zip(form.parts, there, strict=True)]
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
    found: list[int] = np.argsort(lengths, kind="stable")[places].tolist()
    return found


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


def _zstd_ratio(blobs: Sequence[Any]) -> float | None:
    try:
        return sum(len(compress_blob(blob, "zstd")) for blob in blobs) / sum(map(len, blobs))
    except ShdError as error:
        if error.code != "dependency-missing":
            raise
        return None


def _plain_runner(work: TeacherRun) -> Callable[[Batch], Any]:
    session = open_session(
        work.bare, provider=work.run.provider, num_threads=work.run.num_threads, weights=work.weights
    )
    fed = {value.name for value in session.get_inputs()}

    def run(batch: Batch) -> None:
        session.run(None, {name: array for name, array in batch.arrays.items() if name in fed})
        for other in work.others:
            other.run(batch)

    return run


def _time(run: Callable[[Batch], Any], batches: Sequence[Batch]) -> float:
    """Seconds for all batches: medians of some rounds, after one that warms up."""
    for batch in batches:
        run(batch)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for batch in batches:
            run(batch)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
