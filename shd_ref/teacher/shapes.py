"""Sizes of a graph's tensors: as shape inference states them, or measured by one tiny run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError
from shd_ref.teacher.packages import onnx
from shd_ref.teacher.session import open_session

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_PROBE_BATCH: Final = 2
_PROBE_LENGTH: Final = 3


def static_shapes(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors whose dimensions are all numbers or names, each name bound to its own small number."""
    numbers: dict[str, int] = {}
    shapes = {}
    for value in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        if not value.type.tensor_type.HasField("shape") or not all(d.dim_param or d.dim_value for d in dims):
            continue
        shapes[value.name] = tuple(
            numbers.setdefault(d.dim_param, len(numbers) + _PROBE_BATCH) if d.dim_param else d.dim_value for d in dims
        )
    return shapes


def probe_shapes(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors in one tiny run, see ``probe_tensors``."""
    return {name: array.shape for name, array in probe_tensors(model, names).items()}


def probe_tensors(model: onnx.ModelProto, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Tensors of one run of the graph on the CPU with inputs of batch 2 and length 3.

    Integers are fed as ones (as zeros at the second attempt, for tables of one row), floats as ones.

    Raises:
        ShdError: ``graph-unsupported`` where the graph does not run on such inputs.
    """
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = open_session(probe, num_threads=1)
    failure: Exception | None = None
    for fill in (1, 0):
        feeds = {
            value.name: np.full(_probe_shape(value), fill, dtype=onnx.helper.tensor_dtype_to_np_dtype(_dtype(value)))
            for value in model.graph.input
            if value.name not in {tensor.name for tensor in model.graph.initializer}
        }
        try:
            outputs = session.run(list(names), feeds)
        except Exception as error:  # onnxruntime raises its own types, which share no base class
            failure = error
            continue
        return {name: np.asarray(output) for name, output in zip(names, outputs, strict=True)}
    raise ShdError(
        "graph-unsupported",
        f"the graph does not run on a probe of batch {_PROBE_BATCH} and length {_PROBE_LENGTH} ({failure}): "
        "re-export it with dynamic batch and sequence axes, or with its shapes inferred",
    )


def _probe_shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(d.dim_value or (_PROBE_LENGTH if axis else _PROBE_BATCH) for axis, d in enumerate(dims))


def _dtype(value: onnx.ValueInfoProto) -> int:
    return value.type.tensor_type.elem_type
