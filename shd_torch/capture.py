"""Capture: a student's attention logits, with gradient, while its own forward pass stays bit for bit the same.

Nothing is re-implemented, so nothing can drift: the model runs its own code, and the logits are read where they
pass. There are four such places:

- ``torch.nn.functional.scaled_dot_product_attention``, through which most models go (Hugging Face's "sdpa"
  included). The fused kernel never forms logits, so they are computed beside it from its own arguments.
- Hugging Face's "eager" attention: the modelling file's ``eager_attention_forward``, whose softmax is watched.
- ``torch.nn.MultiheadAttention``, with and without weights, without its inference-only fast path.
- ``record_attention``, a line that any other module may hold.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_torch.attention import softmax
from shd_torch.checks import compute_dtype

_REMEDY = (
    "use a model that calls torch.nn.functional.scaled_dot_product_attention (by that name), set "
    "attn_implementation to 'sdpa' or 'eager', or call shd_torch.record_attention(self, attn_logits) in its attention"
)


class Captured:
    """The attention of a student's last forward pass, as ``capture_attention`` recorded it."""

    def __init__(self, layers: tuple[int, ...] | None) -> None:
        self._layers = layers  # the calls to keep, in the order they were asked for; None keeps all
        self._kept: dict[int, Tensor] = {}
        self.num_calls = 0

    @property
    def logits(self) -> list[Tensor]:
        """Attention logits ``(B, H_s, L, S)``, one tensor a layer; -inf where attending is not allowed.

        Raises:
            ShdError: ``capture-failed`` where no forward pass has finished since the start or ``clear``.
        """
        if not self._kept:
            raise ShdError(
                "capture-failed", "captured attention must come from a forward pass of the student; none was run yet"
            )
        return [self._kept[i] for i in (range(self.num_calls) if self._layers is None else self._layers)]

    @property
    def probs(self) -> list[Tensor]:
        """Attention maps ``(B, H_s, L, S)``, before dropout; rows that may not attend at all are zero."""
        return [softmax(logits, check=False) for logits in self.logits]

    def clear(self) -> None:
        """Forget what was recorded, and with it the student's graph."""
        self._kept.clear()
        self.num_calls = 0

    def add(self, compute_logits: Callable[[], Tensor]) -> None:
        """Count one attention call; compute and keep its logits if its layer was asked for."""
        if self._layers is None or self.num_calls in self._layers:
            self._kept[self.num_calls] = compute_logits()
        self.num_calls += 1


_recording: ContextVar[Captured | None] = ContextVar("shd_torch_recording", default=None)


@contextmanager
def capture_attention(student: nn.Module, layers: int | Sequence[int] | None = None) -> Iterator[Captured]:
    """Record the attention logits of every forward pass of ``student`` inside the ``with`` block.

    The last forward pass wins. Outputs are bit-identical to those without capture. Attention calls are
    numbered in the order they run, which is layer order; calls whose tensors do not have the four axes
    ``(B, H, L, d)`` are not counted.

    Args:
        student: any module; only calls of itself are recorded, not of its parts or of a teacher beside it.
        layers: how many attention calls a forward pass must make, or the zero-based numbers of those to keep (the
            student's side of ``layer_map``); default all, whatever their number.

    Yields:
        The ``Captured`` attention, readable inside and after the block.

    Raises:
        ShdError: ``argument-value`` for a bad ``layers``; from the student's forward pass, ``capture-failed`` where
            nothing was recorded, a layer is missing, or activation checkpointing would run it twice.
    """
    expected, kept = _read_layers(layers)
    captured = Captured(kept)
    original, is_own = student.forward, "forward" in vars(student)

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        _refuse_checkpointing(student)
        captured.clear()
        try:
            with _taps(captured):
                result = original(*args, **kwargs)
            _check_count(captured.num_calls, expected, kept, type(student).__name__)
        except BaseException:
            captured.clear()  # half a pass is no pass
            raise
        return result

    student.forward = forward  # this instance only, and taken back below
    try:
        yield captured
    finally:
        if is_own:
            student.forward = original
        else:
            del student.forward


def record_attention(module: nn.Module, attn_logits: Tensor) -> Tensor:
    """Hand a module's attention logits to the capture in progress, if any.

    For modules that compute attention in their own way: one line before the softmax.

    Args:
        module: the caller, named in errors.
        attn_logits: ``(B, H, L, S)``, after scaling and masking, before softmax.

    Returns:
        ``attn_logits``, unchanged.

    Raises:
        ShdError: ``capture-failed`` where a capture is in progress and the logits do not have four axes.
    """
    captured = _recording.get()
    if captured is not None:
        if attn_logits.ndim != 4:
            raise ShdError(
                "capture-failed",
                f"attn_logits of {type(module).__name__} must be (B, H, L, S); got {tuple(attn_logits.shape)}",
            )
        captured.add(lambda: _mark_masked(attn_logits))
    return attn_logits


def _read_layers(layers: int | Sequence[int] | None) -> tuple[int | None, tuple[int, ...] | None]:
    """The number of calls a pass must make, and which to keep; either may be None."""
    if layers is None:
        return None, None
    numbers = (layers,) if isinstance(layers, int) else tuple(layers)
    smallest = 1 if isinstance(layers, int) else 0
    if not numbers or len(set(numbers)) < len(numbers) or any(isinstance(n, bool) or n < smallest for n in numbers):
        raise ShdError(
            "argument-value",
            f"layers must be a count of at least 1 or distinct zero-based layer numbers; got {layers!r}",
        )
    return (layers, None) if isinstance(layers, int) else (None, numbers)


def _check_count(calls: int, expected: int | None, kept: tuple[int, ...] | None, name: str) -> None:
    if calls == 0:
        raise ShdError("capture-failed", f"a forward pass of {name} must show its attention; got 0 calls: {_REMEDY}")
    if expected is not None and calls != expected:
        raise ShdError(
            "capture-failed",
            f"a forward pass of {name} must make layers={expected} attention calls; got {calls}: give the numbers of "
            f"those to keep as layers, or {_REMEDY}",
        )
    if kept is not None and max(kept) >= calls:
        raise ShdError(
            "capture-failed",
            f"layers must lie in 0..{calls - 1}, as a forward pass of {name} makes {calls} attention calls; "
            f"got {list(kept)}",
        )


def _refuse_checkpointing(student: nn.Module) -> None:
    # The second, hidden run of a checkpointed layer must save exactly what the first one saved; a capture adds to it.
    if student.training and any(getattr(module, "gradient_checkpointing", False) for module in student.modules()):
        raise ShdError(
            "capture-failed",
            "the student must not use activation checkpointing (also called gradient checkpointing) while its "
            "attention is captured: turn it off",
        )


@contextmanager
def _taps(captured: Captured) -> Iterator[None]:
    """Everything that listens, in place for the length of one forward pass of the student."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        token = _recording.set(captured)
        stack.callback(_recording.reset, token)
        stack.enter_context(_replaced("scaled_dot_product_attention", _tap_sdpa))
        stack.enter_context(_replaced("multi_head_attention_forward", _tap_multi_head))
        # The inference-only fast path of nn.MultiheadAttention calls neither.
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        if "transformers" in sys.modules:
            stack.enter_context(_eager_tap())
        yield


@contextmanager
def _replaced(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """``torch.nn.functional.<name>`` replaced by what ``make`` builds around it."""
    original = getattr(F, name)
    setattr(F, name, functools.wraps(original)(make(original)))
    try:
        yield
    finally:
        setattr(F, name, original)


def _tap_sdpa(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # Another thread may pass here while this one records.
        captured = _recording.get()
        if captured is not None and query.ndim == 4:
            captured.add(lambda: _sdpa_logits(query, key, attn_mask, is_causal, scale))
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return attend


def _sdpa_logits(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """The logits inside ``scaled_dot_product_attention``; like its kernels, never accumulated in half precision."""
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)  # grouped queries
    with torch.autocast(query.device.type, enabled=False):
        dtype = compute_dtype(query, key)
        logits = (query.to(dtype) * scale) @ key.to(dtype).mT
    if is_causal:
        causal = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~causal, -torch.inf)
    if attn_mask is None:
        return logits
    if attn_mask.dtype == torch.bool:
        return logits.masked_fill(~attn_mask, -torch.inf)
    return _mark_masked(logits + attn_mask, attn_mask.dtype)


def _mark_masked(logits: Tensor, mask_dtype: torch.dtype | None = None) -> Tensor:
    """-inf where an additive mask spoke.

    Such masks hold -inf or the most negative number of their dtype. Half of that is out of reach for a scaled
    product of activations, and not for the sum of one and the mask.
    """
    return logits.masked_fill(logits <= torch.finfo(mask_dtype or logits.dtype).min / 2, -torch.inf)


def _tap_multi_head(original: Callable[..., Any]) -> Callable[..., Any]:
    def attend(
        query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int, *args: Any, **kwargs: Any
    ) -> Any:
        captured = _recording.get()
        if captured is None:
            return original(query, key, value, embed_dim_to_check, num_heads, *args, **kwargs)
        # Asked for weights it calls softmax on (B * H, L, S); else scaled_dot_product_attention, tapped by itself.
        seen: list[Tensor] = []
        with _replaced("softmax", functools.partial(_watch_softmax, seen)):
            result = original(query, key, value, embed_dim_to_check, num_heads, *args, **kwargs)
        if seen:
            captured.add(lambda: _mark_masked(seen[0].reshape(-1, num_heads, *seen[0].shape[1:])))
        return result

    return attend


def _watch_softmax(seen: list[Tensor], original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def softmax_and_remember(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(input)
        return original(input, *args, **kwargs)

    return softmax_and_remember


@contextmanager
def _eager_tap() -> Iterator[None]:
    """Hugging Face's "eager" attention, watched.

    A modelling file asks ``AttentionInterface`` for its implementation and falls back on its own function where
    "eager" is not registered. Registering it for the length of a pass changes no configuration, and so no mask.
    """
    from transformers import AttentionInterface

    AttentionInterface.register("eager", _watch_eager)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop("eager", None)  # the interface has no public way back


def _watch_eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The modelling file's own function, with its softmax watched."""
    eager = _own_eager(module)
    captured = _recording.get()
    if captured is None:
        return eager(module, *args, **kwargs)
    seen: list[Tensor] = []
    with _replaced("softmax", functools.partial(_watch_softmax, seen)):
        result = eager(module, *args, **kwargs)
    weights = result[1]
    if len(seen) != 1 or weights is None or seen[0].shape != weights.shape:
        raise ShdError(
            "capture-failed",
            f"attention of {type(module).__name__} must be one softmax over its keys; got "
            f"{[tuple(logits.shape) for logits in seen]} (attention sinks are not supported)",
        )
    captured.add(lambda: _mark_masked(seen[0]))
    return result


def _own_eager(module: nn.Module) -> Callable[..., Any]:
    for base in type(module).__mro__:
        eager = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if callable(eager):
            return eager  # type: ignore[no-any-return]  # callable() leaves it without a type
    raise ShdError(
        "capture-failed",
        f"the file that defines {type(module).__name__} must define eager_attention_forward; it does not: set "
        "attn_implementation to 'sdpa'",
    )
