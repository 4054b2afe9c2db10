"""Fourteen Hugging Face architectures from small configurations, and the attention calls that each makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LENGTH = 9
_WIDTHS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 50,
}
_GROUPED = _WIDTHS | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 40}
_ENCODER = _WIDTHS | {"max_position_embeddings": 40}
_IMAGES = {k: v for k, v in _WIDTHS.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 4}
_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 50,
    "pad_token_id": 1,
}


def _builders() -> dict[str, Callable[[], Any]]:
    import transformers as t
    from transformers.models.bart.modeling_bart import BartEncoder
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    distilbert = {"vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    t5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    whisper = _SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": LENGTH, "decoder_start_token_id": 1}
    return {
        "bert": lambda: t.BertModel(t.BertConfig(**_ENCODER)),
        "distilbert": lambda: t.DistilBertModel(t.DistilBertConfig(**distilbert)),
        "roberta": lambda: t.RobertaModel(t.RobertaConfig(**_ENCODER)),
        "albert": lambda: t.AlbertModel(t.AlbertConfig(**_ENCODER, embedding_size=16)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=50, n_positions=40, n_embd=32, n_layer=2, n_head=4, scale_attn_by_inverse_layer_idx=True
            )
        ),
        "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**_ENCODER)),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**_GROUPED)),
        "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**_GROUPED, sliding_window=4)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**_GROUPED)),
        "gemma2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(**_GROUPED, attn_logit_softcapping=0.5, sliding_window=4)
        ),
        "t5": lambda: t.T5EncoderModel(t.T5Config(**t5)),
        "bart": lambda: BartEncoder(t.BartConfig(**_SEQ2SEQ)),
        "vit": lambda: t.ViTModel(t.ViTConfig(**_IMAGES)),
        "deit": lambda: t.DeiTModel(t.DeiTConfig(**_IMAGES)),
        "whisper": lambda: WhisperEncoder(t.WhisperConfig(**whisper)),
    }


ARCHITECTURES = (
    "bert",
    "distilbert",
    "roberta",
    "albert",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "t5",
    "bart",
    "vit",
    "deit",
    "whisper",
)
GROUPED = ("llama", "mistral", "qwen3", "gemma2")


def build(name: str, attn_implementation: str = "sdpa") -> Any:
    """A tiny model with random weights, in eval mode."""
    torch.manual_seed(0)
    model = _builders()[name]()
    model.set_attn_implementation(attn_implementation)
    return model.eval()


def inputs_of(name: str) -> dict[str, Tensor]:
    """Inputs for it; text is right-padded in the first sample."""
    generator = torch.Generator().manual_seed(0)
    if name in ("vit", "deit"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 2 * LENGTH, generator=generator)}
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, LENGTH - 2 :] = 0
    return {"input_ids": torch.randint(2, 50, (2, LENGTH), generator=generator), "attention_mask": mask}
