import pytest
from support.attention_graphs import bare_attention
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.teacher import open_session


@pytest.mark.parametrize("provider", ["NoSuchExecutionProvider", "tpu"])
def test_an_unknown_provider_is_an_error_with_the_remedy(provider: str) -> None:
    with refusal("provider-unavailable", f"{provider}.*take --provider cpu"):
        open_session(bare_attention(2), provider=provider)


def test_cuda_is_never_replaced_by_the_cpu() -> None:
    """Where there is a GPU the session runs on it; elsewhere asking for it is an error, not a slow success."""
    try:
        provider = open_session(bare_attention(2), provider="cuda").get_providers()[0]
    except ShdError as error:
        provider = error.code
    assert provider in ("CUDAExecutionProvider", "provider-unavailable")


def test_a_model_that_onnxruntime_rejects_is_graph_invalid() -> None:
    with refusal("graph-invalid"):
        open_session(b"not a model", provider="cpu")
