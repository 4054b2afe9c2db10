"""The inputs of a graph: the type, shape and role of each, and tiny runs that measure sizes of its tensors."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError, graph_invalid, graph_unsupported
from shd_ref.teacher.opening.model import CONTRIB_DOMAIN, STANDARD_DOMAINS, ir, kinds, onnx, take_weights
from shd_ref.teacher.options import PAD_KEY
from shd_ref.teacher.session import open_session, run_bounded

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
"""PyTorch's names of axes that were given by number: the input's name and the number, which mean nothing."""


@dataclass(frozen=True)
class InputSpec:
    """One input of a graph; an axis is an int where the graph fixes it."""

    name: str
    dtype: str
    shape: tuple[Axis, ...]

    @property
    def part(self) -> Part:
        """Read off name, type and rank, as exporters write them."""
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

    @property
    def past_problem(self) -> str | None:
        """Why a past cannot be fed empty, as to a graph of whole samples, and what to do; None where it can."""
        if self.part != "past":
            return None
        if 0 not in InputSizes(1, 1).shapes([self])[self.name]:
            return (
                f"the graph cannot take {self.name} {list(self.shape)} empty: take the graph for whole samples "
                "(decoder_model.onnx, next to decoder_with_past_model.onnx), or re-export with use_cache off"
            )
        # A stack, (2, B, H, past, d), stands before the batch: heads and width are among the last three axes.
        count = len(self.shape)
        opened = [position - count for position, axis in enumerate(self.shape) if not isinstance(axis, int)]
        if len(opened) > 2 or sum(position >= max(-3, 1 - count) for position in opened) > 1:
            return (
                f"{self.name} must have open axes for the batch and the past alone, so that it can be fed empty; got "
                f"{list(self.shape)}: re-export with heads and width fixed, or with use_cache off"
            )
        return None


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

    Equal names are equal sizes, names that are sums the sum, and names of the past 0. A name that means nothing, or
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


_SAME_NUMBERS: Final = kinds("Cast Expand Flatten Identity Reshape Squeeze Transpose Unsqueeze")
_SAME_ROWS: Final = frozenset({"Cast", "DequantizeLinear", "Identity"})
_GATHERS: Final = frozenset({"Gather", "GatherBlockQuantized"})


def count_rows(model: onnx.ModelProto) -> dict[str, int]:
    """Rows of the smallest table that each input, if not computed with first, chooses from; by its name."""
    constants = [(tensor.name, tensor) for tensor in model.graph.initializer]
    constants += [
        (node.output[0], a.t) for node in model.graph.node if node.op_type == "Constant" for a in node.attribute
    ]
    rows = {name: tensor.dims[0] for name, tensor in constants if tensor.dims}
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
    """The padding of inputs of token ids, by name, where the graph has it."""
    pad = next((entry.value for entry in model.metadata_props if entry.key == PAD_KEY), "")
    names = [value.name for value in model.graph.input if value.name.endswith("input_ids")]
    return dict.fromkeys(names, int(pad)) if re.fullmatch(r"\d{1,9}", pad, re.ASCII) else {}


SUPPLIED: Final[frozenset[Part]] = frozenset({"past", "positions", "types", "branch"})
"""Parts that are supplied where the data lack them."""


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Layout: TypeAlias = Literal["batch-heads", "heads-batch", "batch-folded", "heads-folded"]
"""Axes of the map before (L, S): ``B, H``; ``H, B``; ``B * H`` with heads inside; ``H * B`` with samples inside."""

_PROBE_SIZES: Final = InputSizes(batch=2, length=3)  # unlike each other, and not 1, which graphs broadcast
_LONGEST_FROZEN: Final = 4096  # examples that people export with are shorter
_MOST_TRIED: Final = 6  # each with two batches: a graph that fails them all is refused within seconds
_LEAST_SECONDS: Final = 10.0  # a tiny run takes milliseconds, on a busy machine a second
_ENTRIES_PER_SECOND: Final = 2**23  # of weights: a slow disk reads them faster, and a slow core a probe's products
_PAIRS_PER_SECOND: Final = 2**18  # of positions
_LEAST_BYTES: Final = 2**30
_BYTES_PER_ENTRY: Final = 16  # of weights, as they are and packed for products
_BYTES_PER_PAIR: Final = 2**11  # of positions: 512 maps
_NO_MEMORY: Final = "is smaller than requested bytes"  # onnxruntime's message where an arena has a bound
TOO_MUCH: Final = "the graph must run on a few short samples within"
"""How a ``BoundError`` begins."""
_SHAPE: Final = "/probed_shape"  # suffix of the output that holds a tensor's shape
_SHAPE_PLACES: Final = {"Reshape": 1, "Expand": 1, "Tile": 1, "ConstantOfShape": 0}


def frozen_specs(model: onnx.ModelProto, maps: Sequence[ir.Value | None]) -> tuple[InputSpec, ...]:
    """The graph's inputs, with length and batch that a tracer left in its constants, as a run confirms."""
    specs = input_specs(model)
    shaped = [value for value in maps if value is not None and value.shape is not None]
    lengths = {size if isinstance(size, int) else 0 for value in shaped for size in list(value.shape or ())[-2:]}
    if min(lengths, default=0) < 2:
        return specs
    try:
        probe = Probe(model, [str(shaped[0].name)])
    except ShdError:  # nothing is known before a sample runs
        return specs
    sizes, shapes = InputSizes(2, 3), {spec.name: list(spec.shape) for spec in specs}
    for axis, size in (("batch", probe.frozen_batch), ("length", probe.frozen_length)):
        larger = replace(sizes, **{axis: getattr(sizes, axis) + 1}).shapes(specs)
        for name, shape in sizes.shapes(specs).items() if size is not None else ():
            # Axes that grow with it are its own.
            shapes[name] = [
                size if a != b else old for a, b, old in zip(shape, larger[name], shapes[name], strict=True)
            ]
    return tuple(replace(spec, shape=tuple(shapes[spec.name])) for spec in specs)


def probe_tensors(
    model: onnx.ModelProto, names: Collection[str], shapes: Collection[str] = (), sizes: InputSizes = _PROBE_SIZES
) -> tuple[dict[str, NDArray[Any]], dict[str, tuple[int, ...]]]:
    """Tensors, and the shapes of others, of one tiny run of a graph, see ``Probe``; no run for none."""
    if not names and not shapes:
        return {}, {}
    probe = Probe(model, names, sizes, shapes=shapes)
    arrays = probe.run(probe_feeds(probe.specs, probe.sizes, largest=probe.largest))
    return {name: arrays[name] for name in names}, {name: tuple(arrays[name + _SHAPE].tolist()) for name in shapes}


def probe_feeds(specs: Sequence[InputSpec], sizes: InputSizes, *, largest: int = 1) -> dict[str, NDArray[Any]]:
    """Inputs that a graph can run on: masks of ones, an empty past, and data that are all alike."""
    shapes = sizes.fitted(specs).shapes(specs)
    feeds: dict[str, NDArray[Any]] = {}
    for spec in specs:
        shape, dtype = shapes[spec.name], np.dtype(spec.dtype)
        if spec.part == "positions":
            feeds[spec.name] = np.broadcast_to(np.arange(shape[-1]) * min(largest, 1), shape).astype(dtype)
        elif spec.part == "branch":
            feeds[spec.name] = np.zeros(shape, dtype)
        else:
            value = largest if dtype.kind in "iu" and spec.part in ("data", "types") else 1
            feeds[spec.name] = np.full(shape, value, dtype)
    return feeds


class BoundError(ShdError):
    """A graph took too long or too much memory on tiny inputs, and would again."""


class Probe:
    """A graph that runs on tiny inputs and gives any of its tensors, or the ``shapes`` of any, on the CPU.

    Opening it finds sizes that it runs on: a batch of 2 and length 3, those that the graph fixes, or that a tracer
    left in its constants (``frozen_length``, ``frozen_batch``: None where open). The graph is not trusted, and may
    loop for ever or fill the memory: a run ends after 10 seconds and beyond 1 GiB, with more of both for large
    weights (``BoundError``).
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        names: Collection[str],
        sizes: InputSizes = _PROBE_SIZES,
        *,
        shapes: Collection[str] = (),
    ) -> None:
        self.specs = input_specs(model)
        self.sizes = sizes.fitted(self.specs)
        other = InputSizes(sizes.batch + 1, sizes.length + 1).fitted(self.specs)
        self.frozen_length = self.sizes.length if self.sizes.length == other.length else None
        self.frozen_batch = self.sizes.batch if self.sizes.batch == other.batch else None
        self._session = _Bounded(model, names, self.sizes, shapes)
        deadline = time.monotonic() + self._session.seconds
        self.largest, failure = self._try(self.sizes)
        if failure is not None and self.frozen_length is None and _NO_MEMORY in str(failure):
            raise self._session.too_large() from failure
        # Lengths that may be frozen into the constants, each with the probe's batch and with a batch of one.
        lengths = [] if failure is None or self.frozen_length is not None else _frozen_lengths(model)
        batches = dict.fromkeys((self.sizes.batch, 1))
        others = [InputSizes(batch, length).fitted(self.specs) for length in lengths for batch in batches]
        if others:
            longest = max(others, key=lambda sizes: (sizes.length, sizes.batch))
            self._session = _Bounded(model, names, longest, shapes)
        for sizes in others:
            if time.monotonic() > deadline:
                break
            self.largest, problem = self._try(sizes)
            if problem is None:
                self.frozen_length = sizes.length
                self.frozen_batch = self.frozen_batch if sizes.batch == self.sizes.batch else sizes.batch
                self.sizes = sizes
                return
        if failure is not None:
            raise graph_unsupported(
                f"the graph does not run on a probe of batch {self.sizes.batch} and length {self.sizes.length} "
                f"({failure}): {_remedy(self.specs)}"
            )

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The tensors by name, shapes by a longer one, on inputs of ``probe_feeds``; raises what onnxruntime does."""
        return self._session.run(feeds)

    def _try(self, sizes: InputSizes) -> tuple[int, Exception | None]:
        """The integer on which it runs at these sizes, or what went wrong."""
        failure: Exception | None = None
        for largest in (1, 0):  # ids of 1, else of 0: a table of token types may have a single row
            try:
                self.run(probe_feeds(self.specs, sizes, largest=largest))
            except BoundError:
                raise
            except Exception as error:  # onnxruntime raises its own types, which share no base class
                failure = error
                if _NO_MEMORY in str(error):
                    break
            else:
                return largest, None
        return 1, failure


class _Bounded:
    """A session whose runs end after some seconds and beyond some bytes, by weights; a stated length adds little."""

    def __init__(
        self, model: onnx.ModelProto, names: Collection[str], sizes: InputSizes, shapes: Collection[str]
    ) -> None:
        probe, weights = take_weights(model)
        measured = sorted(set(shapes))
        probe.graph.node.extend(onnx.helper.make_node("Shape", [name], [name + _SHAPE]) for name in measured)
        self._names = [*sorted(set(names)), *(name + _SHAPE for name in measured)]
        del probe.graph.output[:]
        probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self._names)
        entries = sum(math.prod(tensor.dims) for tensor in model.graph.initializer)
        pairs = sizes.batch * sizes.length**2  # entries of one head's maps
        self.seconds = _LEAST_SECONDS + entries / _ENTRIES_PER_SECOND
        self.seconds += min(pairs / _PAIRS_PER_SECOND, 8 * entries / _ENTRIES_PER_SECOND)
        self.bytes = _LEAST_BYTES + _BYTES_PER_ENTRY * entries
        self.bytes += min(_BYTES_PER_PAIR * pairs, 8 * _BYTES_PER_ENTRY * entries)
        self._session = open_session(probe, num_threads=1, weights=weights, most_bytes=self.bytes)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        try:
            arrays = [np.asarray(array) for array in run_bounded(self._session, self._names, feeds, self.seconds)]
        except TimeoutError as error:
            raise BoundError(
                "graph-unsupported",
                f"{TOO_MUCH} {self.seconds:.0f} s, and does not: a loop inside it may have no end; export the model "
                "without control flow, or run this on a faster machine",
            ) from error
        if sum(array.nbytes for array in arrays) > _LEAST_BYTES // 4 + (self.bytes - _LEAST_BYTES) // 2:
            raise MemoryError(f"the memory for its outputs {_NO_MEMORY}")  # they are copies, beyond the session's
        return dict(zip(self._names, arrays, strict=True))

    def too_large(self) -> BoundError:
        return BoundError(
            "graph-unsupported",
            f"{TOO_MUCH} {self.bytes >> 20} MiB of memory, and does not: the sizes of its tensors grow beyond "
            "its inputs and weights; copy or export the model again",
        )


def check_bounds(
    model: onnx.ModelProto, names: Sequence[str], feeds: Callable[[], Mapping[str, NDArray[Any]]]
) -> None:
    """Run a graph once within bounds before it runs without, on ``feeds`` if on no tiny sample; else no error."""
    try:
        Probe(model, (), InputSizes(1, _PROBE_SIZES.length), shapes=names)
    except BoundError:
        raise
    except ShdError:
        taken = {spec.name for spec in input_specs(model)}
        arrays = {name: array for name, array in feeds().items() if name in taken}
        longest = max((array.shape[1] for array in arrays.values() if array.ndim > 1), default=1)
        session = _Bounded(model, (), InputSizes(1, longest), names)
        try:
            session.run(arrays)
        except BoundError:
            raise
        except Exception as error:  # onnxruntime raises its own types, which share no base class
            if _NO_MEMORY in str(error):
                raise session.too_large() from error


def _remedy(specs: Sequence[InputSpec]) -> str:
    problem = next((spec.past_problem for spec in specs if spec.past_problem is not None), None)
    if problem is None and all(isinstance(axis, int) for spec in specs for axis in spec.shape):
        problem = "these are the sizes that its inputs fix, so the graph itself is at fault: copy or export it again"
    return problem or (
        "its axes are dynamic, so the exporter may have left the sizes of its example in the constants, as PyTorch's "
        "older one does: export with torch.onnx.export(..., dynamo=True, dynamic_shapes=...)"
    )


def _frozen_lengths(model: onnx.ModelProto) -> list[int]:
    """Numbers in constant shapes, and sizes of constants that are not matrices, the most frequent first."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            constants[node.output[0]] = node.attribute[0].t
    counts: Counter[int] = Counter()
    for node in model.graph.node:
        shape_place = _SHAPE_PLACES.get(node.op_type)
        for number, name in enumerate(node.input):
            tensor = constants.get(name)
            if tensor is None:
                continue
            if number == shape_place and not tensor.external_data and math.prod(tensor.dims) <= 8:
                counts.update(onnx.numpy_helper.to_array(tensor).ravel().tolist())
            elif len(tensor.dims) > 2:
                counts.update(tensor.dims[-2:])
    lengths = [size for size, _ in counts.most_common() if 1 < size <= _LONGEST_FROZEN]
    return lengths[:_MOST_TRIED]
