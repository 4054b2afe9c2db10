"""One sample's supervision: as it is handed to the writer, and as a reader returns it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import check_codes
from shd_ref.cache.codecs.compression import compress_blob
from shd_ref.cache.codecs.factored import CodedFactors, check_coded_factors, pack_factors
from shd_ref.cache.codecs.packing import pack
from shd_ref.cache.documents.keys import check_key
from shd_ref.cache.documents.manifest import Manifest
from shd_ref.cache.documents.receipts import alphas_shape, count_rows, mixing_shape
from shd_ref.cache.storage.documents import MAX_INTEGER
from shd_ref.errors import ShdError


@dataclass(frozen=True, eq=False)
class NewRecord:
    """A sample to be written. Padding behind ``length`` is cut off; it must carry no probability.

    Attributes:
        index: position in the data set.
        key: ``sample_key`` of its inputs.
        length: n, counted positions, at least 1.
        codes: per layer of the manifest, ``(H_s, L, L)`` codes with L >= n; none where ``factors`` are given.
        alphas: float32 ``(num_layers, n_pairs)``, or ``(num_layers, n_pairs, L)`` where every row has its own; rounds
            follow each other. ``n_pairs`` is 0 for strategies that have none.
        mixing: float32 ``(num_layers, H_s, H_t)``, with a last axis L where every row has its own; or None.
        seed: of the sample's augmentation, where the manifest names a column of seeds.
        factors: per layer, where the manifest has factors: queries and keys of positions ``first`` to n - 1.
        first: positions of padding in front, where the manifest has factors and padding around.
        shapes: rows and keys of each layer's maps, where the manifest has shapes ``own`` (CACHE-116).
    """

    index: int
    key: str
    length: int
    codes: Sequence[NDArray[Any]]
    alphas: NDArray[np.float32]
    mixing: NDArray[np.float32] | None = None
    seed: int | None = None
    factors: Sequence[CodedFactors] = ()
    first: int = 0
    shapes: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, eq=False)
class StoredRecord:
    """A sample as stored, its checksums found right.

    Attributes:
        index: position in the data set.
        key: what it was found by.
        length: n.
        blobs: student layer -> packed codes, uint8; see ``unpack``.
        alphas: float32 ``(num_layers, n_pairs)`` or ``(num_layers, n_pairs, n)``.
        mixing: float32 ``(num_layers, H_s, H_t)`` or ``(num_layers, H_s, H_t, n)``, or None if not stored.
        seed: of the sample's augmentation, or None.
        first: positions of padding in front, which factored blobs leave out.
        shapes: rows and keys of each layer of the manifest, where that has shapes ``own``; else empty.
    """

    index: int
    key: str
    length: int
    blobs: dict[int, NDArray[np.uint8]]
    alphas: NDArray[np.float32]
    mixing: NDArray[np.float32] | None
    seed: int | None = None
    first: int = 0
    shapes: tuple[tuple[int, int], ...] = ()


def check_record(record: NewRecord, manifest: Manifest) -> int:
    """How many alphas a layer of the record has, if it fits the manifest.

    Raises:
        ShdError: ``argument-value``, ``argument-shape`` or ``argument-dtype``, naming the record.
    """
    check_key(record.key)
    length, num_rows = record.length, count_rows(record.length, record.shapes)
    given = record.codes if manifest.factors is None else record.factors
    if length < 1 or len(given) != len(manifest.layers) or len(record.codes) + len(record.factors) != len(given):
        held = f"{len(record.codes)} codes and {len(record.factors)} factors"
        raise _misfit(record, f"length must be at least 1 and codes or factors {len(manifest.layers)} layers", held)
    if not 0 <= record.first < length or (record.first and manifest.padding == "behind"):
        raise _misfit(record, f"first must be 0, or below {length} where padding is around", record.first)
    wanted = len(manifest.layers) if manifest.shapes == "own" else 0
    if len(record.shapes) != wanted:
        raise _misfit(record, f"shapes must be rows and keys of {wanted} layers", record.shapes)
    if manifest.factors is None:
        _check_maps(record, manifest)
    else:
        _check_factors(record, manifest)
    num_alphas = record.alphas.shape[1] if record.alphas.ndim > 1 else -1
    if num_alphas not in (0, manifest.num_alphas):
        raise _misfit(record, f"alphas must hold {manifest.num_alphas} pairs, or none", record.alphas.shape)
    _check_floats(record, "alphas", record.alphas, alphas_shape(manifest, num_rows, num_alphas))
    if record.mixing is not None:
        _check_floats(record, "mixing", record.mixing, mixing_shape(manifest, num_rows))
    if (record.seed is None) != (manifest.inputs.seed is None) or not 0 <= (record.seed or 0) <= MAX_INTEGER:
        raise ShdError(
            "argument-value",
            f"record {record.index}: seed must be 0 to {MAX_INTEGER} where the manifest names a column of seeds, "
            f"else None; got {record.seed}",
            "CACHE-60",
        )
    return num_alphas


def float_blobs(record: NewRecord, manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
    """Alphas and mixing as little-endian bytes, padding cut off."""
    for values in (record.alphas, record.mixing):
        if values is not None:
            cut = values[..., : count_rows(record.length, record.shapes)] if manifest.alpha_per == "row" else values
            yield np.ascontiguousarray(cut, dtype="<f4").reshape(-1).view(np.uint8)


def layer_blobs(record: NewRecord, manifest: Manifest) -> Iterator[NDArray[np.uint8]]:
    """Packed codes of every layer as they are stored, padding cut off.

    Raises:
        ShdError: as ``check_codes`` and ``pack``; ``support-mismatch`` when a counted row has mass on padding.
    """
    for coded in record.factors:
        check_coded_factors(coded)
        yield compress_blob(pack_factors(coded), manifest.compression)
    shapes = manifest.map_shapes(record.length, record.shapes)
    for layer, codes, (num_rows, num_keys) in zip(
        manifest.student_layers if record.codes else (), record.codes, shapes if record.codes else (), strict=True
    ):
        rows = codes[:, :num_rows]
        if rows[:, :, num_keys:].any():
            message = f"record {record.index} layer {layer}: keys from {num_keys} on must have no probability"
            raise ShdError("support-mismatch", message + ": the teacher attends to padding", "CACHE-42")
        counted = rows[:, :, :num_keys]
        check_codes(manifest.codec, counted)
        yield compress_blob(pack(counted, manifest.support, manifest.codec), manifest.compression)


def _check_maps(record: NewRecord, manifest: Manifest) -> None:
    heads, shapes = manifest.num_student_heads, manifest.map_shapes(record.length, record.shapes)
    for layer, codes, (rows, keys) in zip(manifest.student_layers, record.codes, shapes, strict=True):
        square = bool(record.shapes) or codes.shape[1:] == codes.shape[1:2] * 2
        fits = (
            codes.ndim == 3
            and codes.shape[0] == heads
            and codes.shape[1] >= rows >= 1
            and codes.shape[2] >= keys >= 1
        )
        if not fits or not square:
            sizes = f"L, L) with L >= {rows}" if rows == keys else f"L, S) with L >= {rows}, S >= {keys}"
            raise _misfit(record, f"codes of layer {layer} must be ({heads}, {sizes}", codes.shape)


def _check_factors(record: NewRecord, manifest: Manifest) -> None:
    length, heads = record.length - record.first, manifest.num_teacher_heads
    if record.mixing is None:
        raise _misfit(record, "mixing must be given where the manifest has factors", None)
    dtype, has_steps = np.dtype(manifest.codec), manifest.codec == "int8"
    for factors, coded in zip(manifest.factors or (), record.factors, strict=True):
        parts = ((heads, coded.queries, coded.query_steps), (factors.num_key_heads, coded.keys, coded.key_steps))
        for count, codes, steps in parts:
            if codes.shape != (count, length, factors.width):
                raise _misfit(record, f"factors must be ({count}, {length}, {factors.width})", codes.shape)
            if (steps is not None) != has_steps or (steps is not None and steps.shape != (count, length)):
                found = None if steps is None else steps.shape
                raise _misfit(record, f"steps must be ({count}, {length}) for int8, else None", found)
            if codes.dtype != dtype or (steps is not None and steps.dtype != np.float32):
                message = f"record {record.index}: factors must be {dtype} with float32 steps; got {codes.dtype}"
                raise ShdError("argument-dtype", message, "CACHE-102")


def _check_floats(record: NewRecord, name: str, values: NDArray[Any], shape: tuple[int, ...]) -> None:
    padded_rows = len(shape) > 2 and values.ndim == len(shape) and values.shape[-1] >= shape[-1]
    expected = (*shape[:-1], values.shape[-1]) if padded_rows else shape
    if values.shape != expected:
        raise _misfit(record, f"{name} must be {shape}", values.shape)
    if values.dtype != np.float32:
        raise ShdError(
            "argument-dtype", f"record {record.index}: {name} must be float32; got {values.dtype}", "CACHE-47"
        )
    if not np.isfinite(values).all():
        raise ShdError("not-finite", f"record {record.index}: {name} must be finite; got NaN or infinity", "CACHE-47")


def _misfit(record: NewRecord, rule: str, value: object) -> ShdError:
    return ShdError("argument-shape", f"record {record.index}: {rule}; got {value}", "CACHE-44")
