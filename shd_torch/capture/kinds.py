"""Encoder, decoder and cross attention of a student, told apart call by call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from shd_torch.capture.taps import RawCall

_CROSS = re.compile(r"cross|enc(oder)?_?dec|encoder_att(n|ention)", re.IGNORECASE)


def find_call_kinds(calls: Sequence[RawCall], student: nn.Module, taught: Sequence[str]) -> list[str]:
    """The kind of each call of a forward pass: ``"encoder"``, ``"decoder"`` or ``"cross"``.

    Cross attention is known by what is certain first: another number of keys than of queries, what the module says
    of itself, other keys than queries given to ``torch.nn.MultiheadAttention``; then by the name that its model has
    for it. Self-attention is the decoder's where the module says so, or stands among layers with cross attention.

    Args:
        calls: in the order they ran.
        student: whose modules made them.
        taught: the kinds that are asked for; a student without cross attention has one of them.
    """
    names = {id(module): name for name, module in student.named_modules()}
    paths = ["" if call.source is None else names.get(id(call.source), "") for call in calls]
    crosses = [_is_cross(call, path) for call, path in zip(calls, paths, strict=True)]
    if not any(crosses):
        own = [kind for kind in taught if kind != "cross"]
        return [own[0] if len(own) == 1 else _own_kind(call, "encoder") for call in calls]
    stacks = {_stack_of(path) for path, cross in zip(paths, crosses, strict=True) if cross and path}
    kinds = []
    for number, (call, path, cross) in enumerate(zip(calls, paths, crosses, strict=True)):
        if cross:
            kinds.append("cross")
        elif path:
            kinds.append(_own_kind(call, "decoder" if _stack_of(path) in stacks else "encoder"))
        else:  # nameless calls: a decoder layer attends to itself, then across
            kinds.append("decoder" if crosses[number + 1 : number + 2] == [True] else "encoder")
    return kinds


def _is_cross(call: RawCall, path: str) -> bool:
    if call.is_cross is not None:
        return call.is_cross
    if call.num_rows != call.num_keys:
        return True
    if getattr(call.source, "is_cross_attention", False) is True:
        return True
    # What follows the last layer number is what a layer calls its parts; before it are the names of whole models.
    return bool(_CROSS.search(re.split(r"\.\d+\.", "." + path)[-1] if re.search(r"\d", path) else path))


def _own_kind(call: RawCall, otherwise: str) -> str:
    said = getattr(call.source, "is_decoder", None)
    return ("decoder" if said else "encoder") if isinstance(said, bool) else otherwise


def _stack_of(path: str) -> str:
    """The list of layers that a module belongs to: its path up to the first number."""
    return re.split(r"\.\d+(\.|$)", path)[0]
