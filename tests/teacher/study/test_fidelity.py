"""A teacher that runs on its own squeezed attention: right numbers in every layout, and what it loses."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from support.attention_graphs import encoder_layer
from support.refusals import refusal

from shd_ref import merge_plan, plan_groups, squeeze_heads
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import (
    AttentionReader,
    Fidelity,
    MergeRule,
    ModelInputs,
    PrecomputeOptions,
    RunOptions,
    find_sites,
    input_specs,
    measure_fidelity,
    open_session,
    replace_attention,
)
from shd_ref.teacher.study.fidelity import cosine_distances, recommend

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


def run_replaced(model: onnx.ModelProto, arrays: dict[str, NDArray[Any]], heads: int, strategy: str | None) -> Any:
    sites = find_sites(model)
    rules = [
        MergeRule(site.num_heads or 0, site.d_v or 0, merge_plan(site.num_heads or 0, heads), strategy or "shd")
        for site in sites
    ]
    output = model.graph.output[-1].name
    graph = replace_attention(model, sites, rules if strategy else None, output=output, row_mask_input="mask")
    session = open_session(graph.model.SerializeToString())
    fed = {value.name for value in session.get_inputs()}
    return session.run([output, *graph.contexts], {name: array for name, array in arrays.items() if name in fed})


@pytest.mark.parametrize("form", FORMS)
def test_as_many_heads_as_the_teacher_reproduce_it(form: str) -> None:
    model = encoder_layer(num_heads=4, **FORMS[form])
    arrays = make_arrays(12)
    wanted = open_session(model.SerializeToString()).run(None, arrays)[0]
    unmerged = run_replaced(model, arrays, 4, None)[1]
    for strategy in ("shd", "constant", "hard"):
        got, context = run_replaced(model, arrays, 4, strategy)
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(context, unmerged)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", ["shd", "constant", "hard", "mean"])
def test_output_is_the_sum_of_merged_maps_times_summed_value_outputs(form: str, strategy: str) -> None:
    """``sum_h A~_h X'_h`` by its definition, from the float64 reference on the graph's own maps."""
    model = encoder_layer(num_heads=4, **FORMS[form])
    arrays = make_arrays(12)
    inputs = ModelInputs(arrays, input_specs(model), "mask")
    (site,) = find_sites(model)
    (batch,) = inputs.batches(range(3), 3)
    maps, outputs = AttentionReader(model, (site,)).read(0, batch)
    mask = arrays["mask"].astype(bool)
    squeezed = squeeze_heads(maps, outputs, 2, strategy=strategy, query_mask=mask)
    summed = np.stack([outputs[:, list(group)].sum(axis=1) for group in plan_groups(squeezed.plan, 4)], axis=1)
    wanted = (squeezed.probs @ summed).sum(axis=1)  # (B, L, D)
    got = run_replaced(model, batch.arrays, 2, strategy)[0]
    got = got.swapaxes(0, 1) if FORMS[form].get("layout") == "batch-folded" else got.reshape(wanted.shape)
    # Rounding of the graph's own dtype, through a product of 12 columns of W_o.
    atol = 20 * load_tolerances()["graph"]["probs"]["float16" if FORMS[form].get("float16") else "float32"]
    np.testing.assert_allclose(got, wanted, atol=atol)


def measure(
    model: onnx.ModelProto, arrays: dict[str, NDArray[Any]], folder: Path, options: PrecomputeOptions, **told: Any
) -> tuple[Fidelity, ...]:
    onnx.save(model, folder / "teacher.onnx")
    return measure_fidelity(folder / "teacher.onnx", arrays, options, RunOptions(mask="mask", num_threads=1), **told)


def test_the_asked_way_is_first_and_plans_are_explicit(tmp_path: Path) -> None:
    pytest.importorskip("networkx", reason="matched plans need networkx")
    arrays, model = make_arrays(12, samples=5), encoder_layer(num_heads=4)
    results = measure(model, arrays, tmp_path, PrecomputeOptions(2, plan="balanced", strategy="hard"))
    assert [(one.plan, one.strategy) for one in results] == [
        (plan, strategy)
        for plan in ("balanced", "progressive", "matched")
        for strategy in ("hard", "shd", "constant")
    ]
    assert all(sorted(p for one in r.plans[0] for p in sum(one, ())) == [0, 1, 2, 3] for r in results)
    by_way = {(one.plan, one.strategy): one for one in results}
    # Balanced pairs are those of the first round; matched ones have the least residual.
    assert by_way["balanced", "shd"].cost == by_way["progressive", "shd"].cost
    matched, other = by_way["matched", "shd"], by_way["progressive", "shd"]
    assert matched.attention_error <= other.attention_error + 1e-6
    assert min(one.excess for one in results) == 0
    given = measure(model, arrays, tmp_path, PrecomputeOptions(2, plans=matched.plans))
    assert (given[0].plan, given[0].cost) == ("given", pytest.approx(matched.cost))
    nothing = measure(model, arrays, tmp_path, PrecomputeOptions(4))
    assert {one.attention_error for one in nothing} == {0.0}
    assert max(one.cost for one in nothing) < 1e-15
    assert recommend(nothing) is nothing[0]


def test_the_first_that_cannot_be_told_from_the_lowest_is_recommended() -> None:
    def way(cost: float, excess: float, margin: float | None) -> Fidelity:
        return Fidelity("progressive", "shd", cost, 0.1, excess, margin, 0.1, ())

    lowest = way(0.5, 0.0, 0.0)
    assert recommend([way(0.9, 0.4, 0.3), near := way(0.6, 0.1, 0.2), lowest]) is near
    assert recommend([way(0.50001, 1e-5, 0.0), lowest]) is lowest
    assert way(0.5, 1e-12, 1e-15).is_tied  # another processor may exchange them
    assert way(0.9, 0.4, None).is_tied  # a single sample


@pytest.mark.parametrize("count", [40, 20])
def test_samples_that_plans_are_matched_on_are_held_out(tmp_path: Path, count: int) -> None:
    """Where at least eight others are left."""
    rng, told = np.random.default_rng(0), list[tuple[int, int]]()
    arrays = {"x": rng.normal(size=(count, 3, 12)).astype(np.float32), "mask": np.ones((count, 3), np.int64)}
    measure(
        encoder_layer(num_heads=4),
        arrays,
        tmp_path,
        PrecomputeOptions(2, plan="matched"),
        on_progress=lambda *both: told.append(both),
    )
    batches = 2  # of 16: 24 samples of 40, all 20 of 20
    assert told == [(number + 1, 4 * batches) for number in range(4 * batches)]


def test_samples_that_are_too_long_for_whole_maps_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("networkx", reason="matched plans need networkx")
    arrays, model = make_arrays(12, samples=4), encoder_layer(num_heads=4)

    def ways(most: int) -> list[str]:
        monkeypatch.setattr("shd_ref.teacher.study.fidelity.MOST_BYTES", most)
        return [one.plan for one in measure(model, arrays, tmp_path, PrecomputeOptions(2))]

    assert set(ways(4 * 4 * (4 + 5 + 6 + 7) ** 2)) == {"progressive", "matched"}
    assert set(ways(4 * 4 * 5**2)) == {"progressive"}  # of two samples; all four would match
    assert ways(4 * 4 * 3**2) == []


def test_padding_and_batching_do_not_matter(tmp_path: Path) -> None:
    arrays = make_arrays(12, samples=5)
    wide = {name: np.concatenate([array, np.zeros_like(array[:, :2])], axis=1) for name, array in arrays.items()}
    wide["x"][:, LENGTH:] = 1e3
    model = encoder_layer(num_heads=4, mask="where")
    one, other = (measure(model, given, tmp_path, PrecomputeOptions(3)) for given in (arrays, wide))
    for first, second in zip(one, other, strict=True):
        assert first.cost == pytest.approx(second.cost, rel=1e-3)
        assert first.attention_error == pytest.approx(second.attention_error, rel=1e-4)


def test_a_sample_with_nan_is_refused_or_skipped(tmp_path: Path) -> None:
    arrays = make_arrays(12)
    arrays["x"][1, 0, 0] = np.nan
    with refusal("not-finite", "must be finite"):
        measure(encoder_layer(num_heads=4), arrays, tmp_path, PrecomputeOptions(2, strategy="constant"))
    options = PrecomputeOptions(2, on_error="skip")
    skipped = measure(encoder_layer(num_heads=4), arrays, tmp_path, options)
    few = {name: array[[0, 2]] for name, array in arrays.items()}
    for one, other in zip(skipped, measure(encoder_layer(num_heads=4), few, tmp_path, options), strict=True):
        assert one.cost == pytest.approx(other.cost, rel=1e-4)
        assert one.attention_error == pytest.approx(other.attention_error, rel=1e-4)


def test_distances_follow_their_definition() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 3, 5))
    mask = np.array([[True, True, False], [True, False, False]])
    pairs = [(a[0, :2].mean(0), b[0, :2].mean(0)), (a[1, 0], b[1, 0])]
    wanted = [1 - x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in pairs]
    np.testing.assert_allclose(cosine_distances(a, b, mask), wanted)
    rows = rng.normal(size=(100, 24))
    assert (cosine_distances(rows * 3.0, rows) >= 0.0).all()  # not -1e-16
    assert cosine_distances(np.zeros((1, 3)), np.zeros((1, 3))).tolist() == [0.0]
