"""Logits and hidden states in what a model's forward pass returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from shd_ref.errors import ShdError


def read_logits(output: Any) -> Tensor | None:
    """The ``logits`` ``(..., V)`` of an output or a mapping, or the output itself where it is a tensor; else None."""
    logits = output if isinstance(output, Tensor) else read_output(output, "logits")
    return logits if isinstance(logits, Tensor) and logits.ndim >= 2 and logits.is_floating_point() else None


def read_hidden_states(output: Any, layers: Sequence[int], name: str) -> dict[int, Tensor]:
    """Chosen hidden states ``(B, L, D)`` as Hugging Face counts them: 0 are the embeddings, k what block k returns.

    The last ones are what the model's head reads, after a final norm where there is one. Of an encoder-decoder they
    are the decoder's (``decoder_hidden_states``). ``name`` is the model's, for errors.
    """
    states = read_every_hidden_state(output, name)
    for layer in layers:
        if not 0 <= layer < len(states):
            raise ShdError(
                "layers-invalid",
                f"hidden layers of {name} must be from 0, its embeddings, to {len(states) - 1}; got {layer}",
            )
    return {layer: states[layer] for layer in layers}


def read_every_hidden_state(output: Any, name: str) -> tuple[Tensor, ...]:
    """All of them; see ``read_hidden_states``."""
    states = read_output(output, "hidden_states")
    states = read_output(output, "decoder_hidden_states") if states is None else states
    if not isinstance(states, Sequence) or not all(isinstance(state, Tensor) for state in states):
        raise ShdError(
            "capture-failed",
            f"{name} must return hidden_states, a tensor per layer, when called with output_hidden_states=True; "
            f"got {type(output).__name__} without them: call shd_torch.hidden_loss in a loop of your own",
        )
    return tuple(states)


def without(output: Any, *names: str) -> Any:
    """A copy of an output of Hugging Face without some of its fields, so that their memory can go; or itself."""
    if not is_dataclass(output) or isinstance(output, type):
        return output
    return replace(output, **dict.fromkeys({field.name for field in fields(output)} & set(names)))


def read_output(output: Any, name: str) -> Any:
    """A field of an output of Hugging Face, or an entry of a mapping; None where it has none."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
