"""Capture: a student's queries and keys, with gradient, while its own forward pass stays bit for bit the same.

First what one attention call says, then the recording of a pass. Transformers' attention functions share one
signature; what differs is how each reads its mask. "sdpa" is read from the fused call that it makes, which cannot be
misread.

Activation checkpointing: with ``use_reentrant=False`` the first run of a layer builds the graph, so what is noted
there carries the gradient, and the second, hidden run is not recorded. With ``use_reentrant=True`` the first run has
no graph at all and PyTorch keeps the second one to itself: that is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_integer
from shd_torch.capture.layers import (
    Layer,
    SameLayers,
    check_calls,
    check_every_layer,
    check_single,
    find_call_kinds,
    number_layers,
)
from shd_torch.capture.taps import RawCall, add_call, is_recording, never_compiled, record
from shd_torch.checks import check_query_key
from shd_torch.maps.attention import softmax
from shd_torch.supervision.mask import AttentionRule, RuleKeywords, is_allowed
from shd_torch.supervision.supervision import Kinds, TaughtLayers


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call: the tensors that its logits are made of, by reference and with their gradient.

    Attributes:
        query: ``(B, H, L, d_k)`` as the model multiplies them (rotated, normalised).
        key: ``(B, H_kv, S, d_k)``, rotated and normalised too; query head h reads key head ``h // (H / H_kv)``.
        rule: how the two become logits, and who may attend; its mask has four axes.
        value: ``(B, H_kv, S, d_v)``, where values are captured.
        output: what the call returned, ``(B, H, L, d_v)`` or ``(B, L, H, d_v)``, where values are captured.
        module: the attention module, where it is known.
    """

    query: Tensor
    key: Tensor
    rule: AttentionRule
    value: Tensor | None = None
    output: Tensor | None = None
    module: nn.Module | None = None

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def mask_keywords(self) -> RuleKeywords:
        """The keywords of ``attention_kl`` that describe this call besides ``query`` and ``key``."""
        return cast(RuleKeywords, dict(vars(self.rule)))

    def compute_logits(self) -> Tensor:
        """The logits ``(B, H, L, S)``, with gradient; -inf where attending is not allowed.

        Computed at every call, like a fused kernel: never accumulated in half precision.
        """
        return self.rule.logits(self.query, self.key)


_KNOWN_TENSORS = frozenset({"position_bias", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k"})
"""Tensors besides queries, keys, values and mask that attention functions take and whose meaning is known."""


def _read_call(raw: RawCall) -> AttentionCall:
    name = "a fused call" if raw.source is None else type(raw.source).__name__
    check_query_key(raw.query, raw.key, f"queries and keys of {name}", code="capture-failed")
    key, mask = raw.key, raw.attn_mask
    if raw.keywords is not None:
        _check_arguments(raw.keywords, name)
        if raw.inner is None:
            rule = _read_rule(raw, raw.keywords, name)
        else:
            key, rule = key[:, :, : raw.inner.key.shape[2]], _read_fused(raw.inner, raw.query)
    else:
        mask = None if mask is None else mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        rule = AttentionRule(mask, bool(raw.is_causal), scale=raw.scale, softcap=raw.softcap)
    return AttentionCall(raw.query, key, rule, raw.value, raw.output, raw.source)


def _check_arguments(keywords: dict[str, Any], name: str) -> None:
    """Tensors of a Hugging Face attention function whose part in its maps is not known may be sinks."""
    if keywords.get("s_aux") is not None:
        raise _unsupported(name, "be a softmax over its keys", "attention sinks")
    for argument, value in keywords.items():
        is_known = argument in _KNOWN_TENSORS or not _holds_tensor(value)
        rule = "be called with tensors whose part in its maps is known"
        got, advice = f"{argument!r}, which may be a bias or attention sinks", "leave its layer out, or call "
        advice += "shd_torch.record_query_key in its attention"
        need(is_known, "capture-failed", f"attention of {name}", rule, got, remedy=advice)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_tensor(item) for item in value)
    # One number in a tensor may be a count or a switch, and cannot be a vector of sinks.
    return isinstance(value, Tensor) and value.ndim > 0


def _read_rule(raw: RawCall, keywords: dict[str, Any], name: str) -> AttentionRule:
    mask = raw.attn_mask
    rule = AttentionRule(scale=keywords.get("scaling"), softcap=keywords.get("softcap"))
    bias = keywords.get("position_bias")
    if mask is not None and not isinstance(mask, Tensor):
        raise _unsupported(name, "be given its mask as a tensor", f"the {type(mask).__name__} of FlexAttention")
    if mask is not None and (mask.ndim == 4 or raw.implementation == "eager"):
        return replace(rule, attn_mask=_add_bias(mask[..., : raw.key.shape[2]], bias))
    if raw.implementation in ("eager", "flex_attention"):
        return replace(rule, attn_mask=bias)
    return _read_flash(raw, keywords, rule, name)


def _read_fused(inner: RawCall, query: Tensor) -> AttentionRule:
    """From the arguments of the fused call, whose keys may be repeated and whose queries may be packed."""
    mask = inner.attn_mask
    if mask is not None and inner.query.shape != query.shape and mask.shape[1] != 1:
        mask = mask.reshape(mask.shape[0], query.shape[1], query.shape[2], mask.shape[3])
    return AttentionRule(mask, bool(inner.is_causal), scale=inner.scale)


def _read_flash(raw: RawCall, keywords: dict[str, Any], rule: AttentionRule, name: str) -> AttentionRule:
    """A function whose mask is padding ``(B, S)`` or nothing, and whose structure is in its keywords."""
    query, positions = raw.query, keywords.get("position_ids")
    packed = query.shape[0] == 1 and positions is not None and bool((positions.diff() < 0).any())
    if packed or keywords.get("cu_seq_lens_q") is not None:
        raise _unsupported(name, "see each sample by itself", "packed sequences")
    length, num_keys, window = query.shape[2], raw.key.shape[2], keywords.get("sliding_window")
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


def _unsupported(name: str, rule: str, got: str) -> ShdError:
    return ShdError(
        "capture-failed", f"attention of {name} must {rule}; got {got}, which cannot be captured: leave its layer out"
    )


class Captured:
    """The attention of a student's last forward pass, as ``capture_attention`` recorded it."""

    def __init__(self, layers: tuple[int, ...] | None, kinds: Kinds = ()) -> None:
        self._layers = layers  # the calls to keep, in this order; None keeps all
        self._kinds = kinds  # by which they are numbered, where there are several
        self._recorded: dict[int, AttentionCall] = {}
        self.num_calls = 0

    @property
    def calls(self) -> list[AttentionCall]:
        """One call per layer, in the order that ``layers`` gave: queries, keys and masks, as ``attention_kl`` needs.

        Raises:
            ShdError: ``capture-failed`` where no forward pass has finished.
        """
        rule = "come from a forward pass of the student"
        need(bool(self._recorded), "capture-failed", "captured attention", rule, "none, as none was run yet")
        return [self._recorded[i] for i in (range(self.num_calls) if self._layers is None else self._layers)]

    @property
    def logits(self) -> list[Tensor]:
        """Attention logits ``(B, H_s, L, S)``, one tensor per layer, computed at each read; -inf = masked."""
        return [call.compute_logits() for call in self.calls]

    @property
    def probs(self) -> list[Tensor]:
        """Attention maps ``(B, H_s, L, S)``, before dropout, computed at each read; fully masked rows are zero."""
        return [softmax(logits, check=False) for logits in self.logits]

    def layer(self, number: int) -> AttentionCall:
        """Queries, keys and masks of one attention call, by its zero-based number in the forward pass.

        Raises:
            ShdError: ``capture-failed`` where it was not kept.
        """
        rule, got = "be among the captured attention calls", sorted(self._recorded) or "no forward pass yet"
        advice = "capture all layers, or name it in layers"
        need(number in self._recorded, "capture-failed", f"layer {number}", rule, got, remedy=advice)
        return self._recorded[number]

    def check_taught(self, layers: tuple[int, ...]) -> None:
        """Refuse a student of another depth, or calls that are numbered otherwise, than its teaching was made for.

        ``capture_attention`` calls this where it is given the layers.

        Args:
            layers: of a supervision.

        Raises:
            ShdError: ``cache-mismatch``.
        """
        if not isinstance(layers, TaughtLayers) or not self.num_calls:
            return
        rule = f"be captured by the kinds that its teaching was made for, {layers.kinds or 'one'}"
        got = self._kinds or "calls in the order they ran"
        advice = "give capture_attention the layers of the supervision (layers=supervision.layers)"
        fits = layers.kinds == self._kinds
        need(fits, "cache-mismatch", "attention", rule, got, remedy=advice, spec_id="CACHE-105")
        layers.check_calls(self.num_calls, "the student")

    def clear(self) -> None:
        self._recorded, self.num_calls = {}, 0

    @never_compiled
    def take(self, layers: Sequence[Layer], grad_enabled: bool) -> None:
        recorded: dict[int, AttentionCall] = {}
        for index in range(len(layers)) if self._layers is None else self._layers:
            raw = layers[index][0]
            advice = "reentrant activation checkpointing hides the run that has one, so checkpoint with "
            advice += "use_reentrant=False (Hugging Face: gradient_checkpointing_kwargs={'use_reentrant': False}); "
            advice += "for a frozen layer, leave its number out of layers"
            who, fits = f"attention call {index}", raw.grad_enabled or not grad_enabled
            need(fits, "capture-failed", who, "run with gradient, as the student does", "none", remedy=advice)
            recorded[index] = _read_call(raw)
        self._recorded, self.num_calls = recorded, len(layers)  # at once: half a pass does not count as one


class _Recording:
    """What ``capture_attention`` knows of a student from one forward pass to the next."""

    def __init__(self, student: nn.Module, layers: int | Sequence[int] | None, keep_values: bool) -> None:
        self._expected, self._layers = _read_layers(layers)
        self._taught = layers if isinstance(layers, TaughtLayers) else None
        self._same = SameLayers(student)
        self._checked_count = 0  # of calls that are known to be those of every layer
        self._is_count_given = self._expected is not None or (
            self._taught is not None and self._taught.num_student_layers is not None
        )
        self._student = student
        self._keep_values = keep_values
        self.captured = Captured(self._layers, () if self._taught is None else self._taught.kinds)

    def run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.captured.clear()
        grad_enabled = torch.is_grad_enabled()
        with record(self._student, values=self._keep_values) as calls:
            result = original(*args, **kwargs)
        name = type(self._student).__name__
        is_count = self._expected == len(calls)  # call is meant, also of modules that make several
        layers: list[Layer] = [[call] for call in calls] if is_count else number_layers(calls, self._student)
        if self._taught is not None and layers:
            self._taught.check_calls(len(layers), name)
            if self._taught.kinds:
                firsts, kinds = [layer[0] for layer in layers], [kind for kind, _ in self._taught.kinds]
                layers = self._taught.order_calls(layers, find_call_kinds(firsts, self._student, kinds), name)
        check_calls(len(layers), self._expected, self._layers, name)
        check_single(layers, range(len(layers)) if self._layers is None else self._layers, self._student)
        if self._layers is not None:
            self._same.check(layers, self._layers)
        if not self._is_count_given and len(layers) != self._checked_count:
            remedy = f"give their count (layers={len(calls)}) or capture the part of the model that is seen "
            remedy += "(such as its decoder)"
            check_every_layer(self._student, calls, kwargs.get("encoder_outputs") is None, remedy)
            self._checked_count = len(layers)
        self.captured.take(layers, grad_enabled)
        return result


class _WatchedForward:
    """The forward of a student that is being captured; a copy of the student has the student's own instead."""

    def __init__(self, original: Callable[..., Any], run: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self.run: Callable[..., Any] | None = run

    # This frame is never compiled, those below it are: a student captured inside a compiled module works too.
    @functools.partial(never_compiled, recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) if self.run is None else self.run(self.original, args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A method is copied as the method of its object's copy.
        return _get_itself, (self.original,)


def _get_itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


@contextmanager
def capture_attention(
    student: nn.Module, layers: int | Sequence[int] | None = None, *, keep_values: bool = False
) -> Iterator[Captured]:
    """Record the queries and keys of every forward pass of ``student`` inside a ``with`` block.

    The last forward pass wins. Outputs are bit-identical to those without capture; only the padded rows of a
    ``torch.nn.TransformerEncoder``, which its inference-only fast path leaves zero, are computed like all others.
    A layer is one run of an attention module, numbered in execution order: a shared module counts each time, and each
    direct call by the student is a layer. Calls whose tensors do not have the four axes ``(B, H, L, d)`` are not
    counted, nor is a head that pools all positions with one query: capture it separately. A module with several calls
    per run (differential attention) counts once and is rejected, unless its number is omitted or the count of all
    calls is given. An encoder-decoder makes the calls of its encoder's layers first, then self- and cross-attention
    of each decoder layer in turn: with n encoder layers, decoder layer i is calls ``n + 2 i`` and ``n + 2 i + 1``;
    the ``layers`` of a supervision with several kinds of attention number the calls of each kind separately. A
    student may be compiled, before or after, and wrapped in any way: capture the module that is called, or one inside
    it. A deep copy (such as an average of its weights) is independent.

    Tensors are kept by reference. A mask of FlexAttention, which is no tensor, is rejected.

    Args:
        student: any module; only its own forward passes are recorded, not calls of its parts or of a teacher.
        layers: number of layers (or calls) of a forward pass, or the zero-based numbers of those to keep (the
            student's side of ``layer_map``); default all. The ``layers`` of a batch's supervision also fix the number
            of calls.
        keep_values: also keep each call's values and output, which a teacher needs.

    Returns:
        A context manager that yields the ``Captured`` attention, readable inside and after the block.

    Raises:
        ShdError: ``argument-value`` for bad ``layers``; from the student's forward pass,
            ``capture-failed`` if nothing was recorded, a layer is missing or makes several calls, layers use code
            that cannot be captured (unless the number of calls is given), a number means another module than in the
            first pass, a tensor of unknown meaning takes part, or reentrant activation checkpointing hides its graph,
            and ``cache-mismatch`` where the supervision was made for another number of layers.

    Source: the student's side of Eq. 10.
    """
    recording = _Recording(student, layers, keep_values)
    # A module compiled in place goes through this attribute and never looks at its forward.
    name = "_compiled_call_impl" if getattr(student, "_compiled_call_impl", None) is not None else "forward"
    original, is_own = getattr(student, name), name in vars(student)
    watched = _WatchedForward(original, recording.run)
    setattr(student, name, watched)  # this instance only, and taken back below
    try:
        yield recording.captured
    finally:
        watched.run = None
        if vars(student).get(name) is watched:  # else other code wrapped it again, and ours now only passes on
            if is_own:
                setattr(student, name, original)
            else:
                delattr(student, name)


def record_query_key(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    value: Tensor | None = None,
    output: Tensor | None = None,
) -> None:
    """Pass a module's queries and keys to the capture in progress, if any.

    For modules with a custom attention implementation. Where logits are no products of queries and keys, call
    ``shd_torch.maps.shd_loss`` on them.

    Args:
        module: the caller, named in errors.
        query: ``(B, H, L, d_k)``, after rotation and normalisation.
        key: ``(B, H_kv, S, d_k)``, rotated and normalised too.
        attn_mask: boolean, True = may attend, or added to the scaled logits; broadcastable to ``(B, H, L, S)``.
        is_causal: row i attends to keys 0..i.
        scale: of the products; None for ``1 / sqrt(d_k)``.
        softcap: logits are ``softcap * tanh(scale q k^T / softcap)`` before the mask.
        value: ``(B, H_kv, S, d_v)``; required for a teacher only.
        output: the maps times the values, ``(B, H, L, d_v)``; required for a teacher.

    Raises:
        ShdError: ``capture-failed`` where a capture is in progress and the shapes do not fit.

    Source: the student's side of Eq. 10.
    """
    if is_recording():
        check_query_key(query, key, f"queries and keys of {type(module).__name__}", code="capture-failed")
        structure: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "softcap": softcap}
        add_call(RawCall(query, key, attn_mask, value=value, output=output, module=module, **structure))


def _read_layers(layers: int | Sequence[int] | None) -> tuple[int | None, tuple[int, ...] | None]:
    """The number of calls a pass must make, and which to keep; either may be None."""
    if layers is None or isinstance(layers, int):
        return None if layers is None else check_integer("layers", layers, 1, None), None
    numbers = tuple(check_integer("layers", number, 0, None) for number in layers)
    fits = bool(numbers) and len(set(numbers)) == len(numbers)
    need(fits, "argument-value", "layers", "be a count, or distinct zero-based layer numbers", repr(layers))
    return None, numbers
