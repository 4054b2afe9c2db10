"""Tiny models with a head, and a vision transformer written by hand."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.binding.architectures import HEADS, make_model

HF_MODELS = ("bert", "gpt2", "llama", "vit")
NUM_LAYERS = 2
_HEADED = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "vit": "ViTForImageClassification"}


def hf_model(name: str, attn_implementation: str = "sdpa", **changes: Any) -> Any:
    """One of the architectures with two layers, and with a head where it is one of ``_HEADED``."""
    return make_model(
        name, attn_implementation, kind=_HEADED.get(name), **{"num_hidden_layers": NUM_LAYERS} | changes
    )


def sharpen(model: Any, names: tuple[str, ...], factor: float = 20.0) -> Any:
    """The model with some parameters multiplied, so that its maps are not nearly uniform."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if any(part in name for part in names):
                value *= factor
    return model


class PlainBlock(nn.Module):
    """Pre-norm attention on scaled_dot_product_attention, and an MLP."""

    def __init__(self, width: int, num_heads: int, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm(hidden)).reshape(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        hidden = hidden + self.proj(self.attend(query, key, value).transpose(1, 2).reshape(batch, length, width))
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out


class PlainViT(nn.Module):
    """A vision transformer as people write it by hand."""

    def __init__(self, width: int = 32, num_heads: int = HEADS, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 16, width))
        self.blocks = nn.ModuleList(PlainBlock(width, num_heads) for _ in range(num_layers))
        self.head = nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.mean(1))
        return logits
