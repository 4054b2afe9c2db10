"""Capture: the right logits, with gradient, and a model that does not notice."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.binding.architectures import HEADS, make_inputs
from support.binding.models import HF_MODELS, NUM_LAYERS, PlainViT, hf_model
from support.refusals import refusal
from torch import Tensor, nn

import shd_torch.maps as shd
from shd_torch import ShdError, capture_attention


@pytest.mark.parametrize(("name", "attn_implementation"), [*zip(HF_MODELS, ("eager", "sdpa") * 2, strict=False)])
def test_hf_training_gradients(name: str, attn_implementation: str) -> None:
    """With dropout: the same random numbers, so the same loss and the same gradients; and SHD adds its own."""
    dropout = {"gpt2": "attn_pdrop", "llama": "attention_dropout"}.get(name, "attention_probs_dropout_prob")
    model, inputs = hf_model(name, attn_implementation, **{dropout: 0.3}).train(), make_inputs(name)
    gradients = []
    for beta in (None, 0.0, 1.0):
        model.zero_grad()
        torch.manual_seed(1)
        if beta is None:
            model(**inputs)[0].square().mean().backward()
        else:
            with capture_attention(model) as captured:
                loss = model(**inputs)[0].square().mean()
                teacher = [torch.softmax(2 * t.detach(), -1) for t in captured.logits]
                (loss + shd.shd_loss(teacher, captured.logits, beta=beta)).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-8, rtol=1e-5)
    assert torch.isfinite(gradients[2]).all()
    assert not torch.allclose(gradients[1], gradients[2], atol=1e-4)


class Sdpa(nn.Module):
    """Passes its arguments on."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "case", ["plain", "causal", "rectangular", "boolean", "additive", "grouped", "scale", "causal-LS"]
)
def test_sdpa_arguments(case: str, dtype: torch.dtype) -> None:
    """``softmax(captured) @ value`` is what the fused kernel returns, under all its options."""
    torch.manual_seed(0)
    keys = 9 if case in ("rectangular", "causal-LS") else 7
    kv_heads = 2 if case == "grouped" else 4
    query = torch.randn(2, 4, 7, 8, dtype=dtype)
    key, value = (torch.randn(2, kv_heads, keys, 8, dtype=dtype) for _ in range(2))
    mask = torch.rand(2, 1, 7, keys) > 0.3
    mask[..., 0] = True
    kwargs: dict[str, Any] = {
        "causal": {"is_causal": True},
        "causal-LS": {"is_causal": True},
        "boolean": {"attn_mask": mask},
        "additive": {"attn_mask": torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)},
        "grouped": {"enable_gqa": True},
        "scale": {"scale": 0.7},
    }.get(case, {})
    module = Sdpa()
    expected = module(query, key, value, **kwargs)
    with capture_attention(module) as captured:
        assert torch.equal(module(query, key, value, **kwargs), expected)
    probs = captured.probs[0]
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    rebuilt = probs @ value.to(probs.dtype).repeat_interleave(4 // kv_heads, 1)
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(rebuilt, expected.to(probs.dtype), atol=tolerance, rtol=tolerance)
    if case in ("boolean", "additive"):
        assert torch.equal(torch.isneginf(captured.logits[0]), ~mask.expand(2, 4, 7, keys))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize(
    ("training", "padded", "context"), [(True, False, torch.enable_grad), (False, True, torch.inference_mode)]
)
def test_transformer_encoder_keeps_its_outputs(training: bool, padded: bool, context: Any) -> None:
    """Its fast path is off during a capture; it left padded rows zero."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, HEADS, 48, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).train(training)
    real = torch.arange(7) < torch.tensor([7, 5, 3])[:, None]
    source, outputs = torch.randn(3, 7, 32), []
    for capture in (nullcontext(), capture_attention(encoder, 2)):
        torch.manual_seed(1)  # dropout
        with context(), capture:
            outputs.append(encoder(source, src_key_padding_mask=~real if padded else None))
    rows = real if padded else torch.ones_like(real)
    torch.testing.assert_close(outputs[1][rows], outputs[0][rows], atol=0.0 if training else 1e-5, rtol=0.0)


def test_layers_are_kept_in_the_order_asked_for() -> None:
    model, images = PlainViT(num_layers=4), torch.randn(2, 3, 16, 16)
    with capture_attention(model) as everything, capture_attention(model, [3, 1]) as some:
        model(images)
    assert [some.calls[i].query is everything.calls[j].query for i, j in ((0, 3), (1, 1))] == [True, True]


def test_last_forward_wins_and_clear_forgets() -> None:
    torch.manual_seed(0)
    model, images = PlainViT(), torch.randn(2, 3, 16, 16)
    with torch.no_grad(), capture_attention(model, NUM_LAYERS) as captured:
        model(images)
        model(2 * images)
        twice = captured.logits
        model(images)
        assert len(captured.logits) == NUM_LAYERS
        assert not captured.logits[0].requires_grad
        assert not torch.equal(captured.logits[0], twice[0])
        captured.clear()
        with pytest.raises(ShdError, match="none was run yet"):
            _ = captured.logits


def traces(model: nn.Module) -> tuple[Any, ...]:
    return (
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        F.softmax,
        torch.backends.mha.get_fastpath_enabled(),
        "forward" in vars(model),
        transformers.AttentionInterface().get("eager"),
    )


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_nothing_is_left_behind_after_an_error(attn_implementation: str) -> None:
    model, inputs = hf_model("bert", attn_implementation), make_inputs("bert")
    before = traces(model)
    hook = model.encoder.layer[1].attention.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), capture_attention(model) as captured:  # noqa: PT012  # the state after it
        try:
            model(**inputs)
        finally:
            assert traces(model)[:4] == before[:4]
            assert captured.num_calls == 0
    hook.remove()
    assert traces(model) == before
    with capture_attention(model, NUM_LAYERS):
        model(**inputs)
    assert traces(model) == before


@pytest.mark.parametrize(
    ("layers", "message"), [(3, r"must make layers=3 attention calls; got 2"), ([0, 2], r"layers must lie in 0\.\.1")]
)
def test_counts_that_differ(layers: Any, message: str) -> None:
    model = PlainViT()
    with capture_attention(model, layers), refusal("capture-failed", message):
        model(torch.randn(1, 3, 16, 16))


@pytest.mark.parametrize("layers", [0, [], [1, 1], [1.5]])
def test_bad_layers(layers: Any) -> None:
    with refusal("argument-value", "layers must be"), capture_attention(nn.Identity(), layers):
        pass


def test_attention_sinks_are_refused() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = transformers.GptOssConfig(layer_types=["full_attention"], **sizes)
    model = transformers.GptOssForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    with capture_attention(model), refusal("capture-failed", "sinks"):
        model(input_ids=torch.ones(1, 4, dtype=torch.int64))
