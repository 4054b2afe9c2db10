"""The queries, keys and weights of the scorers in a live model, with gradient, by module name or by class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shd_ref.errors import ShdError


class ScorerCall(NamedTuple):
    """What one call of a scorer multiplies: the arguments of ``indexer_kl`` by their names."""

    queries: Tensor  # (B, H_i, L, d_i)
    keys: Tensor  # (B, H_k, C, d_i)
    weights: Tensor | None  # (B, H_i, L)
    scale: float
    relu: bool = True
    groups: int = 1


Reader: TypeAlias = Callable[..., ScorerCall]

_KNOWN = (
    "AXK2Indexer", "DeepseekV32Indexer", "DeepseekV4Indexer", "Dots3NoteTextIndexer", "Glm5NextTextIndexer",
    "GlmMoeDsaIndexer", "HYV4Indexer", "MiniMaxM3VLIndexer", "MistralLarge4TextIndexer",
)  # fmt: skip
"""Classes of transformers whose scorers are read: they multiply all queries and keys once."""


@contextmanager
def capture_indexers(
    model: nn.Module, names: Sequence[str] | None = None, read: Reader | None = None
) -> Iterator[dict[str, ScorerCall]]:
    """Collect what a model's scorers multiply while it runs, from detached inputs (IDX-15).

    Args:
        model: whose modules are scorers. Those of transformers' AXK2, DeepSeek-V3.2 and V4, Dots3, GLM-5 (also with
            pooled keys), HYV4, MiniMax-M3 and Mistral Large 4, which run without gradient themselves, are read as
            they compute, without a cache. MiniMax-M3 selects for each head, blocks by their best key.
        names: of the modules (``model.named_modules()``); None for all of a known class.
        read: called as ``read(module, *args, **kwargs)`` with a module and its detached inputs, for other classes.

    Yields:
        The calls by module name, filled as the model runs; the last call of a module stays.

    Raises:
        ShdError: ``argument-value``: a name that the model does not have, a class that cannot be read, or no scorer.
    """
    modules = dict(model.named_modules())
    if names is None:
        names = [name for name, module in modules.items() if type(module).__name__ in _KNOWN]
    missing = [name for name in names if name not in modules]
    if missing or not names:
        rule = f"names must name modules of the model, or the model must have one of {', '.join(_KNOWN)}"
        raise ShdError("argument-value", f"{rule}; got {', '.join(missing) or 'no scorer'}")
    for name in names:
        if read is None and type(modules[name]).__name__ not in _KNOWN:
            rule = f"read must be given for scorers other than {', '.join(_KNOWN)}"
            raise ShdError("argument-value", f"{rule}; got {type(modules[name]).__name__} at {name}")
    calls: dict[str, ScorerCall] = {}
    with ExitStack() as stack:
        for name in names:

            def hook(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                detached = (
                    [_detached(value) for value in args],
                    {key: _detached(value) for key, value in kwargs.items()},
                )
                with torch.enable_grad():
                    calls[name] = (read or _read_known)(module, *detached[0], **detached[1])

            handle = modules[name].register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        yield calls


class _Read(Exception):  # noqa: N818  (no error: it ends a call early)
    """A scorer has computed all that is recorded."""


class _Recorder(TorchFunctionMode):
    """Keeps the queries and keys that a scorer multiplies, and its weights where it projects them."""

    def __init__(self, projection: nn.Linear | None) -> None:
        super().__init__()
        self.projection = projection
        self.operands: tuple[Tensor, Tensor] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.matmul and self.operands is None and args[0].ndim == 4:
            self.operands = args
        is_weights = func is F.linear and self.projection is not None and args[1] is self.projection.weight
        if self.operands is not None and (self.projection is None or is_weights):
            raise _Read(*self.operands, out)
        return out


def _read_known(module: Any, *args: Any, **kwargs: Any) -> ScorerCall:
    """What a scorer of a known class multiplies, as its own code computes it up to there."""
    forward = inspect.unwrap(type(module).forward)  # which runs without gradient
    call = inspect.signature(forward).bind(module, *args, **kwargs)
    call.arguments["past_key_values"] = None
    scorer = getattr(module, "scorer", module)
    recorder = _Recorder(getattr(scorer, "weights_proj", None))
    try:
        with recorder:
            forward(*call.args, **call.kwargs)
    except _Read as read:
        queries, keys, weights = read.args
    else:
        rule = "read must be given for a scorer that does not multiply all queries and keys once"
        raise ShdError("argument-value", f"{rule}; got this version's {type(module).__name__}", "IDX-15")
    if recorder.projection is None:
        return ScorerCall(queries, keys.mT, None, 1.0, relu=False, groups=queries.shape[1])
    weights = weights.transpose(1, 2).float() * weights.shape[-1] ** -0.5  # in float32, as they do
    return ScorerCall(queries.transpose(1, 2), keys.mT, weights, scorer.softmax_scale)


def _detached(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_detached(item) for item in value)
    return value.detach() if isinstance(value, Tensor) else value
