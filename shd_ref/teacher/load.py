"""Read a teacher's ONNX file that nobody vouches for: data files, custom operators, old operator sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shd_ref.errors import ShdError
from shd_ref.teacher.packages import DecodeError, onnx

MIN_OPSET: Final = 13
"""The oldest operator set that can be squeezed; ``load_teacher`` converts older graphs where ONNX can."""

_TARGET_OPSET: Final = 18
_MAX_BYTES: Final = 2**31
CONTRIB_DOMAIN: Final = "com.microsoft"
_KNOWN_DOMAINS: Final = frozenset({"", "ai.onnx", "ai.onnx.ml", CONTRIB_DOMAIN})


def load_teacher(path: str | Path) -> onnx.ModelProto:
    """Read an ONNX model from a file that is not trusted, with its external data, local functions inlined.

    Graphs of old operator sets are converted where ONNX can; others come as they are, to be inspected at least.

    Args:
        path: the ``.onnx`` file; external data must lie in its folder or below.

    Raises:
        ShdError: ``graph-invalid`` for a file that cannot be read or parsed, that refers to data outside its
            folder, or that needs operators from a custom library; ``graph-unsupported`` above 2 GB.
    """
    file = Path(path)
    try:
        model = onnx.load(file, load_external_data=False)
    except OSError as error:
        raise ShdError("graph-invalid", f"teacher graph {file} must be a readable file: {error}") from error
    except DecodeError as error:
        raise ShdError(
            "graph-invalid", f"teacher graph {file} is not a complete ONNX file ({error}): copy or export it again"
        ) from error
    if not model.graph.node or not model.opset_import:
        raise ShdError("graph-invalid", f"teacher graph {file} holds no ONNX graph: copy or export it again")
    _check_external_data(model, file)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    foreign = {node.domain for node in _all_nodes(model.graph)} - _KNOWN_DOMAINS
    if foreign:
        raise ShdError(
            "graph-invalid",
            f"teacher graph {file} needs operators of {', '.join(sorted(foreign))}, and custom operator "
            "libraries are never loaded: re-export the model with standard operators",
        )
    onnx.external_data_helper.load_external_data_for_model(model, str(file.parent))
    return _modernise(model)


def opset_version(model: onnx.ModelProto) -> int:
    """The version of the standard operators that a graph uses."""
    return max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def _modernise(model: onnx.ModelProto) -> onnx.ModelProto:
    if opset_version(model) >= MIN_OPSET:
        return model
    try:
        return onnx.version_converter.convert_version(model, _TARGET_OPSET)
    except RuntimeError:
        # A contrib operator has no conversion. ``squeeze_graph`` refuses the old graph, with the remedy.
        return model


def _check_external_data(model: onnx.ModelProto, file: Path) -> None:
    """External data must exist, be complete, lie in the model's folder, and fit into one message with the model."""
    folder = file.parent.resolve()
    sizes = {file: file.stat().st_size}
    for tensor in _all_tensors(model):
        if not onnx.external_data_helper.uses_external_data(tensor):
            continue
        try:
            info = onnx.external_data_helper.ExternalDataInfo(tensor)
        except ValueError as error:
            raise ShdError(
                "graph-invalid",
                f"teacher graph {file} describes the data of {tensor.name!r} wrongly ({error}): export it again",
            ) from error
        target = (folder / info.location).resolve()
        if not target.is_relative_to(folder):
            raise ShdError(
                "graph-invalid",
                f"teacher graph {file} refers to {info.location!r}, outside its own folder: "
                "put the model and its data files, not links to them, into one folder",
            )
        end = (info.offset or 0) + (info.length or 0)
        if not target.is_file() or target.stat().st_size < end:
            raise ShdError(
                "graph-invalid",
                f"teacher graph {file} needs {end} bytes of {info.location!r}, which is missing or shorter: "
                "copy the model again together with its data files",
            )
        sizes[target] = target.stat().st_size
    if sum(sizes.values()) >= _MAX_BYTES:
        raise ShdError(
            "graph-unsupported",
            f"teacher graph {file} and its data must be smaller than 2 GB, which protobuf allows at most; got "
            f"{sum(sizes.values()) / 2**30:.1f} GB: export the teacher in float16",
        )


def _all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    nodes = [*_all_nodes(model.graph), *(node for function in model.functions for node in function.node)]
    yield from (tensor for graph in _all_graphs(model.graph) for tensor in graph.initializer)
    for node in nodes:
        for attribute in node.attribute:
            yield from attribute.tensors
            if attribute.HasField("t"):
                yield attribute.t


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    yield from (node for part in _all_graphs(graph) for node in part.node)


def _all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and the bodies of its control flow."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _all_graphs(attribute.g)
            for body in attribute.graphs:
                yield from _all_graphs(body)
