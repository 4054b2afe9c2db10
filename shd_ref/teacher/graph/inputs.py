"""The inputs of a graph: what each must hold, which part it plays, and what is fed where the data lack it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import graph_invalid, inputs_invalid
from shd_ref.teacher.opening.model import CONTRIB_DOMAIN, STANDARD_DOMAINS, onnx
from shd_ref.teacher.options import PAD_KEY

Axis: TypeAlias = int | str | None
"""Its size where the graph fixes it, its name, or neither."""

Part: TypeAlias = Literal["data", "mask", "past", "positions", "types", "branch"]
"""Model data; a mask of 0 and 1; keys and values of earlier positions; numbers of positions, and of a
pair's texts; which body to run."""

_PAST: Final = re.compile(r"past([._]|$)|past_key_values", re.IGNORECASE)
TYPES: Final = "token_type_ids"
_BRANCH: Final = frozenset({"use_cache_branch", "use_cache"})
_EARLIER: Final = re.compile(r"past|cache", re.IGNORECASE)
_TOTAL: Final = re.compile(r"total", re.IGNORECASE)
_LENGTH: Final = re.compile(r"seq|length|position", re.IGNORECASE)
_TOLD: Final = re.compile(rf"batch|{_EARLIER.pattern}|{_LENGTH.pattern}", re.IGNORECASE)
_UNNAMED: Final = re.compile(r".*_dynamic_axes_\d+$")
"""As PyTorch names axes that were given by number: after the input, whose name says nothing of them."""


@dataclass(frozen=True)
class InputSpec:
    """One input of a graph; an axis is an int where the graph fixes it."""

    name: str
    dtype: str
    shape: tuple[Axis, ...]

    @property
    def part(self) -> Part:
        """Told by name, type and rank, as exporters write them."""
        kind, rank = np.dtype(self.dtype).kind, len(self.shape)
        if kind == "f" and rank > 2 and _PAST.match(self.name):
            return "past"
        if kind in "iu" and self.name == "position_ids":
            return "positions"
        if kind in "iu" and rank == 2 and self.name == TYPES:
            return "types"
        if kind == "b" and rank < 2 and self.name in _BRANCH:
            return "branch"
        return "mask" if rank == 2 and "mask" in self.name.lower() else "data"


def input_specs(model: onnx.ModelProto) -> tuple[InputSpec, ...]:
    """The inputs that a caller must feed: those of the graph that no initialiser fills."""
    filled = {tensor.name for tensor in model.graph.initializer}
    specs = []
    for value in model.graph.input:
        if value.name in filled:
            continue
        tensor = value.type.tensor_type
        try:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        except KeyError as error:
            raise graph_invalid(
                f"input {value.name!r} of the teacher graph must be a tensor: export it again"
            ) from error
        axes = [axis.dim_value if axis.HasField("dim_value") else axis.dim_param or None for axis in tensor.shape.dim]
        specs.append(InputSpec(value.name, str(np.dtype(dtype)), tuple(axes)))
    return tuple(specs)


@dataclass(frozen=True)
class InputSizes:
    """Sizes of the open axes of a graph's inputs: ``batch`` samples of one ``length``, with nothing before them.

    Equal names are equal sizes, names that are sums the sum, and names of the past 0. A name that tells nothing, or
    none, is the batch on a first axis, else the length; of a past, the batch on its first open axis, else the past.
    """

    batch: int
    length: int

    def fitted(self, specs: Iterable[InputSpec]) -> InputSizes:
        """These sizes, except those that the graph fixes on one input and means for all."""
        batch, length = self.batch, self.length
        for spec in specs:
            if spec.part == "past" or len(spec.shape) < 2:
                continue
            tokens = len(spec.shape) == 2 and np.dtype(spec.dtype).kind in "iub"
            # A first axis of 1 is a frozen batch for every input; other sizes only for tokens.
            if isinstance(spec.shape[0], int) and (spec.shape[0] == 1 or tokens):
                batch = spec.shape[0]
            if tokens and isinstance(spec.shape[1], int):
                length = spec.shape[1]
        return InputSizes(batch, length)

    def shapes(self, specs: Iterable[InputSpec]) -> dict[str, tuple[int, ...]]:
        """The shape of every input at these sizes, by its name."""
        bound: dict[str, int] = {}
        # Of several inputs those of tokens name their axes best.
        ordered = sorted(specs, key=lambda spec: (spec.part == "past", np.dtype(spec.dtype).kind == "f"))
        return {
            spec.name: tuple(
                axis if isinstance(axis, int) else self._size_of(axis, spec, position, bound)
                for position, axis in enumerate(spec.shape)
            )
            for spec in ordered
        }

    def growing(self, specs: Sequence[InputSpec], axis: str) -> dict[str, list[int]]:
        """Places of the axes of every input that grow with one of ``batch`` and ``length``, by its name."""
        more = replace(self, **{axis: getattr(self, axis) + 1}).shapes(specs)
        return {
            name: [position for position, size in enumerate(shape) if size != more[name][position]]
            for name, shape in self.shapes(specs).items()
        }

    def _size_of(self, name: str | None, spec: InputSpec, position: int, bound: dict[str, int]) -> int:
        if spec.part == "past" and (name is None or not _TOLD.search(_UNNAMED.sub("", name))):
            # A stack of keys and values, and of layers, stands before the batch; its size is fixed.
            opened = [number for number, axis in enumerate(spec.shape) if not isinstance(axis, int)]
            return self.batch if position == opened[0] and len(opened) > 1 else 0
        if name is None:
            return self.length if position else self.batch
        if name not in bound:
            bound[name] = self._size_of_name(name, position, bound)
        return bound[name]

    def _size_of_name(self, name: str, position: int, bound: dict[str, int]) -> int:
        terms = [term.strip() for term in name.split("+")]
        if len(terms) > 1:
            # "past + 1" was named after the one token of the export; the axis takes as many as there are.
            return sum(
                (self.length if term == "1" else int(term))
                if term.isdecimal()
                else bound.setdefault(term, self._size_of_name(term, position, bound))
                for term in terms
            )
        if _EARLIER.search(name) and not _TOTAL.search(name):
            return 0
        if "batch" in name.lower():
            return self.batch
        return self.length if position or _LENGTH.search(name) else self.batch


def past_problem(specs: Sequence[InputSpec]) -> str | None:
    """Why a graph cannot run on whole samples, whose past is empty, and what to do about it; None where it can."""
    shapes = InputSizes(1, 1).shapes(specs)
    for spec in specs:
        if spec.part == "past" and 0 not in shapes[spec.name]:
            return (
                f"the graph cannot take {spec.name} empty, as its shape is {list(spec.shape)}; take the graph for "
                "whole samples (decoder_model.onnx beside decoder_with_past_model.onnx), or re-export with an open "
                "past_sequence_length or with use_cache off"
            )
    return None


def with_fixed(specs: Sequence[InputSpec], batch: int | None, length: int | None) -> tuple[InputSpec, ...]:
    """The inputs with their open axes of samples and of positions fixed; None leaves them as they are."""
    shapes = {spec.name: list(spec.shape) for spec in specs}
    for axis, size in (("batch", batch), ("length", length)):
        for name, places in InputSizes(2, 3).growing(specs, axis).items():
            for position in () if size is None else places:
                shapes[name][position] = size
    return tuple(replace(spec, shape=tuple(shapes[spec.name])) for spec in specs)


def batch_axes(specs: Sequence[InputSpec], sizes: InputSizes) -> dict[str, int | None]:
    """Which axis of every input counts samples, by its name; None for an input that all samples share."""
    growing = sizes.growing(specs, "batch")
    fixed = {spec.name: 0 if len(spec.shape) > 1 and spec.shape[0] == sizes.batch else None for spec in specs}
    return {spec.name: next(iter(growing[spec.name]), fixed[spec.name]) for spec in specs}


_SAME_NUMBERS: Final = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_SAME_ROWS: Final = frozenset({"Cast", "DequantizeLinear", "Identity"})
_GATHERS: Final = frozenset({"Gather", "GatherBlockQuantized"})


def count_rows(model: onnx.ModelProto) -> dict[str, int]:
    """Rows of the smallest table that each input, if not computed with first, chooses from; by its name."""
    stated = [(tensor.name, tensor) for tensor in model.graph.initializer]
    stated += [
        (node.output[0], a.t) for node in model.graph.node if node.op_type == "Constant" for a in node.attribute
    ]
    rows = {name: tensor.dims[0] for name, tensor in stated if tensor.dims}
    inputs = {value.name: value.name for value in model.graph.input if value.name not in rows}
    counts: dict[str, int] = {}
    for node in model.graph.node:
        if node.domain not in (*STANDARD_DOMAINS, CONTRIB_DOMAIN) or not node.input:
            continue
        first, *others = node.input
        if node.op_type in _SAME_NUMBERS and first in inputs:
            inputs[node.output[0]] = inputs[first]
        if node.op_type in _SAME_ROWS and first in rows:
            rows[node.output[0]] = rows[first]
        by_rows = node.op_type in _GATHERS and not any(a.name == "axis" and a.i for a in node.attribute)
        if by_rows and first in rows and others[0] in inputs:
            name = inputs[others[0]]
            counts[name] = min(rows[first], counts.get(name, rows[first]))
    return counts


def read_pads(model: onnx.ModelProto) -> dict[str, int]:
    """What inputs of token ids are padded with, by name, where the graph says it."""
    stated = next((entry.value for entry in model.metadata_props if entry.key == PAD_KEY), "")
    names = [value.name for value in model.graph.input if value.name.endswith("input_ids")]
    return dict.fromkeys(names, int(stated)) if re.fullmatch(r"\d{1,9}", stated, re.ASCII) else {}


SUPPLIED: Final[frozenset[Part]] = frozenset({"past", "positions", "types", "branch"})
"""Parts that are supplied where the data lack them."""


class Supply:
    """What is fed beside the data: an empty past, ``position_ids`` by the mask, types of 0, no cache branch."""

    def __init__(self, specs: Sequence[InputSpec]) -> None:
        self._specs = tuple(specs)
        for spec in self._specs:
            if spec.part == "past":
                _check_past(spec)
            elif spec.part == "positions" and len(spec.shape) != 2:
                raise inputs_invalid(
                    f"inputs must hold {spec.name}, since the graph takes it with {len(spec.shape)} axes and only "
                    "(B, L) follows from the attention mask: give it as a column"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the inputs that are supplied, sorted."""
        return tuple(sorted(spec.name for spec in self._specs))

    @property
    def description(self) -> str:
        """What is supplied, in a line; empty for nothing."""
        past = [spec.name for spec in self._specs if spec.part == "past"]
        parts = [f"{past[0]}{f' and {len(past) - 1} more' * (len(past) > 1)} (an empty past)"] if past else []
        parts += [f"{spec.name} (counted from the mask)" for spec in self._specs if spec.part == "positions"]
        parts += [f"{spec.name} (zeros)" for spec in self._specs if spec.part == "types"]
        parts += [f"{spec.name} (false)" for spec in self._specs if spec.part == "branch"]
        return ", ".join(parts)

    def arrays(self, rows: int, length: int, mask: NDArray[Any] | None) -> dict[str, NDArray[Any]]:
        """The arrays of a batch of ``rows`` samples; ``mask`` is ``(B, L)``, None where all are tokens."""
        shapes = InputSizes(rows, length).shapes(self._specs)
        supplied: dict[str, NDArray[Any]] = {}
        for spec in self._specs:
            if spec.part == "positions":
                tokens = np.ones((rows, length), np.int64) if mask is None else mask.astype(np.int64)
                supplied[spec.name] = ((tokens.cumsum(axis=1) - 1) * tokens).astype(spec.dtype)
            else:
                supplied[spec.name] = np.zeros(shapes[spec.name], spec.dtype)
        return supplied


def _check_past(spec: InputSpec) -> None:
    problem = past_problem([spec])
    if problem is not None:
        raise inputs_invalid(f"inputs must hold {spec.name}: {problem}")
    # A stack, (2, B, H, past, d), stands before the batch: heads and width are among the last three axes.
    opened = [position - len(spec.shape) for position, axis in enumerate(spec.shape) if not isinstance(axis, int)]
    if len(opened) > 2 or sum(position >= max(-3, 1 - len(spec.shape)) for position in opened) > 1:
        raise inputs_invalid(
            f"{spec.name} must have open axes for the batch and the past alone, so that it can be fed empty; got "
            f"the shape {list(spec.shape)}: re-export with heads and width fixed, or with use_cache off"
        )
