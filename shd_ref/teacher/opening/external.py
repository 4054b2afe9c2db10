"""Weights that a teacher keeps in files beside its graph: checked, hashed, and read only where they are small."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from shd_ref.errors import ShdError
from shd_ref.teacher.opening.parts import all_tensors
from shd_ref.teacher.packages import ir, onnx

INLINE_BYTES: Final = 2**28
"""Models whose data files are together smaller than this are read into memory as a whole."""

_SMALL: Final = 2**16  # bytes of a tensor that may be a shape or an axis, which must be in the graph to be inferred
_FOLDER: Final = "squeezing_heads.data_folder"


def check_external_data(model: onnx.ModelProto, file: Path) -> int:
    """External data must exist, be complete, and lie in the model's folder or below; their size in bytes.

    Raises:
        ShdError: ``graph-invalid``.
    """
    folder = file.parent.resolve()
    sizes = {file: file.stat().st_size}
    for tensor in all_tensors(model):
        if not onnx.external_data_helper.uses_external_data(tensor):
            continue
        try:
            info = onnx.external_data_helper.ExternalDataInfo(tensor)
            target = (folder / info.location).resolve()
            first, length = info.offset or 0, info.length or 0
            outside, missing = not target.is_relative_to(folder), not target.is_file()
        except (ValueError, OSError) as error:  # numbers that cannot be read, names that no file can have
            raise ShdError(
                "graph-invalid",
                f"teacher graph {file} describes the data of {tensor.name!r} wrongly ({error}): export it again",
            ) from error
        if outside:
            raise ShdError(
                "graph-invalid",
                f"teacher graph {file} refers to {info.location!r}, outside its own folder: "
                "put the model and its data files, not links to them, into one folder",
            )
        if missing or min(first, length) < 0 or target.stat().st_size < first + length:
            raise ShdError(
                "graph-invalid",
                f"teacher graph {file} needs {first + length} bytes of {info.location!r}, which is missing or "
                "shorter: copy the model again together with its data files",
            )
        sizes[target] = target.stat().st_size
    return sum(sizes.values())


def load_external_data(model: onnx.ModelProto, file: Path, *, everything: bool) -> None:
    """Read external data that has passed ``check_external_data``: all of it, or small tensors only.

    What is left keeps its place in its file, and the model remembers the folder for later readers and sessions.
    """
    for place in reversed(range(len(model.metadata_props))):
        if model.metadata_props[place].key == _FOLDER:  # the file has no say in this
            del model.metadata_props[place]
    folder = str(file.parent.resolve())
    if not everything:
        model.metadata_props.add(key=_FOLDER, value=folder)
    for tensor in all_tensors(model):
        if onnx.external_data_helper.uses_external_data(tensor):
            length = onnx.external_data_helper.ExternalDataInfo(tensor).length
            if everything or (length is not None and length < _SMALL):
                onnx.external_data_helper.load_external_data_for_tensor(tensor, folder)
                tensor.data_location = onnx.TensorProto.DEFAULT
                del tensor.external_data[:]


def hash_teacher(path: str | Path) -> str:
    """SHA-256 of a model file, continued over the SHA-256 of each of its external data files in order of their names.

    The file must have passed ``load_teacher``, which refuses external data outside its folder. Every tensor counts,
    wherever it is: a weight in a ``Constant`` node, a body or a local function is a weight.
    """
    file = Path(path)
    digest = hashlib.sha256(file.read_bytes())
    model = onnx.load(file, load_external_data=False)
    tensors = filter(onnx.external_data_helper.uses_external_data, all_tensors(model))
    for location in sorted({onnx.external_data_helper.ExternalDataInfo(tensor).location for tensor in tensors}):
        with (file.parent / location).open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()


def data_folder(model: onnx.ModelProto) -> str | None:
    """Where the data lies that a loaded model left in its files; None where it left none."""
    return next((entry.value for entry in model.metadata_props if entry.key == _FOLDER), None)


def read_graph(model: onnx.ModelProto) -> ir.Graph:
    """The model's graph, with access to the data in its files.

    Raises:
        ShdError: ``graph-invalid`` for a graph that is not well formed.
    """
    try:
        graph = ir.from_proto(model).graph
    except (ir.serde.SerdeError, TypeError, ValueError) as error:
        raise ShdError("graph-invalid", f"the teacher graph is broken: {error}: copy or export it again") from error
    folder = data_folder(model)
    if folder is not None:
        ir.external_data.set_base_dir(graph, folder)
    return graph
