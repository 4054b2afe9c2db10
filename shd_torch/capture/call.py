"""One attention call of a model, as its own tensors describe it: queries, keys, and who may attend."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_torch.checks import compute_dtype
from shd_torch.precision import without_autocast
from shd_torch.supervision.mask import is_allowed


class MaskKeywords(TypedDict):
    """What ``attention_kl`` must know beside queries and keys."""

    scale: float | None
    attn_mask: Tensor | None
    is_causal: bool
    window: int | None
    softcap: float | None


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call: the tensors that its logits are made of, by reference and with their gradient.

    Attributes:
        query: ``(B, H, L, d_k)`` as the model multiplies them (rotated, normalised).
        key: ``(B, H_kv, S, d_k)``, likewise; query head h reads key head ``h // (H / H_kv)``.
        attn_mask: as PyTorch's: boolean, True = may attend, or added to the scaled logits; four axes that broadcast
            to ``(B, H, L, S)``.
        is_causal: row i may attend to keys 0..i.
        window: row i may attend to keys above ``i - window`` and, where not causal, below ``i + window``.
        scale: of the products; None for ``1 / sqrt(d_k)``.
        softcap: logits are ``softcap * tanh(scale q k^T / softcap)`` before masks and biases.
        value: ``(B, H_kv, S, d_v)``, where values were asked for.
        output: what the call returned, ``(B, H, L, d_v)`` or ``(B, L, H, d_v)``, where values were asked for.
        module: the attention module, where it is known.
        own_logits: the model's own way to its logits, where it forms them.
    """

    query: Tensor
    key: Tensor
    attn_mask: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    module: nn.Module | None = None
    own_logits: Callable[[], Tensor] | None = None

    @property
    def num_heads(self) -> int:
        """H, the number of maps."""
        return self.query.shape[1]

    @property
    def mask_keywords(self) -> MaskKeywords:
        """The keywords of ``attention_kl`` that describe this call beside ``query`` and ``key``."""
        return {
            "scale": self.scale,
            "attn_mask": self.attn_mask,
            "is_causal": self.is_causal,
            "window": self.window,
            "softcap": self.softcap,
        }

    @without_autocast
    def compute_logits(self) -> Tensor:
        """The logits ``(B, H, L, S)``, with gradient; -inf where attending is not allowed.

        Computed at every call: by the model's own code where that forms them, else like a fused kernel, never
        accumulated in half precision.
        """
        if self.own_logits is not None:
            return mark_masked(self.own_logits())
        scale = 1.0 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale
        key = self.key
        if key.shape[-3] != self.num_heads:
            key = key.repeat_interleave(self.num_heads // key.shape[-3], dim=-3)  # grouped queries
        with torch.autocast(self.query.device.type, enabled=False):
            dtype = compute_dtype(self.query, key)
            logits = (self.query.to(dtype) * scale) @ key.to(dtype).mT
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
        return self._mask(logits)

    def _mask(self, logits: Tensor) -> Tensor:
        if self.is_causal or self.window is not None:
            logits = logits.masked_fill(~self._structure(logits), -torch.inf)
        if self.attn_mask is None:
            return logits
        allowed = is_allowed(self.attn_mask)
        biased = logits if self.attn_mask.dtype == torch.bool else logits + self.attn_mask
        return biased.masked_fill(~allowed, -torch.inf)

    def _structure(self, logits: Tensor) -> Tensor:
        rows = torch.arange(logits.shape[-2], device=logits.device)[:, None]
        distance = rows - torch.arange(logits.shape[-1], device=logits.device)
        allowed = distance >= 0 if self.is_causal else torch.ones_like(distance, dtype=torch.bool)
        return allowed if self.window is None else allowed & (distance.abs() < self.window)


@dataclass(frozen=True, eq=False)
class LogitsCall:
    """An attention call of which only the logits are known: that of ``record_attention``.

    Attributes:
        attn_logits: ``(B, H, L, S)``.
    """

    attn_logits: Tensor

    @property
    def num_heads(self) -> int:
        """H, the number of maps."""
        return self.attn_logits.shape[1]

    def compute_logits(self) -> Tensor:
        """The logits, -inf where an additive mask spoke."""
        return mark_masked(self.attn_logits)


def mark_masked(logits: Tensor) -> Tensor:
    """-inf where an additive mask spoke.

    Such masks hold -inf or the most negative number of their dtype. Half of that is out of reach for a scaled
    product of activations, and not for the sum of one and the mask.
    """
    return logits.masked_fill(logits <= torch.finfo(logits.dtype).min / 2, -torch.inf)


def check_heads(query: Tensor, key: Tensor, name: str) -> None:
    """Queries and keys must be the two sides of one product."""
    fits = query.ndim == key.ndim == 4 and query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
    if not fits or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise ShdError(
            "capture-failed",
            f"queries and keys of {name} must be (B, H, L, d) and (B, H_kv, S, d) with H_kv a divisor of H; got "
            f"{tuple(query.shape)} and {tuple(key.shape)}",
        )
