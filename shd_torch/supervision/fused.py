"""Products of attention maps with vectors through PyTorch's fused attention: no map is ever formed.

``A v`` is fused attention with ``v`` as values, and ``A^T y`` the gradient that it gives to its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention  # by name: a model's may be replaced, this one is not

from shd_torch.supervision.mask import CHUNK, AttentionRule

_FLOAT16_COLUMN = 2.0**15
"""Half of float16's range: what rounding adds to a sum has room."""


class MapFactors(NamedTuple):
    """Attention maps ``softmax((scale q k^T + bias) / T)`` that are never formed; without a soft cap."""

    queries: Tensor  # (B, H, L, d)
    keys: Tensor  # (B, H, S, d), of the same dtype
    rule: AttentionRule  # fits (B, H, L, S)
    temperature: float = 1.0

    @property
    def scale(self) -> float:
        return self.rule.scale_for(self.queries.shape[3])


def attend(maps: MapFactors, values: Tensor) -> Tensor:
    """``A v`` ``(B, H, L, d_v)`` in the maps' dtype; rows that may attend to no key hold anything finite."""
    maps = _with_positive_scale(maps)
    width, (queries, keys, values) = values.shape[3], _pad(maps.queries, maps.keys, values)
    parts = []
    for rows, columns, mask in _calls(maps):
        inside = queries[:, :, rows], keys[:, :, columns], values[:, :, columns]
        parts.append(_attend_once(*inside, mask, maps.scale / maps.temperature))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))[..., :width]


def attend_both_ways(maps: MapFactors, values: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor]:
    """``A v`` in the maps' dtype and ``A^T y`` in float32 or wider, without gradient; see ``attend``.

    ``weighted``, y ``(B, H, L, d_v)``, may be of a wider dtype; it is 0 in rows that may attend to no key.
    """
    maps = _with_positive_scale(maps)
    weighted, unit = _fit_range(weighted, values.dtype)
    width, (queries, keys, values, weighted) = values.shape[3], _pad(maps.queries, maps.keys, values, weighted)
    parts, transposed = [], torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
    for rows, columns, mask in _calls(maps):
        inside = queries[:, :, rows], keys[:, :, columns]
        function = partial(_attend_once, *inside, mask=mask, scale=maps.scale / maps.temperature)
        product, pulled = _result_and_gradient(function, values[:, :, columns], weighted[:, :, rows])
        transposed[:, :, columns] += pulled
        parts.append(product)
    return torch.cat(parts, dim=2)[..., :width], transposed[..., :width] * unit


def center_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys ``(B, H, S, d)`` in the dtype of the products, shifted by their mean where they would be rounded.

    A shift of all keys changes no map, and smaller numbers are rounded by less. Keys of as few bits stay as they are:
    a shift is rounded alike for all small keys, which moves their logits together against a large one's.
    """
    if keys.dtype.itemsize <= dtype.itemsize:
        return keys.to(dtype)
    return (keys - keys.mean(2, keepdim=True)).to(dtype)


def expand_heads(keys: Tensor, num_heads: int) -> Tensor:
    """Keys ``(B, H_kv, S, d)`` as ``(B, H, S, d)``: query head h reads key head ``h // (H / H_kv)``."""
    return keys.repeat_interleave(num_heads // keys.shape[1], dim=1) if keys.shape[1] != num_heads else keys


def sum_heads(gradient: Tensor, num_kv_heads: int) -> Tensor:
    """The gradient of ``expand_heads``: ``(B, H, S, d)`` summed to ``(B, H_kv, S, d)``."""
    batch, heads, length, width = gradient.shape
    if heads == num_kv_heads:
        return gradient
    return gradient.reshape(batch, num_kv_heads, heads // num_kv_heads, length, width).sum(2)


def _calls(maps: MapFactors) -> Iterator[tuple[slice, slice, Tensor | bool | None]]:
    """Rows, keys and mask, or whether they are causal: all rows where that is all there is to say, else a few."""
    num_rows, num_keys, rule = maps.queries.shape[2], maps.keys.shape[2], maps.rule
    if rule.attn_mask is None and rule.window is None and rule.alibi_slopes is None:
        yield slice(0, num_rows), slice(0, num_keys), rule.is_causal
        return
    for start in range(0, num_rows, CHUNK):
        rows = slice(start, min(start + CHUNK, num_rows))
        keys = rule.key_range(rows, num_keys)
        tile = rule.tile(rows, keys, maps.queries.dtype, maps.queries.device)
        if tile is not None:
            tile = (tile / maps.temperature).expand(*tile.shape[:2], rows.stop - start, keys.stop - keys.start)
        yield rows, keys, tile


def _with_positive_scale(maps: MapFactors) -> MapFactors:
    """The same maps by a scale above 0: fused kernels scale after they mask, where -inf times less does not mask."""
    if maps.scale > 0:
        return maps
    if maps.scale == 0:
        return maps._replace(queries=torch.zeros_like(maps.queries), rule=replace(maps.rule, scale=1.0))
    return maps._replace(queries=-maps.queries, rule=replace(maps.rule, scale=-maps.scale))


def _attend_once(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | bool | None, scale: float) -> Tensor:
    tile, is_causal = (None, mask) if isinstance(mask, bool) else (mask, False)
    with torch.autocast(queries.device.type, enabled=False):
        return scaled_dot_product_attention(queries, keys, values, tile, is_causal=is_causal, scale=scale)


def _result_and_gradient(function: partial[Tensor], values: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor]:
    """A function of the values, and what takes the gradient ``weighted`` of its result to them."""
    if torch.compiler.is_compiling():
        product, pull, *_ = torch.func.vjp(function, values)  # can be compiled in the middle of a forward pass
        return product, pull(weighted)[0]
    # The same by automatic differentiation: torch.func would import the compiler, a second and 150 MB.
    with torch.enable_grad():
        leaf = values.detach().requires_grad_()
        product = function(leaf)
    (transposed,) = torch.autograd.grad(product, leaf, weighted)
    return product.detach(), transposed


def _fit_range(weighted: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
    """y in the dtype of the products, in units in which no column of ``A^T y`` can leave its range.

    Where every row looks at one key, such as a language model's first, ``A^T y`` sums a whole column of y: thousands
    of rows pass float16's 65504. A power of two for each column costs no precision.
    """
    if dtype != torch.float16:
        return weighted.to(dtype), 1.0
    most = weighted.abs().sum(2, keepdim=True, dtype=torch.float32)
    unit = torch.exp2(torch.ceil(torch.log2(most / _FLOAT16_COLUMN)).clamp_(min=0.0))
    return (weighted / unit).to(dtype), unit


def _pad(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one head size, which the fused kernels want; zeros change neither products nor other columns."""
    size = max(tensor.shape[3] for tensor in tensors)
    return [tensor if tensor.shape[3] == size else F.pad(tensor, (0, size - tensor.shape[3])) for tensor in tensors]
