"""Where attention passes, watched for the length of a forward pass, while every model runs its own code.

Watched are Hugging Face's table of attention functions, ``scaled_dot_product_attention``, and
``torch.nn.MultiheadAttention`` without its inference-only fast path; other modules call ``record_query_key``. A tap
notes arguments in a linked list that only grows at its head: ``torch.compile`` traces that without a guard on what is
already there, so a tapped layer is compiled once.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shd_ref.errors import ShdError

P = ParamSpec("P")
R = TypeVar("R")


def never_compiled(function: Callable[P, R], *, recursive: bool = True) -> Callable[P, R]:
    """As ``torch.compiler.disable``: the function, and where ``recursive`` also what it calls, is not compiled."""
    if _has_compiler():
        return _disable(function, recursive)
    disabled: Callable[P, R] | None = None

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            if not _has_compiler():
                return function(*args, **kwargs)
            disabled = _disable(function, recursive)
        return disabled(*args, **kwargs)

    return run


def run_eagerly() -> AbstractContextManager[object]:
    """A block in which what has been compiled runs as it was written."""
    return torch.compiler.set_stance("force_eager") if _has_compiler() else nullcontext()


def _has_compiler() -> bool:
    return "torch._dynamo" in sys.modules


def _disable(function: Callable[P, R], recursive: bool) -> Callable[P, R]:
    disabled: Callable[P, R] = torch.compiler.disable(function, recursive=recursive)  # type: ignore[no-untyped-call]
    return disabled


@dataclass(eq=False)
class RawCall:
    """One attention call as a tap saw it; ``capture.py`` makes sense of it."""

    query: Tensor
    key: Tensor
    attn_mask: Any = None
    is_causal: bool | None = None
    scale: float | None = None
    softcap: float | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    module: nn.Module | None = None
    implementation: str | None = None  # this and the next two are of a Hugging Face call
    keywords: dict[str, Any] | None = None
    inner: RawCall | None = None  # the fused call inside of it
    projection: Tensor | None = None  # (D, H * d_v), of a function that attends and projects in one
    is_cross: bool | None = None  # whether keys are of another sequence, where a tap can tell
    before: RawCall | None = None
    run: ModuleRun | None = None
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)

    @property
    def source(self) -> nn.Module | None:
        """The module that made the call; None where that is the recorded model itself."""
        return self.module if self.module is not None or self.run is None else self.run.module


@dataclass(eq=False)
class ModuleRun:
    """One run of a module, inside ``outer``. A compiled graph makes it unread, so that it has no guard on it."""

    module: nn.Module
    outer: ModuleRun | None


@dataclass(eq=False)
class _Recorder:
    """What one thread records; one object for good."""

    run: ModuleRun | None = None  # the module under way
    active: bool = False
    wants_values: bool = False
    last: RawCall | None = None
    nested: bool = False  # inside an attention function that is recorded as a whole
    inner: RawCall | None = None


class _Threads(threading.local):
    """A recorder a thread: attention of other threads passes the same taps, compiled or not, and is not recorded.

    The recorder is a separate object: ``torch.compile`` guards on its attributes, and not on this one's.
    """

    def __init__(self) -> None:
        self.recorder = _Recorder()


_threads = _Threads()
_lock = threading.RLock()  # the taps are the process's: one recording thread at a time


@contextmanager
def record(model: nn.Module, *, values: bool = False) -> Iterator[list[RawCall]]:
    """The attention calls of this thread inside the block, once it is left; with ``values`` also values and outputs.

    Calls are known by the modules of ``model`` that make them.
    """
    calls: list[RawCall] = []
    with _lock:
        recorder = _threads.recorder
        saved = dict(vars(recorder))
        recorder.active, recorder.last, recorder.nested, recorder.inner = True, None, False, None
        recorder.wants_values = values or (saved["active"] and saved["wants_values"])
        last: RawCall | None = None
        try:
            with ExitStack() as stack:
                if not saved["active"]:
                    _install(stack)
                _watch_runs(model, stack)
                yield calls
            last = recorder.last
        finally:
            vars(recorder).update(saved)
        chain = last
        while chain is not None:
            calls.append(chain)
            chain = chain.before
        calls.reverse()
        if saved["active"] and not saved["nested"] and calls:
            calls[0].before = saved["last"]  # an outer recording sees them too
            recorder.last = last
        for call in calls if not saved["active"] else ():
            call.before = None


def is_recording() -> bool:
    recorder = _threads.recorder
    return recorder.active and not recorder.nested


def add_call(call: RawCall) -> None:
    recorder = _threads.recorder
    call.run = recorder.run
    call.before, recorder.last = recorder.last, call


def last_call() -> RawCall | None:
    return _threads.recorder.last if is_recording() else None


# One tap for one function: a compiled graph is bound to the tap it was traced with. Few are kept: a model may
# make a new function for every pass.
_once = functools.lru_cache(maxsize=64)


def tap_interface(implementation: str, function: Callable[..., Any]) -> Callable[..., Any]:

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if args or not is_recording():
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        recorder = _threads.recorder
        recorder.nested, recorder.inner = True, None
        result = function(module, query, key, value, attention_mask, **kwargs)
        inner = recorder.inner
        recorder.nested, recorder.inner = False, None
        add_call(
            RawCall(
                query,
                key,
                attention_mask,
                value=value if recorder.wants_values else None,
                output=result[0] if recorder.wants_values else None,
                module=module,
                implementation=implementation,
                keywords=kwargs,
                inner=inner,
            )
        )
        return result

    return attend


@never_compiled
def _install(stack: ExitStack) -> None:
    # What is there may be a replacement (another kernel, context parallelism), and it is what must run.
    _replace(stack, F, "scaled_dot_product_attention", _tap_sdpa(F.scaled_dot_product_attention))
    _replace(stack, F, "multi_head_attention_forward", _tap_multi_head(F.multi_head_attention_forward))
    # The inference-only fast path of nn.MultiheadAttention calls neither.
    stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
    torch.backends.mha.set_fastpath_enabled(False)
    if "transformers" in sys.modules:
        _install_interface(stack)


@never_compiled
def _watch_runs(model: nn.Module, stack: ExitStack) -> None:
    """Know the module under way: of every part of a model but PyTorch's own without parts, which never attend."""
    for module in model.modules():
        if module is not model and (type(module).__module__.partition(".")[0] != "torch" or any(module.children())):
            stack.callback(module.register_forward_pre_hook(_enter_run).remove)
            stack.callback(module.register_forward_hook(_leave_run).remove)


def _enter_run(module: nn.Module, args: Any) -> None:
    recorder = _threads.recorder
    recorder.run = ModuleRun(module, recorder.run)


def _leave_run(module: nn.Module, args: Any, output: Any) -> None:
    recorder = _threads.recorder
    run = recorder.run
    while run is not None and run.module is not module:  # one that failed, and was caught
        run = run.outer
    recorder.run = None if run is None else run.outer


def _replace(stack: ExitStack, owner: Any, name: str, function: Any) -> None:
    stack.callback(_put_back, owner, name, getattr(owner, name), function)
    setattr(owner, name, function)


def _put_back(owner: Any, name: str, original: Any, function: Any) -> None:
    if getattr(owner, name) is function:  # else it was replaced during the pass, for good
        setattr(owner, name, original)


@_once
def _tap_sdpa(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        recorder = _threads.recorder
        last, inner = recorder.last, recorder.inner
        output = original(*args, **kwargs)  # as they are: a replacement may have another signature
        is_noted = recorder.last is not last or recorder.inner is not inner  # by a tap inside of it
        if recorder.active and not is_noted:
            call = _read_sdpa(output, *args, **kwargs)
            if call is not None and recorder.nested:
                recorder.inner = call
            elif call is not None:
                add_call(call)
        return output

    return attend


def _read_sdpa(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: Any,
) -> RawCall | None:
    """A call of ``scaled_dot_product_attention``; None for one without heads."""
    if unknown:
        rule = "scaled_dot_product_attention must be called with the keywords of PyTorch's own"
        advice = "whose meaning is not known: leave them out, or call record_query_key"
        raise ShdError("capture-failed", f"{rule}; got {', '.join(unknown)}, {advice}")
    if query.ndim != 4:
        return None
    call = RawCall(query, key, attn_mask, is_causal=is_causal, scale=scale)
    if _threads.recorder.wants_values:
        call.value, call.output = value, output
    return call


@_once
def _tap_multi_head(original: Callable[..., Any]) -> Callable[..., Any]:
    # A compiled graph would hold it unopened, and run past the taps inside of it.
    @never_compiled
    @functools.wraps(original)
    def attend(
        query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int, *args: Any, **kwargs: Any
    ) -> Any:
        # Asked for weights it multiplies (B * H, L, d) by hand; else it calls scaled_dot_product_attention, which is
        # tapped by itself.
        if not is_recording():
            return original(query, key, value, embed_dim_to_check, num_heads, *args, **kwargs)
        recorder = _threads.recorder
        products: list[tuple[Tensor, ...]] = []
        before = recorder.last
        with ExitStack() as stack:
            for name in ("bmm", "baddbmm"):
                _replace(stack, torch, name, _watch(products, getattr(torch, name), threading.get_ident()))
            result = original(query, key, value, embed_dim_to_check, num_heads, *args, **kwargs)
        if products and recorder.last is before:  # else this tap was passed twice, by a TorchFunctionMode
            add_call(_read_products(products, num_heads, recorder.wants_values))
        call = recorder.last
        if call is not None and call is not before:
            call.projection = args[6] if len(args) > 6 else kwargs.get("out_proj_weight")
            call.is_cross = key is not query
        return result

    return attend


def _read_products(products: list[tuple[Tensor, ...]], num_heads: int, wants_values: bool) -> RawCall:
    """A call by hand, of products ``(B * H, ...)``: first of queries and keys, then of weights and values."""

    def by_heads(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, num_heads, *tensor.shape[1:])

    *mask, scaled, transposed = products[0]
    bias = None if not mask else mask[0][None] if mask[0].shape[0] == 1 else by_heads(mask[0])
    value = by_heads(products[1][1]) if wants_values else None
    return RawCall(by_heads(scaled), by_heads(transposed.mT), bias, is_causal=False, scale=1.0, value=value)


def _watch(products: list[tuple[Tensor, ...]], original: Callable[..., Tensor], thread: int) -> Callable[..., Tensor]:
    def multiply(*tensors: Tensor, **kwargs: Any) -> Tensor:
        if threading.get_ident() == thread:
            products.append(tensors)
        return original(*tensors, **kwargs)

    return multiply


def _install_interface(stack: ExitStack) -> None:
    """Hugging Face's table of attention functions, with every function tapped.

    A modelling file gives its own "eager" function as a default. Replacing entries changes no configuration, and so
    no mask, and compiled graphs have guards on it.
    """
    from transformers import AttentionInterface

    table = AttentionInterface._global_mapping
    saved = dict(table)
    # First, and put back last: only it knows what the entry "eager" means.
    _replace(stack, AttentionInterface, "get_interface", _get_interface(AttentionInterface.get_interface))
    tapped = {name: _tap_once(name, function) for name, function in saved.items()} | {"eager": _refuse_eager}
    table.update(tapped)

    def put_back() -> None:
        for name in [name for name, function in tapped.items() if table.get(name) is function]:
            if name in saved:
                table[name] = saved[name]
            else:
                del table[name]

    stack.callback(put_back)


def _refuse_eager(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("'eager' is the modelling file's own function")


_tap_once = _once(tap_interface)


@_once
def _get_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function: Callable[..., Any] = original(self, attn_implementation, default)
        return tap_interface("eager", default) if function is _refuse_eager else function

    return get_interface
