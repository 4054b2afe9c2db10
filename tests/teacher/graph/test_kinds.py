"""Kinds of attention as people write them in PyTorch: exported, found, and equal to what the model computes.

BERT's, Llama's and PyTorch's own module are in the exports of other tests.

Only kinds whose spelling is the exporter's are here; others are rows of ``test_forms.py`` and ``test_projection.py``.
"""

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

from support.attention_graphs import run_session  # noqa: E402  (after the skips)
from support.attention_kinds import CASES, HEADS, Together, sample  # noqa: E402

from shd_ref.merging.plans import merge_plan, plan_groups  # noqa: E402
from shd_ref.teacher import (  # noqa: E402
    AttentionSite,
    PrecomputeOptions,
    compare_with_reference,
    find_sites,
    load_teacher,
    open_session,
    squeeze_graph,
)
from shd_ref.teacher.rewrite.tiles import Tiling, find_tiles  # noqa: E402
from shd_ref.teacher.run.teacher import list_slots  # noqa: E402
from shd_torch.export import export_teacher  # noqa: E402

WHOLE = ("largest entries", "slots")
"""Kinds whose maps are not made in tiles: keys of a row depend on one another."""


@cache
def exported() -> tuple[dict[str, AttentionSite], dict[str, Any], dict[str, Any]]:
    """Sites of these kinds, what the graph gives at another batch and length, and the modules, by name."""
    names = list(CASES)
    module = Together(names).eval()
    axes = {0: "batch", 1: "length"}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "teacher.onnx"
        export_teacher(module, sample(2, 8), path, dynamic={"x": axes})
        model = load_teacher(path)
    sites = find_sites(model)
    supported = [(number, site) for number, site in enumerate(sites) if site.supported]
    graph = squeeze_graph(model, supported, PrecomputeOptions(2, codec="float32"), check_outputs=True)
    session = open_session(graph.model, num_threads=1)
    inputs = sample(3, 6)
    with torch.no_grad():
        module(**inputs)
    outputs = run_session(session, {node.name: inputs[node.name].numpy() for node in session.get_inputs()})
    compare_with_reference(graph, outputs)
    tiles = {tiles.site.layer: tiles for tiles in find_tiles(model, sites)}
    slots = {
        site.layer: list_slots(tiles[site.layer], plan_groups(merge_plan(HEADS, 2), HEADS))
        for _, site in supported
        if tiles[site.layer].reason is None
    }
    options = PrecomputeOptions(2, codec="float32")
    tiled = squeeze_graph(model, supported, options, tiling=Tiling(4, tiles, slots))
    feeds = {node.name: inputs[node.name].numpy() for node in session.get_inputs()}
    of_tiles = run_session(open_session(tiled.model, num_threads=1), feeds)
    arrays = {
        names[layer.student_layer]: {
            "maps": outputs[layer.names["probs"]],
            "values": outputs[layer.names["values"]],
            **{role: outputs[layer.names[role]] for role in ("alphas", "codes")},
            **{f"tiled {role}": of_tiles[other.names[role]] for role in ("alphas", "codes")},
            "is tiled": np.array(tiles[layer.site.layer].reason is None),
        }
        for layer, other in zip(graph.layers, tiled.layers, strict=True)
    }
    return dict(zip(names, sites, strict=True)), arrays, dict(zip(names, module.kinds, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kinds_are_those_of_the_model_or_refused_for_their_own_reason(name: str) -> None:
    sites, arrays, modules = exported()
    site, case, module = sites[name], CASES[name], modules[name]
    if case.reason is not None:
        assert not site.supported
        assert case.reason in str(site.reason)
        return
    assert site.supported, site.reason
    assert (site.num_heads, site.row_sums) == (HEADS, case.row_sums)
    assert site.output_projection is not None
    outputs: NDArray[Any] = arrays[name]["values"] @ site.output_projection.reshape(HEADS, site.d_v, -1)
    assert module.maps.std() > 0.01, "maps that are all alike compare nothing"
    np.testing.assert_allclose(arrays[name]["maps"], module.maps.detach().numpy(), rtol=0, atol=2e-5)
    np.testing.assert_allclose(outputs, module.value_outputs.detach().numpy(), rtol=0, atol=2e-5)
    assert bool(arrays[name]["is tiled"]) == (name not in WHOLE)
    for role in ("alphas", "codes"):
        np.testing.assert_allclose(arrays[name][f"tiled {role}"], arrays[name][role], rtol=0, atol=1e-6)
