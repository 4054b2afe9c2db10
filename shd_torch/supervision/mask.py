"""Who may attend to what, described without an ``L x S`` tensor: causality, a window, padding, biases.

A description is cut into tiles of query rows and keys when they are needed, so that memory stays linear in the
length wherever the description itself is. True = may attend, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shd_ref.errors import ShdError

CHUNK = 256
"""Rows that are looked at together where a mask must be read as a whole."""


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Which keys a query row may attend to, and what is added to its logits.

    Attributes:
        attn_mask: up to four axes, broadcastable to ``(B, H, L, S)``: boolean, True = may attend, or floating
            point, added to the scaled logits. An added number at or below half of its dtype's lowest one (such as
            -inf) marks a key as masked.
        is_causal: row i may attend to keys 0..i only, counted from the first key, as in PyTorch.
        window: row i may attend to keys above ``i - window`` only and, where not causal, below ``i + window``.
        alibi_slopes: ``(H,)`` or ``(B, H)``; ``slope * (j - i)`` is added to the logit of row i and key j.
    """

    attn_mask: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    alibi_slopes: Tensor | None = None

    @property
    def is_structural(self) -> bool:
        """Whether no tensor takes part in who may attend."""
        return self.attn_mask is None

    @property
    def is_biased(self) -> bool:
        """Whether anything is added to the logits of keys that may be attended to."""
        return self.alibi_slopes is not None or (self.attn_mask is not None and self.attn_mask.dtype != torch.bool)

    def fit(self, shape: Sequence[int], device: torch.device) -> AttentionMask:
        """The description with four axes on one device, checked against ``(B, H, L, S)``.

        Raises:
            ShdError: ``argument-shape``, ``argument-dtype``, ``argument-value``.
        """
        if self.window is not None and (type(self.window) is not int or self.window < 1):
            raise ShdError("argument-value", f"window must be an integer of at least 1; got {self.window!r}")
        if not isinstance(self.is_causal, bool):
            raise ShdError("argument-value", f"is_causal must be True or False; got {self.is_causal!r}")
        mask, slopes = self.attn_mask, self.alibi_slopes
        for name, tensor in (("attn_mask", mask), ("alibi_slopes", slopes)):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise ShdError("argument-dtype", f"{name} must be a tensor or None; got {type(tensor).__name__}")
        if mask is not None:
            _check_mask(mask, shape)
            mask = mask.to(device).reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        if slopes is not None:
            if not slopes.is_floating_point() or tuple(slopes.shape) not in ((shape[1],), tuple(shape[:2])):
                raise ShdError(
                    "argument-shape",
                    f"alibi_slopes must be floating point of shape (H,) or (B, H) with B={shape[0]}, H={shape[1]}; "
                    f"got {slopes.dtype} {tuple(slopes.shape)}",
                )
            slopes = slopes.detach().to(device).reshape(-1, shape[1])
        return replace(self, attn_mask=mask, alibi_slopes=slopes)

    # What follows works on a description that fits.

    def narrow(self, samples: slice = slice(None), heads: Tensor | None = None) -> AttentionMask:
        """The description of some samples, and of the heads that an index names."""
        parts = []
        for tensor in (self.attn_mask, self.alibi_slopes):
            if tensor is not None and tensor.shape[0] > 1:
                tensor = tensor[samples]
            if tensor is not None and heads is not None and tensor.shape[1] > 1:
                tensor = tensor[:, heads]
            parts.append(tensor)
        return replace(self, attn_mask=parts[0], alibi_slopes=parts[1])

    def key_range(self, rows: slice, num_keys: int) -> slice:
        """The keys outside of which no row of the slice may attend, from causality and window; at least one."""
        first, end = 0, num_keys
        if self.is_causal:
            end = min(end, rows.stop)
        if self.window is not None:
            first = max(0, rows.start - self.window + 1)
            end = end if self.is_causal else min(end, rows.stop + self.window - 1)
        first = min(first, num_keys - 1)
        return slice(first, max(end, first + 1))

    def allowed(self, rows: slice, keys: slice, device: torch.device) -> Tensor | None:
        """Who may attend in a tile, broadcastable to ``(B, H, R, K)``; None where everyone may."""
        allowed = None
        i = torch.arange(rows.start, rows.stop, device=device).reshape(1, 1, -1, 1)
        j = torch.arange(keys.start, keys.stop, device=device)
        if self.is_causal and keys.stop - 1 > rows.start:
            allowed = j <= i
        if self.window is not None:
            near = i - j < self.window
            if not self.is_causal:
                near = near & (j - i < self.window)
            allowed = near if allowed is None else allowed & near
        if self.attn_mask is not None:
            given = is_allowed(self._cut(self.attn_mask, rows, keys))
            allowed = given if allowed is None else allowed & given
        return allowed

    def tile(self, rows: slice, keys: slice, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """What is added to the scaled logits of a tile, -inf where attending is not allowed; None for nothing.

        Rows that may attend to no key of the tile are left open, so that no softmax is ever taken of nothing: what
        comes of them must be given no weight (see ``live_rows``).
        """
        allowed = self.allowed(rows, keys, device)
        bias = None
        if self.attn_mask is not None and self.attn_mask.dtype != torch.bool:
            bias = self._cut(self.attn_mask.detach(), rows, keys).to(dtype)
            bias = bias.masked_fill(~is_allowed(self._cut(self.attn_mask, rows, keys)), 0.0)
        if self.alibi_slopes is not None:
            i = torch.arange(rows.start, rows.stop, device=device, dtype=dtype).reshape(-1, 1)
            j = torch.arange(keys.start, keys.stop, device=device, dtype=dtype)
            slope = self.alibi_slopes.to(dtype)[..., None, None] * (j - i)
            bias = slope if bias is None else bias + slope
        if allowed is None:
            return bias
        blocked = ~(allowed | ~allowed.any(-1, keepdim=True))
        if bias is None:
            return torch.zeros(blocked.shape, dtype=dtype, device=device).masked_fill_(blocked, -torch.inf)
        return bias.masked_fill(blocked, -torch.inf)

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
    """A mask as a boolean one.

    Additive masks hold -inf or the lowest number of their dtype; half of that is out of reach for a bias.
    """
    return mask if mask.dtype == torch.bool else mask.detach() > torch.finfo(mask.dtype).min / 2


def _check_mask(mask: Tensor, shape: Sequence[int]) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ShdError(
            "argument-dtype",
            f"attn_mask must be a boolean tensor (True = may attend) or a floating-point one; got {kind}",
            "MAP-7",
        )
    pairs = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.ndim > 4 or any(size not in (1, full) for size, full in pairs):
        raise ShdError(
            "argument-shape",
            f"attn_mask must broadcast to (B, H, L, S) = {tuple(shape)}; got {tuple(mask.shape)}",
            "MAP-10",
        )
