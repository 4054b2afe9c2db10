"""A small vision transformer: the demo's teacher and students."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VisionTransformer(nn.Module):
    """Patches, a class token, pre-norm blocks, a linear head.

    Args:
        image_size: height and width of the square image.
        patch_size: divides it.
        width: D.
        num_layers: blocks.
        num_heads: divides the width.
        num_classes: C.
    """

    def __init__(
        self, *, image_size: int, patch_size: int, width: int, num_layers: int, num_heads: int, num_classes: int
    ) -> None:
        super().__init__()
        num_patches = (image_size // patch_size) ** 2
        self.embed = nn.Conv2d(1, width, kernel_size=patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, num_patches + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Class logits ``(B, C)`` of images ``(B, H, W)`` with values in [0, 1]."""
        patches = self.embed(image.unsqueeze(1)).flatten(2).transpose(1, 2)  # (B, N, D)
        tokens = torch.cat([self.class_token.expand(patches.shape[0], -1, -1), patches], dim=1) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        logits: Tensor = self.head(self.norm(tokens[:, 0]))
        return logits


class Block(nn.Module):
    """Pre-norm attention and MLP, both residual."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``(B, L, D)`` to tokens."""
        tokens = tokens + self.attention(self.norm1(tokens))
        tokens = tokens + self.mlp(self.norm2(tokens))
        return tokens


class Attention(nn.Module):
    """Multi-head self-attention through PyTorch's fused function, as any modern model has it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``(B, L, D)`` to tokens."""
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(tokens).chunk(3, dim=-1)
        )  # (B, H, L, d)
        mixed = F.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return projected
