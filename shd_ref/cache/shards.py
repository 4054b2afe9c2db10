"""Shard files: safetensors, written blob by blob (CACHE-44 to CACHE-48).

The header follows from the manifest and the receipt alone, so a verifier can make it again and compare.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.distortion import CodecError
from shd_ref.cache.documents.manifest import Manifest
from shd_ref.cache.documents.receipts import (
    Blob,
    Receipt,
    Record,
    RecordShape,
    Skipped,
    alphas_shape,
    count_rows,
    mixing_shape,
)
from shd_ref.cache.records import NewRecord, check_record, float_blobs, layer_blobs
from shd_ref.cache.storage.checksums import RunningHash, hex_64, xxh3_64
from shd_ref.cache.storage.layout import alphas_blob, layer_blob, mixing_blob
from shd_ref.cache.storage.storage import PendingFile

_ALIGNMENT: Final = 8


class Tensor(NamedTuple):
    """One entry of a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


def shard_tensors(manifest: Manifest, records: Sequence[RecordShape]) -> Iterator[Tensor]:
    """The tensors of a shard in stored order (CACHE-44).

    All float32 tensors come first: behind codes of odd length they would not be aligned, and readers of
    safetensors files map them in place.
    """
    for record in records:
        shape = alphas_shape(manifest, record.num_rows, record.num_alphas)
        yield _float_tensor(alphas_blob(record.index), shape)
        if record.has_mixing:
            yield _float_tensor(mixing_blob(record.index), mixing_shape(manifest, record.num_rows))
    for record in records:
        for student_layer, size in zip(manifest.student_layers, record.layer_sizes, strict=True):
            yield Tensor(layer_blob(record.index, student_layer), "U8", (size,), size)


def shard_header(manifest: Manifest, shard: int, tensors: Sequence[Tensor]) -> bytes:
    """Eight bytes of header length, then the JSON header padded with spaces (CACHE-45)."""
    members: dict[str, Any] = {
        "__metadata__": {
            "format": f"shd-cache-{manifest.format_version}",
            "manifest": manifest.id,
            "shard": str(shard),
        }
    }
    position = 0
    for name, dtype, shape, size in tensors:
        members[name] = {"dtype": dtype, "shape": shape, "data_offsets": (position, position + size)}
        position += size
    header = json.dumps(members, separators=(",", ":")).encode("ascii")
    header += b" " * (-len(header) % _ALIGNMENT)
    return struct.pack("<Q", len(header)) + header


def _float_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, "F32", shape, 4 * math.prod(shape))


def write_blobs(
    file: PendingFile,
    manifest: Manifest,
    shard: int,
    records: Sequence[NewRecord],
    codec_error: CodecError,
    skipped: Sequence[Skipped] = (),
) -> Receipt:
    """Write a shard's header and blobs, and make its receipt.

    One packed blob is in memory at a time; all of them where they are compressed, since the header tells their sizes.

    Args:
        file: an empty pending file.
        manifest: of the cache.
        shard: its number.
        records: in stored order.
        codec_error: measured on their rows.
        skipped: the shard's samples without a record.

    Raises:
        ShdError: for a record that does not fit; see ``check_record`` and ``layer_blobs``.
    """
    num_alphas = [check_record(record, manifest) for record in records]
    if manifest.compression == "none":
        blobs: list[Iterable[NDArray[np.uint8]]] = [layer_blobs(record, manifest) for record in records]
        sizes = [manifest.blob_sizes(record.length, record.first, record.shapes) for record in records]
    else:
        compressed = [list(layer_blobs(record, manifest)) for record in records]
        blobs, sizes = [*compressed], [tuple(map(len, layers)) for layers in compressed]
    shapes = [
        RecordShape(record.index, count_rows(record.length, record.shapes), count, record.mixing is not None, size)
        for record, count, size in zip(records, num_alphas, sizes, strict=True)
    ]
    tensors = list(shard_tensors(manifest, shapes))
    stream = _HashedStream(file)
    stream.write(shard_header(manifest, shard, tensors))
    floats = [[stream.write(blob) for blob in float_blobs(record, manifest)] for record in records]
    layers = [tuple(stream.write(blob) for blob in record_blobs) for record_blobs in blobs]
    return Receipt(
        manifest=manifest.id,
        shard=shard,
        size=stream.position,
        xxh3_128=stream.hash.hexdigest(),
        codec_error=codec_error,
        records=tuple(
            Record(
                index=record.index,
                key=record.key,
                length=record.length,
                layers=codes,
                alphas=values[0],
                mixing=values[1] if record.mixing is not None else None,
                seed=record.seed,
                first=record.first,
                shapes=tuple((rows, keys) for rows, keys in record.shapes),
            )
            for record, values, codes in zip(records, floats, layers, strict=True)
        ),
        skipped=tuple(skipped),
    )


class _HashedStream:
    """Writes blobs one after another, and notes where each lies and what it hashes to."""

    def __init__(self, file: PendingFile) -> None:
        self._file = file
        self.hash = RunningHash()
        self.position = 0

    def write(self, data: bytes | NDArray[np.uint8]) -> Blob:
        self._file.write(data)
        self.hash.update(data)
        start, self.position = self.position, self.position + len(data)
        return Blob(start, self.position, hex_64(xxh3_64(data)))
