"""Further teachers, whose logits are averaged with the first's in one pass (CACHE-163).

Their graphs stand next to the first teacher's in one graph, on the same inputs. The mean is taken of a batch's
logits, on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import AveragedTeacher
from shd_ref.cache.codecs.logits import check_padding
from shd_ref.errors import ShdError, need
from shd_ref.teacher.graph.targets import LOGITS, TargetTensors, dtype_of, find_targets
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.opening.model import hash_teacher, onnx, opset_version
from shd_ref.teacher.options import PrecomputeOptions

_MOST_BYTES: Final = 2**60
"""Weights in files of several folders: no session maps those, so they are read."""


@dataclass(frozen=True, eq=False)
class OtherTeacher:
    """A teacher of which only its logits are needed: ``tensor`` of its graph, ``role`` among the targets of a run."""

    path: Path
    model: onnx.ModelProto
    tensor: str
    role: str

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"--with-teacher {self.path}"

    def describe(self, columns: int, vocab_size: int) -> AveragedTeacher:
        """Its part of the manifest, where it gives so many classes, padding included."""
        dtype = dtype_of(self.model, (), TargetTensors({LOGITS: self.tensor}))
        padded = columns if columns > vocab_size else None
        return AveragedTeacher(hash_teacher(self.path), self.path.name, dtype, self.tensor, padded)


def open_others(first: Path, options: PrecomputeOptions) -> tuple[OtherTeacher, ...]:
    """The further teachers, each by its file; their logits have the usual name, or else the first teacher's."""
    paths, others = options.with_teachers, []
    distinct = len({path.resolve() for path in (first, *paths)}) == 1 + len(paths)
    rule, got = "name each teacher once, and not the first", ", ".join(map(str, paths))
    need(distinct, "argument-value", "with_teachers", rule, got, spec_id="CACHE-163")
    for number, path in enumerate(paths, 1):
        with naming(f"--with-teacher {path}"):
            model = load_teacher(path, inline_bytes=_MOST_BYTES)
            try:
                targets = find_targets(model, (), PrecomputeOptions(logits=options.logits))
            except ShdError:
                if options.logits_output is None:
                    raise
                as_first = PrecomputeOptions(logits=options.logits, logits_output=options.logits_output)
                targets = find_targets(model, (), as_first)
        others.append(OtherTeacher(path, model, targets.names[LOGITS], f"{LOGITS}-{number}"))
    return tuple(others)


def join_graphs(model: onnx.ModelProto, others: Sequence[OtherTeacher]) -> dict[str, str]:
    """Append the graphs of others to the first teacher's, in place; their logits there, by role.

    Inputs of one name are one input, in the first teacher's type.
    """
    names = {}
    for other in others:
        rule, got = f"use ONNX operator set {opset_version(model)}, as the first teacher", opset_version(other.model)
        need(got == opset_version(model), "graph-unsupported", other.label, rule, f"{got}: export both alike")
        prefix = f"squeezing_heads/{other.role}/"
        added = onnx.compose.add_prefix(other.model, prefix).graph
        filled = {tensor.name for tensor in added.initializer}
        for value in (value for value in added.input if value.name not in filled):
            shared = value.name.removeprefix(prefix)
            kind = value.type.tensor_type.elem_type
            model.graph.node.append(onnx.helper.make_node("Cast", [shared], [value.name], name=value.name, to=kind))
            if all(existing.name != shared for existing in model.graph.input):
                value.name = shared
                model.graph.input.append(value)
        model.graph.node.extend(added.node)
        model.graph.initializer.extend(added.initializer)
        model.graph.output.extend(value for value in added.output if value.name == prefix + other.tensor)
        domains = {entry.domain for entry in model.opset_import}
        model.opset_import.extend(entry for entry in other.model.opset_import if entry.domain not in domains)
        names[other.role] = prefix + other.tensor
    return names


def check_masks(others: Sequence[OtherTeacher], masks: Sequence[str | None]) -> None:
    """Refuse a teacher without a mask that the first one has: padding would change its logits."""
    for other in others:
        inputs = [value.name for value in other.model.graph.input]
        for mask in filter(None, masks):
            got = f"{', '.join(inputs)}: export it with its mask, or padding would change its logits"
            need(mask in inputs, "inputs-invalid", other.label, f"take {mask}, as the first teacher does", got)


def average_logits(
    logits: Sequence[NDArray[np.float32]],
    others: Sequence[OtherTeacher],
    mask: NDArray[np.bool_] | None,
    options: PrecomputeOptions,
) -> NDArray[np.float32]:
    """The mean of the first teacher's logits of a batch and of the others', of the classes that count."""
    first, columns = logits[0], logits[0].shape[-1]
    size = columns if options.vocab_size is None else options.vocab_size
    if size > columns:
        return first  # refused with its own message
    counted = mask if mask is not None and first.shape[:-1] == mask.shape else None
    for label, array in zip(("the first teacher", *(other.label for other in others)), logits, strict=True):
        rule, got = f"give logits for the first teacher's samples and positions, {first.shape[:-1]}", array.shape[:-1]
        remedy = "export both with the same head"
        need(got == first.shape[:-1], "graph-unsupported", label, rule, got, remedy=remedy, spec_id="CACHE-163")
        remedy = "take teachers of one vocabulary; where one pads it, say how many classes count (--vocab-size)"
        rule, got = f"have the first teacher's classes for a mean of logits, {size}", array.shape[-1]
        fits = got == size or (got > size and options.vocab_size is not None)
        need(fits, "argument-value", label, rule, got, remedy=remedy, spec_id="CACHE-163")
        if got > size:
            # Padding must have no mass where its row is finite; other rows are faults of their sample.
            rows = array.reshape(-1, got) if counted is None else array[counted]
            with naming(label):
                check_padding(rows[np.isfinite(rows[:, :size]).all(axis=-1)], size, options.logits_temperature)
    total = first[..., :size].copy()
    for array in logits[1:]:
        total += array[..., :size]
    total /= np.float32(len(logits))
    return total


@contextmanager
def naming(who: str) -> Iterator[None]:
    """Name the teacher in its errors."""
    try:
        yield
    except ShdError as error:
        named = ShdError(error.code, f"{who}: {error}")
        named.spec_id = error.spec_id
        raise named from error
