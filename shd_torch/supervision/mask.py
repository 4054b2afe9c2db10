"""Who may attend to what, and how queries and keys become logits: the one place that decides it.

A rule holds no ``L x S`` tensor unless a model gave it one: causality, a window, padding and biases are cut into
tiles of query rows and keys when they are needed, so that memory stays linear in the length. True = may attend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_number
from shd_torch.checks import check_attn_mask, compute_dtype, without_autocast

CHUNK = 256
"""Rows that are looked at together where a mask must be read as a whole."""

HolderT = TypeVar("HolderT")


def move(holder: HolderT, device: torch.device | str, *, non_blocking: bool = False) -> HolderT:
    """A copy of a dataclass with its tensors, and what holds tensors in it, on another device."""
    record: Any = holder
    values = {field.name: getattr(record, field.name) for field in fields(record) if field.init}
    for name, value in values.items():
        values[name] = value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value
    return replace(record, **values)  # type: ignore[no-any-return]


class RuleKeywords(TypedDict, total=False):
    """The fields of an ``AttentionRule`` as keywords, under PyTorch's names where it has one."""

    attn_mask: Tensor | None
    is_causal: bool
    window: int | None
    scale: float | None
    softcap: float | None


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """How one attention layer makes its logits of queries and keys, and which keys a row may attend to.

    ``logits = cap(scale q k^T) + bias``, where ``cap(z) = softcap * tanh(z / softcap)`` if there is a soft cap.

    Attributes:
        attn_mask: up to four axes, broadcastable to ``(B, H, L, S)``: boolean, True = may attend, or floating
            point, added to the capped logits. An added number at or below half of its dtype's lowest one (such as
            -inf) marks a key as masked.
        is_causal: row i may attend to keys 0..i only, counted from the first key, as in PyTorch.
        window: row i may attend to keys above ``i - window`` only and, where not causal, below ``i + window``.
        scale: of the products; None for ``1 / sqrt(d)``.
        softcap: bound of the scaled products, above 0; None where there is none.
    """

    attn_mask: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    @property
    def is_biased(self) -> bool:
        """Whether anything is added to the logits of keys that may be attended to."""
        return self.attn_mask is not None and self.attn_mask.dtype != torch.bool

    def scale_for(self, width: int) -> float:
        return 1.0 / math.sqrt(width) if self.scale is None else float(self.scale)

    def check(self) -> None:
        """The checks that need no queries and keys: ``argument-value``, ``argument-dtype``."""
        if self.scale is not None:
            check_number("scale", self.scale, "GRAD-8")
        if self.softcap is not None and check_number("softcap", self.softcap, "GRAD-8") <= 0:
            raise ShdError("argument-value", f"softcap must be above 0; got {self.softcap!r}", "GRAD-8")
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ShdError("argument-value", f"window must be an integer of at least 1; got {self.window!r}")
        if not isinstance(self.is_causal, bool):
            raise ShdError("argument-value", f"is_causal must be True or False; got {self.is_causal!r}")
        is_mask, got = isinstance(self.attn_mask, Tensor | None), type(self.attn_mask).__name__
        need(is_mask, "argument-dtype", "attn_mask", "be a tensor or None", got)

    def fit(self, queries: Tensor, keys: Tensor) -> AttentionRule:
        """The rule with a mask of four axes on the queries' device, checked against queries and keys.

        That queries ``(B, H, L, d)`` and keys ``(B, H_kv, S, d)`` fit is checked already (``check_query_key``).
        """
        self.check()
        mask = self.attn_mask
        if mask is None:
            return self
        check_attn_mask(mask, (*queries.shape[:3], keys.shape[2]), may_add=True)
        return replace(self, attn_mask=mask.to(queries.device).reshape((1,) * (4 - mask.ndim) + tuple(mask.shape)))

    @without_autocast
    def logits(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The logits ``(B, H, L, S)``, with gradient; -inf where attending is not allowed.

        Args:
            queries: ``(B, H, L, d)``.
            keys: ``(B, H_kv, S, d)``; query head h reads key head ``h // (H / H_kv)``.

        Returns:
            float64 if an argument is, else float32: never accumulated in half precision.

        Raises:
            ShdError: as ``fit``.
        """
        rule, dtype = self.fit(queries, keys), compute_dtype(queries, keys)
        logits, _ = rule.products(queries.to(dtype), keys.to(dtype))
        rows, columns = slice(0, queries.shape[2]), slice(0, keys.shape[2])
        bias, allowed = rule.bias(rows, columns, dtype), rule.allowed(rows, columns, logits.device)
        logits = logits if bias is None else logits + bias
        return logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)

    def products(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scaled and capped products ``(B, H, R, K)`` of some rows and keys; the cap's derivative if there is one."""
        batch, heads, height, width = queries.shape
        scaled = queries * self.scale_for(width)
        logits = (scaled.reshape(batch, keys.shape[1], -1, width) @ keys.mT).reshape(batch, heads, height, -1)
        if self.softcap is None:
            return logits, None
        bent = torch.tanh(logits / self.softcap)
        return self.softcap * bent, 1.0 - bent.square()

    # The methods below need a rule that fits.

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> AttentionRule:
        return move(self, device, non_blocking=non_blocking)

    def __getitem__(self, samples: slice) -> AttentionRule:
        return self.narrow(samples)

    def narrow(self, samples: slice = slice(None), heads: Tensor | None = None) -> AttentionRule:
        """The rule of some samples, and of the heads that an index names."""
        mask = self.attn_mask
        if mask is None:
            return self
        mask = mask[samples] if mask.shape[0] > 1 else mask
        return replace(self, attn_mask=mask if heads is None or mask.shape[1] == 1 else mask[:, heads])

    def key_range(self, rows: slice, num_keys: int) -> slice:
        first, end = 0, num_keys
        if self.is_causal:
            end = min(end, rows.stop)
        if self.window is not None:
            first = max(0, rows.start - self.window + 1)
            end = end if self.is_causal else min(end, rows.stop + self.window - 1)
        first = min(first, num_keys - 1)
        return slice(first, max(end, first + 1))

    def allowed(self, rows: slice, keys: slice, device: torch.device) -> Tensor | None:
        """Who may attend in a tile, broadcastable to ``(B, H, R, K)``; None where all may."""
        allowed = None
        i = torch.arange(rows.start, rows.stop, device=device).reshape(1, 1, -1, 1)
        j = torch.arange(keys.start, keys.stop, device=device)
        if self.is_causal and keys.stop - 1 > rows.start:
            allowed = j <= i
        if self.window is not None:
            inside = i - j < self.window
            if not self.is_causal:
                inside = inside & (j - i < self.window)
            allowed = inside if allowed is None else allowed & inside
        if self.attn_mask is not None:
            mask = is_allowed(self._cut(self.attn_mask, rows, keys))
            allowed = mask if allowed is None else allowed & mask
        return allowed

    def bias(self, rows: slice, keys: slice, dtype: torch.dtype) -> Tensor | None:
        """The addend of a tile's logits, 0 where an added mask masks a key; None for nothing."""
        if self.attn_mask is None or self.attn_mask.dtype == torch.bool:
            return None
        mask = self._cut(self.attn_mask, rows, keys)
        return mask.to(dtype).masked_fill(~is_allowed(mask), 0.0)

    def tile(self, rows: slice, keys: slice, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """``bias`` without gradient, and -inf where attending is not allowed; None for nothing.

        Rows that may attend to no key of the tile are left open, so that no softmax is ever taken of nothing: what
        comes of them must be given no weight (see ``live_rows``).
        """
        allowed, bias = self.allowed(rows, keys, device), self.bias(rows, keys, dtype)
        bias = None if bias is None else bias.detach()
        if allowed is None:
            return bias
        blocked = ~(allowed | ~allowed.any(-1, keepdim=True))
        if bias is None:
            return torch.zeros(blocked.shape, dtype=dtype, device=device).masked_fill_(blocked, -torch.inf)
        return bias.masked_fill(blocked, -torch.inf)

    def tile_logits(self, queries: Tensor, keys: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
        """The logits of a tile ``(B, H, R, K)``, its empty rows left open, and the derivative of a soft cap.

        ``queries`` are those of ``rows``, ``keys`` those of ``columns``, of one dtype.
        """
        logits, slope = self.products(queries, keys)
        # Keys that all of these rows may attend to need no mask, and a row with such a key is not empty.
        first = columns.start if self.window is None else max(columns.start, rows.stop - self.window)
        end = columns.stop
        if self.is_causal or self.window is not None:
            end = min(end, rows.start + (1 if self.is_causal else self.window or 0))
        if self.attn_mask is not None or first >= end:
            tile = self.tile(rows, columns, logits.dtype, logits.device)
            return logits if tile is None else logits.add_(tile), slope
        for span in (slice(columns.start, first), slice(end, columns.stop)):
            allowed = self.allowed(rows, span, logits.device) if span.start < span.stop else None
            if allowed is not None:
                part = logits[..., span.start - columns.start : span.stop - columns.start]
                part.masked_fill_(~allowed, -torch.inf)
        return logits, slope

    def live_rows(self, num_rows: int, num_keys: int, device: torch.device) -> Tensor | None:
        """``(B or 1, H or 1, L)``, True where a row may attend to some key; None where every row may."""
        i = torch.arange(num_rows, device=device)
        first, end = torch.zeros_like(i), torch.full_like(i, num_keys)
        if self.is_causal:
            end = (i + 1).clamp(max=num_keys)
        if self.window is not None:
            first = (i - self.window + 1).clamp(min=0, max=num_keys)
            end = end if self.is_causal else (i + self.window).clamp(max=num_keys)
        mask = self.attn_mask
        if mask is None:
            reached = num_rows - self.window < num_keys if self.window is not None else True
            return None if reached else (end > first)[None, None]
        if mask.shape[2] == 1:
            # Each row's keys are a run of positions: how many of them are allowed is a difference of running sums.
            counts = torch.nn.functional.pad(is_allowed(mask)[:, :, 0].expand(-1, -1, num_keys).cumsum(-1), (1, 0))
            return counts[..., end] > counts[..., first]
        if not self.is_causal and self.window is None:
            return is_allowed(mask).any(-1)
        chunks = []
        for start in range(0, num_rows, CHUNK):
            rows = slice(start, min(start + CHUNK, num_rows))
            allowed = self.allowed(rows, self.key_range(rows, num_keys), device)
            assert allowed is not None  # a mask is there
            chunks.append(allowed.any(-1))
        return torch.cat(chunks, dim=-1)

    @staticmethod
    def _cut(mask: Tensor, rows: slice, keys: slice) -> Tensor:
        if mask.shape[2] > 1:
            mask = mask[:, :, rows]
        return mask[..., keys] if mask.shape[3] > 1 else mask


def is_allowed(mask: Tensor) -> Tensor:
    """A mask, or logits that a mask was added to, as a boolean mask.

    Additive masks hold -inf or the lowest number of their dtype. Half of that is out of reach for a bias or a scaled
    product of activations, and not for the sum of one and the mask. NaN masks nothing: it shows in the loss.
    """
    return mask if mask.dtype == torch.bool else ~(mask.detach() <= torch.finfo(mask.dtype).min / 2)


def expand_heads(keys: Tensor, num_heads: int) -> Tensor:
    """Keys ``(B, H_kv, S, d)`` as ``(B, H, S, d)``: query head h reads key head ``h // (H / H_kv)``."""
    return keys.repeat_interleave(num_heads // keys.shape[1], dim=1) if keys.shape[1] != num_heads else keys


def sum_heads(gradient: Tensor, num_kv_heads: int) -> Tensor:
    """The gradient of ``expand_heads``: ``(B, H, S, d)`` summed to ``(B, H_kv, S, d)``."""
    batch, heads, length, width = gradient.shape
    if heads == num_kv_heads:
        return gradient
    return gradient.reshape(batch, num_kv_heads, heads // num_kv_heads, length, width).sum(2)
