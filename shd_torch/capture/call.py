"""One attention call of a model: queries, keys, and who may attend, also where transformers passes them.

Its attention functions share one signature; what differs is how each reads its mask. "sdpa" is read from the fused
call that it makes, which cannot be misread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shd_ref.errors import ShdError
from shd_torch.capture.taps import RawCall
from shd_torch.checks import check_query_key
from shd_torch.supervision.mask import AttentionRule, RuleKeywords, is_allowed, mark_masked


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call: the tensors that its logits are made of, by reference and with their gradient.

    Attributes:
        query: ``(B, H, L, d_k)`` as the model multiplies them (rotated, normalised).
        key: ``(B, H_kv, S, d_k)``, rotated and normalised too; query head h reads key head ``h // (H / H_kv)``.
        rule: how the two become logits, and who may attend; its mask has four axes.
        value: ``(B, H_kv, S, d_v)``, where values were asked for.
        output: what the call returned, ``(B, H, L, d_v)`` or ``(B, L, H, d_v)``, where values were asked for.
        module: the attention module, where it is known.
        own_logits: computes the logits by the model's own code, where that forms them.
    """

    query: Tensor
    key: Tensor
    rule: AttentionRule
    value: Tensor | None = None
    output: Tensor | None = None
    module: nn.Module | None = None
    own_logits: Callable[[], Tensor] | None = None

    @property
    def num_heads(self) -> int:
        """H, the number of maps."""
        return self.query.shape[1]

    @property
    def mask_keywords(self) -> RuleKeywords:
        """The keywords of ``attention_kl`` that describe this call beside ``query`` and ``key``."""
        rule = self.rule
        return RuleKeywords(
            attn_mask=rule.attn_mask,
            is_causal=rule.is_causal,
            window=rule.window,
            scale=rule.scale,
            softcap=rule.softcap,
        )

    def compute_logits(self) -> Tensor:
        """The logits ``(B, H, L, S)``, with gradient; -inf where attending is not allowed.

        Computed at every call: by the model's own code where that forms them, else like a fused kernel, never
        accumulated in half precision.
        """
        if self.own_logits is not None:
            return mark_masked(self.own_logits())
        return self.rule.logits(self.query, self.key)


@dataclass(frozen=True, eq=False)
class LogitsCall:
    """An attention call of which only the logits are known: that of ``record_attention``."""

    attn_logits: Tensor  # (B, H, L, S)

    @property
    def num_heads(self) -> int:
        """H, the number of maps."""
        return self.attn_logits.shape[1]

    def compute_logits(self) -> Tensor:
        """The logits, -inf where an additive mask spoke."""
        return mark_masked(self.attn_logits)


_KNOWN_TENSORS = frozenset({"position_bias", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"})
"""Tensors beside queries, keys, values and mask that attention functions are given, and whose meaning is known."""


def read_hf_call(
    raw: RawCall, opened: dict[int, Tensor], ignored_arguments: frozenset[str] = frozenset()
) -> AttentionCall:
    """The call that a Hugging Face attention function made, as the tap saw it.

    ``opened`` are the masks of the same pass that were opened before, by the identity of their ``BlockMask``, and
    ``ignored_arguments`` names of further tensors that change no map.
    """
    name = type(raw.module).__name__
    query, key, keywords = raw.query, raw.key, raw.keywords or {}
    assert query is not None
    assert key is not None
    check_query_key(query, key, f"queries and keys of {name}", code="capture-failed")
    if keywords.get("s_aux") is not None:
        raise _unsupported(name, "be a softmax over its keys", "attention sinks")
    for argument, value in keywords.items():
        if _holds_tensor(value) and argument not in _KNOWN_TENSORS | ignored_arguments:
            raise ShdError(
                "capture-failed",
                f"attention of {name} must be called with tensors whose part in its maps is known; got {argument!r}, "
                "which may be a bias or attention sinks: leave its layer out, call shd_torch.record_query_key in its "
                f"attention, or, if it changes no map, capture with ignored_arguments=[{argument!r}]",
            )
    own_logits = None
    if raw.inner is not None:
        assert raw.inner.key is not None
        key, rule = key[:, :, : raw.inner.key.shape[2]], _read_fused(raw.inner, query)
    else:
        rule = _read_rule(raw, query, key, opened, name)
        if raw.implementation == "eager":
            own_logits = partial(_eager_logits, raw)
    return AttentionCall(query, key, rule, raw.value, raw.output, raw.module, own_logits)


def _read_rule(raw: RawCall, query: Tensor, key: Tensor, opened: dict[int, Tensor], name: str) -> AttentionRule:
    keywords, mask = raw.keywords or {}, raw.attn_mask
    rule = AttentionRule(scale=keywords.get("scaling"), softcap=keywords.get("softcap"))
    bias = keywords.get("position_bias")
    if mask is not None and not isinstance(mask, Tensor):
        if id(mask) not in opened:  # a BlockMask, with one head or sample where it was made for all of them
            from torch.nn.attention.flex_attention import create_mask

            samples, heads = mask.shape[:2]
            opened[id(mask)] = create_mask(
                mask.mask_mod, samples, heads, query.shape[2], key.shape[2], device=query.device
            )
        return replace(rule, attn_mask=_add_bias(opened[id(mask)], bias))
    if mask is not None and (mask.ndim == 4 or raw.implementation == "eager"):
        return replace(rule, attn_mask=_add_bias(mask[..., : key.shape[2]], bias))
    if raw.implementation in ("eager", "flex_attention"):
        return replace(rule, attn_mask=bias)
    return _read_flash(raw, query, key, rule, name)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_tensor(item) for item in value)
    # One number in a tensor may be a count or a switch, and cannot be a vector of sinks.
    return isinstance(value, Tensor) and value.ndim > 0


def _read_fused(inner: RawCall, query: Tensor) -> AttentionRule:
    """From the arguments of the fused call, whose keys may be repeated and whose queries may be packed."""
    assert inner.query is not None
    mask = inner.attn_mask
    if mask is not None and inner.query.shape != query.shape and mask.shape[1] != 1:
        mask = mask.reshape(mask.shape[0], query.shape[1], query.shape[2], mask.shape[3])
    return AttentionRule(mask, bool(inner.is_causal), scale=inner.scale)


def _read_flash(raw: RawCall, query: Tensor, key: Tensor, rule: AttentionRule, name: str) -> AttentionRule:
    """A function whose mask is padding ``(B, S)`` or nothing, and whose structure is in its keywords."""
    keywords = raw.keywords or {}
    positions = keywords.get("position_ids")
    packed = query.shape[0] == 1 and positions is not None and bool((positions.diff() < 0).any())
    if packed or keywords.get("cu_seq_lens_q") is not None:
        raise _unsupported(name, "see each sample by itself", "packed sequences")
    length, num_keys, window = query.shape[2], key.shape[2], keywords.get("sliding_window")
    is_causal = keywords.get("is_causal")
    is_causal = getattr(raw.module, "is_causal", True) if is_causal is None else is_causal
    structure = AttentionRule(
        is_causal=bool(is_causal) and length > 1, window=window if window is not None and window < num_keys else None
    )
    mask = None if raw.attn_mask is None else raw.attn_mask[:, None, None, -num_keys:].bool()
    if length == num_keys:
        return replace(rule, attn_mask=mask, is_causal=structure.is_causal, window=structure.window)
    # These kernels count from the last key.
    near = structure.allowed(slice(num_keys - length, num_keys), slice(0, num_keys), query.device)
    if mask is None or near is None:
        return replace(rule, attn_mask=near if mask is None else mask)
    return replace(rule, attn_mask=mask & near)


def _add_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    return torch.where(is_allowed(mask), bias if mask.dtype == torch.bool else bias + mask, -torch.inf)


class _SoftmaxReachedError(Exception):
    """Carries the argument of a softmax out of the function that called it."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class _StopAtSoftmax(TorchFunctionMode):
    """While entered, ends this thread's code at its first softmax; other threads do not notice."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (F.softmax, torch.softmax, Tensor.softmax):
            raise _SoftmaxReachedError(args[0] if args else (kwargs or {})["input"])
        return func(*args, **(kwargs or {}))


def _eager_logits(raw: RawCall) -> Tensor:
    """The modelling file's own function, run up to its softmax: nothing after it, dropout included, happens."""
    assert raw.function is not None
    assert raw.query is not None
    assert raw.key is not None
    try:
        with _StopAtSoftmax():
            # Keys stand in for the values, which play no part before the softmax.
            raw.function(raw.module, raw.query, raw.key, raw.key, raw.attn_mask, **(raw.keywords or {}))
    except _SoftmaxReachedError as reached:
        logits = reached.logits
    else:
        raise _unsupported(type(raw.module).__name__, "be one softmax over its keys", "no softmax")
    if logits.shape != (*raw.query.shape[:3], raw.key.shape[2]):
        raise _unsupported(type(raw.module).__name__, "be one softmax over its keys", f"{tuple(logits.shape)}")
    return logits


def _unsupported(name: str, rule: str, got: str) -> ShdError:
    return ShdError(
        "capture-failed", f"attention of {name} must {rule}; got {got}, which cannot be captured: leave its layer out"
    )
