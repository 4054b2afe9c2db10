"""Threads of NumPy's matrix products: one while they are small, and afterwards as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import threadpoolctl
from support.attention_graphs import bare_attention

from shd_ref.errors import ShdError
from shd_ref.teacher.graph.find import find_sites
from shd_ref.teacher.graph.inputs import input_specs
from shd_ref.teacher.precompute import compare
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.rewrite.squeeze import squeeze_graph
from shd_ref.teacher.run import calibration, teacher
from shd_ref.teacher.run.inputs import ModelInputs
from shd_ref.teacher.run.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.run.reading import AttentionReader
from shd_ref.teacher.run.threads import SMALL_PRODUCT, threads_for
from shd_ref.teacher.session import open_session, run_session


def make_arrays(layers: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"mask": np.ones((3, 5), dtype=np.int64)}
    for layer in range(layers):
        arrays[f"logits_{layer}"] = rng.normal(size=(3, 4, 5, 5)).astype(np.float32)
        arrays[f"values_{layer}"] = rng.normal(size=(3, 4, 5, 4)).astype(np.float32)
    return arrays


def blas_threads() -> list[int]:
    return [each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"]


def test_small_products_take_one_thread() -> None:
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        if max(before, default=1) < 2:
            pytest.skip("NumPy's BLAS has one thread here")
        with threads_for(SMALL_PRODUCT):
            assert set(blas_threads()) == {1}
        assert blas_threads() == before
        with threads_for(SMALL_PRODUCT + 1):
            assert blas_threads() == before
        with pytest.raises(ValueError, match="inside"), threads_for(1):
            raise ValueError("inside")
        assert blas_threads() == before


def test_plans_are_matched_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = calibration.match_factored

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.extend(blas_threads())
        return plain(*arguments, **options)

    monkeypatch.setattr(calibration, "match_factored", watched)
    model = bare_attention(4)
    arrays = make_arrays()
    inputs = ModelInputs(arrays, input_specs(model), None)
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        plans = calibration.calibrate_plans(AttentionReader(model, find_sites(model)), inputs, 2, num_samples=2)
    assert len(plans) == 1
    assert set(seen) == {1}


def test_layers_are_compared_at_once_or_one_by_one_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model = bare_attention(4, num_layers=3)
    graph = squeeze_graph(model, tuple(enumerate(find_sites(model))), num_student_heads=2, check_outputs=True)
    feeds = make_arrays(3)
    session = open_session(graph.model, num_threads=1)
    outputs = run_session(session, {value.name: feeds[value.name] for value in session.get_inputs()})
    found = []
    for largest in (compare.SMALL_PRODUCT, 0):
        monkeypatch.setattr(compare, "SMALL_PRODUCT", largest)
        found.append(compare.compare_with_reference(graph, outputs))
    assert found[0] == found[1]
    assert found[0].residual > 0
    last = graph.layers[2].merged
    with pytest.raises(ShdError, match="student layer 2") as error:
        compare.compare_with_reference(graph, outputs | {last: outputs[last] + 1e-3})
    assert error.value.code == "graph-mismatch"


def test_what_goes_wrong_with_the_hash_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Path) -> str:
        raise ShdError("graph-invalid", "the file is gone")

    monkeypatch.setattr(teacher, "hash_teacher", fails)
    onnx.save(bare_attention(4), tmp_path / "teacher.onnx")
    arrays = make_arrays()
    students = [(tmp_path / "cache", PrecomputeOptions(num_student_heads=2))]
    with pytest.raises(ShdError, match="the file is gone"):
        precompute(tmp_path / "teacher.onnx", arrays, students)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("provider", "beside"), [("cpu", True), ("CPUExecutionProvider", True), ("cuda", False)])
def test_only_sessions_on_the_processor_are_opened_beside(tmp_path: Path, provider: str, beside: bool) -> None:
    """Loading CUDA redirects stdout, which two threads at once would not give back."""
    onnx.save(bare_attention(4), tmp_path / "teacher.onnx")
    arrays = make_arrays()
    options = [PrecomputeOptions(num_student_heads=2)]
    run = teacher.TeacherRun(tmp_path / "teacher.onnx", arrays, options, RunOptions(provider=provider))
    run.begin()
    assert (run._opening is not None) == beside
    assert len(run.fingerprint().sha256) == 64
