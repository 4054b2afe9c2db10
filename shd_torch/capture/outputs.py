"""What a model's forward pass gave: logits and hidden states, and W_o, the matrix that a call's output meets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shd_ref.errors import ShdError, need
from shd_torch.capture.taps import RawCall, last_call


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
    rule = f"be from 0, its embeddings, to {len(states) - 1}"
    for layer in layers:
        need(0 <= layer < len(states), "layers-invalid", f"hidden layers of {name}", rule, layer)
    return {layer: states[layer] for layer in layers}


def read_every_hidden_state(output: Any, name: str) -> tuple[Tensor, ...]:
    states = read_output(output, "hidden_states")
    states = read_output(output, "decoder_hidden_states") if states is None else states
    has_states = isinstance(states, Sequence) and all(isinstance(state, Tensor) for state in states)
    rule = "return hidden_states, a tensor per layer, when called with output_hidden_states=True"
    got, advice = f"{type(output).__name__} without them", "call shd_torch.hidden_loss in your own loop"
    need(has_states, "capture-failed", name, rule, got, remedy=advice)
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


class Projection(NamedTuple):
    """An output projection W_o, by its name in the model, so that a weight may be moved, trained or loaded."""

    weight: Tensor | str  # (D, H * d_v) as torch.nn.Linear stores it, or its transpose; or the name of that parameter
    is_linear: bool = True  # the former

    def matrix(self, model: nn.Module) -> Tensor:
        weight = self.weight
        if isinstance(weight, str):
            try:
                weight = model.get_parameter(weight)
            except AttributeError:
                raise ShdError(
                    "capture-failed",
                    f"{type(model).__name__} must keep the output projection {weight}; it is gone since the first "
                    "batch: make another OnlineTeacher for a model whose modules were replaced",
                ) from None
        return weight.detach().mT if self.is_linear else weight.detach()


class ProjectionWatch(TorchFunctionMode):
    """While entered, notes which matrices the output of each recorded attention call meets, by no list of names.

    The output projection is the matrix that meets exactly the numbers which the call returned, heads side by side.
    Where several do (an adapter next to it) or none does (a gate before it), nothing is guessed.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model_name = type(model).__name__
        self._projections: list[tuple[RawCall, Projection]] = []
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def find(self, layer: int, call: RawCall, known: Mapping[int, Tensor]) -> Projection:
        """The output projection of a layer: one of the ``known``, or the only matrix that its call's output met."""
        if layer in known:
            return Projection(known[layer], is_linear=False)
        if call.projection is not None:
            return self._name(Projection(call.projection))
        projections = [projection for recorded, projection in self._projections if recorded is call]
        who, rule = f"attention call {layer} of {self._model_name}", "hand its output to one output projection"
        advice = f"merge adapters into it, or give W_o (H_t * d_v, D) as output_projections={{{layer}: ...}}"
        need(len(projections) == 1, "capture-failed", who, rule, len(projections), remedy=advice)
        return projections[0]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        product = _read_product(func, args, kwargs or {})
        call = last_call()
        # This code runs outside of the mode, so that looking is not looked at.
        if product is not None and call is not None and _is_output(product[0], call.output):
            self._projections.append((call, self._name(product[1])))
        return func(*args, **(kwargs or {}))

    def _name(self, projection: Projection) -> Projection:
        assert isinstance(projection.weight, Tensor)
        name = self._names.get(id(projection.weight))
        # One without a name was gathered from shards or dequantised, and is gone after the pass.
        return projection._replace(weight=projection.weight.detach().clone() if name is None else name)


def _read_product(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Projection] | None:
    """What is multiplied and with what; None for a function that multiplies with no matrix."""
    if func is F.linear:
        vectors, weight, *_ = (*args, *(kwargs[name] for name in ("input", "weight") if name in kwargs))
        return vectors, Projection(weight)
    if func is torch.addmm and len(args) == 3:
        return args[1], Projection(args[2], is_linear=False)
    if func in (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm) and len(args) == 2 and args[1].ndim == 2:
        return args[0], Projection(args[1], is_linear=False)
    return None


def _is_output(vectors: Tensor, output: Tensor | None) -> bool:
    """Whether these are the heads' outputs side by side, in any of the orders that models have them in."""
    if output is None or output.ndim != 4 or vectors.numel() != output.numel() or vectors.dtype != output.dtype:
        return False
    for by_row in (output.transpose(1, 2), output):  # of (B, H, L, d_v), or of (B, L, H, d_v)
        width = by_row.shape[2] * by_row.shape[3]
        if vectors.shape[-1] == width:
            orders = (by_row, by_row.transpose(0, 1))  # samples first, or rows first
            # NaN, which a broken teacher gives, is not a difference: it is refused later, by layer and head.
            rows = vectors.reshape(-1, width).nan_to_num()
            if any(torch.equal(rows, order.reshape(-1, width).nan_to_num()) for order in orders):
                return True
    return False
