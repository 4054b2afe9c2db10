"""Exact targets: the states that a teacher's head reads, and the head, once per cache (CACHE-186 to CACHE-193)."""

from __future__ import annotations

import functools
import json
import math
import re
import struct
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import check_finite
from shd_ref.cache.codecs.logits import MAX_VOCABULARY
from shd_ref.cache.forms.form import U8, FormFile, Part, require, require_ranges
from shd_ref.cache.forms.rows import Vectors
from shd_ref.cache.storage.documents import optional
from shd_ref.cache.storage.storage import RunningHash
from shd_ref.errors import need

HEAD_NAME: Final = "teacher_head.safetensors"

HEAD_DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types of a head's matrix, and what safetensors calls them."""

_XXH3_128: Final = re.compile(r"[0-9a-f]{32}")
_NUMPY: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_HELD_ROWS: Final = 4096  # of a matrix that are looked at together
_HEAD_FORMAT: Final = "shd-head-1"
_require: Final = functools.partial(require, spec_id="CACHE-188")


NORMS: Final = ("rms", "layer")
"""Kinds of a final norm."""


@dataclass(frozen=True)
class FinalNorm:
    """The norm between the states that are stored and the head's matrix."""

    kind: str  # one of NORMS
    epsilon: float  # added to the mean square
    bias: bool


@dataclass(frozen=True, eq=False)
class TeacherHead:
    """A head: ``cap(scale * W norm(h) + bias)``."""

    weight: NDArray[Any]  # W (V, D)
    bias: NDArray[Any] | None = None  # (V,)
    scale: float = 1.0
    soft_cap: float | None = None  # c of c tanh(u / c)
    norm: FinalNorm | None = None  # where states come before it
    norm_weight: NDArray[Any] | None = None  # (D,)
    norm_bias: NDArray[Any] | None = None

    def cut(self, size: int) -> TeacherHead:
        """Its first classes."""
        return replace(self, weight=self.weight[:size], bias=None if self.bias is None else self.bias[:size])

    def logits(self, states: NDArray[Any]) -> NDArray[Any]:
        """The logits ``(R, V)`` of states ``(R, D)``, in float64 where these are, else in float32."""
        dtype = np.float64 if states.dtype == np.float64 else np.float32
        hidden = self.normed(states)
        weight: Any = self.weight.astype(dtype, copy=False)
        logits: NDArray[Any] = np.matmul(hidden, weight.T)
        if self.scale != 1.0:
            logits *= dtype(self.scale)
        if self.bias is not None:
            logits += self.bias.astype(dtype)
        return logits if self.soft_cap is None else dtype(self.soft_cap) * np.tanh(logits / dtype(self.soft_cap))

    def normed(self, states: NDArray[Any]) -> NDArray[Any]:
        """Inputs of the head's matrix, ``(R, D)`` in the dtype of ``logits``."""
        dtype = np.float64 if states.dtype == np.float64 else np.float32
        hidden = states.astype(dtype)
        if self.norm is None:
            return hidden
        centred = hidden - hidden.mean(axis=-1, keepdims=True) if self.norm.kind == "layer" else hidden
        deviation = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + dtype(self.norm.epsilon))
        hidden = centred / deviation * np.asarray(self.norm_weight, dtype)
        normed: NDArray[Any] = hidden if self.norm_bias is None else hidden + self.norm_bias.astype(dtype)
        return normed


class HeadTensor(NamedTuple):
    """A tensor of the head's file: its type in safetensors, its shape, and its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Head:
    """The teacher's head as the manifest describes it; its numbers are in a file of the cache."""

    xxh3_128: str  # of that file, 32 hex digits
    vocab_size: int  # V, classes that are stored
    padded_vocab_size: int | None = optional(None)  # the teacher's, where the last ones only pad the vocabulary
    dtype: str  # of the matrix, one of HEAD_DTYPES
    bias: bool  # this and the rest as of TeacherHead
    scale: float = optional(1.0)
    soft_cap: float | None = optional(None)
    norm: FinalNorm | None = optional(None)  # noqa: RUF009  (of a frozen dataclass)

    def __post_init__(self) -> None:
        size, padded, cap, norm = self.vocab_size, self.padded_vocab_size, self.soft_cap, self.norm
        _require(bool(_XXH3_128.fullmatch(self.xxh3_128)), "head.xxh3_128 must be 32 hex digits", self.xxh3_128)
        require_ranges(self, "CACHE-188", "head.", vocab_size=(1, MAX_VOCABULARY))
        fits = padded is None or size < padded <= MAX_VOCABULARY
        _require(fits, "head.padded_vocab_size must be None, or above vocab_size", padded)
        _require(self.dtype in HEAD_DTYPES, f"head.dtype must be one of {tuple(HEAD_DTYPES)}", self.dtype)
        _require(math.isfinite(self.scale) and self.scale != 0, "head.scale must be finite, not 0", self.scale)
        _require(cap is None or 0 < cap < math.inf, "head.soft_cap must be finite and above 0", cap)
        if norm is not None:
            known = norm.kind in NORMS and not (norm.bias and norm.kind == "rms")
            _require(known, f"head.norm.kind must be one of {NORMS}, of which 'rms' has no bias", norm)
            _require(0 <= norm.epsilon < math.inf, "head.norm.epsilon must be finite, at least 0", norm.epsilon)


@dataclass(frozen=True, kw_only=True)
class Exact(Vectors):
    """Records hold the states that the teacher's head reads, coded as ``Hidden``; the cache holds the head."""

    SUBJECT: ClassVar[str] = "exact"
    CHOICE: ClassVar[str] = "exact"
    SPEC_ID: ClassVar[str] = "CACHE-186"
    PART: ClassVar[Part] = Part("last", U8, SUBJECT, called="last state")
    head: Head

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.rows != "sample", "exact.rows must be 'positions' or 'decoder'", self.rows, "CACHE-186")

    @property
    def files(self) -> tuple[FormFile, ...]:
        return (FormFile(HEAD_NAME, self.head_layout["weight"].end, self.head.xxh3_128),)

    @functools.cached_property
    def head_header(self) -> bytes:
        """Eight bytes of header length, then the JSON header of the head's file (CACHE-189)."""
        members: dict[str, Any] = {"__metadata__": {"format": _HEAD_FORMAT}}
        for name, tensor in self._tensors(0).items():
            offsets = [tensor.start, tensor.end]
            members[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
        header = json.dumps(members, separators=(",", ":")).encode("ascii")
        header += b" " * (-len(header) % 8)
        return struct.pack("<Q", len(header)) + header

    @property
    def head_layout(self) -> dict[str, HeadTensor]:
        """The tensors of the head's file by name, in stored order."""
        return self._tensors(len(self.head_header))

    def _tensors(self, start: int) -> dict[str, HeadTensor]:
        head, width = self.head, (self.width,)
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {"bias": ("F32", (head.vocab_size,))} if head.bias else {}
        if head.norm is not None:
            kinds |= {"norm.weight": ("F32", width)} | ({"norm.bias": ("F32", width)} if head.norm.bias else {})
        kinds["weight"] = HEAD_DTYPES[head.dtype], (head.vocab_size, self.width)
        sizes = (math.prod(shape) * np.dtype(_NUMPY[dtype]).itemsize for dtype, shape in kinds.values())
        spans = pairwise(accumulate(sizes, initial=start))
        return {name: HeadTensor(*kind, *span) for (name, kind), span in zip(kinds.items(), spans, strict=True)}

    @classmethod
    def of_head(
        cls, head: TeacherHead, codec: str, rows: str, tensor: str, padded: int | None = None
    ) -> tuple[Exact, list[NDArray[np.uint8]]]:
        """The form for a head, with its checksum, and the pieces of the head's file.

        A matrix of bfloat16 has the type of the package ml_dtypes. Raises ``not-finite``, ``argument-shape``.
        """
        (size, width), bias, dtype = head.weight.shape, head.bias is not None, head.weight.dtype.name
        facts: dict[str, Any] = {"bias": bias, "scale": head.scale, "soft_cap": head.soft_cap, "norm": head.norm}
        about = Head(xxh3_128="0" * 32, vocab_size=size, padded_vocab_size=padded, dtype=dtype, **facts)
        form = cls(codec=codec, rows=rows, tensor=tensor, width=width, head=about)
        arrays = {"bias": head.bias, "norm.weight": head.norm_weight, "norm.bias": head.norm_bias}
        arrays["weight"] = head.weight.view(np.uint16) if dtype == "bfloat16" else head.weight
        pieces: list[NDArray[np.uint8]] = [np.frombuffer(form.head_header, np.uint8)]
        for name, tensor_of in form.head_layout.items():
            values = np.ascontiguousarray(arrays[name], dtype=_NUMPY[tensor_of.dtype])
            where, shape = f"{name} of the head", tensor_of.shape
            need(values.shape == shape, "argument-shape", where, f"be {shape}", values.shape)
            matrix = values.reshape(-1, values.shape[-1])
            chunks = np.array_split(matrix, 1 + len(matrix) // _HELD_ROWS)
            for chunk in chunks:
                check_finite(where, _widen(chunk, tensor_of.dtype), "CACHE-189")
            pieces.append(values.reshape(-1).view(np.uint8))
        checksum = RunningHash()
        for piece in pieces:
            checksum.update(piece)
        return replace(form, head=replace(about, xxh3_128=checksum.hexdigest())), pieces

    def read_head(self, data: NDArray[np.uint8]) -> TeacherHead:
        """The head from the bytes of its file, whose checksum was compared; the matrix in float32 or float16."""
        arrays = {}
        for name, tensor in self.head_layout.items():
            numbers = data[tensor.start : tensor.end].view(_NUMPY[tensor.dtype])
            arrays[name] = _widen(numbers, tensor.dtype).reshape(tensor.shape)
        norm = arrays.get("norm.weight"), arrays.get("norm.bias")
        head = self.head
        return TeacherHead(arrays["weight"], arrays.get("bias"), head.scale, head.soft_cap, head.norm, *norm)

    def describe(self) -> list[tuple[str, str]]:
        head, size = self.head, self.files[0].size
        extras = [] if head.norm is None else [f"{head.norm.kind} norm"]
        extras += ["bias"] * head.bias + [f"scale {head.scale:g}"] * (head.scale != 1)
        extras += [] if head.soft_cap is None else [f"soft cap {head.soft_cap:g}"]
        about = f"{head.vocab_size} classes, {head.dtype}, {size} bytes once"
        codec = f"{self.codec}, {self.row_sizes[0]} bytes per {self.unit}"
        return [("last states", f"width {self.width}"), ("head", ", ".join([about, *extras])), ("last codec", codec)]


def _widen(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Numbers, of the bits of bfloat16 float32 ones."""
    return (values.astype("<u4") << 16).view("<f4") if dtype == "BF16" else values
