"""A Llama-style language model in the llama2.c file format: the real teacher of some tests, and their students."""

import math
import struct
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Stories(nn.Module):
    """Token ids ``(B, L)`` to next-token logits: RMS norms, rotary positions, grouped queries, SwiGLU."""

    def __init__(
        self,
        *,
        width: int,
        hidden: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        vocabulary: int,
        length: int,
    ) -> None:
        super().__init__()
        head = width // num_heads
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, hidden, num_heads, num_kv_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, head, 2) / head)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(hidden), self.embed.weight)


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        kv_width = width // num_heads * num_kv_heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = nn.Linear(width, kv_width, bias=False), nn.Linear(width, kv_width, bias=False)
        self.w1, self.w3 = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.attn_norm(hidden)
        query = _rotate(self.wq(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2), cos, sin)
        key = _rotate(self.wk(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2), cos, sin)
        value = self.wv(x).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
        groups = self.num_heads // self.num_kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.wo(mixed.transpose(1, 2).flatten(2))
        x = self.mlp_norm(hidden)
        out: Tensor = hidden + self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def load_stories(path: Path) -> Stories:
    """The model of a llama2.c ``.bin`` file: a header of seven integers, then float32 weights in a fixed order."""
    data = path.read_bytes()
    width, hidden, num_layers, num_heads, num_kv_heads, vocabulary, length = struct.unpack("<7i", data[:28])
    model = Stories(
        width=width,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        vocabulary=abs(vocabulary),
        length=length,
    )
    numbers = torch.from_numpy(np.frombuffer(data, dtype="<f4", offset=28).copy())
    taken = 0

    def take(parameters: list[Tensor]) -> None:
        nonlocal taken
        for parameter in parameters:
            count = math.prod(parameter.shape)
            parameter.copy_(numbers[taken : taken + count].view(parameter.shape))
            taken += count

    with torch.no_grad():
        take([model.embed.weight])
        for names in ("attn_norm", "wq", "wk", "wv", "wo", "mlp_norm", "w1", "w2", "w3"):
            take([getattr(layer, names).weight for layer in model.layers])
        take([model.norm.weight])
    rotary = length * (width // num_heads)  # the cosines and sines, which the model computes itself
    if taken + rotary != len(numbers):
        raise ValueError(f"{path} holds {len(numbers)} numbers; {taken + rotary} were expected")
    return model.eval()
