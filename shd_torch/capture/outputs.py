"""What a model's forward pass returned: logits and hidden states, and padded rows as its fast path leaves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_torch.capture.compiling import never_compiled


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
    last = read_output(output, "last_hidden_state")  # some vision models list the state before their final norm
    is_same = isinstance(last, Tensor) and last.shape == states[-1].shape
    return (*states[:-1], last) if is_same else tuple(states)


def without(output: Any, *names: str) -> Any:
    """A copy of an output of Hugging Face without some of its fields, so that their memory can go; or itself."""
    if not is_dataclass(output) or isinstance(output, type):
        return output
    return replace(output, **dict.fromkeys({field.name for field in fields(output)} & set(names)))


def read_output(output: Any, name: str) -> Any:
    """A field of an output of Hugging Face, or an entry of a mapping; None where it has none."""
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


@never_compiled
def keep_padded_zeros(student: nn.Module, stack: ExitStack) -> None:
    """Give padded rows of encoders inside a student what the fast path, which packs them, would while it is off."""
    for module in student.modules():
        if module is not student and _packs(module):  # the student's own hooks have been looked for already
            stack.callback(module.register_forward_hook(_fill_padding, with_kwargs=True).remove)


@never_compiled
def fill_own_padding(student: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Like ``keep_padded_zeros``, for the output of a student that is such an encoder itself."""
    filled = _fill_padding(student, args, kwargs, output) if _packs(student) else None
    return output if filled is None else filled


def _packs(module: nn.Module) -> TypeGuard[nn.TransformerEncoder]:
    return (
        isinstance(module, nn.TransformerEncoder)
        and torch.backends.mha.get_fastpath_enabled()
        and bool(module.use_nested_tensor)
        and not module.layers[0].training
    )


def _fill_padding(
    encoder: nn.TransformerEncoder, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor | None:
    arguments = dict(zip(("src", "mask", "src_key_padding_mask", "is_causal"), args, strict=False)) | kwargs
    source, padding = arguments["src"], arguments.get("src_key_padding_mask")
    if padding is None or arguments.get("mask") is not None or source.is_nested or source.ndim != 3:
        return None
    if torch.is_autocast_enabled() or torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() and (source.requires_grad or any(p.requires_grad for p in encoder.parameters())):
        return None
    kept = padding.logical_not()  # also of additive masks, which hold 0 and -inf
    if getattr(encoder, "mask_check", True) and not torch._nested_tensor_from_mask_left_aligned(source, kept):
        return None
    empty = torch.zeros_like(output)
    return torch.where(kept[..., None], output, empty if encoder.norm is None else encoder.norm(empty))
