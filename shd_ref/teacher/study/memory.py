"""Memory of a training step on a cache, and what a live teacher would add; activations apart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from shd_ref.teacher.opening.parts import all_tensors
from shd_ref.teacher.packages import onnx
from shd_ref.teacher.run.teacher import TeacherRun

_FLOAT: Final = 4  # bytes
_OPTIMIZER_FLOATS: Final = 3  # a parameter: its gradient, and both moments of AdamW
_WORKING_ARRAYS: Final = 6  # of the size of a layer's queries, while its loss is computed


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one step, in float32 with AdamW (mixed precision takes as much: halves beside float32 copies).

    Attributes:
        batch_size: samples of the step.
        length: positions of the longest of them.
        student_parameters: how many the student has.
        is_assumed: whether that is only the teacher's number, as none was given.
        student: weights.
        optimizer: gradients and both moments.
        records: of the batch, each as large as the longest.
        term: of SHD: gradients of queries and keys of all taught layers, and one layer's work; about.
        teacher: what a live one would hold in place of ``records``: weights, and its queries and keys of the batch.
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
    """What a step takes.

    Args:
        work: the teacher.
        record_bytes: of the longest sample.
        length: its positions.
        batch_size: samples of a step.
        student_parameters: None for as many as the teacher has.
    """
    parameters, weights = count_weights(work.model)
    student = parameters if student_parameters is None else student_parameters
    weights += sum(count_weights(other.model)[1] for other in work.others)
    positions = _FLOAT * batch_size * length
    # A student's head is taken to be as wide as the teacher's.
    own = [positions * work.options.num_student_heads * (site.d_k or site.d_v or 0) for _, site in work.layers]
    teachers = sum(positions * work.num_teacher_heads * (site.d_k or site.d_v or 0) for _, site in work.layers)
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
