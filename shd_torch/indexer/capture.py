"""The queries, keys and weights of the scorers in a live model, with gradient, by module name or by class."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError


class ScorerCall(NamedTuple):
    """What one call of a scorer multiplies: the arguments of ``indexer_kl`` by their names."""

    queries: Tensor  # (B, H_i, L, d_i)
    keys: Tensor  # (B, H_k, C, d_i)
    weights: Tensor | None  # (B, H_i, L)
    scale: float


Reader: TypeAlias = Callable[..., ScorerCall]

_ROTATIONS = {"DeepseekV32Indexer": "apply_rotary_pos_emb", "GlmMoeDsaIndexer": "apply_rotary_pos_emb_interleave"}
"""Classes of transformers whose scorers are read, with the rotation that their module applies."""


@contextmanager
def capture_indexers(
    model: nn.Module, names: Sequence[str] | None = None, read: Reader | None = None
) -> Iterator[dict[str, ScorerCall]]:
    """Collect what a model's scorers multiply while it runs, from detached inputs (IDX-15).

    Args:
        model: whose modules are scorers; transformers' ``DeepseekV32Indexer`` and ``GlmMoeDsaIndexer``, which run
            without gradient themselves, are read as they compute.
        names: of the modules (``model.named_modules()``); None for all of a known class.
        read: called as ``read(module, *args, **kwargs)`` with a module and its detached inputs, for other classes.

    Yields:
        The calls by module name, filled as the model runs; the last call of a module stays.

    Raises:
        ShdError: ``argument-value``: a name that the model does not have, a class that cannot be read, or no scorer.
    """
    modules = dict(model.named_modules())
    if names is None:
        names = [name for name, module in modules.items() if type(module).__name__ in _ROTATIONS]
    missing = [name for name in names if name not in modules]
    if missing or not names:
        rule = f"names must name modules of the model, or the model must have one of {', '.join(_ROTATIONS)}"
        raise ShdError("argument-value", f"{rule}; got {', '.join(missing) or 'no scorer'}")
    for name in names:
        if read is None and type(modules[name]).__name__ not in _ROTATIONS:
            rule = f"read must be given for scorers other than {', '.join(_ROTATIONS)}"
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


def _read_known(
    module: Any, hidden_states: Tensor, q_resid: Tensor, position_embeddings: Any, *_: Any, **__: Any
) -> ScorerCall:
    """A scorer of DeepSeek-V3.2 or GLM-5: one key for all heads, the first part of a head rotated."""
    rotate = getattr(sys.modules[type(module).__module__], _ROTATIONS[type(module).__name__])
    cos, sin = position_embeddings
    queries = module.wq_b(q_resid).unflatten(-1, (module.n_heads, module.head_dim))
    keys = module.k_norm(module.wk(hidden_states)).unsqueeze(2)
    turned = [tensor[..., : module.qk_rope_head_dim] for tensor in (queries, keys)]
    turned = rotate(*turned, cos, sin, unsqueeze_dim=2)
    queries, keys = (
        torch.cat([part, tensor[..., module.qk_rope_head_dim :]], dim=-1).transpose(1, 2)
        for part, tensor in zip(turned, (queries, keys), strict=True)
    )
    weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).transpose(1, 2)
    return ScorerCall(queries, keys, weights * module.n_heads**-0.5, module.softmax_scale)


def _detached(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_detached(item) for item in value)
    return value.detach() if isinstance(value, Tensor) else value
