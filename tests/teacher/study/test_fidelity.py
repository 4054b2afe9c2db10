"""A teacher that runs on its own squeezed attention: right numbers in every layout, and what it loses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from support.attention_graphs import bare_attention, bare_samples, encoder_layer
from support.commands import shd
from support.refusals import refusal

from shd_ref import ShdError, merge_plan, plan_groups, squeeze_heads
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import (
    AttentionReader,
    FidelityOptions,
    MergeRule,
    ModelInputs,
    RunOptions,
    find_sites,
    input_specs,
    measure_fidelity,
    open_session,
    rank_costs,
    replace_attention,
)
from shd_ref.teacher.run.inputs import Batch
from shd_ref.teacher.study.fidelity import Targets, cosine_distances, cross_entropies, relative_error, squared_error

LENGTH = 7
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked by where": {"mask": "where", "nan_guard": True},
    "grouped queries": {"num_kv_heads": 2, "kv_repeat": "gather"},
    "half precision": {"float16": True},
    "heads first": {"layout": "heads-batch"},
    "folded, samples outside": {"layout": "batch-folded"},
    "folded, heads outside": {"layout": "heads-folded"},
    "gemm": {"projection": "gemm"},
    "head mask": {"head_mask": True},
    "old operators": {"opset": 13},
}


def make_arrays(width: int, seed: int = 0, samples: int = 3) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    lengths = np.arange(LENGTH, LENGTH - samples, -1)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)
    return {"x": rng.normal(size=(samples, LENGTH, width)).astype(np.float32) * 2, "mask": mask}


WEIGHTS = [(strategy, "map") for strategy in ("shd", "constant", "hard", "mean")] + [("shd", "row"), ("hard", "row")]


def run_replaced(
    model: onnx.ModelProto, arrays: dict[str, NDArray[Any]], heads: int, weights: tuple[str, str]
) -> Any:
    sites = find_sites(model)
    strategy, alpha_per = weights
    rules = [
        MergeRule(
            site.num_heads or 0, site.d_v or 0, merge_plan(site.num_heads or 0, heads), strategy, alpha_per=alpha_per
        )
        for site in sites
    ]
    output = model.graph.output[-1].name
    graph = replace_attention(model, sites, rules, output=output, row_mask_input="mask")
    session = open_session(graph.model.SerializeToString())
    fed = {value.name for value in session.get_inputs()}
    names = [output, graph.sites[0].context, graph.sites[0].unmerged]
    return session.run(names, {name: array for name, array in arrays.items() if name in fed})


@pytest.mark.parametrize("form", FORMS)
def test_as_many_heads_as_the_teacher_reproduce_it(form: str) -> None:
    model = encoder_layer(num_heads=4, **FORMS[form])
    arrays = make_arrays(12)
    wanted = open_session(model.SerializeToString()).run(None, arrays)[0]
    for weights in (one for one in WEIGHTS if one[0] != "mean"):
        got, context, unmerged = run_replaced(model, arrays, 4, weights)
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(context, unmerged)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights", WEIGHTS, ids="-".join)
def test_output_is_the_sum_of_merged_maps_times_summed_value_outputs(form: str, weights: tuple[str, str]) -> None:
    """``sum_h A~_h X'_h`` by its definition, from the float64 reference on the graph's own maps."""
    model = encoder_layer(num_heads=4, **FORMS[form])
    arrays = make_arrays(12)
    inputs = ModelInputs(arrays, input_specs(model), "mask")
    (site,) = find_sites(model)
    (batch,) = inputs.batches(range(3), 3)
    maps, outputs = AttentionReader(model, (site,)).read(0, batch)
    strategy, alpha_per = weights
    mask = arrays["mask"].astype(bool)
    squeezed = squeeze_heads(maps, outputs, 2, strategy=strategy, alpha_per=alpha_per, query_mask=mask)
    summed = np.stack([outputs[:, list(group)].sum(axis=1) for group in plan_groups(squeezed.plan, 4)], axis=1)
    wanted = (squeezed.probs @ summed).sum(axis=1)  # (B, L, D)
    got = run_replaced(model, batch.arrays, 2, weights)[0]
    got = got.swapaxes(0, 1) if FORMS[form].get("layout") == "batch-folded" else got.reshape(wanted.shape)
    # Rounding of the graph's own dtype, through a product of 12 columns of W_o.
    atol = 20 * load_tolerances()["graph"]["probs"]["float16" if FORMS[form].get("float16") else "float32"]
    np.testing.assert_allclose(got, wanted, atol=atol)


def test_nothing_else_of_the_teacher_changes() -> None:
    """Two sites whose maps are inputs: each is replaced by its own merge, and by no other."""
    model = bare_attention(4, num_layers=2)
    arrays = bare_samples(2, 5, 6, num_layers=2)
    before = [value.name for value in model.graph.output]
    options = FidelityOptions(
        (2,), plan=("progressive",), strategy=("shd",), alpha_per=("map",), graph_output=before[1]
    )
    report = measure_fidelity_of(model, arrays, options)
    (result,) = report.results
    sites = find_sites(model)
    reader = AttentionReader(model, sites)
    (batch,) = ModelInputs(arrays, input_specs(model), "mask").batches(range(2), 2)
    residuals = []
    for number in range(2):
        maps, outputs = reader.read(number, batch)
        squeezed = squeeze_heads(maps, outputs, 2)
        own = (maps @ outputs).sum(axis=1)
        summed = np.stack([outputs[:, list(group)].sum(axis=1) for group in plan_groups(squeezed.plan, 4)], axis=1)
        error = (squeezed.probs @ summed).sum(axis=1) - own
        residuals.append(np.linalg.norm(error) / np.linalg.norm(own))
    assert result.merge_error == pytest.approx(np.mean(residuals), rel=1e-3)
    assert result.attention_error == pytest.approx(np.mean(residuals), rel=1e-3)  # no layer feeds another here
    assert result.output_error == pytest.approx(residuals[1], rel=1e-3)


def measure_fidelity_of(model: onnx.ModelProto, arrays: dict[str, NDArray[Any]], options: FidelityOptions) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "teacher.onnx"
        onnx.save(model, path)
        return measure_fidelity(path, arrays, options, RunOptions(mask="mask", num_threads=1))


def test_settings_are_ranked_and_matched_plans_are_explicit() -> None:
    pytest.importorskip("networkx", reason="matched plans need networkx")
    arrays = make_arrays(12, samples=5)
    options = FidelityOptions(
        (4, 2),
        plan=("balanced", "progressive", "matched"),
        matched_by=("residual", "similarity"),
        strategy=("shd", "constant", "hard"),
    )
    report = measure_fidelity_of(encoder_layer(num_heads=4), arrays, options)
    assert len(report.results) == 2 * 4 * 5  # alpha_per makes a difference for shd and hard alone
    costs = [result.cost for result in report.results]
    assert rank_costs(costs) == list(range(len(costs)))
    assert {result.setting.num_student_heads for result in report.results[:20]} == {4}  # nothing is lost
    assert report.results[0].output_error == 0.0
    assert list(report.best()) == [2, 4]
    by_setting = {
        (r.setting.matched_by or r.setting.plan, r.setting.strategy, r.setting.alpha_per): r
        for r in report.results
        if r.setting.num_student_heads == 2
    }
    assert all(sorted(p for one in r.plans[0] for p in sum(one, ())) == [0, 1, 2, 3] for r in by_setting.values())
    # Balanced pairs are those of the first round.
    row = by_setting["progressive", "shd", "row"]
    assert by_setting["balanced", "shd", "row"].output_error == row.output_error
    assert by_setting["residual", "shd", "row"].merge_error <= row.merge_error + 1e-6


def test_costs_that_rounding_tells_apart_are_equal() -> None:
    costs = [0.5 + 1e-12, 2e-16, 0.5, 0.4, 0.5 - 1e-12, 0.0, 0.50001]
    assert rank_costs(costs) == [1, 5, 3, 0, 2, 4, 6]
    report = measure_fidelity_of(encoder_layer(num_heads=2), make_arrays(6), FidelityOptions((1,)))
    near = replace(report.results[0], cosine_distance=0.5, loss=None, excess=1e-12, excess_margin=1e-15)
    assert near.is_tied
    assert not replace(near, excess=1e-5).is_tied


def test_padding_and_batching_do_not_matter() -> None:
    arrays = make_arrays(12, samples=5)
    wide = {name: np.concatenate([array, np.zeros_like(array[:, :2])], axis=1) for name, array in arrays.items()}
    wide["x"][:, LENGTH:] = 1e3
    options = FidelityOptions((3,), plan=("progressive",), strategy=("shd",))
    model = encoder_layer(num_heads=4, mask="where")
    one, other = (measure_fidelity_of(model, given, options) for given in (arrays, wide))
    for first, second in zip(one.results, other.results, strict=True):
        assert first.output_error == pytest.approx(second.output_error, rel=1e-4)
        assert first.cosine_distance == pytest.approx(second.cosine_distance, rel=1e-3)
        assert first.merge_error == pytest.approx(second.merge_error, rel=1e-4)


@pytest.mark.parametrize(
    ("code", "options", "match"),
    [
        ("heads-exceed", {"student_heads": (5,)}, "num_teacher_heads=4"),
        ("argument-value", {"plan": ("best",)}, "plan"),
        ("argument-value", {"strategy": ("median",)}, "strategy"),
        ("argument-value", {"alpha_per": ("head",)}, "alpha_per"),
        ("argument-value", {"matched_by": ("luck",)}, "matched_by"),
        ("argument-value", {"graph_output": "logits"}, "output must be one of"),
        ("inputs-invalid", {"targets": "labels"}, "must hold the targets labels"),
        ("inputs-invalid", {"targets": "x"}, "must hold integers"),
        ("inputs-invalid", {"targets": "classes"}, "must hold a class for every row"),
    ],
)
def test_what_does_not_fit_is_refused(code: str, options: dict[str, Any], match: str) -> None:
    arrays = make_arrays(12) | {"classes": np.zeros(3, dtype=np.int64)}
    with refusal(code, match):
        measure_fidelity_of(
            encoder_layer(num_heads=4), arrays, FidelityOptions(**({"student_heads": (2,)} | options))
        )


def test_a_teacher_without_attention_or_with_nan_is_refused() -> None:
    arrays = make_arrays(12)
    arrays["x"][1, 0, 0] = np.nan
    options = FidelityOptions((2,), plan=("progressive",), strategy=("constant",))
    with refusal("not-finite", "NaN or infinity"):
        measure_fidelity_of(encoder_layer(num_heads=4), arrays, options)


def test_measures_follow_their_definitions() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 3, 5))
    mask = np.array([[True, True, False], [True, False, False]])
    error = np.add(squared_error(a[:1], b[:1], mask[:1]), squared_error(a[1:], b[1:], mask[1:]))
    assert relative_error(*error) == pytest.approx(np.linalg.norm((a - b)[mask]) / np.linalg.norm(b[mask]))
    pairs = [(a[0, :2].mean(0), b[0, :2].mean(0)), (a[1, 0], b[1, 0])]
    assert cosine_distances(a, b, mask).value == pytest.approx(
        np.mean([1 - x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in pairs])
    )
    assert relative_error(*squared_error(np.zeros((2, 3)), np.zeros((2, 3)))) == 0.0
    assert relative_error(*squared_error(np.ones((2, 3)), np.zeros((2, 3)))) == np.inf
    rows = rng.normal(size=(100, 24))
    assert (cosine_distances(rows * 3.0, rows).sums >= 0.0).all()  # not -1e-16


def test_targets_are_next_tokens_given_tokens_or_classes() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 4, 6)).astype(np.float32)
    ids = rng.integers(0, 6, (5, 9))
    batch = Batch((3, 1), (4, 3), {})
    mask = np.array([[True] * 4, [True, True, True, False]])
    log_probs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))

    def loss(targets: NDArray[Any], given: NDArray[Any], *, next_token: bool = False) -> float:
        by_sample = Targets("targets", dict(enumerate(targets)), next_token)
        return cross_entropies(given, by_sample.of_batch(batch, mask, given)).value

    following = [-log_probs[0, i, ids[3, i + 1]] for i in range(3)] + [
        -log_probs[1, i, ids[1, i + 1]] for i in (0, 1)
    ]
    assert loss(ids, logits, next_token=True) == pytest.approx(np.mean(following))
    labels = ids.copy()
    labels[3, 0] = -100
    aligned = [-log_probs[0, i, ids[3, i]] for i in (1, 2, 3)] + [-log_probs[1, i, ids[1, i]] for i in range(3)]
    assert loss(labels, logits) == pytest.approx(np.mean(aligned))
    classes = ids[:, 0]
    expected = np.mean([-log_probs[0, 0, classes[3]], -log_probs[1, 0, classes[1]]])
    assert loss(classes, logits[:, 0]) == pytest.approx(expected)
    with pytest.raises(ShdError, match="below the output's 6 classes"):
        loss(classes + 6, logits[:, 0])


def test_command_takes_lists_and_ends_with_the_next_command(tmp_path: Path) -> None:
    onnx.save(encoder_layer(num_heads=4), tmp_path / "my teacher.onnx")
    np.savez(tmp_path / "data.npz", **make_arrays(12))
    given = ("fidelity", tmp_path / "my teacher.onnx", "--inputs", tmp_path / "data.npz", "--mask", "mask")
    given += ("--student-heads", "4, 2", "--plan", "progressive,balanced", "--strategy", "shd", "--alpha-per", "row")
    output, document = shd(*given), json.loads(shd(*given, "--json"))
    found = [(r["num_student_heads"], r["strategy"], r["alpha_per"]) for r in document["results"]]
    assert found == [(4, "shd", "row")] * 2 + [(2, "shd", "row")] * 2
    assert document["recommended"]["2"] in output
    assert f"shd precompute '{tmp_path}/my teacher.onnx'" in output
    assert "--student-heads 2 --alpha-per row" in output
    assert "--graph-output must be one of" in shd(*given, "--graph-output", "none", code=1)
    for option, wrong in (("--plan", "adjacent"), ("--student-heads", "4 6"), ("--alpha-per", "map,")):
        assert f"error (argument-value): {option} must be" in shd(*given, option, wrong, code=1)
