"""A narrower stream: one change of basis for every matrix that writes to it or reads it.

With the kept axes B ``(D, D')`` the teacher's stream x is ``x B`` in the student. What writes to it becomes ``W B``.
What reads it becomes ``R^T W``, where a ``Reading`` says how the student's channels stand for what the teacher's
matrix reads. There are two kinds of stream:

- norms read it (Llama, GPT-2, ViT): B holds its principal axes, and a norm's scale and shift fold into what reads it
- norms lie on it (BERT's family), which scale single channels: B holds channels, from which the others are predicted

Embeddings, poolers and heads are the ends of the stream, outside the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from shd_ref.errors import need
from shd_ref.shrink.align import RowSums, choose_change, solve_change
from shd_ref.shrink.heads import HeadWeights
from shd_ref.shrink.kept import kept_scale, predictive_channels
from shd_torch.shrink.calibration import Batch, held_rows, join_rows
from shd_torch.shrink.families import (
    Array,
    Family,
    Rows,
    as_array,
    base_of,
    find_part,
    has_part,
    read_linear,
    write_linear,
)

_KINDS = (nn.Embedding, nn.Linear, nn.LayerNorm)


class Reading(NamedTuple):
    """What the teacher's matrix reads, from the student's channels y: ``scale * (y R^T) + shift``."""

    rows: Array  # R^T, (D', D)
    scale: Array | None  # (D,)
    shift: Array | None  # (D,)

    def __call__(self, matrix: Array, bias: Array | None) -> Rows:
        """A projection ``(..., D, E)`` of the teacher's as the student's."""
        moved = None if self.shift is None else self.shift @ matrix
        scaled = matrix if self.scale is None else self.scale[:, None] * matrix
        return self.rows @ scaled, bias if moved is None else moved if bias is None else moved + bias


@dataclass(frozen=True, eq=False)
class Basis:
    """The kept axes, or channels, of a stream."""

    kept: Tensor  # B, (D, D')
    norm: str  # as Family.norm
    eps: float  # the norms' small constant
    is_folded: bool  # whether norms read the stream, as opposed to lying on it

    @cached_property
    def axes(self) -> Array:
        """``kept`` for weights, which are in the host's memory."""
        return as_array(self.kept)

    def report(self) -> dict[str, Any]:
        channels = {"kept": "channels", "exact": False, "channels": self.axes.argmax(0).tolist()}
        return {"kept": "axes"} if self.is_folded else channels

    def normalise(self, stream: Tensor) -> Tensor:
        """What a norm gives before its scale, float64."""
        x = stream.double()
        x = x - x.mean(-1, keepdim=True) if self.norm == "layer" else x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def write(self, matrix: Array, bias: Array | None) -> Rows:
        """A projection ``(F, D)`` that writes to the stream."""
        return matrix @ self.axes, None if bias is None else bias @ self.axes

    def through(self, norm: Any) -> Reading:
        """What is read through a norm that reads the stream: its scale and shift fold into the matrix."""
        shift = getattr(norm, "bias", None)
        scale = as_array(norm.weight) + (1.0 if self.norm == "rms-plus-one" else 0.0)
        return Reading(self.axes.T, scale, None if shift is None else as_array(shift))

    def predicted(self, rows: Tensor, held: Tensor) -> Reading:
        """What is read of a stream ``(n, D)`` that norms lie on: all channels, predicted from the kept ones."""
        fit = OutputFit(as_array(self.kept.mT), np.zeros(len(self.kept)), None, rows.device)
        fit.add(rows.double() @ self.kept, rows, held)
        matrix, shift = fit.solve()
        return Reading(matrix, None, shift)

    def turn_attention(self, reading: Reading, weights: HeadWeights) -> HeadWeights:
        """An attention that reads and writes the stream."""
        changed: dict[str, Any] = {}
        for name in ("query", "key", "value"):  # each head alone
            heads, biases = reading(getattr(weights, name), getattr(weights, f"{name}_bias"))
            changed |= {name: heads, f"{name}_bias": biases}
        output, output_bias = self.write(weights.output, weights.output_bias)
        return replace(weights, **changed, output=output, output_bias=output_bias)

    @torch.no_grad()
    def write_norm(self, norm: Any, rows: Tensor, shift: Array | None = None) -> None:
        """The one scale that a folded norm keeps, from the normalised rows ``(n, D)`` that it gave."""
        scale = kept_scale(as_array(rows.mT @ rows), self.axes)
        norm.weight.fill_(scale - (1.0 if self.norm == "rms-plus-one" else 0.0))
        if getattr(norm, "bias", None) is not None:
            norm.bias.copy_(torch.zeros_like(norm.bias) if shift is None else torch.from_numpy(shift))


class OutputFit:
    """Sums of one ridge regression from W0 ``(F, D)`` of the closed form, batch by batch.

    Without a ridge, one, or no change at all, is ``chosen`` on samples that are held out.
    """

    def __init__(self, matrix: Array, bias: Array | None, ridge: float | None, device: torch.device) -> None:
        self.start = matrix if bias is None else np.concatenate([matrix, bias[None]])
        self.biased, self.ridge, self.chosen = bias is not None, ridge, ridge
        self._start = torch.from_numpy(self.start).to(device)
        size, like = len(self.start), self._start
        # Of the rows that are fitted, and of those held out: Z^T Z, Z^T (T - Z W0), their number and ||T||^2.
        self._sums: list[list[Any]] = [[like.new_zeros(size, size), torch.zeros_like(like), 0, 0.0] for _ in "fh"]
        self._left = [0.0, 0.0]  # ||T - Z W0||^2 of both

    def add(self, inputs: Tensor, targets: Tensor, held: Tensor) -> None:
        """Rows that count: what the matrix reads ``(n, F)`` and should give ``(n, D)``, and which are held out."""
        z, goal = inputs.double(), targets.double()
        if self.biased:
            z = torch.cat([z, z.new_ones(len(z), 1)], dim=1)
        parts = [(z, goal)] if self.ridge is not None else [(z[some], goal[some]) for some in (~held, held)]
        for at, (read, there) in enumerate(parts):
            sums, rest = self._sums[at], there - read @ self._start
            sums[0] += read.mT @ read
            sums[1] += read.mT @ rest
            sums[2] += len(read)
            sums[3] += float(there.square().sum())
            self._left[at] += float(rest.square().sum())

    def _read_sums(self) -> list[RowSums]:
        return [RowSums(as_array(inner), as_array(cross), *rest) for inner, cross, *rest in self._sums]

    def solve(self) -> Rows:
        fitted, held = self._read_sums()
        if self.ridge is not None:
            change: Array | None = solve_change(fitted, self.ridge, biased=self.biased)
        else:
            change, self.chosen = choose_change(fitted, held, biased=self.biased)
        refitted = self.start if change is None else self.start + change
        return (refitted[:-1], refitted[-1]) if self.biased else (refitted, None)

    def held_error(self) -> float:
        """After ``solve``: the relative error of a fit on held-out rows, or on all where none are held out."""
        fitted, held = self._read_sums()
        at = int(held.rows > 0 and fitted.rows > 0)
        judged, left = (fitted, held)[at], self._left[at]
        if self.chosen is not None:
            change = solve_change(fitted, self.chosen, biased=self.biased)
            left += float((change * (judged.inner @ change - 2.0 * judged.cross)).sum())
        return float(np.sqrt(max(left, 0.0) / judged.size)) if judged.size > 0.0 else 0.0


@torch.no_grad()
def fit_norm(norm: Any, rows: Tensor, goals: Tensor) -> None:
    """Scale and shift of a norm on the stream, one pair a channel, by least squares from rows to goals."""
    x, goal = layer_norm(rows.double(), rows.shape[-1:], eps=norm.eps), goals.double()
    away = x - x.mean(0)
    scale = (away * goal).mean(0) / away.square().mean(0).clamp_min(torch.finfo(x.dtype).tiny)
    norm.weight.copy_(scale)
    norm.bias.copy_((goal - x * scale).mean(0))


def spread(rows: Tensor) -> Tensor:
    """The second moment of rows less their mean, as a share of its trace: all norms count alike."""
    away = rows.double() - rows.double().mean(0)
    moment = away.mT @ away
    return moment / moment.trace().clamp_min(torch.finfo(moment.dtype).tiny)


def check_ends(model: Any, family: Family) -> None:
    """Refuse a model with anything on the stream, outside the layers, that no rule below can narrow."""
    base, width, layers = base_of(model), model.config.hidden_size, family.layers_of(model)
    if family.norms is None:
        for name, module in _outer_modules(model, family).items():
            wide = any(width in parameter.shape for parameter in module.parameters(recurse=False))
            is_known = isinstance(module, _KINDS) and getattr(module, "bias", module) is not None
            rule = "stay the teacher's where anything but tables, norms and biased projections is as wide"
            got = f"{name}, a {type(module).__name__}"
            need(not wide or is_known, "shrink-unsupported", "hidden", rule, got)
        return
    assert family.final_norm is not None  # the norms read the stream, and so does one after the last layer
    find_part(layers[0], f"{family.norms[0]}.weight")  # an error where norms have no scale to fold
    known = {id(parameter) for parameter in layers.parameters()}
    known |= {id(parameter) for parameter in find_part(base, family.final_norm).parameters()}
    for path, axis in family.embeddings:
        if has_part(base, path):
            table = find_part(base, path)
            rule = f"stay the teacher's where {path} has other channels than the stream"
            need(table.shape[axis] == width, "shrink-unsupported", "hidden", rule, table.shape[axis])
            known.add(id(table))
    readers = list(final_readers(model, family))
    for _, module in readers:
        known |= {id(parameter) for parameter in module.parameters()}
    others = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    reason = f"{others[0]} is neither an embedding nor a reader" if others else "nothing reads the last norm"
    rule = f"stay the teacher's where {reason} of the stream"
    need(not others and bool(readers), "shrink-unsupported", "hidden", rule, f"a {type(model).__name__}")


def final_readers(model: Any, family: Family) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers that read the last norm: heads and poolers, outside embeddings and layers."""
    for name, module in _outer_modules(model, family).items():
        if isinstance(module, nn.Linear) and module.in_features % model.config.hidden_size == 0:
            yield name, module


def _outer_modules(model: nn.Module, family: Family) -> dict[str, nn.Module]:
    inside = {id(module) for module in family.layers_of(model).modules()}
    return {name: module for name, module in model.named_modules() if id(module) not in inside}


@torch.no_grad()
def turn_ends(teacher: nn.Module, student: nn.Module, family: Family, basis: Basis, last_rows: Tensor) -> None:
    """Where norms read the stream: embeddings, the last norm and its readers, from what that norm gave."""
    base, own = base_of(teacher), base_of(student)
    factor = (basis.kept.shape[0] / basis.kept.shape[1]) ** 0.5 if family.embedding_scale else 1.0
    for path, axis in family.embeddings:
        if has_part(base, path):
            rows = find_part(base, path).detach().double().movedim(axis, -1)
            find_part(own, path).copy_((rows @ basis.kept * factor).movedim(-1, axis))
    assert family.final_norm is not None  # check_ends
    reading, shift = basis.through(find_part(base, family.final_norm)), None
    for name, module in final_readers(teacher, family):
        target = student.get_submodule(name)
        matrix, bias = read_linear(module)
        # A reader of several rows side by side has a chunk for each.
        chunks = matrix.reshape(-1, basis.kept.shape[0], matrix.shape[1])
        turned, moved = zip(*(reading(chunk, None) for chunk in chunks), strict=True)
        added = [vector for vector in (bias, *moved) if vector is not None]
        total = np.sum(added, axis=0) if added else None
        if target.bias is None and total is not None:
            # No place for a bias: the last norm keeps the shift that comes nearest to it through this reader.
            shift = np.linalg.lstsq(turned[0].T, total, rcond=None)[0]
            total = None
        write_linear(target, np.concatenate(turned), total)
    basis.write_norm(find_part(own, family.final_norm), last_rows, shift)


class _Calls:
    """What modules outside the layers read in a run over all batches, in the order of their calls."""

    def __init__(
        self, model: Any, family: Family, batches: Sequence[Batch], names: Sequence[str] | None = None
    ) -> None:
        self.before: dict[str, list[Tensor]] = {}
        self.after: dict[str, list[Tensor]] = {}
        self.streams: list[Tensor] = []
        handles = [family.layers_of(model)[-1].register_forward_hook(self._note_stream)]
        for name, module in _outer_modules(model, family).items():
            if isinstance(module, _KINDS[1:]) and (names is None or name in names):
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
def write_embeddings(teacher: Any, student: Any, family: Family, batches: Sequence[Batch], basis: Basis) -> None:
    """Where norms lie on the stream: what stands before the layers; weights of other widths stay."""
    own, width = student.state_dict(), len(basis.kept)
    modules, targets = _outer_modules(teacher, family), _outer_modules(student, family)
    for name, tensor in teacher.state_dict().items():
        if name.rpartition(".")[0] in modules and own[name].shape == tensor.shape:
            own[name].copy_(tensor)
    for name, module in modules.items():
        if isinstance(module, nn.Embedding) and module.embedding_dim == width:
            targets[name].weight.copy_(module.weight.double() @ basis.kept)  # type: ignore[operator]
    for name, inputs in _Calls(teacher, family, batches).before.items():
        module, target = teacher.get_submodule(name), targets[name]
        if isinstance(module, nn.LayerNorm) and module.weight.numel() == width:
            rows = join_rows(inputs, batches)
            fit_norm(target, rows.double() @ basis.kept, module(rows).double() @ basis.kept)
        elif isinstance(module, nn.Linear) and module.out_features == width:
            write_linear(target, *basis.write(*read_linear(module)))


@torch.no_grad()
def write_heads(
    teacher: Any,
    student: Any,
    family: Family,
    batches: Sequence[Batch],
    basis: Basis,
    *,
    align: bool,
    ridge: float | None,
) -> None:
    """Where norms lie on the stream: poolers and heads in the order of their calls, as the teacher gives them."""
    width, calls = len(basis.kept), _Calls(teacher, family, batches)
    # Of what the last projection gave, for each token or for each sample: heads on both may run side by side.
    kept = {2: basis.kept, 3: basis.kept}
    for name, inputs in calls.after.items():
        module, target = teacher.get_submodule(name), student.get_submodule(name)
        if inputs[0].shape[-1] != width:
            continue  # it reads something of another width, and is the teacher's
        axes = inputs[0].ndim
        stream = calls.streams[0] if axes == 3 else calls.streams[0][:, 0]
        read_by = basis.kept if torch.equal(inputs[0], stream) else kept[axes]
        rows = join_rows(inputs, batches)
        own = _Calls(student, family, batches, [name]).after[name] if align else []
        if isinstance(module, nn.LayerNorm):
            read = join_rows(own, batches) if align else rows.double() @ read_by
            fit_norm(target, read, module(rows).double() @ read_by)
            continue
        columns: Any = slice(None)  # of its output, those that stay
        if module.out_features == width:
            away = module(rows).double()
            away = away - away.mean(0)
            chosen = predictive_channels(as_array(away.mT @ away), target.out_features)
            kept[axes], columns = torch.from_numpy(chosen).to(rows.device), chosen.argmax(axis=0)
        matrix, bias = read_linear(module)
        reading = replace(basis, kept=read_by).predicted(rows, held_rows(inputs, batches))
        write_linear(target, *reading(matrix[:, columns], None if bias is None else bias[columns]))
        if align:
            fit = OutputFit(*read_linear(target), ridge, rows.device)
            for read, there, batch in zip(own, inputs, batches, strict=True):
                fit.add(batch.rows(read), module(batch.rows(there))[:, columns], batch.held_rows(there))
            write_linear(target, *fit.solve())
