"""Kinds of attention as people write them in PyTorch: exported, found, and equal to what the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="the models are PyTorch's")
pytest.importorskip("onnxscript", reason="torch exports through onnxscript")
pytest.importorskip("onnxruntime")

from support import attention_kinds  # noqa: E402  (after the skips)
from support.attention_graphs import run_session  # noqa: E402
from support.attention_kinds import CASES, HEADS, Together  # noqa: E402

from shd_ref.teacher.graph.find import AttentionSite, find_sites  # noqa: E402
from shd_ref.teacher.opening.load import load_teacher  # noqa: E402
from shd_ref.teacher.precompute.compare import compare_with_reference  # noqa: E402
from shd_ref.teacher.rewrite.squeeze import squeeze_graph  # noqa: E402
from shd_ref.teacher.session import open_session  # noqa: E402
from shd_torch.export import export_teacher  # noqa: E402

SEQUENCE_FIRST = tuple(name for name, case in CASES.items() if case.sequence_first)
FIXED_LENGTH = tuple(name for name, case in CASES.items() if case.fixed_length)
OTHERS = tuple(name for name in CASES if name not in SEQUENCE_FIRST + FIXED_LENGTH)
GROUPS = {name: group for group in (SEQUENCE_FIRST, FIXED_LENGTH, OTHERS) for name in group}


@cache
def exported(names: Sequence[str]) -> tuple[dict[str, AttentionSite], dict[str, Any], Any]:
    """Sites of kinds exported together, what the graph gives at another batch and length, and the modules."""
    module = Together(names).eval()
    batch_axis = 1 if names == SEQUENCE_FIRST else 0
    axes = {batch_axis: "batch"} if names == FIXED_LENGTH else {batch_axis: "batch", 1 - batch_axis: "length"}
    inputs = attention_kinds.sample(names, 2, 8)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "teacher.onnx"
        export_teacher(module, inputs, path, dynamic={"x": axes, "padding": axes})
        model = load_teacher(path)
    sites = find_sites(model)
    assert len(sites) == len(names)
    by_name, modules = dict(zip(names, sites, strict=True)), dict(zip(names, module.kinds, strict=True))
    supported = [(number, site) for number, site in enumerate(sites) if site.supported]
    if not supported:
        return by_name, {}, modules
    graph = squeeze_graph(model, supported, num_student_heads=2, check_outputs=True, codec="float32")
    session = open_session(graph.model, num_threads=1)
    inputs = attention_kinds.sample(names, 3, 6)
    with torch.no_grad():
        module(**inputs)
    outputs = run_session(session, {node.name: inputs[node.name].numpy() for node in session.get_inputs()})
    compare_with_reference(graph, outputs)
    found = {
        names[layer.student_layer]: {"maps": outputs[layer.names["probs"]], "values": outputs[layer.names["values"]]}
        for layer in graph.layers
    }
    return by_name, found, modules


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.reason is None])
def test_maps_and_value_outputs_are_those_of_the_model(name: str) -> None:
    sites, found, modules = exported(GROUPS[name])
    site = sites[name]
    assert site.supported, site.reason
    assert (site.num_heads, site.row_sums) == (HEADS, CASES[name].row_sums)
    assert site.output_projection is not None
    outputs: NDArray[Any] = found[name]["values"] @ site.output_projection.reshape(HEADS, site.d_v, -1)
    module = modules[name]
    assert module.maps.std() > 0.01, "maps that are all alike compare nothing"
    np.testing.assert_allclose(found[name]["maps"], module.maps.detach().numpy(), rtol=0, atol=2e-5)
    np.testing.assert_allclose(outputs, module.value_outputs.detach().numpy(), rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.reason is not None])
def test_what_cannot_be_merged_is_refused_for_its_own_reason(name: str) -> None:
    site = exported(GROUPS[name])[0][name]
    assert not site.supported
    assert str(CASES[name].reason) in str(site.reason)
