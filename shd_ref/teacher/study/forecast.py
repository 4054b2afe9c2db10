"""What a cache would cost, before anyone writes it: bytes, time and error, measured on a few samples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from shd_ref.cache import (
    CODECS,
    FACTORED_CODECS,
    CodecError,
    Extent,
    Factors,
    codec_error,
    decode,
    encode,
    merge_codec_errors,
    pack,
    packed_size,
)
from shd_ref.cache.codecs.compression import compress_blob
from shd_ref.errors import ShdError
from shd_ref.teacher.precompute.forms.maps import find_support
from shd_ref.teacher.precompute.forms.targets import Forms
from shd_ref.teacher.precompute.manifest import describe_attention
from shd_ref.teacher.precompute.records import make_records, measure_errors
from shd_ref.teacher.run.inputs import Batch
from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.run.outputs import StudentOutputs
from shd_ref.teacher.run.teacher import TeacherRun
from shd_ref.teacher.session import open_session
from shd_ref.teacher.sources import Arrays, ArraySource, IndexedSource, Row, Source

READ_SAMPLES: Final = 1000
"""Samples whose lengths are read: spread over the data set where any row is at hand, else the first."""
ROUNDS: Final = 3
"""Timed runs of every batch, after one that warms up; the median counts."""
DEFAULT_BANDWIDTH: Final = 500e6
"""Bytes a second that one training device can be fed from a good network file system."""


@dataclass(frozen=True)
class CodecForecast:
    """One way to store the maps.

    Attributes:
        codec: one of ``CODECS``.
        bytes_per_sample: of the mean sample, with its alphas and mixing.
        total_bytes: of the whole data set.
        zstd_ratio: compressed size over plain, measured; None where the package zstandard is missing.
        break_even: bytes a second: a reader that is slower waits longer than the teacher would take.
        error: measured on the sampled rows.
    """

    codec: str
    bytes_per_sample: float
    total_bytes: float
    zstd_ratio: float | None
    break_even: float
    error: CodecError


@dataclass(frozen=True)
class FactoredForecast:
    """The other form of supervision: the teacher's queries and keys with the mixing matrix, in place of maps.

    Attributes:
        codec: ``float16``, or ``int8`` with a float32 scale per head and position.
        bytes_per_sample: of the mean sample, with its alphas and mixing.
        total_bytes: of the whole data set.
        error: of the maps that they make, measured on the sampled rows as that of a codec.
    """

    codec: str
    bytes_per_sample: float
    total_bytes: float
    error: CodecError


@dataclass(frozen=True)
class Forecast:
    """What ``shd plan`` shows.

    Attributes:
        num_samples: in the data set.
        read_samples: of how many the lengths are known; the rest is extrapolated.
        measured_samples: on how many the teacher ran.
        mean_length, max_length: positions.
        support: ``"full"`` or ``"causal"``.
        teacher_seconds: a sample, of the teacher as it is, in batches as asked for.
        squeeze_seconds: a sample, of the squeezed graph.
        codecs: by codec.
        factored: empty where the maps are not what queries and keys make; without ``float16`` where numbers are too
            large for it.
        form: ``"maps"`` or ``"factored"``: which is smaller, ``sqrt8-row`` or int8 factors, whose errors are alike.
            That turns with the length: ``L H_s`` bytes a row (half of it if causal) against about
            ``d_k (H_t + H_kv)``.
        recommended: the codec to take, see ``forecast_cache``.
        pays: whether reading it is faster than running the teacher.
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
    codecs: tuple[CodecForecast, ...]
    factored: tuple[FactoredForecast, ...]
    form: str
    recommended: str
    pays: bool
    remarks: tuple[str, ...]
    supplied: str


def forecast_cache(
    teacher: str | Path,
    inputs: Source | Arrays,
    options: PrecomputeOptions,
    run: RunOptions | None = None,
    *,
    num_samples: int = 8,
    bandwidth: float = DEFAULT_BANDWIDTH,
) -> Forecast:
    """Measure a few samples and say what the cache of the whole data set would cost.

    Recommended is ``sqrt8-row``, whose error a student's gradient does not notice (1 to 2 percent of it), unless
    reading it would take longer than running the teacher and ``sqrt8-abs`` or ``u4`` would not.

    Args:
        teacher: an ``.onnx`` file.
        inputs: as for ``precompute``.
        options: what to make of the teacher; the codec does not matter.
        run: how to run it.
        num_samples: on how many samples the teacher runs.
        bandwidth: bytes a second that a training device can be fed.

    Raises:
        ShdError: as ``TeacherRun``; ``argument-value``, ``graph-unsupported``, ``not-finite``.
    """
    if num_samples < 1 or not bandwidth > 0:
        raise ShdError(
            "argument-value",
            f"num_samples must be at least 1 and bandwidth above 0; got {num_samples} and {bandwidth}",
        )
    source = inputs if isinstance(inputs, Source) else ArraySource(inputs)
    work = TeacherRun(Path(teacher), _SampledSource(source, READ_SAMPLES), [options], run or RunOptions())
    work.check_samples()
    chosen = np.linspace(0, len(work.inputs) - 1, min(num_samples, len(work.inputs))).astype(int)
    batches = list(work.batches(dict.fromkeys(chosen.tolist())))
    outputs = [work.squeeze(batch, checked=True)[0] for batch in batches]
    support = find_support(work, outputs[0])
    merged = [maps for output in outputs for maps in _maps(work, output)]
    if not all(np.isfinite(maps).all() for maps in merged):
        raise ShdError(
            "not-finite", "the teacher gives NaN or infinity on a sampled sample: look at the inputs", "MAP-5"
        )
    measured = sum(len(batch.indices) for batch in batches)
    teacher_seconds = _time(_plain_runner(work), batches) / measured
    squeeze_seconds = _time(work.squeeze, batches) / measured
    lengths = work.inputs.lengths if work.inputs.lengths.any() else np.full(1, merged[0].shape[-1])
    codecs = tuple(
        _forecast_codec(codec, work, merged, support, lengths, len(source), teacher_seconds) for codec in CODECS
    )
    factored = () if work.site_kinds.kinds else _forecast_factored(work, batches, lengths, len(source))
    recommended = _recommend(codecs, bandwidth)
    return Forecast(
        num_samples=len(source),
        read_samples=len(work.inputs),
        measured_samples=measured,
        mean_length=float(lengths.mean()),
        max_length=int(lengths.max()),
        support=support,
        teacher_seconds=teacher_seconds,
        squeeze_seconds=squeeze_seconds,
        codecs=codecs,
        factored=factored,
        form=_choose_form(codecs, factored),
        recommended=recommended.codec,
        pays=recommended.break_even <= bandwidth,
        remarks=work.remarks,
        supplied=work.inputs.supply,
    )


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


def _maps(work: TeacherRun, outputs: StudentOutputs) -> Iterator[Any]:
    """The merged maps of every sample and layer, ``(H_s, rows, keys)`` float32, as they are stored (CACHE-129)."""
    for number in range(len(outputs.batch.indices)):
        sample = work.sample(outputs, number)
        for layer, (rows, keys) in zip(sample.layers, sample.extent.shapes, strict=True):
            maps = np.array(layer.checked.merged[:, :rows, :keys], dtype=np.float32)
            if layer.row_mask is not None:
                maps[:, ~layer.row_mask[:rows]] = 0
            yield maps


def _forecast_codec(
    codec: str,
    work: TeacherRun,
    merged: Sequence[Any],
    support: str,
    lengths: Any,
    num_samples: int,
    teacher_seconds: float,
) -> CodecForecast:
    heads, layers = work.options.num_student_heads, len(work.layers)
    sizes = np.array([packed_size(codec, support, heads, int(length)) for length in lengths], dtype=np.float64)
    if work.site_kinds.kinds:  # of two sequences: as in the samples that were run
        sizes = np.array([packed_size(codec, support, heads, *maps.shape[1:]) for maps in merged], dtype=np.float64)
    weights = sum(len(one_round) for one_round in work.students[0].plans[0])
    if work.options.alpha_per == "map":
        floats = 4.0 * (weights + heads * work.num_teacher_heads)
    else:
        floats = 4.0 * weights * float(lengths.mean())
    per_sample = layers * (float(sizes.mean()) + floats)
    codes = [encode(codec, maps) for maps in merged]
    return CodecForecast(
        codec=codec,
        bytes_per_sample=per_sample,
        total_bytes=per_sample * num_samples,
        zstd_ratio=_zstd_ratio([pack(part, support, codec) for part in codes]),
        break_even=per_sample / teacher_seconds,
        error=merge_codec_errors(
            codec_error(maps, decode(codec, part)) for maps, part in zip(merged, codes, strict=True)
        ),
    )


def _forecast_factored(
    work: TeacherRun, batches: Sequence[Batch], lengths: Any, num_samples: int
) -> tuple[FactoredForecast, ...]:
    try:
        factored = work.as_factored()
        outputs = [factored.squeeze(batch, checked=True)[0] for batch in batches]
        form = describe_attention(factored, outputs[0])
        assert isinstance(form, Factors)
        errors = {codec: _factored_error(factored, outputs, replace(form, codec=codec)) for codec in FACTORED_CODECS}
    except ShdError as error:
        if error.code not in ("graph-unsupported", "inputs-invalid"):
            raise
        return ()
    heads, pairs = work.num_teacher_heads, sum(len(one_round) for one_round in work.students[0].plans[0])
    floats = 4.0 * len(work.layers) * (pairs + work.options.num_student_heads * heads)
    counted = lengths - work.inputs.firsts
    forecasts = []
    for codec, measured in errors.items():
        if measured is None:
            continue
        coded = replace(form, codec=codec)
        sizes = [coded.held_size(Extent(int(length))) for length in counted]
        per_sample = floats + float(np.mean(sizes))
        forecasts.append(FactoredForecast(codec, per_sample, per_sample * num_samples, measured))
    return tuple(forecasts)


def _factored_error(work: TeacherRun, outputs: Sequence[StudentOutputs], form: Factors) -> CodecError | None:
    """What coding costs the merged maps of the sampled samples; None where the codec cannot hold their numbers."""
    errors = []
    for output in outputs:
        try:
            records = make_records(work, output, set(output.batch.indices), Forms(form))
        except ShdError as error:
            if error.code != "argument-value":
                raise
            return None
        errors.append(measure_errors(work, output, records, Forms(form)).attention)
    return merge_codec_errors(errors)


def _choose_form(codecs: Sequence[CodecForecast], factored: Sequence[FactoredForecast]) -> str:
    (maps,) = [row.bytes_per_sample for row in codecs if row.codec == "sqrt8-row"]
    return "factored" if any(row.codec == "int8" and row.bytes_per_sample < maps for row in factored) else "maps"


def _zstd_ratio(blobs: Sequence[Any]) -> float | None:
    try:
        return sum(len(compress_blob(blob, "zstd")) for blob in blobs) / sum(map(len, blobs))
    except ShdError as error:
        if error.code != "dependency-missing":
            raise
        return None


def _recommend(codecs: Sequence[CodecForecast], bandwidth: float) -> CodecForecast:
    by_name = {forecast.codec: forecast for forecast in codecs}
    preferred = [by_name[name] for name in ("sqrt8-row", "sqrt8-abs", "u4")]
    return next((forecast for forecast in preferred if forecast.break_even <= bandwidth), preferred[0])


def _plain_runner(work: TeacherRun) -> Callable[[Batch], Any]:
    session = open_session(work.model, provider=work.run.provider, num_threads=work.run.num_threads)
    fed = {value.name for value in session.get_inputs()}
    return lambda batch: session.run(None, {name: array for name, array in batch.arrays.items() if name in fed})


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
