"""Tiny Hugging Face teachers, and a teacher whose attention logits are mixed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

WIDTH = 24


def make_teacher(
    name: str, *, heads: int = 4, kv_heads: int = 2, layers: int = 3, seed: int = 0, **changes: Any
) -> Any:
    """A teacher of a family, float64, with biases and norms away from where they start."""
    torch.manual_seed(seed)
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": WIDTH}
    stacked = {"layers": layers, "attention_heads": heads, "ffn_dim": 20}
    text = {"vocab_size": 31, "max_position_embeddings": 40, "intermediate_size": 20}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    grouped = {"num_key_value_heads": kv_heads, "head_dim": 6}
    pair = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in stacked.items()}
    pair |= {"d_model": WIDTH, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    audio = {"num_mel_bins": 5, "max_source_positions": 8, "max_target_positions": 40, "begin_suppress_tokens": None}
    image = {"image_size": 12, "patch_size": 4, "num_channels": 2, "num_labels": 5}
    made: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaForCausalLM", {**sizes, **text, **tokens, **grouped, "attention_bias": True}),
        "mistral": ("MistralForCausalLM", {**sizes, **text, **tokens, **grouped, "sliding_window": 5}),
        "qwen2": ("Qwen2ForCausalLM", {**sizes, **text, **tokens, **grouped}),
        "qwen3": ("Qwen3ForCausalLM", {**sizes, **text, **tokens, **grouped}),
        "gemma": ("GemmaForCausalLM", {**sizes, **text, **tokens, **grouped}),
        "gpt2": (
            "GPT2LMHeadModel",
            {"n_layer": layers, "n_head": heads, "n_embd": WIDTH, "vocab_size": 31, "n_positions": 40, **tokens},
        ),
        "phi3": (
            "Phi3ForCausalLM",
            {**sizes, **text, **tokens, **grouped, "partial_rotary_factor": 0.67, "rms_norm_eps": 1e-7},
        ),
        "opt": ("OPTForCausalLM", {**sizes, **text, **tokens, "ffn_dim": 20}),
        "gpt_neox": ("GPTNeoXForCausalLM", {**sizes, **text, **tokens, "rotary_pct": 0.67, "layer_norm_eps": 1e-7}),
        "olmo2": ("Olmo2ForCausalLM", {**sizes, **text, **tokens, "num_key_value_heads": kv_heads}),
        "modernbert": ("ModernBertForMaskedLM", {**sizes, **text, **tokens, "local_attention": 6}),
        "bart": ("BartForConditionalGeneration", {**pair, **text, **tokens}),
        "whisper": ("WhisperForConditionalGeneration", {**pair, **audio, "vocab_size": 31, **tokens}),
        "t5": (
            "T5ForConditionalGeneration",
            {"num_layers": layers, "num_heads": heads, "d_model": WIDTH, "d_kv": 6, "d_ff": 20, "vocab_size": 31}
            | {"decoder_start_token_id": 0, **tokens},
        ),
        "bert": ("BertForMaskedLM", {**sizes, **text, "pad_token_id": 0}),
        "electra": ("ElectraForPreTraining", {**sizes, **text, "embedding_size": 10, "pad_token_id": 0}),
        "distilbert": ("DistilBertForMaskedLM", {**sizes, **text, "hidden_dim": 20, "pad_token_id": 0}),
        "mpnet": ("MPNetForMaskedLM", {**sizes, **text, "pad_token_id": 1}),
        "roberta": ("RobertaForMaskedLM", {**sizes, **text, **tokens}),
        "xlm-roberta": ("XLMRobertaForMaskedLM", {**sizes, **text, **tokens}),
        "vit": ("ViTForImageClassification", {**sizes, **image, "intermediate_size": 20}),
        "deit": ("DeiTForImageClassificationWithTeacher", {**sizes, **image, "intermediate_size": 20}),
        "dinov2": ("Dinov2ForImageClassification", {**sizes, **image, "mlp_ratio": 2}),
    }
    kind, options = made[name]
    model: Any = getattr(transformers, kind)
    model = model(model.config_class(**{**options, **changes})).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.2 if parameter.ndim < 2 else 0.1) * torch.randn_like(parameter))
    return model


def make_data(name: str, samples: int = 6, length: int = 9, seed: int = 1) -> dict[str, Tensor]:
    """Inputs of a teacher; text is padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("vit", "deit", "dinov2"):
        return {"pixel_values": torch.randn(samples, 2, 12, 12, generator=generator).double()}
    ids = torch.randint(3, 31, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0
    texts = {"input_ids": ids, "attention_mask": mask}
    if name in ("bart", "t5", "whisper"):
        decoded = {f"decoder_{key}": tensor[:, 2:] for key, tensor in texts.items()}
        sound = torch.randn(samples, 5, 16, generator=generator).double()
        return ({"input_features": sound} if name == "whisper" else texts) | decoded
    return texts


def logits_of(model: Any, data: dict[str, Tensor]) -> Tensor:
    """Of the rows that are no padding."""
    with torch.no_grad():
        logits: Tensor = model(**data).logits
    mask = data.get("decoder_attention_mask", data.get("attention_mask"))
    return logits if mask is None else logits[mask.bool()]


@contextmanager
def mixed_logits(
    model: Any, merges: list[tuple[list[list[int]], list[list[float]]]], stack: str = ""
) -> Iterator[None]:
    """The teacher with, in each layer, the softmax of each group's mixed logits as the map of all of its heads.

    ``stack`` is the one whose self attention merges, of a model with two.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = iter(range(1000))

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        groups, mixing = merges[next(calls) % len(merges)]
        repeats = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(repeats, 1).mT * (kwargs.get("scaling") or query.shape[-1] ** -0.5)
        mixed = torch.einsum("ht,btls->bhls", torch.tensor(mixing, dtype=logits.dtype), logits)
        mixed = mixed if attention_mask is None else mixed + attention_mask
        homes = {head: number for number, group in enumerate(groups) for head in group}
        probs = mixed.softmax(-1)[:, [homes[head] for head in range(query.shape[1])]]
        return (probs @ value.repeat_interleave(repeats, 1)).transpose(1, 2).contiguous(), probs

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS["mixed"] = attend
    # Masks are made for eager attention, by the name that the configuration has then.
    layers = [
        module
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention") and stack in name and "encoder_attn" not in name
    ]
    model.config._attn_implementation = "eager"

    def switch(name: str) -> Any:
        return lambda *_: setattr(model.config, "_attn_implementation", name)

    handles = [layer.register_forward_pre_hook(switch("mixed")) for layer in layers]
    handles += [layer.register_forward_hook(switch("eager")) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        model.config._attn_implementation = before
        del ALL_ATTENTION_FUNCTIONS["mixed"]
