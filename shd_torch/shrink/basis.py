"""A narrower stream: one change of basis for every matrix that writes to it or reads it.

With the kept axes B ``(D, D')`` the teacher's stream x is ``x B`` in the student. What writes to it becomes ``W B``.
What reads it, always through a norm (Llama, GPT-2, ViT), becomes ``B^T s W`` with the norm's scale s, and the norm's
shift goes into its bias. B holds the principal axes of the stream. Embeddings, poolers and heads are the ends of the
stream, outside the layers. Norms that lie on the stream (BERT) scale single channels: no axes pass through them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.errors import need
from shd_ref.shrink.align import RowSums, choose_change, solve_change
from shd_ref.shrink.heads import HeadWeights
from shd_ref.shrink.kept import kept_scale
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


class Reading(NamedTuple):
    """The teacher's matrix reads ``scale * (y B^T) + shift``, with the student's channels y."""

    rows: Array  # B^T, (D', D)
    scale: Array  # (D,)
    shift: Array | None  # (D,)

    def __call__(self, matrix: Array, bias: Array | None) -> Rows:
        """A projection ``(..., D, E)`` of the teacher's as the student's."""
        if self.shift is not None:
            shifted = self.shift @ matrix
            bias = shifted if bias is None else shifted + bias
        return self.rows @ (self.scale[:, None] * matrix), bias


@dataclass(frozen=True, eq=False)
class Basis:
    """The kept axes of a stream."""

    kept: Tensor  # B, (D, D')
    norm: str  # as Family.norm
    eps: float  # the norms' small constant

    @cached_property
    def axes(self) -> Array:
        """``kept`` for weights, which are in the host's memory."""
        return as_array(self.kept)

    def normalise(self, stream: Tensor) -> Tensor:
        """The output of a norm before its scale, float64."""
        x = stream.double()
        x = x - x.mean(-1, keepdim=True) if self.norm == "layer" else x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def write(self, matrix: Array, bias: Array | None) -> Rows:
        """A projection ``(F, D)`` that writes to the stream."""
        return matrix @ self.axes, None if bias is None else bias @ self.axes

    def through(self, norm: Any) -> Reading:
        """A reading through a norm, whose scale and shift fold into the matrix."""
        shift = getattr(norm, "bias", None)
        scale = as_array(norm.weight) + (1.0 if self.norm == "rms-plus-one" else 0.0)
        return Reading(self.axes.T, scale, None if shift is None else as_array(shift))

    def rotate_attention(self, reading: Reading, weights: HeadWeights) -> HeadWeights:
        """An attention between the kept axes: queries, keys and values read the stream, W_o writes to it."""
        changed: dict[str, Any] = {}
        for name in ("query", "key", "value"):
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
        size, start = len(self.start), self._start
        # Of the rows that are fitted, and of those held out: Z^T Z, Z^T (T - Z W0), their number and ||T||^2.
        self._sums: list[list[Any]] = [
            [start.new_zeros(size, size), torch.zeros_like(start), 0, 0.0] for _ in range(2)
        ]
        self._residuals = [0.0, 0.0]  # ||T - Z W0||^2 of both

    def add(self, inputs: Tensor, targets: Tensor, is_held_out: Tensor) -> None:
        """Rows that count: inputs ``(n, F)`` and targets ``(n, D)`` of the matrix, and which are held out."""
        z, t = inputs.double(), targets.double()
        if self.biased:
            z = torch.cat([z, z.new_ones(len(z), 1)], dim=1)
        # A given ridge needs no rows to choose it by.
        parts = [(z, t)] if self.ridge is not None else [(z[rows], t[rows]) for rows in (~is_held_out, is_held_out)]
        for part, (z, t) in enumerate(parts):
            sums, residual = self._sums[part], t - z @ self._start
            sums[0] += z.mT @ z
            sums[1] += z.mT @ residual
            sums[2] += len(z)
            sums[3] += float(t.square().sum())
            self._residuals[part] += float(residual.square().sum())

    def _read_sums(self) -> list[RowSums]:
        return [RowSums(as_array(inner), as_array(cross), *rest) for inner, cross, *rest in self._sums]

    def solve(self) -> Rows:
        fitted, held_out = self._read_sums()
        if self.ridge is not None:
            change: Array | None = solve_change(fitted, self.ridge, biased=self.biased)
        else:
            change, self.chosen = choose_change(fitted, held_out, biased=self.biased)
        refitted = self.start if change is None else self.start + change
        return (refitted[:-1], refitted[-1]) if self.biased else (refitted, None)

    def held_error(self) -> float:
        """After ``solve``: the relative error of a fit on held-out rows, or on all where none are held out."""
        fitted, held_out = self._read_sums()
        part = int(held_out.rows > 0 and fitted.rows > 0)
        sums, squared = (fitted, held_out)[part], self._residuals[part]
        if self.chosen is not None:
            change = solve_change(fitted, self.chosen, biased=self.biased)
            # ||R - Z C||^2 = ||R||^2 + <C, Z^T Z C - 2 Z^T R>, from sums alone.
            squared += float((change * (sums.inner @ change - 2.0 * sums.cross)).sum())
        return float(np.sqrt(max(squared, 0.0) / sums.size)) if sums.size > 0.0 else 0.0


def check_ends(model: Any, family: Family) -> None:
    """Refuse a model with anything on the stream, outside the layers, that no rule below can narrow."""
    base, width, layers = base_of(model), model.config.hidden_size, family.layers_of(model)
    assert family.norms is not None  # check_refused
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
    width, inside = model.config.hidden_size, {id(module) for module in family.layers_of(model).modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.in_features % width == 0 and id(module) not in inside:
            yield name, module


@torch.no_grad()
def rotate_ends(teacher: nn.Module, student: nn.Module, family: Family, basis: Basis, last_rows: Tensor) -> None:
    """Embeddings, the last norm and its readers, from what that norm gave."""
    base, student_base = base_of(teacher), base_of(student)
    # The student's model multiplies by sqrt(D'), the teacher's by sqrt(D).
    factor = (basis.kept.shape[0] / basis.kept.shape[1]) ** 0.5 if family.embedding_scale else 1.0
    for path, axis in family.embeddings:
        if has_part(base, path):
            rows = find_part(base, path).detach().double().movedim(axis, -1)
            find_part(student_base, path).copy_((rows @ basis.kept * factor).movedim(-1, axis))
    assert family.final_norm is not None  # check_ends
    reading, shift = basis.through(find_part(base, family.final_norm)), None
    for name, module in final_readers(teacher, family):
        target = student.get_submodule(name)
        matrix, bias = read_linear(module)
        # A reader of several concatenated rows has a chunk for each.
        chunks = matrix.reshape(-1, basis.kept.shape[0], matrix.shape[1])
        rotated, shifts = zip(*(reading(chunk, None) for chunk in chunks), strict=True)
        summands = [vector for vector in (bias, *shifts) if vector is not None]
        total = np.sum(summands, axis=0) if summands else None
        if target.bias is None and total is not None:
            # No place for a bias: the last norm keeps the shift that comes nearest to it through this reader.
            shift = np.linalg.lstsq(rotated[0].T, total, rcond=None)[0]
            total = None
        write_linear(target, np.concatenate(rotated), total)
    basis.write_norm(find_part(student_base, family.final_norm), last_rows, shift)
