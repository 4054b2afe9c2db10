from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.attention_graphs import bare_attention

from shd_ref.errors import ShdError
from shd_ref.teacher.session import open_session, run_session

FEEDS = {
    "mask": np.ones((1, 2), np.int64),
    "logits_0": np.zeros((1, 2, 2, 3), np.float32),
    "values_0": np.ones((1, 2, 3, 4), np.float32),
}


@pytest.fixture(scope="module")
def session() -> Any:
    return open_session(bare_attention(2).SerializeToString(), provider="cpu", num_threads=1)


def test_the_provider_is_the_one_asked_for(session: Any) -> None:
    assert session.get_providers()[0] == "CPUExecutionProvider"


@pytest.mark.parametrize("provider", ["NoSuchExecutionProvider", "tpu"])
def test_an_unknown_provider_is_an_error_with_the_remedy(provider: str) -> None:
    with pytest.raises(ShdError, match=f"{provider}.*take --provider cpu") as caught:
        open_session(bare_attention(2).SerializeToString(), provider=provider)
    assert caught.value.code == "provider-unavailable"


def provider_or_code(provider: str) -> str:
    try:
        return str(open_session(bare_attention(2).SerializeToString(), provider=provider).get_providers()[0])
    except ShdError as error:
        return error.code


def test_cuda_is_never_replaced_by_the_cpu() -> None:
    """Where there is a GPU the session runs on it; elsewhere asking for it is an error, not a slow success."""
    assert provider_or_code("cuda") in ("CUDAExecutionProvider", "provider-unavailable")


def test_a_model_that_onnxruntime_rejects_is_graph_invalid() -> None:
    with pytest.raises(ShdError) as caught:
        open_session(b"not a model", provider="cpu")
    assert caught.value.code == "graph-invalid"


def test_outputs_come_by_name(session: Any) -> None:
    outputs = run_session(session, {**FEEDS})
    assert [output.name for output in session.get_outputs()] == list(outputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits_0": None}, "missing: logits_0; unknown: none"),
        ({"labels": np.zeros(1)}, "missing: none; unknown: labels"),
        ({"logits_0": FEEDS["logits_0"].astype(np.float64)}, "logits_0 must be float32; got float64"),
        ({"logits_0": FEEDS["logits_0"][0]}, r"logits_0 must have shape .*; got \[2, 2, 3\]"),
        ({"values_0": np.ones((1, 3, 3, 4), np.float32)}, r"values_0 must have shape .*; got \[1, 3, 3, 4\]"),
    ],
)
def test_inputs_that_do_not_fit_are_named(session: Any, change: dict[str, Any], message: str) -> None:
    feeds = {name: array for name, array in {**FEEDS, **change}.items() if array is not None}
    with pytest.raises(ShdError, match=message) as caught:
        run_session(session, feeds)
    assert caught.value.code == "inputs-invalid"
