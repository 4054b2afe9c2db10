"""A small diffusion transformer (DiT), and a student of it that starts as its squeezed teacher."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shd_ref.shrink.heads import merge_heads
from shd_torch import capture_attention
from shd_torch.maps import gram_tensor

PATCH = 2


class Denoiser(nn.Module):
    """Patches, adaptive layer norms by the diffusion step (DiT), epsilon as output.

    Args:
        size: height and width of an image.
        width: D.
        heads: of each block.
        layers: blocks.
    """

    def __init__(self, size: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.size, self.width = size, width
        self.embed = nn.Conv2d(1, width, PATCH, PATCH)
        self.positions = nn.Parameter(torch.randn(1, (size // PATCH) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, PATCH**2)

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        """Noised images ``(B, 1, H, W)`` and steps ``(B,)`` to the noise in them."""
        half = torch.arange(self.width // 2, device=t.device)
        rates = torch.exp(-math.log(10000.0) * half / (self.width // 2))
        angles = t[:, None] * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))[:, None]
        tokens = self.embed(x_t).flatten(2).mT + self.positions
        for block in self.blocks:
            tokens = block(tokens, time)
        side = self.size // PATCH
        patches = self.head(F.layer_norm(tokens, tokens.shape[-1:])).unflatten(1, (side, side))
        return patches.unflatten(-1, (PATCH, PATCH)).permute(0, 1, 3, 2, 4).reshape(x_t.shape)


class Block(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the step."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulate = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor, time: Tensor) -> Tensor:
        """Tokens ``(B, N, D)`` and the step's vector ``(B, 1, D)`` to tokens."""
        shift, scale, gate, shift2, scale2, gate2 = self.modulate(F.silu(time)).chunk(6, -1)
        x = F.layer_norm(tokens, tokens.shape[-1:]) * (1 + scale) + shift
        query, key, value = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens = tokens + (1 + gate) * self.project(mixed)
        x = F.layer_norm(tokens, tokens.shape[-1:]) * (1 + scale2) + shift2
        out: Tensor = tokens + (1 + gate2) * self.mlp(x)
        return out


@torch.no_grad()
def squeeze_denoiser(
    teacher: Denoiser, heads: int, layers: Sequence[int], x_t: Tensor, t: Tensor, plan: str
) -> Denoiser:
    """Some layers of a denoiser as one of its width and fewer, wider heads.

    A group's queries, keys and values lie side by side in one head, so that the weights are the teacher's in
    another order, and queries carry C and the ratio of the scales.

    Args:
        teacher: of ``width``.
        heads: H_s, which divide the teacher's.
        layers: of the teacher, one a student layer.
        x_t: noised images for the alphas ``(B, 1, H, W)``.
        t: their steps ``(B,)``.
        plan: of ``merge_heads``.
    """
    student = Denoiser(teacher.size, teacher.width, heads, len(layers)).to(x_t.device)
    state = {name: part for name, part in teacher.state_dict().items() if not name.startswith("blocks.")}
    student.load_state_dict(state, strict=False)
    with capture_attention(teacher.eval(), keep_values=True) as captured:
        teacher(x_t, t)
    for block, layer in zip(student.blocks, layers, strict=True):
        source, call = teacher.blocks[layer], captured.layer(layer)
        assert isinstance(block, Block)
        assert isinstance(source, Block)
        assert call.value is not None
        probs = call.compute_logits().double().softmax(-1)
        gram = gram_tensor(probs, call.value.double(), source.project.weight.mT.double()).sum(0)
        merge = merge_heads(gram.cpu().numpy(), heads, plan, call.num_heads)
        order = torch.tensor([head for group in merge.groups for head in group], device=x_t.device)
        weights = merge.mixing.sum(0) * (call.num_heads / heads) ** 0.5  # each teacher head is in one group
        scale = torch.from_numpy(weights).to(x_t.device)
        block.load_state_dict(source.state_dict())
        for name in ("weight", "bias"):
            rows = getattr(source.qkv, name).unflatten(0, (3, call.num_heads, -1)).clone()
            rows[0] *= scale.to(rows.dtype).reshape(-1, *[1] * (rows[0].ndim - 1))
            getattr(block.qkv, name).copy_(rows[:, order].flatten(0, 2))
        columns = source.project.weight.unflatten(1, (call.num_heads, -1))
        block.project.weight.copy_(columns[:, order].flatten(1))
    return student
