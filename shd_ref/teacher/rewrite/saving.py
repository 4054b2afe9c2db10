"""A graph and its weights as files, which change together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shd_ref.cache.storage.drafts import drafting, hash_file, put
from shd_ref.cache.storage.storage import write_errors
from shd_ref.teacher.opening.model import all_tensors
from shd_ref.teacher.packages import ir, onnx


@contextmanager
def saving_graph(model: ir.Model, target: Path, *, large: bool) -> Iterator[tuple[Path, Path | None]]:
    """The draft of a graph, and the place of its weights beside it; both are in place when the block has not failed.

    The file of ``large`` weights is named after its hash, ``NAME.0123456789abcdef.data``, so that graph and weights
    change together at one rename, the graph's; whoever is killed before leaves the earlier graph, else replaced with
    its weights, as it was.
    """
    with drafting(target) as draft:
        data, weights_file = draft.with_name("data"), None
        ir.save(model, draft, external_data=data.name if large else None)
        if data.exists():
            weights_file = target.with_name(f"{target.name}.{hash_file(data)[:16]}.data")
            _name_data(draft, weights_file.name)
            data = data.rename(draft.with_name(weights_file.name))
        yield draft, weights_file
        if weights_file is not None:
            put(data, weights_file)
    with write_errors(target):
        for file in target.parent.iterdir():  # also of graphs that were never finished
            if _is_data_of(target, file.name) and file != weights_file:
                file.unlink(missing_ok=True)


def _name_data(graph: Path, name: str) -> None:
    proto = onnx.load(graph, load_external_data=False)
    for tensor in all_tensors(proto):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    graph.write_bytes(proto.SerializeToString())


def _is_data_of(graph: Path, name: str) -> bool:
    return name.startswith(graph.name) and re.fullmatch(r"\.[0-9a-f]{16}\.data", name[len(graph.name) :]) is not None
