"""Which attention blocks and activations matter, and which splits between them are worth measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_integer
from shd_ref.shrink.align import HELD_OUT
from shd_ref.shrink.kept import most_important
from shd_torch.shrink.basis import OutputFit
from shd_torch.shrink.families import Family, family_of, find_part
from shd_torch.shrink.sizes import Dropped


@dataclass(frozen=True)
class Ranking:
    """How much a loss depends on each attention block and each activation.

    The two kinds are never compared: gradients of attention were 1.4 to 14 times smaller on four models.

    Attributes:
        attention: importance of each layer's attention, at least 0.
        activations: of each layer's activation, or gated FFN.
    """

    attention: tuple[float, ...]
    activations: tuple[float, ...]

    def drop(self, *, attention: int | None = None, activations: int | None = None) -> Dropped:
        """The parts to drop so that this many of each kind remain, the most important ones; of equal ones the first.

        Args:
            attention: attention blocks to keep, at least 1; default all.
            activations: activations to keep; default all.

        Raises:
            ShdError: ``argument-value``.
        """
        blocks = _least(self.attention, "attention", attention, 1)
        return Dropped(blocks, _least(self.activations, "activations", activations, 0))


def _least(scores: tuple[float, ...], kind: str, kept: int | None, least: int) -> tuple[int, ...]:
    """The layers that go where ``kept`` stay."""
    number = len(scores)
    count = number if kept is None else check_integer(kind, kept, min(least, number), number)
    staying = most_important(np.array(scores), count)
    return tuple(layer for layer in range(number) if layer not in staying)


def rank_layers(
    model: Any,
    batches: Iterable[Mapping[str, Tensor]],
    loss: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None,
) -> Ranking:
    """Importance of every attention block and activation of a trained model, without training.

    A gate g = 1 multiplies what a part adds: ``g * attention(x)``, and in an FFN ``W2 (g * act(h) + (1 - g) * h)``.
    A gated FFN becomes ``g * ffn(x) + (1 - g) * (W x + b)``, with the ridge fit of ``shrink`` on these batches.

    Args:
        model: of a known family; its weights and their gradients are not changed.
        batches: inputs by name, on the model's device; start with 16 batches. Those of gated FFNs are read twice.
        loss: of the model and a batch, a scalar; default the ``loss`` that the model returns for its ``labels``.

    Returns:
        The mean over batches of ``|gradient of the gate|``.

    Raises:
        ShdError: ``shrink-unsupported``, ``argument-value``, ``not-finite``.
    """
    family, example, mode = family_of(model), next(model.parameters()), model.training
    count = len(family.layers_of(model))
    dtype = torch.promote_types(example.dtype, torch.float32)
    gates = [torch.ones(count, dtype=dtype, device=example.device, requires_grad=True) for _ in "ab"]
    sums, number = [torch.zeros_like(gate) for gate in gates], 0
    model.eval()
    try:
        fits: list[tuple[Tensor, Tensor]] = []
        if family.is_gated:
            batches = list(batches)
            fits = _fit_ffns(model, family, batches)
        with _gated(model, family, gates[0], gates[1], fits), torch.enable_grad():
            for batch in batches:
                value = model(**batch).loss if loss is None else loss(model, batch)
                if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
                    got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                    rule = f"the loss must be one number that depends on the model; got {got}"
                    raise ShdError("argument-value", f"{rule}: give batches with labels, or a loss")
                gradients = torch.autograd.grad(value, gates, allow_unused=True, materialize_grads=True)
                sums = [total + gradient.abs() for total, gradient in zip(sums, gradients, strict=True)]
                number += 1
    finally:
        model.train(mode)
    need(number > 0, "argument-value", "batches", "hold at least one", "none")
    finite = bool(torch.isfinite(torch.cat(sums)).all())
    need(finite, "not-finite", "the loss", "have finite gradients", "NaN or infinity")
    return Ranking(*(tuple((total / number).tolist()) for total in sums))


_Change: TypeAlias = Callable[[int, Tensor, Tensor], Tensor | None]


def _change_ffns(model: Any, family: Family, change: _Change) -> list[Any]:
    """Hooks: ``change`` gets a layer, what its FFN read and what this gave, and may return something in its place."""
    handles, read = [], {}

    def keep(number: int) -> Callable[..., None]:
        return lambda _, inputs: read.update({number: inputs[0]})

    def give(number: int) -> Callable[..., Tensor | None]:
        return lambda _, inputs, output: change(number, read.pop(number), output)

    for number, layer in enumerate(family.layers_of(model)):
        handles.append(find_part(layer, family.ffn[0][0]).register_forward_pre_hook(keep(number)))
        handles.append(find_part(layer, family.ffn[1]).register_forward_hook(give(number)))
    return handles


@torch.no_grad()
def _fit_ffns(model: Any, family: Family, batches: Iterable[Mapping[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Of each FFN the matrix ``(D, D)`` and bias that come nearest to it on these batches."""
    fits: dict[int, OutputFit] = {}
    mask: Tensor | None = None

    def add(number: int, read: Tensor, output: Tensor) -> None:
        width = read.shape[-1]
        is_held_out = (torch.arange(len(read), device=read.device) % HELD_OUT == HELD_OUT - 1)[:, None].expand(
            read.shape[:2]
        )
        counted = torch.ones_like(is_held_out) if mask is None or mask.shape != is_held_out.shape else mask.bool()
        start = np.zeros((width, width)), np.zeros(width), None, read.device
        fits.setdefault(number, OutputFit(*start)).add(read[counted], output[counted], is_held_out[counted])

    handles = _change_ffns(model, family, add)
    try:
        for batch in batches:
            mask = batch.get("decoder_attention_mask" if family.stack == "decoder" else "attention_mask")
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    example = next(model.parameters())
    solved = [fits[number].solve() for number in sorted(fits)]
    return [(torch.from_numpy(matrix).to(example), torch.from_numpy(bias).to(example)) for matrix, bias in solved]


@contextmanager
def _gated(
    model: Any, family: Family, attention: Tensor, activations: Tensor, fits: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[None]:
    """A model whose parts are multiplied by gates."""

    def gate_ffn(number: int, read: Tensor, output: Tensor) -> Tensor:
        value, (matrix, bias) = activations[number].to(output.dtype), fits[number]
        return value * output + (1 - value) * (read @ matrix + bias)

    def gate_attention(number: int) -> Callable[..., Tensor]:
        return lambda _, inputs, output: attention[number].to(output.dtype) * output

    def gate_activation(number: int) -> Callable[..., Tensor]:
        def gate(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            value = activations[number].to(output.dtype)
            return value * output + (1 - value) * inputs[0]

        return gate

    handles: list[Any] = []
    try:
        if family.is_gated:
            handles += _change_ffns(model, family, gate_ffn)
        for number, layer in enumerate(family.layers_of(model)):
            output = find_part(layer, family.projections[-1])
            handles.append(output.register_forward_hook(gate_attention(number)))
            if family.activation is not None:
                activation = find_part(layer, family.activation)
                rule, remedy = "be modules", "name one in the model's configuration"
                is_module = isinstance(activation, nn.Module)
                need(is_module, "shrink-unsupported", "activations", rule, repr(activation), remedy=remedy)
                handles.append(activation.register_forward_hook(gate_activation(number)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def choose_splits(num_layers: int) -> list[tuple[int, int]]:
    """Splits to measure, as the second source chose its 22 of 12 layers.

    All kept; each kind separately down to a third; both together, alternately, down to three quarters.

    Args:
        num_layers: L of the teacher.

    Returns:
        Numbers of kept ``(attention, activations)``.
    """
    count = check_integer("num_layers", num_layers, 1, None)
    fewer = range(count - 1, max(1, -(-count // 3)) - 1, -1)
    steps = range(2, 2 * (count - max(1, -(-3 * count // 4))) + 1)
    both = [(count - step // 2, count - (step + 1) // 2) for step in steps]  # activations go first
    return [(count, count), *((few, count) for few in fewer), *((count, few) for few in fewer), *both]
