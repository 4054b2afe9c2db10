"""What a rival reads of a model in one forward pass: its attention calls, and its hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shd_torch.capture import Captured, capture_attention
from shd_torch.capture.outputs import read_every_hidden_state


@dataclass(eq=False)
class Seen:
    """The last forward pass of a watched model.

    Attributes:
        captured: its attention calls, with values.
        hidden: hidden states ``(B, L, D)`` as Hugging Face counts them, 0 for the embeddings; empty unless asked for.
    """

    captured: Captured
    hidden: tuple[Tensor, ...] = field(default=())


@contextmanager
def watch_model(model: nn.Module, *, hidden: bool) -> Iterator[Seen]:
    """Read every forward pass inside the block; the last one wins.

    Args:
        model: where ``hidden`` is True, one that takes ``output_hidden_states=True`` and returns ``hidden_states``.
        hidden: whether to ask for hidden states.

    Raises:
        ShdError: ``capture-failed`` for what cannot be read.
    """
    with capture_attention(model, keep_values=True) as captured:
        seen, handles = Seen(captured), []
        if hidden:

            def ask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
                return args, {**kwargs, "output_hidden_states": True}

            def take(_: nn.Module, __: Any, output: Any) -> None:
                seen.hidden = read_every_hidden_state(output, type(model).__name__)

            handles = [model.register_forward_pre_hook(ask, with_kwargs=True), model.register_forward_hook(take)]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; every module gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
