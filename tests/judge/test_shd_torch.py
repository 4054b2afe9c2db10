"""The binding's adapter; that the binding conforms is judged in test_implementations.py."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the PyTorch binding needs torch")

from shd_ref.conformance import OUTPUTS, Missing, cases, check  # noqa: E402
from shd_torch.maps.judged import Adapter  # noqa: E402

NOT_OFFERED = {"diagnose", "matched_plan", "indexer_target", "indexer_loss", "indexer_loss_gradient"}


def test_binding_offers_what_it_says() -> None:
    for operation in OUTPUTS:
        if operation in NOT_OFFERED:
            with pytest.raises(NotImplementedError, match=operation):
                Adapter().run_operation(operation, {}, "float64")
    (law,) = cases("law/oracles-bound")
    with pytest.raises(Missing):
        check(law, Adapter())


def test_device_is_the_callers_or_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Adapter().device.type == "cpu"
    monkeypatch.setenv("SHD_TORCH_DEVICE", "meta")
    assert Adapter().device.type == "meta"
    assert Adapter("cpu").device.type == "cpu"


def test_arrays_keep_their_kinds() -> None:
    maps, outputs = np.full((1, 2, 3, 4), 0.25, np.float32), np.ones((1, 2, 4, 5), np.float32)
    answer = Adapter().run_operation(
        "squeeze_heads", {"teacher_probs": maps, "value_outputs": outputs, "num_student_heads": 1}, "bfloat16"
    )
    assert answer["probs"].dtype == np.float64
    assert answer["num_degenerate"] == 1
    assert answer["plan"] == (((0, 1),),)
    assert isinstance(answer["alphas"], tuple)
    with pytest.raises(NotImplementedError):
        Adapter().run_operation("no_such_operation", {}, "float64")
