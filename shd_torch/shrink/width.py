"""A narrower stream: a model's norms, weights and ends on the axes that it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_ref.shrink.merges import HeadWeights, join_heads, split_heads
from shd_ref.shrink.width import fold_norm, kept_scale
from shd_torch.shrink import families
from shd_torch.shrink.families import Array, Family, Rows, as_array, base_of, find_part, has_part


@dataclass(frozen=True, eq=False)
class Turn:
    """The kept axes and how a norm is written on them."""

    basis: Tensor  # (D, D'): the stream x becomes x @ basis
    norm: str  # as Family.norm
    eps: float  # the norms' small constant

    def normalise(self, stream: Tensor) -> Tensor:
        """What a norm gives before its scale, float64."""
        x = stream.double()
        x = x - x.mean(-1, keepdim=True) if self.norm == "layer" else x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    @cached_property
    def axes(self) -> Array:
        """``basis`` for weights, which are in the host's memory."""
        return as_array(self.basis)

    def report(self) -> dict[str, Any]:
        """What ``shrink.json`` says of the stream."""
        return {"kept": "axes"}

    @torch.no_grad()
    def write_norm(self, norm: Any, rows: Tensor, shift: Array | None = None) -> None:
        """The one scale that a norm keeps, from the normalised rows ``(n, D)`` that it gave."""
        scale = kept_scale(as_array(rows.mT @ rows), self.axes)
        norm.weight.fill_(scale - (1.0 if self.norm == "rms-plus-one" else 0.0))
        if getattr(norm, "bias", None) is not None:
            norm.bias.copy_(torch.zeros_like(norm.bias) if shift is None else torch.from_numpy(shift))

    def read(self, norm: Any, matrix: Array, bias: Array | None) -> Rows:
        """A projection ``(D, E)`` that reads through this norm, on the kept axes."""
        scale = as_array(norm.weight) + (1.0 if self.norm == "rms-plus-one" else 0.0)
        shift = getattr(norm, "bias", None)
        folded, bias = fold_norm(matrix, scale, None if shift is None else as_array(shift), bias)
        return self.axes.T @ folded, bias

    def write(self, matrix: Array, bias: Array | None) -> Rows:
        """A projection ``(F, D)`` that writes to the stream, on the kept axes."""
        return matrix @ self.axes, None if bias is None else bias @ self.axes

    def turn_attention(self, norm: Any, weights: HeadWeights) -> HeadWeights:
        """An attention on the kept axes."""
        changed: dict[str, Any] = {}
        for name in ("query", "key", "value"):
            heads, bias = getattr(weights, name), getattr(weights, f"{name}_bias")
            matrix, moved = self.read(norm, join_heads(heads), None if bias is None else bias.ravel())
            changed[name] = split_heads(matrix, len(heads))
            changed[f"{name}_bias"] = None if moved is None else moved.reshape(len(heads), -1)
        output, output_bias = self.write(weights.output, weights.output_bias)
        return replace(weights, **changed, output=output, output_bias=output_bias)


def check_width(model: nn.Module, family: Family) -> None:
    """Everything outside the layers must write to the stream or read its last norm."""
    assert family.final_norm is not None  # a stream with norms on it is check_channels'
    assert family.norms is not None
    base = base_of(model)
    hidden = len(find_part(family.layers_of(model)[0], f"{family.norms[0]}.weight"))
    for path, axis in family.embeddings:
        if has_part(base, path) and (channels := find_part(base, path).shape[axis]) != hidden:
            message = f"hidden must stay the teacher's where {path} has other channels ({channels}) than the stream"
            raise ShdError("shrink-unsupported", message)
    known = {id(parameter) for parameter in family.layers_of(model).parameters()}
    known |= {id(parameter) for parameter in find_part(base, family.final_norm).parameters()}
    known |= {id(find_part(base, path)) for path, _ in family.embeddings if has_part(base, path)}
    readers = list(final_readers(model, family))
    for _, module in readers:
        known |= {id(parameter) for parameter in module.parameters()}
    others = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    if others or not readers:
        reason = f"{others[0]} is neither an embedding nor a reader" if others else "nothing reads the last norm"
        message = f"hidden must stay the teacher's where {reason} of the stream; got a {type(model).__name__}"
        raise ShdError("shrink-unsupported", message)


def final_readers(model: Any, family: Family) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers that read the last norm: heads and poolers, outside embeddings and layers."""
    hidden = model.config.hidden_size
    inside = {id(module) for module in family.layers_of(model).modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module) not in inside and module.in_features % hidden == 0:
            yield name, module


@torch.no_grad()
def turn_ends(teacher: nn.Module, student: nn.Module, family: Family, turn: Turn, last_rows: Tensor) -> None:
    """Embeddings, the last norm and its readers, on the kept axes, from what the norm gave."""
    base, own = base_of(teacher), base_of(student)
    factor = (turn.basis.shape[0] / turn.basis.shape[1]) ** 0.5 if family.embedding_scale else 1.0
    for path, axis in family.embeddings:
        if has_part(base, path):
            rows = find_part(base, path).detach().double().movedim(axis, -1)
            find_part(own, path).copy_((rows @ turn.basis * factor).movedim(-1, axis))
    assert family.final_norm is not None  # check_width
    norm = find_part(base, family.final_norm)
    shift = None
    for name, module in final_readers(teacher, family):
        target = student.get_submodule(name)
        matrix, bias = families.read_linear(module)
        # A reader of several rows side by side has a chunk for each.
        chunks = matrix.reshape(-1, turn.basis.shape[0], matrix.shape[1])
        turned, moved = zip(*(turn.read(norm, chunk, None) for chunk in chunks), strict=True)
        added = [vector for vector in (bias, *moved) if vector is not None]
        total = np.sum(added, axis=0) if added else None
        if target.bias is None and total is not None:
            # No place for a bias: the last norm keeps the shift that comes nearest to it through this reader.
            shift = np.linalg.lstsq(turned[0].T, total, rcond=None)[0]
            total = None
        families.write_linear(target, np.concatenate(turned), total)
    turn.write_norm(find_part(own, family.final_norm), last_rows, shift)
