"""Which attention blocks and activations matter, and how good students without some of them are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.cache.storage.documents import read_json
from shd_ref.cache.storage.drafts import drafting, output_file
from shd_ref.errors import ShdError, need
from shd_ref.integers import check_integer, check_number
from shd_ref.shrink.kept import most_important
from shd_torch.shrink.custom import Dropped
from shd_torch.shrink.families import Family, family_of, find_part
from shd_torch.shrink.sizes import count_parameters, sizes_of
from shd_torch.shrink.student import shrink

PARTS = ("attention", "activations")


@dataclass(frozen=True)
class Ranking:
    """How much a loss depends on each attention block and each activation.

    The two kinds are never compared: gradients of attention are smaller by orders of magnitude, by construction.

    Attributes:
        attention: importance of each layer's attention, at least 0.
        activations: of each layer's activation; empty where FFNs are gated.
        disparity: mean gradient of the gates on activations over that of the gates on attention; None without both.
            It shows how misleading a joint ranking would be.
    """

    attention: tuple[float, ...]
    activations: tuple[float, ...]
    disparity: float | None

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


class Gates(nn.Module):
    """One number per layer and kind, 1 at first, that multiplies what its part adds.

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
        self.attention, self.activations = (nn.Parameter(ones.to(like.device)) for ones in made)
        self._kept: dict[str, int | None] = dict.fromkeys(PARTS)
        self._importance = {kind: torch.zeros_like(getattr(self, kind)) for kind in PARTS}
        self._gradient = {kind: torch.zeros_like(getattr(self, kind)) for kind in PARTS}
        self._count = 0

    def keep(self, *, attention: int | None = None, activations: int | None = None) -> None:
        """How many gates of each kind are open from now on: those with the largest numbers; None for all."""
        for kind, count in zip(PARTS, (attention, activations), strict=True):
            most = len(getattr(self, kind))
            self._kept[kind] = None if count is None else check_integer(kind, count, 0, most)

    def value(self, kind: str, layer: int) -> Tensor:
        """A gate as it multiplies: 1 or 0, with the gradient of its number."""
        scores: Tensor = getattr(self, kind)
        count = self._kept[kind]
        rank = scores.detach().argsort(descending=True, stable=True).argsort()[layer]
        is_open = torch.ones_like(scores[layer]) if count is None else (rank < count).to(scores.dtype)
        return is_open + (scores[layer] - scores[layer].detach())

    def observe(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Count the gradients of one batch towards the importance; by default those of ``backward``."""
        for kind in PARTS:
            scores = getattr(self, kind)
            gradient = scores.grad if gradients is None else gradients[kind]
            if gradient is None and len(scores):
                message = "gates must have a gradient: call backward on the loss before observe"
                raise ShdError("argument-value", message)
            if gradient is not None:
                self._gradient[kind] += gradient.abs()
                self._importance[kind] += (gradient * scores.detach()).abs()
        self._count += 1

    def rank(self) -> Ranking:
        """The mean over all batches that were observed."""
        need(self._count > 0, "argument-value", "gates", "observe a batch before they rank", "none")
        attention, activations = ((self._importance[kind] / self._count).tolist() for kind in PARTS)
        means = [float(self._gradient[kind].mean()) for kind in PARTS]
        if not torch.isfinite(torch.cat([*self._importance.values()])).all():
            raise ShdError("not-finite", "the loss must have finite gradients; got NaN or infinity")
        disparity = means[1] / means[0] if activations and means[0] > 0 else None
        return Ranking(tuple(attention), tuple(activations), disparity)


@contextmanager
def gate_layers(model: Any) -> Iterator[Gates]:
    """A Hugging Face model of a known family with gates; open ones change nothing. They are gone afterwards.

    Train them, with or without the model, under ``keep``; call ``observe`` after each ``backward``; then ``rank``.

    Raises:
        ShdError: ``shrink-unsupported``.
    """
    family = family_of(model)
    layers = family.layers_of(model)
    gates = Gates(len(layers), has_activations=not family.is_gated, like=next(model.parameters()))
    handles: list[Any] = []
    try:
        for number, layer in enumerate(layers):
            output = find_part(layer, family.projections[-1])
            handles.append(output.register_forward_hook(_gate(gates, number, is_activation=False)))
            if not family.is_gated:
                activation = _activation(layer, family)
                handles.append(activation.register_forward_hook(_gate(gates, number, is_activation=True)))
        yield gates
    finally:
        for handle in handles:
            handle.remove()


def _activation(layer: nn.Module, family: Family) -> nn.Module:
    assert family.activation is not None  # is_gated
    activation = find_part(layer, family.activation)
    if not isinstance(activation, nn.Module):
        message = f"the model's activations must be modules; got {activation!r}: name one in its configuration"
        raise ShdError("shrink-unsupported", message)
    return activation


def _gate(gates: Gates, layer: int, *, is_activation: bool) -> Callable[..., Tensor]:
    def gate(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        value = gates.value(PARTS[is_activation], layer).to(output.dtype)
        return value * output + (1 - value) * inputs[0] if is_activation else value * output

    return gate


def rank_layers(
    model: Any,
    batches: Iterable[Mapping[str, Tensor]],
    loss: Callable[[Any, Mapping[str, Tensor]], Tensor] | None = None,
) -> Ranking:
    """Importance of every attention block and activation of a trained model, without training.

    Args:
        model: of a known family; its weights and their gradients are not changed.
        batches: inputs by name, on the model's device; start with 16 batches.
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
            numbers = {kind: getattr(gates, kind) for kind in PARTS}
            for batch in batches:
                value = model(**batch).loss if loss is None else loss(model, batch)
                if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
                    got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                    rule = f"the loss must be one number that depends on the model; got {got}"
                    raise ShdError("argument-value", f"{rule}: give batches with labels, or a loss")
                gradients = torch.autograd.grad(value, [*numbers.values()], allow_unused=True, materialize_grads=True)
                gates.observe(dict(zip(PARTS, gradients, strict=True)))
            return gates.rank()
    finally:
        model.train(mode)


FORMAT = 1
Split = tuple[int, int]
Point = tuple[float, float, float]


def choose_splits(num_layers: int) -> list[Split]:
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


def measure_splits(
    teacher: nn.Module,
    data: Mapping[str, Any],
    ranking: Ranking,
    splits: Sequence[Split],
    quality: Callable[[Any], float],
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    **sizes: Any,
) -> list[Point]:
    """Build a student for each split and measure its quality with your function, usually after a short fine-tune.

    Points are saved one by one; the same call resumes after the last one.

    Args:
        teacher: as in ``shrink``.
        data: the calibration set, as in ``shrink``.
        ranking: the order in which parts are dropped, within each kind: from ``rank_layers``.
        splits: numbers of kept ``(attention, activations)``; see ``choose_splits``.
        quality: function of the student, in evaluation mode, which it may modify; returns a finite number, higher is
            better. PyTorch's seed is set before each call, so points are independent of each other.
        out: a JSON file, new or from an earlier run.
        seed: of every call.
        progress: called with one line per split.
        **sizes: other options of ``shrink``, such as ``heads``; the same for every split.

    Returns:
        Rows ``(attention ratio, activation ratio, quality)`` in the order of the splits, with ratios of kept parts,
        as for ``shd_ref.shrink.predictor.fit_predictor``.

    Raises:
        ShdError: what ``shrink`` raises; ``argument-value`` for a split, a quality, or points of other arguments;
            ``read-failed``, ``write-failed``.

    Source: MAP of the second source.
    """
    file = output_file(out)
    family = family_of(teacher)
    own = sizes_of(teacher.config, family)
    num_layers = own.layers
    rule = f"be of the teacher's {num_layers} layers"
    need(len(ranking.attention) == num_layers, "argument-value", "ranking", rule, f"one of {len(ranking.attention)}")
    is_whole = not family.is_gated or all(activations == num_layers for _, activations in splits)
    rule = f"keep all {num_layers} activations where FFNs are gated"
    need(is_whole, "shrink-unsupported", "splits", rule, splits)
    dropped = [ranking.drop(attention=a, activations=None if family.is_gated else t) for a, t in splits]
    keys = [json.dumps([list(lacks.attention), list(lacks.activations)]) for lacks in dropped]
    head = {
        "format": FORMAT,
        "teacher": own.__dict__ | {"parameters": count_parameters(teacher)},
        "options": json.loads(json.dumps(sizes, default=str)),
        "seed": check_integer("seed", seed, 0, None),
    }
    measured = _read_points(file, head)
    for number, (split, lacks, key) in enumerate(zip(splits, dropped, keys, strict=True)):
        if key not in measured:
            without: dict[str, Any] = {"drop_attention": lacks.attention, "drop_activations": lacks.activations}
            student = shrink(teacher, data, **without, **sizes).student
            torch.manual_seed(seed)
            measured[key] = check_number("quality", quality(student))
            points = [{"dropped": json.loads(name), "quality": value} for name, value in measured.items()]
            with drafting(file) as draft:  # a run that is killed leaves the last one
                draft.write_text(json.dumps(head | {"points": points}, indent=1) + "\n", encoding="utf-8")
        if progress is not None:
            kept = f"{split[0]} attention blocks, {split[1]} activations"
            progress(f"split {number + 1} of {len(splits)}: {kept}: {measured[key]:g}")
    return [(a / num_layers, t / num_layers, measured[key]) for (a, t), key in zip(splits, keys, strict=True)]


def _read_points(path: Path, head: dict[str, Any]) -> dict[str, float]:
    """Qualities by what was dropped, from an earlier run with the same arguments."""
    if not path.exists():
        return {}
    try:
        file = read_json(path)
        other = [name for name, value in head.items() if file[name] != value]
        points = {json.dumps(point["dropped"]): float(point["quality"]) for point in file["points"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"out must be new, or points of measure_splits; got {str(path)!r}: {error!r}"
        raise ShdError("read-failed", message) from error
    rule = f"be new, or hold points of the same {' and '.join(other)}"
    need(not other, "argument-value", "out", rule, repr(str(path)), remedy="name another file")
    return points
