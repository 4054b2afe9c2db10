"""Which way of storing to take: one answer, and why; and the memory of a training step with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shd_ref.cache import CodecError
from shd_ref.teacher.opening.model import all_tensors, onnx
from shd_ref.teacher.options import NO_FORM
from shd_ref.teacher.run.teacher import TeacherRun

_FLOAT: Final = 4  # bytes
_OPTIMIZER_FLOATS: Final = 3  # a parameter: its gradient, and both moments of AdamW
_WORKING_ARRAYS: Final = 6  # of the size of a layer's queries, while its loss is computed


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
    bytes_longest: float
    total_bytes: float
    break_even: float
    error: CodecError

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.form} {self.codec}" if self.form != NO_FORM else f"{self.codec} alone"


@dataclass(frozen=True)
class Advice:
    """The number of the way to take; unless it ``pays``, run the teacher while training."""

    form: int
    pays: bool
    reasons: tuple[str, ...]


def advise(ways: Sequence[FormForecast], usual: FormForecast | None, bandwidth: float, max_error: float) -> Advice:
    """The smallest way, of equal ones the most exact, that is exact enough and read faster than the teacher runs."""
    exact = [way for way in ways if way.error.tv_mean <= max_error]
    ordered = sorted(exact, key=lambda way: (way.bytes_per_sample, way.error.tv_mean))
    if not ordered:  # none is exact enough: take the most exact
        ordered = [min(ways, key=lambda way: (way.error.tv_mean, way.bytes_per_sample))]
    taken = ordered[0]
    reasons = [*_compare(taken, ways, usual, max_error), _say_reading(taken, bandwidth)]
    return Advice(ways.index(taken), taken.break_even <= bandwidth, tuple(reasons))


def _compare(
    taken: FormForecast, ways: Sequence[FormForecast], usual: FormForecast | None, max_error: float
) -> list[str]:
    error = taken.error.tv_mean
    cost = f"{taken.bytes_per_token:.0f} bytes per token, and coding moves {_percent(error)} of a row's probability"
    if error > max_error:
        return [f"{cost}: none of these reaches {_percent(max_error)}, and this one is nearest"]
    reasons = [f"{cost}: the smallest of those below {_percent(max_error)}"]
    if usual is not None and usual is not taken:
        change = 1 - taken.bytes_per_sample / usual.bytes_per_sample
        size = f"{abs(change):.0%} {'smaller' if change >= 0 else 'larger'}"
        reasons.append(f"{size} than {usual.title}, the default, which moves {_percent(usual.error.tv_mean)}")
    for way in sorted(ways, key=lambda way: way.error.tv_mean):
        smaller = 1 - way.bytes_per_sample / taken.bytes_per_sample
        if way.error.tv_mean > max_error and smaller > 0:
            reasons.append(f"{way.title} would be {smaller:.0%} smaller, but moves {_percent(way.error.tv_mean)}")
    return reasons


def _say_reading(taken: FormForecast, bandwidth: float) -> str:
    least, fed = (f"{rate / 1e6:.3g} MB/s" for rate in (taken.break_even, bandwidth))
    if taken.break_even > bandwidth:
        return f"reading it keeps up with the teacher from {least} for each training device, which gets {fed}"
    return f"read faster than the teacher runs, from {least} for each training device ({fed} assumed)"


def _percent(share: float) -> str:
    return f"{share:.2%}" if share >= 0.00005 else "0%" if share == 0 else f"{100 * share:.1g}%"


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one step, in float32 with AdamW (mixed precision takes as much: halves beside float32 copies).

    ``optimizer`` is gradients and both moments, ``records`` are as large as the longest, ``term`` is SHD's work,
    about, and ``teacher`` is a live one's weights, queries and keys instead of ``records``.
    """

    batch_size: int
    length: int
    student_parameters: int
    is_assumed: bool
    student: int
    optimizer: int
    records: int
    term: int
    teacher: int


def forecast_memory(
    work: TeacherRun, record_bytes: float, length: int, batch_size: int, student_parameters: int | None
) -> TrainingMemory:
    """What a step takes, by the longest sample; a student of unknown size is as large as its teacher."""
    parameters, weights = count_weights(work.graph.model)
    student = parameters if student_parameters is None else student_parameters
    weights += sum(count_weights(other.model)[1] for other in work.others)
    positions = _FLOAT * batch_size * length
    # A student's head is taken to be as wide as the teacher's.
    own = [positions * work.options.num_student_heads * (site.d_k or site.d_v or 0) for _, site in work.graph.layers]
    teachers = sum(positions * work.graph.num_heads * (site.d_k or site.d_v or 0) for _, site in work.graph.layers)
    return TrainingMemory(
        batch_size=batch_size,
        length=length,
        student_parameters=student,
        is_assumed=student_parameters is None,
        student=_FLOAT * student,
        optimizer=_FLOAT * _OPTIMIZER_FLOATS * student,
        records=round(batch_size * record_bytes),
        term=2 * sum(own) + _WORKING_ARRAYS * max(own, default=0),
        teacher=weights + 2 * teachers,
    )


def count_weights(model: onnx.ModelProto) -> tuple[int, int]:
    """Parameters of a graph and their bytes, those in files beside it too; shapes and axes are no parameters."""
    kinds = onnx.TensorProto
    others = (kinds.INT64, kinds.INT32, kinds.BOOL, kinds.STRING, kinds.UNDEFINED)
    count, size = 0, 0.0
    for tensor in all_tensors(model):
        if tensor.data_type not in others:
            entries = math.prod(tensor.dims)
            count += entries
            size += entries * np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
    return count, round(size)
