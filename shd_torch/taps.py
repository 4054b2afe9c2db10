"""Where attention passes, watched for the length of a forward pass, while every model runs its own code.

A tap notes the arguments of a call and computes nothing. What it notes goes into a linked list that only grows at
its head: ``torch.compile`` traces that without a guard on what is already there, so a tapped layer is compiled once.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RawCall:
    """One attention call as a tap saw it; ``shd_torch.hf_attention`` and ``shd_torch.capture`` make sense of it."""

    def __init__(
        self,
        kind: str,
        query: Tensor | None,
        key: Tensor | None,
        attn_mask: Any = None,
        *,
        is_causal: bool | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        value: Tensor | None = None,
        output: Tensor | None = None,
        logits: Tensor | None = None,
        module: nn.Module | None = None,
        implementation: str | None = None,
        function: Callable[..., Any] | None = None,
        keywords: dict[str, Any] | None = None,
        inner: RawCall | None = None,
        projection: Tensor | None = None,
    ) -> None:
        self.kind = kind  # "fused", "hugging-face" or "logits"
        self.query = query
        self.key = key
        self.attn_mask = attn_mask
        self.is_causal = is_causal
        self.scale = scale
        self.softcap = softcap
        self.value = value
        self.output = output
        self.logits = logits
        self.module = module
        self.implementation = implementation
        self.function = function
        self.keywords = keywords
        self.inner = inner  # the fused call inside of a Hugging Face one
        self.projection = projection  # (D, H * d_v), of a function that attends and projects in one
        self.grad_enabled = torch.is_grad_enabled()
        self.before: RawCall | None = None


class _Recorder:
    """What is being recorded; one object for good, so that compiled graphs may hold on to it."""

    def __init__(self) -> None:
        self.active = False
        self.wants_values = False
        self.thread = 0
        self.last: RawCall | None = None
        self.nested = False  # inside an attention function that is recorded as a whole
        self.inner: RawCall | None = None


_recorder = _Recorder()
_lock = threading.RLock()  # the taps are the process's: one recording thread at a time


class Recording:
    """The calls of one forward pass; complete when ``record`` is left."""

    def __init__(self) -> None:
        self.calls: list[RawCall] = []


@contextmanager
def record(*, values: bool = False) -> Iterator[Recording]:
    """Note every attention call of this thread inside the block, with ``values`` also values and outputs."""
    recording = Recording()
    with _lock:
        saved = dict(vars(_recorder))
        _recorder.active, _recorder.last, _recorder.nested, _recorder.inner = True, None, False, None
        _recorder.wants_values = values or (saved["active"] and saved["wants_values"])
        _recorder.thread = threading.get_ident()
        last: RawCall | None = None
        try:
            with ExitStack() as stack:
                if not saved["active"]:
                    _install(stack)
                yield recording
            last = _recorder.last
        finally:
            vars(_recorder).update(saved)
        chain = last
        while chain is not None:
            recording.calls.append(chain)
            chain = chain.before
        recording.calls.reverse()
        if saved["active"] and not saved["nested"] and recording.calls:
            recording.calls[0].before = saved["last"]  # an outer recording sees them too
            _recorder.last = last
        for call in recording.calls if not saved["active"] else ():
            call.before = None


def is_recording() -> bool:
    """Whether this thread's attention is being recorded."""
    if not _recorder.active or _recorder.nested:
        return False
    return torch.compiler.is_compiling() or _recorder.thread == threading.get_ident()


def add_call(call: RawCall) -> None:
    """Note a call at the head of the list."""
    call.before = _recorder.last
    _recorder.last = call


def last_call() -> RawCall | None:
    """The call that was noted last, while this thread records."""
    return _recorder.last if is_recording() else None


def tap_interface(implementation: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A Hugging Face attention function that notes its arguments."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if args or not is_recording():
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        _recorder.nested, _recorder.inner = True, None
        result = function(module, query, key, value, attention_mask, **kwargs)
        inner = _recorder.inner
        _recorder.nested, _recorder.inner = False, None
        add_call(
            RawCall(
                "hugging-face",
                query,
                key,
                attention_mask,
                value=value if _recorder.wants_values else None,
                output=result[0] if _recorder.wants_values else None,
                module=module,
                implementation=implementation,
                function=function,
                keywords=kwargs,
                inner=inner,
            )
        )
        return result

    return attend


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as torch has it
def _install(stack: ExitStack) -> None:
    _replace(stack, F, "scaled_dot_product_attention", _tapped_sdpa)
    _replace(stack, F, "multi_head_attention_forward", _tapped_multi_head)
    # The inference-only fast path of nn.MultiheadAttention calls neither.
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    if "transformers" in sys.modules:
        _install_interface(stack)


def _replace(stack: ExitStack, owner: Any, name: str, function: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, function)


def _tap_sdpa(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
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
        output = original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if not _recorder.active or query.ndim != 4:
            return output
        values = (value, output) if _recorder.wants_values else (None, None)
        call = RawCall(
            "fused", query, key, attn_mask, is_causal=is_causal, scale=scale, value=values[0], output=values[1]
        )
        if is_recording():
            add_call(call)
        elif _recorder.nested:
            _recorder.inner = call
        return output

    return attend


def _tap_multi_head(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attend(
        query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int, *args: Any, **kwargs: Any
    ) -> Any:
        # Asked for weights it multiplies (B * H, L, d) by hand; else it calls scaled_dot_product_attention, which is
        # tapped by itself. A compiled graph has no use for weights, and nothing is replaced while one is traced.
        if torch.compiler.is_compiling() or not is_recording():
            return original(query, key, value, embed_dim_to_check, num_heads, *args, **kwargs)
        projection = args[6] if len(args) > 6 else kwargs.get("out_proj_weight")
        products: list[tuple[Tensor, ...]] = []
        before = _recorder.last
        with ExitStack() as stack:
            for name in ("bmm", "baddbmm"):
                _replace(stack, torch, name, _watch(products, getattr(torch, name)))
            result = original(query, key, value, embed_dim_to_check, num_heads, *args, **kwargs)
        if products:  # the first is of queries and keys, the second of weights and values
            *mask, scaled, transposed = products[0]
            heads = [t.reshape(-1, num_heads, *t.shape[1:]) for t in (scaled, transposed.mT)]
            bias = None if not mask else mask[0]
            if bias is not None:
                bias = bias[None] if bias.shape[0] == 1 else bias.reshape(-1, num_heads, *bias.shape[1:])
            values = products[1][1] if _recorder.wants_values else None
            values = None if values is None else values.reshape(-1, num_heads, *values.shape[1:])
            add_call(
                RawCall(
                    "fused", heads[0], heads[1], bias, is_causal=False, scale=1.0, value=values, projection=projection
                )
            )
        elif _recorder.last is not None and _recorder.last is not before:
            _recorder.last.projection = projection
        return result

    return attend


def _watch(products: list[tuple[Tensor, ...]], original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def multiply(*tensors: Tensor, **kwargs: Any) -> Tensor:
        products.append(tensors)
        return original(*tensors, **kwargs)

    return multiply


# Made once: a compiled graph is bound to the function it was traced with.
_tapped_sdpa = _tap_sdpa(F.scaled_dot_product_attention)
_tapped_multi_head = _tap_multi_head(F.multi_head_attention_forward)
_tapped_interfaces: dict[tuple[str, Callable[..., Any]], Callable[..., Any]] = {}


def _install_interface(stack: ExitStack) -> None:
    """Hugging Face's table of attention functions, with every function tapped.

    A modelling file asks ``get_interface`` for its implementation and gives its own "eager" function as the default.
    Replacing the entries, "eager" included, changes no configuration, and so no mask; and it is what a compiled
    graph has guards on.
    """
    from transformers import AttentionInterface

    table = AttentionInterface._global_mapping
    saved = dict(table)
    for name, function in saved.items():
        if (name, function) not in _tapped_interfaces:
            _tapped_interfaces[name, function] = tap_interface(name, function)
        table[name] = _tapped_interfaces[name, function]
    table["eager"] = _refuse_eager
    stack.callback(table.update, saved)
    stack.callback(table.pop, "eager", None)
    _replace(stack, AttentionInterface, "get_interface", _get_interface(AttentionInterface.get_interface))


def _refuse_eager(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the modelling file's own function stands behind 'eager'")


@functools.cache
def _get_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = original(self, attn_implementation, default)
        return tap_interface("eager", default) if found is _refuse_eager else found

    return get_interface
