"""The layers of a forward pass: attention calls by the modules that made them, and layers that made none.

A layer is a run of a module in which it attends, numbered in the order they ran. A shared module that runs
several times is as many layers, and the calls that the model itself makes are a layer each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from torch import nn

from shd_ref.errors import ShdError, need
from shd_torch.capture.taps import RawCall, never_compiled

Layer: TypeAlias = Sequence[RawCall]

_REMEDY = (
    "use a model that calls torch.nn.functional.scaled_dot_product_attention (by that name), set "
    "attn_implementation to 'sdpa', or call shd_torch.record_query_key in its attention; "
    "a student with 'eager' attention must not be compiled before it is captured"
)


@never_compiled
def number_layers(calls: Sequence[RawCall], model: nn.Module) -> list[Layer]:
    """The calls of each layer in one forward pass; a pooling head (one query, in no list of layers) is no layer."""
    runs: dict[tuple[int, int], list[RawCall]] = {}
    layers = []
    for call in calls:
        run = [] if call.run is None else runs.setdefault((id(call.run), id(call.module)), [])
        if not run:
            layers.append(run)
        run.append(call)
    pooled = [layer for layer in layers if layer[0].query.shape[2] == 1 < layer[0].key.shape[2]]
    if pooled:
        paths = _find_paths(model, (layer[0].source for layer in layers))
        numbered = [re.search(r"\.\d+\.", f".{path}.") is not None for path in paths]
        if any(numbered):
            return [layer for layer, inside in zip(layers, numbered, strict=True) if inside or layer not in pooled]
    return list(layers)


def check_single(layers: Sequence[Layer], numbers: Iterable[int], model: nn.Module) -> None:
    """A layer that is taught must make one call, whose maps are the layer's."""
    for number in numbers:
        if len(layers[number]) > 1:
            (path,) = _find_paths(model, [layers[number][0].source])
            rule = f"{path}, layer {number} of {type(model).__name__}, must make one attention call each time it runs"
            got = f"{len(layers[number])}, none of which holds the maps of the layer (as in differential attention "
            got += "or attention by chunks), so it can neither be squeezed nor taught"
            advice = "leave its number out, or, to read every call by itself, give capture_attention their count "
            advice += f"(layers={sum(map(len, layers))})"
            raise ShdError("capture-failed", f"{rule}; got {got}: {advice}")


class SameLayers:
    """Layers are known by their numbers, which must mean the same modules in every pass of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sources: list[nn.Module | None] = []
        self._paths: list[str] = []

    def check(self, layers: Sequence[Layer], numbers: Iterable[int]) -> None:
        """Refuse a pass whose layers of these numbers are others than in the first one."""
        sources, name = [layer[0].source for layer in layers], type(self._model).__name__
        if not self._paths:
            self._sources, self._paths = sources, _find_paths(self._model, sources)
        count = len(self._sources)
        rule, fits = f"make {count} attention calls, as the first one did", len(sources) == count
        advice = "their numbers would mean other layers, so switch off what skips some (layer drop, a fast path)"
        need(fits, "capture-failed", f"a forward pass of {name}", rule, len(sources), remedy=advice)
        if all(source is known for source, known in zip(sources, self._sources, strict=True)):
            return
        paths = _find_paths(self._model, sources)  # of modules that were replaced, which is no other layer
        for number in numbers:
            rule = f"be {self._paths[number]} in every forward pass, as in the first one"
            advice, fits = "switch off what skips layers (layer drop, a router)", paths[number] == self._paths[number]
            need(fits, "capture-failed", f"layer {number} of {name}", rule, paths[number], remedy=advice)


def check_calls(calls: int, expected: int | None, layers: tuple[int, ...] | None, name: str) -> None:
    """A forward pass must make attention calls, as many as expected, those to keep among them."""
    who, code = f"a forward pass of {name}", "capture-failed"
    need(calls > 0, code, who, "show its attention", "0 calls", remedy=_REMEDY)
    advice = f"give the numbers of those to keep as layers, or {_REMEDY}"
    need(expected in (None, calls), code, who, f"make layers={expected} attention calls", calls, remedy=advice)
    rule = f"lie in 0..{calls - 1}, as {who} makes {calls} attention calls"
    need(layers is None or max(layers) < calls, code, "layers", rule, layers)


@never_compiled
def check_every_layer(model: nn.Module, calls: Sequence[RawCall], encoder_ran: bool, remedy: str) -> None:
    """Layers that attend by code which is not watched make no call, and shift the numbers of those that do.

    ``encoder_ran`` is False where the decoder was given the encoder's outputs, and ``remedy`` is for who means to
    leave such layers out.
    """
    unseen = _find_unseen(model, calls, encoder_ran=encoder_ran)
    names = ", ".join(unseen[:3]) + (", ..." if len(unseen) > 3 else "")
    got = f"{len(calls)} calls for more layers, of which these are among the unseen or cannot be told: {names}. The "
    got += "numbers of calls would mean other layers"
    who, advice = f"a forward pass of {type(model).__name__}", f"where that is meant, {remedy}; else {_REMEDY}"
    need(not unseen, "capture-failed", who, "show the attention of every layer", got, remedy=advice)


def _find_paths(model: nn.Module, modules: Iterable[nn.Module | None]) -> list[str]:
    """Names of modules inside a model; that of the model itself is its class."""
    paths = {id(module): path for path, module in model.named_modules()}
    return [paths.get(id(module)) or type(module or model).__name__ for module in modules]


def _find_unseen(student: nn.Module, calls: Sequence[RawCall], *, encoder_ran: bool) -> list[str]:
    """Names of layers that attend by their own code, where others of the same stack or the decoder were seen.

    A layer is an entry of a list of modules with a module named after attention in it. A stack that nothing was seen
    of may not have run (a vision tower that got no picture), unless it is the encoder of a decoder that was seen.
    """
    callers = {id(call.source) for call in calls}
    unseen: dict[str, list[str]] = {}
    seen_stacks = set()
    for path, stack in _find_stacks(student, ""):
        layers = {f"{path}.{number}": layer for number, layer in enumerate(stack) if _attends(layer)}
        unseen[path] = [n for n, layer in layers.items() if callers.isdisjoint(map(id, layer.modules()))]
        if len(unseen[path]) < len(layers):
            seen_stacks.add(path)
    return [
        name
        for path, names in unseen.items()
        if path in seen_stacks or (encoder_ran and _is_encoder_of(path, seen_stacks))
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


def _attends(layer: nn.Module) -> bool:
    # A layer whose attention ``shrink`` dropped may keep the module around it.
    modules = list(layer.modules())
    dropped = any(getattr(module, "attention_is_dropped", False) for module in modules)
    return not dropped and any("attention" in type(module).__name__.lower() for module in modules)


def _is_encoder_of(path: str, seen_stacks: set[str]) -> bool:
    """Whether a stack belongs to an unseen ``encoder`` next to a ``decoder`` that was seen."""
    names, stacks = path.split("."), [other.split(".") for other in seen_stacks]
    for index in (index for index, name in enumerate(names) if name == "encoder"):
        encoder, decoder = names[: index + 1], [*names[:index], "decoder"]
        starts = [other[: index + 1] for other in stacks]
        if decoder in starts and encoder not in starts:
            return True
    return False


_CROSS = re.compile(r"cross|enc(oder)?_?dec|encoder_att(n|ention)", re.IGNORECASE)


def find_call_kinds(calls: Sequence[RawCall], student: nn.Module, taught_kinds: Sequence[str]) -> list[str]:
    """The kind of each call of a forward pass: ``"encoder"``, ``"decoder"`` or ``"cross"``.

    Cross attention is known by what is certain first: another number of keys than of queries, what the module says
    of itself, other keys than queries given to ``torch.nn.MultiheadAttention``; then by the name that its model has
    for it. Self-attention is the decoder's where the module says so, or stands among layers with cross attention. A
    student without cross attention has one of the kinds that are ``taught_kinds``.
    """
    names = {id(module): name for name, module in student.named_modules()}
    paths = ["" if call.source is None else names.get(id(call.source), "") for call in calls]
    crosses = [_is_cross(call, path) for call, path in zip(calls, paths, strict=True)]
    if not any(crosses):
        self_kinds = [kind for kind in taught_kinds if kind != "cross"]
        return [self_kinds[0] if len(self_kinds) == 1 else _own_kind(call, "encoder") for call in calls]
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
    if call.query.shape[2] != call.key.shape[2]:
        return True
    if getattr(call.source, "is_cross_attention", False) is True:
        return True
    # What follows the last layer number is what a layer calls its parts; before it are the names of whole models.
    return bool(_CROSS.search(re.split(r"\.\d+\.", "." + path)[-1] if re.search(r"\d", path) else path))


def _own_kind(call: RawCall, otherwise: str) -> str:
    is_decoder = getattr(call.source, "is_decoder", None)
    return ("decoder" if is_decoder else "encoder") if isinstance(is_decoder, bool) else otherwise


def _stack_of(path: str) -> str:
    """The list of layers that a module belongs to: its path up to the first number."""
    return re.split(r"\.\d+(\.|$)", path)[0]
