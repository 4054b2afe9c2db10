"""Sessions of a graph on the CPU, and random inputs of any batch and length that it takes."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, import_package

_DTYPES: Final = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
}


def require_runtime() -> Any:
    """The module onnxruntime; ``dependency-missing`` where it, or onnx, is not installed."""
    for package in ("onnx", "onnxruntime"):
        import_package(package, f"{package} must be installed: pip install '.[cpu]' (in a checkout)")
    return import_package("onnxruntime", "")


def open_graph(path: str | os.PathLike[str], threads: int = 1) -> Any:
    """A session as a user opens it: ``threads`` inside an operator, operators one after the other.

    Raises:
        ShdError: ``dependency-missing``, or ``read-failed`` where the file is no graph that onnxruntime loads.
    """
    onnxruntime = require_runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # errors are raised
    try:
        return onnxruntime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ShdError("read-failed", f"{path} must be an ONNX graph that onnxruntime loads: {error}") from error


def run_graph(session: Any, inputs: Mapping[str, NDArray[Any]], name: object) -> list[NDArray[Any]]:
    """All outputs; ``inputs-invalid`` where the graph does not take the inputs."""
    try:
        outputs: list[NDArray[Any]] = session.run(None, dict(inputs))
    except Exception as error:  # onnxruntime's exceptions share no base class
        shapes = {key: array.shape for key, array in inputs.items()}
        raise ShdError("inputs-invalid", f"{name} must run with inputs of {shapes}: {error}") from error
    return outputs


class GraphInputs:
    """The inputs of a graph: the first axis, where it is dynamic, is the batch; other dynamic axes are the length."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.session = session = open_graph(path)  # with one thread, for whoever runs the graph
        for entry in session.get_inputs():
            if entry.type not in _DTYPES:
                raise ShdError(
                    "inputs-invalid", f"{path} must take tensors of numbers; {entry.name} is a {entry.type}"
                )
        shapes: dict[str, tuple[Any, ...]] = {entry.name: tuple(entry.shape) for entry in session.get_inputs()}
        self.path, self.shapes = Path(path), shapes
        self.dtypes = {entry.name: _DTYPES[entry.type] for entry in session.get_inputs()}
        self.output: str = session.get_outputs()[0].name
        self._rows = _count_rows(self.path)
        self.has_batch = all(shape and not isinstance(shape[0], int) for shape in shapes.values())
        self.has_length = any(not isinstance(size, int) for shape in shapes.values() for size in shape[1:])

    def draw(self, batch: int, length: int, seed: int = 0) -> dict[str, NDArray[Any]]:
        """Random token ids and pixels, and ones for masks: no sample is padded."""
        random = np.random.default_rng(seed)
        arrays: dict[str, NDArray[Any]] = {}
        for name, shape in self.shapes.items():
            sizes = [size if isinstance(size, int) else length if axis else batch for axis, size in enumerate(shape)]
            if np.issubdtype(self.dtypes[name], np.floating):
                arrays[name] = random.standard_normal(sizes).astype(self.dtypes[name])
            else:
                most = self._rows.get(name)  # some models count no position for padding, whose number is small
                ids = np.ones(sizes) if most is None else random.integers(min(4, most - 1), most, sizes)
                arrays[name] = ids.astype(self.dtypes[name])
        return arrays

    def longest(self, most: int) -> int:
        """The longest samples up to ``most`` that the graph runs with: a model may have fewer positions."""

        def fails(length: int) -> bool:
            try:
                run_graph(self.session, self.draw(1, length), self.path)
            except ShdError:
                return True
            return False

        if not (self.has_length and fails(most)):
            return most
        longest = bisect_left(range(1, most), True, key=fails)
        return longest if longest > 1 else most  # one position also runs where other axes are fixed


def _count_rows(path: Path) -> dict[str, int]:
    """By input of token ids: rows of the smallest table that is read with it."""
    import onnx

    from shd_ref.teacher.graph.inputs import count_rows

    try:
        return count_rows(onnx.load(path, load_external_data=False))
    except Exception as error:  # protobuf's and the file system's
        raise ShdError("read-failed", f"{path} must be an ONNX graph: {error}") from error
