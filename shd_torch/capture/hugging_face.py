"""What a Hugging Face attention call means: its mask in PyTorch's terms, its scale, and its own logits.

Attention functions share one signature; what differs is how each reads its mask. "sdpa" is read from the fused call
that it makes, which cannot be misread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shd_ref.errors import ShdError
from shd_torch.capture.call import AttentionCall, check_heads
from shd_torch.capture.taps import RawCall
from shd_torch.supervision.mask import is_allowed

_KNOWN_TENSORS = frozenset({"position_bias", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"})
"""Tensors beside queries, keys, values and mask that attention functions are given, and whose meaning is known."""


def read_hf_call(
    raw: RawCall, opened: dict[int, Tensor], ignored_arguments: frozenset[str] = frozenset()
) -> AttentionCall:
    """The call that a Hugging Face attention function made.

    Args:
        raw: as the tap saw it.
        opened: the masks of the same pass that were opened before, by the identity of their ``BlockMask``.
        ignored_arguments: names of further tensors that change no map.

    Raises:
        ShdError: ``capture-failed`` for attention sinks, tensors of unknown meaning, packed sequences and shapes that
            fit nothing.
    """
    name = type(raw.module).__name__
    query, key, keywords = raw.query, raw.key, raw.keywords or {}
    assert query is not None
    assert key is not None
    check_heads(query, key, name)
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
    common: dict[str, Any] = {
        "query": query,
        "scale": keywords.get("scaling"),
        "value": raw.value,
        "output": raw.output,
        "module": raw.module,
    }
    if raw.inner is not None:
        return _read_fused(raw.inner, key, common)
    bias = keywords.get("position_bias")
    common |= {"key": key, "softcap": keywords.get("softcap")}
    mask = raw.attn_mask
    if raw.implementation == "eager":
        mask = None if mask is None else mask[..., : key.shape[2]]
        return AttentionCall(**common, attn_mask=_add_bias(mask, bias), own_logits=lambda: _eager_logits(raw))
    if mask is not None and not isinstance(mask, Tensor):
        if id(mask) not in opened:
            opened[id(mask)] = _open_block_mask(mask, query, key)
        return AttentionCall(**common, attn_mask=_add_bias(opened[id(mask)], bias))
    if mask is not None and mask.ndim == 4:
        return AttentionCall(**common, attn_mask=_add_bias(mask[..., : key.shape[2]], bias))
    if raw.implementation == "flex_attention":
        return AttentionCall(**common, attn_mask=bias)
    return _read_flash(raw, common, name)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_tensor(each) for each in value)
    # One number in a tensor may be a count or a switch, and cannot be a vector of sinks.
    return isinstance(value, Tensor) and value.ndim > 0


def _read_fused(inner: RawCall, key: Tensor, common: dict[str, Any]) -> AttentionCall:
    """From the arguments of the fused call, but with keys that are not repeated and queries that are not packed."""
    assert inner.key is not None
    assert inner.query is not None
    mask, query = inner.attn_mask, common["query"]
    if mask is not None and inner.query.shape != query.shape and mask.shape[1] != 1:
        mask = mask.reshape(mask.shape[0], query.shape[1], query.shape[2], mask.shape[3])
    return AttentionCall(
        **common | {"scale": inner.scale},
        key=key[:, :, : inner.key.shape[2]],
        attn_mask=mask,
        is_causal=bool(inner.is_causal),
    )


def _read_flash(raw: RawCall, common: dict[str, Any], name: str) -> AttentionCall:
    """A function whose mask is padding ``(B, S)`` or nothing, and whose structure is in its keywords."""
    keywords = raw.keywords or {}
    query, key = common["query"], common["key"]
    positions = keywords.get("position_ids")
    packed = query.shape[0] == 1 and positions is not None and bool((positions.diff() < 0).any())
    if packed or keywords.get("cu_seq_lens_q") is not None:
        raise _unsupported(name, "see each sample by itself", "packed sequences")
    length, num_keys, window = query.shape[2], key.shape[2], keywords.get("sliding_window")
    is_causal = keywords.get("is_causal")
    is_causal = getattr(raw.module, "is_causal", True) if is_causal is None else is_causal
    is_causal = bool(is_causal) and length > 1
    mask = None if raw.attn_mask is None else raw.attn_mask[:, None, None, -num_keys:].bool()
    window = window if window is not None and window < num_keys else None
    if length != num_keys and (is_causal or window is not None):
        # These kernels count from the last key.
        rows = torch.arange(length, device=query.device)[:, None] + num_keys - length
        distance = rows - torch.arange(num_keys, device=query.device)
        near = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
        near = near if window is None else near & (distance.abs() < window)
        return AttentionCall(**common, attn_mask=near[None, None] if mask is None else mask & near)
    return AttentionCall(**common, attn_mask=mask, is_causal=is_causal, window=window)


def _add_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    return torch.where(is_allowed(mask), bias if mask.dtype == torch.bool else bias + mask, -torch.inf)


def _open_block_mask(block_mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """A ``BlockMask`` as a boolean one, with one head or sample where it was made for all of them."""
    from torch.nn.attention.flex_attention import create_mask

    samples, heads = block_mask.shape[:2]
    return create_mask(block_mask.mask_mod, samples, heads, query.shape[2], key.shape[2], device=query.device)


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
