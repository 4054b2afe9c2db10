"""Padded rows of ``torch.nn.TransformerEncoder``, whose fast path leaves zeros there and whose slow path does not."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from shd_torch.capture.compiling import never_compiled


@never_compiled
def keep_padded_zeros(student: nn.Module, stack: ExitStack) -> None:
    """Give padded rows of the encoders inside a student what the fast path would, while it is off.

    In eval mode without gradient such an encoder packs its sequences into a nested tensor, which holds no padding.
    """
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
