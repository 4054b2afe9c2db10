"""A narrower stream (spec chapter WIDTH): principal axes over all norms, and a layer's weights on the kept ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_torch.shrink.families import Family, base_of, find_part, has_part, read_linear, write_linear
from shd_torch.shrink.heads import leading_phases
from shd_torch.shrink.weights import AttentionWeights


@dataclass(frozen=True, eq=False)
class Turn:
    """The kept axes and how a norm is written on them.

    Attributes:
        basis: ``(D, D')``: the stream x becomes ``x @ basis``.
        norm: as ``Family.norm``.
        eps: the norms' small constant.
    """

    basis: Tensor
    norm: str
    eps: float

    def normalise(self, stream: Tensor) -> Tensor:
        """What a norm gives before its scale, float64."""
        x = stream.double()
        x = x - x.mean(-1, keepdim=True) if self.norm == "layer" else x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def read_norm(self, norm: Any) -> tuple[Tensor, Tensor | None]:
        """A norm's scale and shift."""
        scale = norm.weight.detach().double() + (1.0 if self.norm == "rms-plus-one" else 0.0)
        shift = getattr(norm, "bias", None)
        return scale, None if shift is None else shift.detach().double()

    @torch.no_grad()
    def write_norm(self, norm: Any, rows: Tensor, shift: Tensor | None = None) -> None:
        """The one scale that a norm keeps (WIDTH-5), from the normalised rows ``(n, D)`` that it gave."""
        total = rows.square().sum()
        energy = (rows @ self.basis).square().sum() / total if total > 0 else total + 1.0
        scale = float((energy * self.basis.shape[0] / self.basis.shape[1]).sqrt())
        norm.weight.fill_(scale - (1.0 if self.norm == "rms-plus-one" else 0.0))
        if getattr(norm, "bias", None) is not None:
            norm.bias.copy_(torch.zeros_like(norm.bias) if shift is None else shift)

    def read(self, norm: Any, matrix: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A projection ``(..., D, E)`` that reads through this norm, on the kept axes (WIDTH-1, WIDTH-2)."""
        scale, shift = self.read_norm(norm)
        if shift is not None:
            moved = shift @ matrix
            bias = moved if bias is None else bias + moved
        return self.basis.mT @ (scale[:, None] * matrix), bias

    def turn_attention(self, norm: Any, weights: AttentionWeights) -> AttentionWeights:
        """An attention on the kept axes."""
        query, query_bias = self.read(norm, weights.query, weights.query_bias)
        key, key_bias = self.read(norm, weights.key, weights.key_bias)
        value, value_bias = self.read(norm, weights.value, weights.value_bias)
        return replace(
            weights,
            query=query,
            key=key,
            value=value,
            output=weights.output @ self.basis,
            query_bias=query_bias,
            key_bias=key_bias,
            value_bias=value_bias,
            output_bias=None if weights.output_bias is None else weights.output_bias @ self.basis,
        )


def principal_axes(moment: Tensor, width: int, norm: str) -> Tensor:
    """``(D, width)``: the axes that hold most of the moment; for a LayerNorm with rows of mean zero (WIDTH-3, -4)."""
    channels = len(moment)
    layer = norm == "layer"
    if layer and width < 2:
        raise ShdError("argument-value", f"hidden must be at least 2 with LayerNorms; got {width}", "WIDTH-4")
    start = _contrasts(channels, moment) if layer else torch.eye(channels, dtype=moment.dtype, device=moment.device)
    values, vectors = torch.linalg.eigh(start.mT @ ((moment + moment.mT) / 2) @ start)
    kept = start @ vectors[:, values.argsort(descending=True, stable=True)[: width - layer]]
    basis: Tensor = kept * leading_phases(kept)
    return basis @ _contrasts(width, moment).mT if layer else basis


def _contrasts(size: int, like: Tensor) -> Tensor:
    """``(size, size - 1)``: an orthonormal basis of what is orthogonal to the ones."""
    ones = torch.ones(size, 1, dtype=like.dtype, device=like.device)
    rest = torch.eye(size, dtype=like.dtype, device=like.device)[:, 1:]
    axes: Tensor = torch.linalg.qr(torch.cat([ones, rest], 1))[0]
    return axes[:, 1:]


def check_width(model: nn.Module, family: Family) -> None:
    """Everything outside the layers must write to the stream or read its last norm (WIDTH-1, WIDTH-2)."""
    if family.norms is None or family.final_norm is None:
        raise ShdError(
            "shrink-unsupported",
            "hidden must stay the teacher's where norms lie on the stream (post-norm): their scale has no "
            f"next matrix to fold into; got a {type(model).__name__}",
            "WIDTH-2",
        )
    base = base_of(model)
    known = {id(parameter) for parameter in family.layers_of(model).parameters()}
    known |= {id(parameter) for parameter in find_part(base, family.final_norm).parameters()}
    known |= {id(find_part(base, path)) for path, _ in family.embeddings if has_part(base, path)}
    readers = list(final_readers(model, family))
    for _, module in readers:
        known |= {id(parameter) for parameter in module.parameters()}
    open_names = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    if open_names or not readers:
        raise ShdError(
            "shrink-unsupported",
            "hidden must stay the teacher's where "
            + (
                f"{open_names[0]} is neither an embedding nor a reader"
                if open_names
                else "nothing reads the last norm"
            )
            + f" of the stream; got a {type(model).__name__}",
            "WIDTH-1",
        )


def final_readers(model: Any, family: Family) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers that read the last norm: heads and poolers, outside embeddings and layers."""
    hidden = model.config.hidden_size
    inside = {id(module) for module in family.layers_of(model).modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module) not in inside and module.in_features % hidden == 0:
            yield name, module


@torch.no_grad()
def turn_ends(teacher: nn.Module, student: nn.Module, family: Family, turn: Turn, last_rows: Tensor) -> None:
    """Embeddings, the last norm and its readers, on the kept axes (WIDTH-1, -5, -6).

    Args:
        teacher: the source.
        student: of the same class, narrower.
        family: of both.
        turn: the axes.
        last_rows: what the last norm gives before its scale ``(n, D)``.
    """
    base, own = base_of(teacher), base_of(student)
    factor = (turn.basis.shape[0] / turn.basis.shape[1]) ** 0.5 if family.embedding_scale else 1.0
    for path, axis in family.embeddings:
        if has_part(base, path):
            given = find_part(base, path).detach().double().movedim(axis, -1)
            find_part(own, path).copy_((given @ turn.basis * factor).movedim(-1, axis))
    assert family.final_norm is not None  # check_width
    norm = find_part(base, family.final_norm)
    shift = None
    for name, module in final_readers(teacher, family):
        target = student.get_submodule(name)
        matrix, bias = read_linear(module)
        chunks = matrix.reshape(
            -1, turn.basis.shape[0], matrix.shape[1]
        )  # a reader of several rows side by side has several
        turned, moved = zip(*(turn.read(norm, chunk, None) for chunk in chunks), strict=True)
        added = [part for part in (bias, *moved) if part is not None]
        total = torch.stack(added).sum(0) if added else None
        if target.bias is None and total is not None:
            # No place for a bias: the last norm keeps the shift that comes nearest to it through this reader.
            shift = torch.linalg.lstsq(turned[0].mT, total[:, None]).solution[:, 0]
            total = None
        write_linear(target, torch.cat(turned), total)
    turn.write_norm(find_part(own, family.final_norm), last_rows, shift)
