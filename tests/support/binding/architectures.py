"""Sixteen architectures with their own attention code, tiny and with random weights, and what they are fed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 50
HEADS = 4
_SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": HEADS, "intermediate_size": 48}
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = _TOKENS | _SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 64}
SEQ2SEQ = _TOKENS | {"d_model": 32, "decoder_start_token_id": 1}
for _side in ("encoder", "decoder"):
    SEQ2SEQ |= {f"{_side}_layers": 1, f"{_side}_attention_heads": HEADS, f"{_side}_ffn_dim": 48}
_VISION: dict[str, Any] = {**_SIZES, "image_size": 16, "patch_size": 4, "num_hidden_layers": 1}
_TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, **_SIZES, "num_hidden_layers": 1, "max_position_embeddings": 64}

# Name of the configuration and of the model, and the configuration's arguments.
_HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertModel", _TEXT),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertModel",
        {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 1, "n_heads": HEADS, "hidden_dim": 48},
    ),
    "roberta": ("RobertaConfig", "RobertaModel", _TEXT),
    "electra": ("ElectraConfig", "ElectraModel", {**_TEXT, "embedding_size": 16}),
    "gpt2": (
        "GPT2Config",
        "GPT2Model",
        {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": HEADS, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXModel", {**_TEXT, "bos_token_id": 1, "eos_token_id": 2}),
    "llama": ("LlamaConfig", "LlamaModel", {**_DECODER, "num_hidden_layers": 1}),
    "mistral": ("MistralConfig", "MistralModel", {**_DECODER, "num_hidden_layers": 1, "sliding_window": 4}),
    "qwen3": ("Qwen3Config", "Qwen3Model", {**_DECODER, "num_hidden_layers": 1, "head_dim": 8}),
    # One layer with a sliding window and one without; softcap in both.
    "gemma2": (
        "Gemma2Config",
        "Gemma2Model",
        {**_DECODER, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 0.5},
    ),
    "t5": (
        "T5Config",
        "T5EncoderModel",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": HEADS},
    ),
    "bart": ("BartConfig", "BartModel", {**SEQ2SEQ, "max_position_embeddings": 64}),
    "vit": ("ViTConfig", "ViTModel", _VISION),
    "deit": ("DeiTConfig", "DeiTModel", _VISION),
    "whisper": (
        "WhisperConfig",
        "WhisperModel",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
    ),
}
ENCODERS_INSIDE = ("bart", "whisper")  # of these the encoder alone is the teacher
HUGGING_FACE = tuple(_HUGGING_FACE)
ARCHITECTURES = (*HUGGING_FACE, "dit")
GROUPED = ("llama", "mistral", "qwen3", "gemma2")  # fewer key/value heads than heads


def make_model(name: str, attn_implementation: str | None = None, kind: str | None = None, **changes: Any) -> Any:
    """The architecture with random weights, in eval mode, by its library's choice of attention or another.

    ``kind`` names another class of the library than the bare model.
    """
    torch.manual_seed(0)
    if name == "dit":
        return DiffusionTransformer().eval()
    import transformers

    config, model, arguments = _HUGGING_FACE[name]
    network = getattr(transformers, kind or model)(getattr(transformers, config)(**(arguments | changes)))
    if attn_implementation is not None:
        network.set_attn_implementation(attn_implementation)
    return (network.get_encoder() if name in ENCODERS_INSIDE else network).eval()


def make_inputs(name: str, batch: int = 2, length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """Inputs of that batch and, for text, length; the second sample of a text is padded on the right."""
    draw = torch.Generator().manual_seed(seed)
    if name in ("vit", "deit"):
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=draw)}
    if name == "whisper":
        return {"input_features": torch.randn(batch, 8, 40, generator=draw)}
    if name == "dit":
        return {"patches": torch.randn(batch, 16, 12, generator=draw), "timestep": torch.rand(batch, generator=draw)}
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


class DiffusionTransformer(nn.Module):
    """One block in the style of DiT: normalisation is scaled, shifted and gated by the time step."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.output = nn.Linear(12, width), nn.Linear(width, 12)
        self.position = nn.Parameter(0.5 * torch.randn(1, 16, width))
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, 6 * width))
        self.norm, self.mlp_norm = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, patches: Tensor, timestep: Tensor) -> Tensor:
        """Predicted noise ``(B, 16, 12)``."""
        x = self.embed(patches) + self.position
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.time(timestep[:, None, None]).chunk(6, dim=-1)
        x = x + gate * self.attend(self.norm(x) * (1 + scale) + shift)
        x = x + mlp_gate * self.mlp(self.mlp_norm(x) * (1 + mlp_scale) + mlp_shift)
        output: Tensor = self.output(x)
        return output

    def attend(self, x: Tensor) -> Tensor:
        """Self-attention over patches."""
        split: Callable[[Tensor], Tensor] = lambda t: t.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # noqa: E731
        query, key, value = (split(part) for part in self.qkv(x).chunk(3, dim=-1))
        context = nn.functional.scaled_dot_product_attention(query, key, value)
        joined: Tensor = self.projection(context.transpose(1, 2).flatten(2))
        return joined
