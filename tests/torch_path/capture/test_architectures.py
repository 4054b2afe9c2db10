"""Queries and keys of many architectures: the model does not notice, and its own maps come out of them."""

import pytest
import torch
from support.binding.architectures import GROUPED, HEADS, HUGGING_FACE, make_inputs, make_model
from torch import Tensor

from shd_torch import attention_kl, capture_attention
from shd_torch.maps import shd_loss


def own_maps(name: str) -> tuple[Tensor, ...]:
    attentions: tuple[Tensor, ...] = make_model(name, "eager")(**make_inputs(name), output_attentions=True).attentions
    return attentions


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_outputs_do_not_change_and_the_maps_are_the_models(name: str, attn_implementation: str) -> None:
    if name == "gemma2" and attn_implementation == "sdpa":
        pytest.skip("transformers refuses a soft cap with sdpa")
    model, inputs = make_model(name, attn_implementation), make_inputs(name)
    plain = model(**inputs)
    maps = own_maps(name)
    with capture_attention(model, len(maps)) as captured:
        watched = model(**inputs)
    for key, value in plain.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, watched[key]), key
    for call, probs, attention in zip(captured.calls, captured.probs, maps, strict=True):
        assert call.query.shape[1] == HEADS
        assert call.key.shape[1] == (2 if name in GROUPED else HEADS)  # not repeated
        assert call.query.requires_grad
        assert call.key.requires_grad
        torch.testing.assert_close(probs, attention, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "t5", "vit"])
def test_attention_kl_takes_a_call_as_it_is(name: str) -> None:
    model, inputs = make_model(name, "eager" if name == "gemma2" else "sdpa"), make_inputs(name)
    gradients = []
    for fused in (True, False):
        model.zero_grad()
        with capture_attention(model) as captured:
            model(**inputs)
        loss = torch.zeros(())
        for call in captured.calls:
            logits = call.compute_logits()
            teacher = torch.softmax(3 * logits.detach(), -1)
            loss = loss + (
                attention_kl(call.query, call.key, teacher, **call.mask_keywords)
                if fused
                else shd_loss(teacher, logits)
            )
        loss.backward()
        gradients.append(
            (loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        )
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_flash_style_masks(causal: bool) -> None:
    """A function that never calls the fused one, with the mask and keywords of FlashAttention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    name = "mistral" if causal else "bert"
    model, inputs = make_model(name), make_inputs(name)
    with capture_attention(model) as captured:
        expected = model(**inputs)[0]
    maps = list(captured.probs)

    def attend(module, query, key, value, attention_mask, scaling=None, **kwargs):  # type: ignore[no-untyped-def]
        assert attention_mask.ndim == 2
        layer = 0 if module is first else 1
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return (maps[layer] @ value).transpose(1, 2), None

    AttentionInterface.register("by_padding", attend)
    AttentionMaskInterface.register("by_padding", flash_attention_mask)
    try:
        first = next(m for m in model.modules() if hasattr(m, "is_causal"))
        model.set_attn_implementation("by_padding")
        with capture_attention(model, len(maps)) as captured:
            torch.testing.assert_close(model(**inputs)[0], expected)
        for probs, target in zip(captured.probs, maps, strict=True):
            real = inputs["attention_mask"].bool()[:, None, :, None]
            torch.testing.assert_close(probs * real, target * real, atol=1e-6, rtol=1e-5)
        assert all(call.rule.window == (4 if causal else None) for call in captured.calls)
    finally:
        AttentionInterface._global_mapping.pop("by_padding")
        AttentionMaskInterface._global_mapping.pop("by_padding")
