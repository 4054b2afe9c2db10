"""Further teachers, whose logits are averaged with the first's in one pass (CACHE-163)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import AveragedTeacher
from shd_ref.cache.codecs.logits import check_padding
from shd_ref.errors import ShdError, inputs_invalid, need
from shd_ref.teacher.graph.inputs import SUPPLIED, check_bounds, input_specs
from shd_ref.teacher.graph.targets import TargetTensors, dtype_of, find_targets
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.opening.model import hash_teacher, onnx, take_weights
from shd_ref.teacher.options import PrecomputeOptions, RunOptions
from shd_ref.teacher.rewrite.squeeze import squeeze_graph
from shd_ref.teacher.run.inputs import Batch, ModelInputs, Supply, as_dtype, run_batch
from shd_ref.teacher.session import open_session

_WHO: Final = "--with-teacher {}"


class LogitsTeacher:
    """A teacher of which nothing but its logits is asked; ``columns``, with padding, may be None until it ran."""

    def __init__(self, path: Path, options: PrecomputeOptions, run: RunOptions) -> None:
        self.path = path
        self.who = _WHO.format(path)
        with naming(self.who):
            self.model = load_teacher(path)
            self._targets = _find_logits(self.model, options.logits_output)
        self._options, self._run_options = options, run
        self._specs = {spec.name: spec for spec in input_specs(self.model)}
        self._supply = Supply(())
        self._mask: str | None = None
        self.columns = count_classes(self.model, str(self._targets.logits))

    def fit(self, inputs: ModelInputs) -> None:
        """Refuse inputs that this teacher cannot run on; afterwards it runs on their batches."""
        supplied = [spec for name, spec in self._specs.items() if spec.part in SUPPLIED and name not in inputs.names]
        self._supply, self._mask = Supply(supplied), inputs.mask
        missing = sorted(self._specs.keys() - set(inputs.names) - {spec.name for spec in supplied})
        if missing:
            rule = f"take inputs that the first teacher takes too ({', '.join(inputs.names)})"
            got = f"also {', '.join(missing)}: export both with the same inputs"
            need(False, "inputs-invalid", self.who, rule, got, spec_id="CACHE-36")
        unread = [name for name in (inputs.mask, inputs.decoder_mask) if name not in {None, *self._specs}]
        if unread:
            raise inputs_invalid(
                f"{self.who} must take {unread[0]}, as the first teacher does, or padding would change its logits; "
                f"it takes {', '.join(sorted(self._specs))}: export it with its mask"
            )
        with naming(self.who):
            check_bounds(self.model, [str(self._targets.logits)], lambda: self._feeds(inputs.shortest()))

    def check_classes(self, size: int, *, exact: bool) -> None:
        """Refuse another number of classes, as soon as this teacher's are known."""
        if self.columns is None or self.columns == size or (self.columns > size and not exact):
            return
        remedy = "take teachers of one vocabulary; where one pads it, say how many classes count (--vocab-size)"
        rule = f"have the first teacher's classes for a mean of logits, {size}"
        need(False, "argument-value", self.who, rule, self.columns, remedy=remedy, spec_id="CACHE-163")

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Its logits of a batch, float32 ``(B, L, V)`` or ``(B, V)`` with padding; a fixed batch keeps its fill."""
        session, name = self._graph
        with naming(self.who):
            values = run_batch(session, [name], Batch(batch.indices, batch.lengths, self._feeds(batch)))
        logits: NDArray[np.float32] = values[name]
        self.columns = logits.shape[-1]
        return logits

    def _feeds(self, batch: Batch) -> dict[str, NDArray[Any]]:
        arrays = {
            name: as_dtype(batch.arrays[name], np.dtype(spec.dtype))
            for name, spec in self._specs.items()
            if name in batch.arrays and name not in self._supply.names
        }
        wrong = [name for name, array in arrays.items() if array is None]
        if wrong:
            raise inputs_invalid(
                f"{self.who} must take {wrong[0]} in a type that holds its values; it takes "
                f"{self._specs[wrong[0]].dtype}, and the first teacher's are {batch.arrays[wrong[0]].dtype}"
            )
        mask = None if self._mask is None else batch.arrays[self._mask]
        first = mask if mask is not None else next(iter(batch.arrays.values()))
        supplied = self._supply.arrays(len(first), first.shape[1] if first.ndim > 1 else 1, mask)
        return {name: array for name, array in arrays.items() if array is not None} | supplied

    def describe(self, vocab_size: int) -> AveragedTeacher:
        assert self.columns is not None  # it has run
        tensor = str(self._targets.logits)
        padded = self.columns if self.columns > vocab_size else None
        return AveragedTeacher(
            hash_teacher(self.path), self.path.name, dtype_of(self.model, (), self._targets), tensor, padded
        )

    @functools.cached_property
    def _graph(self) -> tuple[Any, str]:
        model, weights = take_weights(self.model)
        graph, run = squeeze_graph(model, (), targets=self._targets), self._run_options
        session = open_session(graph.model, provider=run.provider, num_threads=run.num_threads, weights=weights)
        return session, str(graph.targets.logits)


def average_logits(
    first: NDArray[np.float32],
    others: Sequence[LogitsTeacher],
    batch: Batch,
    mask: NDArray[np.bool_] | None,
    options: PrecomputeOptions,
) -> NDArray[np.float32]:
    """The mean logits of all teachers on a batch, of the classes that count; ``first`` is overwritten."""
    columns, count = first.shape[-1], len(batch.indices)
    size = columns if options.vocab_size is None else options.vocab_size
    if size > columns:
        return first  # refused with its own message
    by_position = mask is not None and first.shape[:-1] == mask.shape
    counted = mask if by_position else None
    _check_padding("the first teacher", first, size, counted, options)
    total = first[..., :size] if first.flags.writeable else first[..., :size].copy()
    for other in others:
        logits = other.run(batch)[:count]
        other.check_classes(size, exact=options.vocab_size is None)
        given, asked = list(logits.shape[:-1]), list(first.shape[:-1])
        rule = f"give logits for the first teacher's samples and positions, {asked}"
        got = f"{given}: export both with the same head"
        need(given == asked, "graph-unsupported", other.who, rule, got, spec_id="CACHE-163")
        _check_padding(other.who, logits, size, counted, options)
        total += logits[..., :size]
    total /= np.float32(1 + len(others))
    return total


def count_classes(model: onnx.ModelProto, output: str) -> int | None:
    """How many classes an output has, where the graph says it."""
    axes = [value.type.tensor_type.shape.dim for value in model.graph.output if value.name == output]
    return axes[0][-1].dim_value or None if axes and axes[0] else None


def _check_padding(
    who: str, logits: NDArray[np.float32], size: int, counted: NDArray[np.bool_] | None, options: PrecomputeOptions
) -> None:
    """A teacher's padding must have no mass where its row is finite; other rows are faults of their sample."""
    if logits.shape[-1] == size:
        return
    rows = logits.reshape(-1, logits.shape[-1]) if counted is None else logits[counted]
    rows = rows[np.isfinite(rows[:, :size]).all(axis=-1)]
    with naming(who):
        check_padding(rows, size, options.logits_temperature)


def _find_logits(model: onnx.ModelProto, output: str | None) -> TargetTensors:
    """The output of the usual name; where that cannot be told, the one that was named for the first teacher."""
    try:
        return find_targets(model, (), logits=True)
    except ShdError:
        if output is None:
            raise
    return find_targets(model, (), logits=True, output=output)


@contextmanager
def naming(who: str) -> Iterator[None]:
    try:
        yield
    except ShdError as error:
        named = ShdError(error.code, f"{who}: {error}")
        named.spec_id = error.spec_id
        raise named from error
