"""Which attention blocks and activations matter: learnable gates, and what the loss says about them (DEPTH-9)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_ref.integers import check_integer
from shd_ref.shrink.ffn import most_important
from shd_torch.shrink.dropped import Dropped
from shd_torch.shrink.families import Family, family_of, find_part

KINDS = ("attention", "activations")


@dataclass(frozen=True)
class Ranking:
    """How much a loss depends on each attention block and each activation.

    The two kinds are never compared: gradients of attention are smaller by orders of magnitude, by construction.

    Attributes:
        attention: importance of each layer's attention, at least 0.
        activations: of each layer's activation; empty where FFNs are gated.
        disparity: mean gradient of the gates on activations over that of the gates on attention; None without both.
            It says how wrong a common ranking would be.
    """

    attention: tuple[float, ...]
    activations: tuple[float, ...]
    disparity: float | None

    def drop(self, *, attention: int | None = None, activations: int | None = None) -> Dropped:
        """What goes where this many of each kind stay, the most important ones; of equal ones the first stay.

        Args:
            attention: attention blocks that stay, at least 1; default all.
            activations: activations that stay; default all.

        Raises:
            ShdError: ``argument-value``.
        """
        return Dropped(
            _least(self.attention, "attention", attention, 1), _least(self.activations, "activations", activations, 0)
        )


def _least(scores: tuple[float, ...], kind: str, kept: int | None, least: int) -> tuple[int, ...]:
    """The layers that go where ``kept`` stay."""
    number = len(scores)
    count = number if kept is None else check_integer(kind, kept, min(least, number), number, "DEPTH-9")
    staying = most_important(np.array(scores), count)
    return tuple(layer for layer in range(number) if layer not in staying)


class Gates(nn.Module):
    """One number a layer and kind, 1 at first, that multiplies what its part adds.

    An attention block gives ``g * attention(x)``; an FFN ``W2 (g * act(h) + (1 - g) * h)`` with ``h = W1 x + b1``, so
    that a closed gate is exactly what ``shrink`` makes. Forward, a gate is 1 or 0 (``keep``); backward, the gradient
    goes straight through to its number, also of closed gates, which may open again.

    Attributes:
        attention: ``(L,)``.
        activations: ``(L,)``; ``(0,)`` where FFNs are gated.
    """

    def __init__(self, num_layers: int, *, has_activations: bool, like: Tensor) -> None:
        super().__init__()
        sizes = num_layers, num_layers if has_activations else 0
        made = [torch.ones(size, dtype=torch.promote_types(like.dtype, torch.float32)) for size in sizes]
        self.attention, self.activations = (nn.Parameter(part.to(like.device)) for part in made)
        self._kept: dict[str, int | None] = dict.fromkeys(KINDS)
        self._importance = {kind: torch.zeros_like(getattr(self, kind)) for kind in KINDS}
        self._gradient = {kind: torch.zeros_like(getattr(self, kind)) for kind in KINDS}
        self._count = 0

    def keep(self, *, attention: int | None = None, activations: int | None = None) -> None:
        """How many gates of each kind are open from now on: those with the largest numbers; None for all."""
        for kind, count in zip(KINDS, (attention, activations), strict=True):
            most = len(getattr(self, kind))
            self._kept[kind] = None if count is None else check_integer(kind, count, 0, most, "DEPTH-9")

    def value(self, kind: str, layer: int) -> Tensor:
        """A gate as it multiplies: 1 or 0, with the gradient of its number."""
        scores: Tensor = getattr(self, kind)
        count = self._kept[kind]
        place = scores.detach().argsort(descending=True, stable=True).argsort()[layer]
        is_open = torch.ones_like(scores[layer]) if count is None else (place < count).to(scores.dtype)
        return is_open + (scores[layer] - scores[layer].detach())

    def observe(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Count the gradients of one batch towards the importance; by default those of ``backward``."""
        for kind in KINDS:
            scores = getattr(self, kind)
            gradient = scores.grad if gradients is None else gradients[kind]
            if gradient is None and len(scores):
                raise ShdError(
                    "argument-value",
                    "gates must have a gradient: call backward on the loss before observe",
                    "DEPTH-9",
                )
            if gradient is not None:
                self._gradient[kind] += gradient.abs()
                self._importance[kind] += (gradient * scores.detach()).abs()
        self._count += 1

    def rank(self) -> Ranking:
        """The mean over all batches that were observed.

        Raises:
            ShdError: ``argument-value`` before the first, ``not-finite``.
        """
        if not self._count:
            raise ShdError("argument-value", "gates must observe a batch before they rank; got none", "DEPTH-9")
        attention, activations = ((self._importance[kind] / self._count).tolist() for kind in KINDS)
        means = [float(self._gradient[kind].mean()) for kind in KINDS]
        if not torch.isfinite(torch.cat([*self._importance.values()])).all():
            raise ShdError("not-finite", "the loss must have finite gradients; got NaN or infinity", "DEPTH-9")
        disparity = means[1] / means[0] if activations and means[0] > 0 else None
        return Ranking(tuple(attention), tuple(activations), disparity)


@contextmanager
def gate_layers(model: Any) -> Iterator[Gates]:
    """A Hugging Face model of a known family with gates; open ones change nothing. They are gone afterwards.

    Train them, alone or with the model, under ``keep``; ``observe`` after each ``backward``; then ``rank``.

    Raises:
        ShdError: ``shrink-unsupported``.
    """
    family = family_of(model)
    layers = family.layers_of(model)
    gates = Gates(len(layers), has_activations=not family.is_gated, like=next(model.parameters()))
    handles: list[Any] = []
    try:
        for number, layer in enumerate(layers):
            handles.append(
                find_part(layer, family.projections[-1]).register_forward_hook(
                    _gate(gates, number, is_activation=False)
                )
            )
            if not family.is_gated:
                handles.append(
                    _activation(layer, family).register_forward_hook(_gate(gates, number, is_activation=True))
                )
        yield gates
    finally:
        for handle in handles:
            handle.remove()


def _activation(layer: nn.Module, family: Family) -> nn.Module:
    assert family.activation is not None  # is_gated
    found = find_part(layer, family.activation)
    if not isinstance(found, nn.Module):
        raise ShdError(
            "shrink-unsupported",
            f"the model's activations must be modules; got {found!r}: name one in its configuration",
            "DEPTH-9",
        )
    return found


def _gate(gates: Gates, layer: int, *, is_activation: bool) -> Callable[..., Tensor]:
    def gate(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        value = gates.value(KINDS[is_activation], layer).to(output.dtype)
        return value * output + (1 - value) * inputs[0] if is_activation else value * output

    return gate


def rank_layers(
    model: Any,
    batches: Iterable[Mapping[str, Tensor]],
    loss: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None,
) -> Ranking:
    """Importance of every attention block and activation of a trained model, without training.

    Args:
        model: of a known family; its weights and their gradients are left as they are.
        batches: inputs by name, on the model's device; 16 batches are a start.
        loss: of the model and a batch, a scalar; default the ``loss`` that the model returns for its ``labels``.

    Returns:
        The mean over batches of ``|gate x gradient|``.

    Raises:
        ShdError: ``shrink-unsupported``, ``argument-value``, ``not-finite``.
    """
    mode = model.training
    model.eval()
    try:
        with gate_layers(model) as gates, torch.enable_grad():
            parts = {kind: getattr(gates, kind) for kind in KINDS}
            for batch in batches:
                value = model(**batch).loss if loss is None else loss(model, batch)
                if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
                    raise ShdError(
                        "argument-value",
                        "the loss must be one number that depends on the model; got "
                        + (f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value))
                        + ": give batches with labels, or a loss",
                        "DEPTH-9",
                    )
                found = torch.autograd.grad(value, [*parts.values()], allow_unused=True)
                gates.observe(
                    {
                        kind: torch.zeros_like(parts[kind]) if gradient is None else gradient
                        for kind, gradient in zip(KINDS, found, strict=True)
                    }
                )
            return gates.rank()
    finally:
        model.train(mode)
