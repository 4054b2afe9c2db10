"""Capture: a student's queries and keys, with gradient, while its own forward pass stays bit for bit the same.

Activation checkpointing: with ``use_reentrant=False`` the first run of a layer builds the graph, so what is noted
there carries the gradient, and the second, hidden run is not recorded. With ``use_reentrant=True`` the first run has
no graph at all and PyTorch keeps the second one to itself: that is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_ref.integers import as_index
from shd_torch.capture.call import AttentionCall, LogitsCall, read_hf_call
from shd_torch.capture.layers import (
    Layer,
    SameLayers,
    check_calls,
    check_every_layer,
    check_single,
    find_call_kinds,
    number_layers,
)
from shd_torch.capture.outputs import fill_own_padding, keep_padded_zeros
from shd_torch.capture.taps import RawCall, add_call, is_recording, never_compiled, record
from shd_torch.checks import check_query_key
from shd_torch.maps.attention import softmax
from shd_torch.supervision.mask import AttentionRule
from shd_torch.supervision.taught import Kinds, TaughtLayers

Call: TypeAlias = AttentionCall | LogitsCall


class Captured:
    """The attention of a student's last forward pass, as ``capture_attention`` recorded it."""

    def __init__(
        self, layers: tuple[int, ...] | None, ignored_arguments: frozenset[str] = frozenset(), kinds: Kinds = ()
    ) -> None:
        self._layers = layers  # the calls to keep, in the order they were asked for; None keeps all
        self._kinds = kinds  # by which they are numbered, where there are several
        self._ignored_arguments = ignored_arguments
        self._kept: dict[int, Call] = {}
        self.num_calls = 0

    @property
    def attention(self) -> list[Call]:
        """One call per layer, in the order that ``layers`` gave: ``AttentionCall``, or ``LogitsCall``.

        Raises:
            ShdError: ``capture-failed`` where no forward pass has finished since the start or ``clear``.
        """
        if not self._kept:
            raise ShdError(
                "capture-failed", "captured attention must come from a forward pass of the student; none was run yet"
            )
        return [self._kept[i] for i in (range(self.num_calls) if self._layers is None else self._layers)]

    @property
    def calls(self) -> list[AttentionCall]:
        """Queries, keys and masks, one ``AttentionCall`` a layer: what ``attention_kl`` asks for.

        Raises:
            ShdError: ``capture-failed`` where no forward pass has finished, or a module gave its logits alone.
        """
        return [_with_query_key(call, index) for index, call in enumerate(self.attention)]

    @property
    def logits(self) -> Sequence[Tensor]:
        """Attention logits ``(B, H_s, L, S)``, one tensor per layer, each computed when it is read.

        -inf where attending is not allowed. Each read computes them again: keep what is used twice.
        """
        return _Lazy(self.attention, lambda call: call.compute_logits())

    @property
    def probs(self) -> Sequence[Tensor]:
        """Attention maps ``(B, H_s, L, S)``, before dropout, each computed when it is read.

        Rows that may not attend at all are zero.
        """
        return _Lazy(self.attention, lambda call: softmax(call.compute_logits(), check=False))

    def layer(self, number: int) -> AttentionCall:
        """Queries, keys and masks of one attention call, by its zero-based number in the forward pass.

        Raises:
            ShdError: ``capture-failed`` where it was not kept, or its module gave its logits alone.
        """
        call = self._kept.get(number)
        if call is None:
            kept = sorted(self._kept)
            raise ShdError(
                "capture-failed",
                f"layer {number} must be among the captured attention calls; got {kept or 'no forward pass yet'}: "
                "capture all layers, or name it in layers",
            )
        return _with_query_key(call, number)

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
        if layers.kinds != self._kinds:
            raise ShdError(
                "cache-mismatch",
                f"attention must be captured by the kinds that its teaching was made for, {layers.kinds or 'one'}; "
                f"got {self._kinds or 'calls in the order they ran'}: give capture_attention the layers of the "
                "supervision (layers=supervision.layers)",
                "CACHE-105",
            )
        layers.check_calls(self.num_calls, "the student")

    def clear(self) -> None:
        self._kept.clear()
        self.num_calls = 0

    @never_compiled
    def take(self, layers: Sequence[Layer], grad_enabled: bool) -> None:
        self.num_calls = len(layers)
        opened: dict[int, Tensor] = {}  # block masks by their identity, which holds as long as the calls
        for index in range(len(layers)) if self._layers is None else self._layers:
            raw = layers[index][0]
            if grad_enabled and not raw.grad_enabled:
                raise ShdError(
                    "capture-failed",
                    f"attention call {index} must run with gradient, as the student does; it ran without: reentrant "
                    "activation checkpointing hides the run that has one, so checkpoint with use_reentrant=False "
                    "(Hugging Face: gradient_checkpointing_kwargs={'use_reentrant': False}); for a frozen layer, "
                    "leave its number out of layers",
                )
            self._kept[index] = _read_call(raw, opened, self._ignored_arguments)


class AttentionCapture:
    """Records a student between ``start`` and ``stop``, or inside a ``with`` block; as ``capture_attention``.

    Raises:
        ShdError: ``argument-value`` for bad ``layers`` or ``ignored_arguments``.
    """

    def __init__(
        self,
        student: nn.Module,
        layers: int | Sequence[int] | None = None,
        *,
        keep_values: bool = False,
        ignored_arguments: Sequence[str] = (),
    ) -> None:
        self._expected, kept = _read_layers(layers)
        self._kept = kept
        self._taught = layers if isinstance(layers, TaughtLayers) else None
        self._same = SameLayers(student)
        self._checked_count = 0  # of calls that are known to be those of every layer
        self._is_count_given = self._expected is not None or (
            self._taught is not None and self._taught.num_student_layers is not None
        )
        self._student = student
        self._keep_values = keep_values
        self._undo: Callable[[], None] | None = None
        if isinstance(ignored_arguments, str) or not all(isinstance(name, str) for name in ignored_arguments):
            raise ShdError(
                "argument-value", f"ignored_arguments must be a list of argument names; got {ignored_arguments!r}"
            )
        kinds = () if self._taught is None else self._taught.kinds
        self.captured = Captured(kept, frozenset(ignored_arguments), kinds)

    def start(self) -> Captured:
        """Record every forward pass from now on; the result fills itself.

        Raises:
            ShdError: ``capture-failed`` if it was started before and not stopped.
        """
        if self._undo is not None:
            raise ShdError("capture-failed", "a capture must be stopped before it starts again; it is running")
        self._undo = self._wrap()
        return self.captured

    def stop(self) -> None:
        """Leave the student as it was; what was recorded last stays readable. Stopping twice is not an error."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def __enter__(self) -> Captured:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _wrap(self) -> Callable[[], None]:
        student = self._student
        # A module compiled in place goes through this attribute and never looks at its forward.
        name = "_compiled_call_impl" if getattr(student, "_compiled_call_impl", None) is not None else "forward"
        original, is_own = getattr(student, name), name in vars(student)
        watched = _WatchedForward(original, self._run)
        setattr(student, name, watched)  # this instance only, and taken back below

        def undo() -> None:
            watched.run = None
            if vars(student).get(name) is not watched:
                return  # wrapped again by other code, whose wrapper stays; ours now only passes on
            if is_own:
                setattr(student, name, original)
            else:
                delattr(student, name)

        return undo

    def _run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.captured.clear()
        grad_enabled = torch.is_grad_enabled()
        with ExitStack() as hooks:
            keep_padded_zeros(self._student, hooks)
            with record(self._student, values=self._keep_values) as calls:
                result = original(*args, **kwargs)
        result = fill_own_padding(self._student, args, kwargs, result)
        name = type(self._student).__name__
        is_count = self._expected == len(calls)  # call is meant, also of modules that make several
        layers: list[Layer] = [[call] for call in calls] if is_count else number_layers(calls, self._student)
        if self._taught is not None and layers:
            self._taught.check_calls(len(layers), name)
            if self._taught.kinds:
                firsts, taught = [layer[0] for layer in layers], [kind for kind, _ in self._taught.kinds]
                layers = self._taught.order_calls(layers, find_call_kinds(firsts, self._student, taught), name)
        check_calls(len(layers), self._expected, self._kept, name)
        check_single(layers, range(len(layers)) if self._kept is None else self._kept, self._student)
        if self._kept is not None:
            self._same.check(layers, self._kept)
        if not self._is_count_given and len(layers) != self._checked_count:
            encoder_ran = kwargs.get("encoder_outputs") is None
            remedy = (
                f"give their count (layers={len(calls)}) or capture the part of the model that is seen (such as its "
                "decoder)"
            )
            check_every_layer(self._student, calls, encoder_ran, remedy)
            self._checked_count = len(layers)
        try:
            self.captured.take(layers, grad_enabled)
        except BaseException:
            self.captured.clear()  # half a pass does not count as one
            raise
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


def capture_attention(
    student: nn.Module,
    layers: int | Sequence[int] | None = None,
    *,
    keep_values: bool = False,
    ignored_arguments: Sequence[str] = (),
) -> AttentionCapture:
    """Record the queries and keys of every forward pass of ``student``, in a ``with`` block or from start to stop.

    The last forward pass wins. Outputs are bit-identical to those without capture. A layer is one run of an attention
    module, numbered in execution order: a shared module counts each time, and each direct call by the student is a
    layer. Calls whose tensors do not have the four axes ``(B, H, L, d)`` are not counted, nor is a head that pools
    all positions with one query: capture it separately. A module with several calls per run (differential attention)
    counts once and is rejected, unless its number is omitted or the count of all calls is given. An encoder-decoder
    makes the calls of its encoder's layers first, then self- and cross-attention of each decoder layer in turn: with
    n encoder layers, decoder layer i is calls ``n + 2 i`` and ``n + 2 i + 1``; the ``layers`` of a supervision with
    several kinds of attention number the calls of each kind separately. A student may be compiled, before or after,
    and wrapped in any way: capture the module that is called, or one inside it. A deep copy (such as an average of
    its weights) is independent.

    Tensors are kept by reference, except for FlexAttention: its ``BlockMask`` is expanded to booleans, one byte per
    entry of ``(B, 1, L, S)`` (``(1, 1, L, S)`` if made with ``B=None``, ``(B, H, L, S)`` if made with ``H``), once
    for all layers that share it.

    Args:
        student: any module; only its own forward passes are recorded, not calls of its parts or of a teacher.
        layers: number of layers (or calls) of a forward pass, or the zero-based numbers of those to keep (the
            student's side of ``layer_map``); default all. The ``layers`` of a batch's supervision also fix the number
            of calls.
        keep_values: also keep each call's values and output, which a teacher needs.
        ignored_arguments: names of tensor arguments of the student's attention function that change no logit and no
            map. Tensors with names unknown to transformers (such as attention sinks) are rejected.

    Returns:
        The capture: a context manager that yields the ``Captured`` attention, readable inside and after the block;
        or an object with ``start``, which returns it, and ``stop``.

    Raises:
        ShdError: ``argument-value`` for bad ``layers`` or ``ignored_arguments``; from the student's forward pass,
            ``capture-failed`` if nothing was recorded, a layer is missing or makes several calls, layers use code
            that cannot be captured (unless the number of calls is given), a number means another module than in the
            first pass, a tensor of unknown meaning takes part, or reentrant activation checkpointing hides its graph,
            and ``cache-mismatch`` where the supervision was made for another number of layers.

    Source: the student's side of Eq. 10.
    """
    return AttentionCapture(student, layers, keep_values=keep_values, ignored_arguments=ignored_arguments)


def record_attention(module: nn.Module, attn_logits: Tensor) -> Tensor:
    """Pass a module's attention logits to the capture in progress, if any.

    For modules with a custom attention implementation: call it before the softmax. If queries and keys are available,
    prefer ``record_query_key``: ``attention_kl`` needs no logits.

    Args:
        module: the caller, named in errors.
        attn_logits: ``(B, H, L, S)``, after scaling and masking, before softmax.

    Returns:
        ``attn_logits``, unchanged.

    Raises:
        ShdError: ``capture-failed`` where a capture is in progress and the logits do not have four axes.

    Source: the student's side of Eq. 10.
    """
    if is_recording():
        if attn_logits.ndim != 4:
            raise ShdError(
                "capture-failed",
                f"attn_logits of {type(module).__name__} must be (B, H, L, S); got {tuple(attn_logits.shape)}",
            )
        add_call(RawCall(logits=attn_logits, module=module))
    return attn_logits


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
        add_call(
            RawCall(
                query,
                key,
                attn_mask,
                is_causal=is_causal,
                scale=scale,
                softcap=softcap,
                value=value,
                output=output,
                module=module,
            )
        )


class _Lazy(Sequence[Tensor]):
    """One tensor per layer, each computed when it is read."""

    def __init__(self, calls: list[Call], compute: Callable[[Call], Tensor]) -> None:
        self._calls = calls
        self._compute = compute

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Lazy(self._calls[index], self._compute)
        return self._compute(self._calls[index])


def _with_query_key(call: Call, number: int) -> AttentionCall:
    if isinstance(call, LogitsCall):
        raise ShdError(
            "capture-failed",
            f"layer {number} must show its queries and keys; it showed its logits alone: call "
            "shd_torch.record_query_key instead of record_attention, or use captured.logits",
        )
    return call


def _read_call(raw: RawCall, opened: dict[int, Tensor], ignored_arguments: frozenset[str]) -> Call:
    if raw.logits is not None:
        return LogitsCall(raw.logits)
    if raw.function is not None:
        return read_hf_call(raw, opened, ignored_arguments)
    assert raw.query is not None
    assert raw.key is not None
    name = "a fused call" if raw.source is None else type(raw.source).__name__
    check_query_key(raw.query, raw.key, f"queries and keys of {name}", code="capture-failed")
    mask = raw.attn_mask
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    return AttentionCall(
        raw.query,
        raw.key,
        AttentionRule(mask, bool(raw.is_causal), scale=raw.scale, softcap=raw.softcap),
        value=raw.value,
        output=raw.output,
        module=raw.source,
    )


def _read_layers(layers: int | Sequence[int] | None) -> tuple[int | None, tuple[int, ...] | None]:
    """The number of calls a pass must make, and which to keep; either may be None."""
    if layers is None:
        return None, None
    smallest = 1 if isinstance(layers, int) else 0
    try:
        numbers = tuple(as_index(number) for number in ((layers,) if isinstance(layers, int) else layers))
    except TypeError:
        numbers = ()
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < smallest:
        raise ShdError(
            "argument-value",
            f"layers must be a count of at least 1 or distinct zero-based layer numbers; got {layers!r}",
        )
    return (numbers[0], None) if isinstance(layers, int) else (None, numbers)
