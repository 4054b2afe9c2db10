"""Which layers of a student showed their attention: calls are known by their numbers, so a gap must not pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from shd_torch.capture.taps import RawCall


def find_unseen(student: nn.Module, calls: Sequence[RawCall], *, encoder_ran: bool = True) -> list[str]:
    """Names of layers that attend by their own code, where others of the same stack or the decoder were seen.

    A layer is an entry of a list of modules with a module named after attention in it. A stack that nothing was seen
    of may not have run (a vision tower that got no picture), unless it is the encoder of a decoder that was seen.
    Where calls do not tell their modules (those of ``scaled_dot_product_attention``), they are counted.

    Args:
        student: the module that ran.
        calls: of one forward pass.
        encoder_ran: False where the decoder was given the encoder's outputs.
    """
    stacks = {
        path: layers for path, stack in _find_stacks(student, "") if (layers := _find_attending_layers(path, stack))
    }
    if any(call.module is None for call in calls):
        every = [name for layers in stacks.values() for name in layers]
        return every if encoder_ran and len(calls) < len(every) else []
    callers = {id(call.module) for call in calls}
    unseen: dict[str, list[str]] = {
        path: [name for name, layer in layers.items() if not any(id(part) in callers for part in layer.modules())]
        for path, layers in stacks.items()
    }
    seen = {path for path, names in unseen.items() if len(names) < len(stacks[path])}
    return [
        name
        for path, names in unseen.items()
        if path in seen or (encoder_ran and _is_encoder_of(path, seen))
        for name in names
    ]


def _find_stacks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList]]:
    """Lists of modules that lie in no other."""
    for name, child in module.named_children():
        inside = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield inside, child
        else:
            yield from _find_stacks(child, inside)


def _find_attending_layers(path: str, stack: nn.ModuleList) -> dict[str, nn.Module]:
    return {f"{path}.{number}": layer for number, layer in enumerate(stack) if _attends(layer)}


def _attends(layer: nn.Module) -> bool:
    # A layer whose attention ``shrink`` dropped may keep the module around it.
    parts = list(layer.modules())
    dropped = any(getattr(part, "attention_is_dropped", False) for part in parts)
    return not dropped and any("attention" in type(part).__name__.lower() for part in parts)


def _is_encoder_of(path: str, seen: set[str]) -> bool:
    """Whether a stack belongs to an unseen ``encoder`` beside a ``decoder`` that was seen."""
    parts, others = path.split("."), [other.split(".") for other in seen]
    for index in (index for index, part in enumerate(parts) if part == "encoder"):
        encoder, decoder = parts[: index + 1], [*parts[:index], "decoder"]
        starts = [other[: index + 1] for other in others]
        if decoder in starts and encoder not in starts:
            return True
    return False
