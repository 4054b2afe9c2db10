"""A narrower stream where norms lie on it: kept channels, from which the others are predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from shd_ref.errors import ShdError
from shd_ref.shrink.align import HELD_OUT
from shd_ref.shrink.width import predictive_channels
from shd_torch.shrink.calibration import Batch, join_rows
from shd_torch.shrink.families import Array, Family, Rows, as_array, read_linear, write_linear
from shd_torch.shrink.heads import OutputFit
from shd_torch.shrink.width import Turn

_KINDS = (nn.Embedding, nn.Linear, nn.LayerNorm)


class Channels(Turn):
    """Kept channels of a stream with norms on it; in place of a norm there is a prediction of the whole stream."""

    def report(self) -> dict[str, Any]:
        """The channels, where single ones are kept."""
        return {"kept": "channels", "exact": False, "channels": self.axes.argmax(0).tolist()}

    def read(self, norm: Any, matrix: Array, bias: Array | None) -> Rows:
        """A projection ``(D, E)`` that reads the whole stream, as one that reads the kept channels."""
        predicted, shift = norm
        moved = shift @ matrix
        return predicted @ matrix, moved if bias is None else bias + moved


def predict_stream(basis: Tensor, rows: Tensor, held: Tensor) -> Rows:
    """The whole rows ``(n, D)`` from their kept channels: a matrix ``(D', D)`` and a shift."""
    fit = OutputFit(as_array(basis.mT), np.zeros(len(basis)), None, rows.device)
    fit.add(rows.double() @ basis, rows, held)
    return fit.solve()


@torch.no_grad()
def fit_norm(norm: Any, rows: Tensor, goals: Tensor) -> None:
    """Scale and shift of a student's norm, a pair per channel, by least squares from rows to goals ``(n, D')``."""
    x, goal = layer_norm(rows.double(), rows.shape[-1:], eps=norm.eps), goals.double()
    away = x - x.mean(0)
    scale = (away * goal).mean(0) / away.square().mean(0).clamp_min(torch.finfo(x.dtype).tiny)
    norm.weight.copy_(scale)
    norm.bias.copy_((goal - x * scale).mean(0))


def check_channels(model: Any, family: Family) -> None:
    """Outside the layers, what is as wide as the stream is a table, a norm, or a projection with a bias."""
    width = model.config.hidden_size
    for name, module in _outer_modules(model, family).items():
        wide = any(width in parameter.shape for parameter in module.parameters(recurse=False))
        if wide and (not isinstance(module, _KINDS) or getattr(module, "bias", module) is None):
            rule = "hidden must stay the teacher's where anything but tables, norms and biased projections is as wide"
            raise ShdError("shrink-unsupported", f"{rule}; got {name}, a {type(module).__name__}")


def _outer_modules(model: nn.Module, family: Family) -> dict[str, nn.Module]:
    """Modules outside the layers, by name."""
    inside = {id(module) for module in family.layers_of(model).modules()}
    return {name: module for name, module in model.named_modules() if id(module) not in inside}


def spread(rows: Tensor) -> Tensor:
    """The second moment of rows less their mean, as a share of its trace: all norms count alike."""
    away = rows.double() - rows.double().mean(0)
    moment = away.mT @ away
    return moment / moment.trace().clamp_min(torch.finfo(moment.dtype).tiny)


def held_rows(tensors: Sequence[Tensor], batches: Sequence[Batch]) -> Tensor:
    """Which of these rows belong to held-out samples: boolean ``(n,)``."""
    pairs = zip(tensors, batches, strict=True)
    held = [
        batch.held_rows if tensor.ndim == 3 else (torch.arange(len(tensor)) + batch.first) % HELD_OUT == HELD_OUT - 1
        for tensor, batch in pairs
    ]
    return torch.cat([rows.to(tensors[0].device) for rows in held])


class _Calls:
    """What modules outside the layers read in a run over all batches, in the order of their calls."""

    def __init__(
        self, model: Any, family: Family, batches: Sequence[Batch], names: Sequence[str] | None = None
    ) -> None:
        self.before: dict[str, list[Tensor]] = {}
        self.after: dict[str, list[Tensor]] = {}
        self.streams: list[Tensor] = []
        layers = family.layers_of(model)
        outer = {
            name: module for name, module in _outer_modules(model, family).items() if isinstance(module, _KINDS[1:])
        }
        handles = [layers[-1].register_forward_hook(self._note_stream)]
        for name, module in outer.items():
            if names is None or name in names:
                handles.append(module.register_forward_pre_hook(self._noting(name)))
        try:
            for self._number, batch in enumerate(batches):
                model(**batch.inputs)
        finally:
            for handle in handles:
                handle.remove()

    def _noting(self, name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            calls = self.before if len(self.streams) == self._number else self.after
            calls.setdefault(name, []).append(args[0].detach())

        return note

    def _note_stream(self, _: nn.Module, __: Any, output: Any) -> None:
        self.streams.append((output[0] if isinstance(output, tuple) else output).detach())


@torch.no_grad()
def write_ends(teacher: Any, student: Any, family: Family, batches: Sequence[Batch], turn: Channels) -> None:
    """What lies before the layers, on the kept channels; weights of other widths stay."""
    own, width = student.state_dict(), len(turn.basis)
    modules, targets = _outer_modules(teacher, family), _outer_modules(student, family)
    for name, tensor in teacher.state_dict().items():
        if name.rpartition(".")[0] in modules and own[name].shape == tensor.shape:
            own[name].copy_(tensor)
    for name, module in modules.items():
        if isinstance(module, nn.Embedding) and module.embedding_dim == width:
            targets[name].weight.copy_(module.weight.double() @ turn.basis)  # type: ignore[operator]
    for name, inputs in _Calls(teacher, family, batches).before.items():
        module, target = teacher.get_submodule(name), targets[name]
        if isinstance(module, nn.LayerNorm) and module.weight.numel() == width:
            rows = join_rows(inputs, batches)
            fit_norm(target, rows.double() @ turn.basis, module(rows).double() @ turn.basis)
        elif isinstance(module, nn.Linear) and module.out_features == width:
            write_linear(target, *turn.write(*read_linear(module)))


@torch.no_grad()
def write_heads(
    teacher: Any,
    student: Any,
    family: Family,
    batches: Sequence[Batch],
    turn: Channels,
    *,
    align: bool,
    ridge: float | None,
) -> None:
    """Poolers and heads in the order of their calls, towards what the teacher's give."""
    width, calls = len(turn.basis), _Calls(teacher, family, batches)
    # Of what the last projection gave, for each token or for each sample: heads on both may run side by side.
    bases = {2: turn.basis, 3: turn.basis}
    for name, inputs in calls.after.items():
        module, target = teacher.get_submodule(name), student.get_submodule(name)
        if inputs[0].shape[-1] != width:
            continue  # it reads something of another width, and is the teacher's
        axes = inputs[0].ndim
        stream = calls.streams[0] if axes == 3 else calls.streams[0][:, 0]
        basis = turn.basis if torch.equal(inputs[0], stream) else bases[axes]
        rows = join_rows(inputs, batches)
        own = _Calls(student, family, batches, [name]).after[name] if align else []
        if isinstance(module, nn.LayerNorm):
            read = join_rows(own, batches) if align else rows.double() @ basis
            fit_norm(target, read, module(rows).double() @ basis)
            continue
        columns: Any = slice(None)  # of its output, those that stay
        if module.out_features == width:
            away = module(rows).double()
            away = away - away.mean(0)
            kept = predictive_channels(as_array(away.mT @ away), target.out_features)
            bases[axes], columns = torch.from_numpy(kept.basis).to(rows.device), kept.basis.argmax(axis=0)
        matrix, bias = read_linear(module)
        prediction = predict_stream(basis, rows, held_rows(inputs, batches))
        write_linear(target, *turn.read(prediction, matrix[:, columns], None if bias is None else bias[columns]))
        fit = OutputFit(*read_linear(target), ridge, rows.device)
        for read, there, batch in zip(own, inputs, batches, strict=False):
            goals = module(join_rows([there], [batch]))[:, columns]
            fit.add(join_rows([read], [batch]), goals, held_rows([there], [batch]))
        if align:
            write_linear(target, *fit.solve())
