"""Threads of NumPy's matrix products: one while they are small, and afterwards as before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import threadpoolctl
from support.attention_graphs import bare_attention

from shd_ref.teacher.graph.find import find_sites
from shd_ref.teacher.graph.inputs import input_specs
from shd_ref.teacher.run import calibration
from shd_ref.teacher.run.inputs import ModelInputs
from shd_ref.teacher.run.reading import AttentionReader
from shd_ref.teacher.run.threads import SMALL_PRODUCT, threads_for


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
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {"mask": np.ones((3, 5), dtype=np.int64)}
    for name, width in (("logits_0", 5), ("values_0", 4)):
        arrays[name] = rng.normal(size=(3, 4, 5, width)).astype(np.float32)
    inputs = ModelInputs(arrays, input_specs(model), None)
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        plans = calibration.calibrate_plans(AttentionReader(model, find_sites(model)), inputs, 2, num_samples=2)
    assert len(plans) == 1
    assert set(seen) == {1}
