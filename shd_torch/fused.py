"""Products of attention maps with vectors through PyTorch's fused attention: no map is ever formed.

``A v`` is a call of ``scaled_dot_product_attention`` with ``v`` as values, and ``A^T y`` is the gradient that this
call gives to its values. Only PyTorch's public functions take part.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shd_torch.masks import CHUNK, AttentionMask


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, scale: float, temperature: float = 1.0
) -> Tensor:
    """``softmax((scale q k^T + bias) / T) v``, with memory linear in the length unless the mask itself is larger.

    Differentiable in the values. Rows that may attend to no key hold anything finite.

    Args:
        queries: ``(B, H, L, d)``.
        keys: ``(B, H, S, d)``.
        values: ``(B, H, S, d_v)``, all three of one dtype.
        mask: who may attend; fits ``(B, H, L, S)``.
        scale: of the products.
        temperature: T_a > 0.

    Returns:
        ``(B, H, L, d_v)``.
    """
    num_rows, num_keys, width = queries.shape[2], keys.shape[2], values.shape[3]
    # The fused kernels want one head size; zeros change neither the products nor the other columns.
    size = max(queries.shape[3], width)
    queries, keys, values = (F.pad(each, (0, size - each.shape[3])) for each in (queries, keys, values))
    factor = scale / temperature
    with torch.autocast(queries.device.type, enabled=False):
        if mask.is_structural and mask.window is None and not mask.is_biased:
            product = F.scaled_dot_product_attention(queries, keys, values, is_causal=mask.is_causal, scale=factor)
            return product[..., :width]
        parts = []
        for start in range(0, num_rows, CHUNK):
            rows = slice(start, min(start + CHUNK, num_rows))
            seen = mask.key_range(rows, num_keys)
            tile = mask.tile(rows, seen, queries.dtype, queries.device)
            if tile is not None:
                tile = (tile / temperature).expand(*tile.shape[:2], rows.stop - rows.start, seen.stop - seen.start)
            parts.append(
                F.scaled_dot_product_attention(
                    queries[:, :, rows], keys[:, :, seen], values[:, :, seen], attn_mask=tile, scale=factor
                )
            )
        return torch.cat(parts, dim=2)[..., :width]


def attend_both_ways(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    weighted: Tensor,
    mask: AttentionMask,
    scale: float,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """``A v`` and ``A^T y``, see ``attend``; rows that may attend to no key must have a y of 0.

    Args:
        queries: ``(B, H, L, d)``.
        keys: ``(B, H, S, d)``.
        values: v ``(B, H, S, d_v)``.
        weighted: y ``(B, H, L, d_v)``, of the same dtype.
        mask: who may attend; fits ``(B, H, L, S)``.
        scale: of the products.
        temperature: T_a > 0.

    Returns:
        ``(B, H, L, d_v)`` and ``(B, H, S, d_v)``.
    """
    function = partial(attend, queries, keys, mask=mask, scale=scale, temperature=temperature)
    # torch.func and not torch.autograd: it can be compiled whole in the middle of a forward pass.
    product, pull, *_ = torch.func.vjp(function, values)
    return product, pull(weighted)[0]


def expand_heads(keys: Tensor, num_heads: int) -> Tensor:
    """Keys ``(B, H_kv, S, d)`` as ``(B, H, S, d)``: query head h reads key head ``h // (H / H_kv)``."""
    return keys.repeat_interleave(num_heads // keys.shape[1], dim=1) if keys.shape[1] != num_heads else keys


def sum_heads(gradient: Tensor, num_kv_heads: int) -> Tensor:
    """The gradient of ``expand_heads``: ``(B, H, S, d)`` summed to ``(B, H_kv, S, d)``."""
    batch, heads, length, width = gradient.shape
    if heads == num_kv_heads:
        return gradient
    return gradient.reshape(batch, num_kv_heads, heads // num_kv_heads, length, width).sum(2)
