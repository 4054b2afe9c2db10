"""Shard files: safetensors whose header follows from manifest and receipt alone (CACHE-40 to CACHE-42, CACHE-80).

Beside them lie files that a form keeps once per cache, such as the teacher's head (CACHE-192).
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import check_finite
from shd_ref.cache.documents import FORMAT_VERSION, Blob, Errors, Manifest, Receipt, Record, Skipped
from shd_ref.cache.forms.form import F32, U8, FormFile, SampleRecord, misfit
from shd_ref.cache.storage.documents import MAX_INTEGER
from shd_ref.cache.storage.keys import check_key
from shd_ref.cache.storage.storage import (
    Folder,
    PendingFile,
    RunningHash,
    hex_64,
    open_storage,
    shard_name,
    tensor_name,
    xxh3_64,
)
from shd_ref.errors import ShdError

Bytes: TypeAlias = NDArray[np.uint8]
_ALIGNMENT: Final = 8  # what safetensors requires of a header's end, and more than float32 needs
_PIECE_BYTES: Final = 2**23  # of a file at once: hashing is as fast as with more, and memory stays small


def shard_header(manifest: Manifest, shard: int, records: Sequence[Record]) -> bytes:
    """Eight bytes of header length, then the JSON header padded with spaces (CACHE-41).

    Float32 tensors come first, aligned, as readers map them in place (CACHE-40).
    """
    metadata = {"format": f"shd-cache-{FORMAT_VERSION}", "manifest": manifest.id, "shard": str(shard)}
    members: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    shapes = [manifest.part_shapes(record.extent) for record in records]
    for dtype in (F32, U8):
        for record, part_shapes in zip(records, shapes, strict=True):
            for part, shape, blob in zip(manifest.parts, part_shapes, record.blobs, strict=True):
                if part.dtype == dtype and blob is not None:
                    size = blob.end - blob.start
                    offsets, position = (position, position + size), position + size
                    stated = shape if dtype == F32 else (size,)
                    name = tensor_name(record.index, part.name)
                    members[name] = {"dtype": dtype, "shape": stated, "data_offsets": offsets}
    header = json.dumps(members, separators=(",", ":")).encode("ascii")
    header += b" " * (-len(header) % _ALIGNMENT)
    return struct.pack("<Q", len(header)) + header


def check_record(record: SampleRecord, manifest: Manifest) -> None:
    check_key(record.key)
    if record.length < 1:
        raise misfit(record, "length must be at least 1", record.length)
    for problem in manifest.extent_problems(record.extent):
        raise ShdError("argument-shape", f"record {record.index}: {problem}", "CACHE-40")
    names = [part.name for part in manifest.parts]
    missing = {part.name for part in manifest.parts if not part.optional} - record.parts.keys()
    if missing or not record.parts.keys() <= set(names):
        raise misfit(record, f"parts must be {names}, as the manifest's forms", sorted(record.parts), "CACHE-160")
    if (record.seed is None) != (manifest.inputs.seed is None) or not 0 <= (record.seed or 0) <= MAX_INTEGER:
        rule = f"seed must be 0 to {MAX_INTEGER} where the manifest names a column of seeds, else None"
        raise ShdError("argument-value", f"record {record.index}: {rule}; got {record.seed}", "CACHE-50")


def write_blobs(
    file: PendingFile,
    manifest: Manifest,
    shard: int,
    records: Sequence[SampleRecord],
    errors: Errors,
    skipped: Sequence[Skipped] = (),
) -> Receipt:
    """Write a shard and make its receipt; one blob is in memory at a time.

    The header comes first and names every blob's place, so all sizes are known before anything is packed.
    """
    drafts = [_draft(manifest, record) for record in records]
    whole, position = RunningHash(), 0

    def write(data: bytes | Bytes) -> Blob:
        nonlocal position
        file.write(data)
        whole.update(data)
        start, position = position, position + len(data)
        return Blob(start, position, hex_64(xxh3_64(data)))

    write(shard_header(manifest, shard, drafts))
    placed = [list(draft.blobs) for draft in drafts]
    for dtype in (F32, U8):
        for record, draft, blobs in zip(records, drafts, placed, strict=True):
            packed = (data for form in manifest.forms for data in form.pack(record))
            shapes = manifest.part_shapes(record.extent)
            for number, (part, shape, drafted) in enumerate(zip(manifest.parts, shapes, draft.blobs, strict=True)):
                if part.dtype != dtype or drafted is None:
                    continue
                data = next(packed) if dtype == U8 else _floats(record, part.name, shape)
                if len(data) != drafted.end:
                    raise misfit(record, f"{part.title} must make {drafted.end} bytes", len(data))
                blobs[number] = write(data)
    return Receipt(
        manifest=manifest.id,
        shard=shard,
        size=position,
        xxh3_128=whole.hexdigest(),
        errors=errors,
        records=tuple(replace(draft, blobs=tuple(blobs)) for draft, blobs in zip(drafts, placed, strict=True)),
        skipped=tuple(skipped),
    )


def _floats(record: SampleRecord, name: str, shape: tuple[int, ...]) -> Bytes:
    """The bytes of a float32 part."""
    values = np.ascontiguousarray(record.parts[name], dtype="<f4")
    if values.shape != shape:
        raise misfit(record, f"{name} must be {shape}", values.shape)
    check_finite(f"record {record.index}: {name}", values, "CACHE-107")
    return values.reshape(-1).view(np.uint8)


def _draft(manifest: Manifest, record: SampleRecord) -> Record:
    """A checked record with its parts' sizes alone, before any code is packed."""
    check_record(record, manifest)
    sizes = (
        math.prod(shape) * (4 if part.dtype == F32 else 1) if part.name in record.parts else None
        for part, shape in zip(manifest.parts, manifest.part_shapes(record.extent), strict=True)
    )
    blobs = tuple(None if size is None else Blob(0, size, "") for size in sizes)
    length, first, shapes, decoder = astuple(record.extent)
    return Record(record.index, record.key, length, blobs, record.seed, first, shapes, decoder)


class StoredFile:
    """An open file of a cache. Reads name their position, so processes and threads may share it."""

    def __init__(self, folder: Folder, name: str) -> None:
        storage = open_storage(folder)
        self.path = storage.locate(name)
        with _present(self.path):  # an object store tells at the first read
            self._fill = storage.open(name)

    def read(self, start: int, end: int) -> Bytes:
        data = np.empty(end - start, np.uint8)
        self.read_into(start, [data])
        return data

    def read_into(self, start: int, parts: Sequence[Bytes]) -> None:
        """Fill these arrays, one after another, with the bytes from ``start`` on."""
        with _present(self.path):
            end = start + self._fill(start, parts)
        if end < (least := start + sum(map(len, parts))):
            raise _incomplete(self.path, f"it ends at byte {end} of at least {least}")

    def pieces(self, size: int) -> Iterator[Bytes]:
        """The whole file, in bounded memory."""
        return (self.read(start, min(start + _PIECE_BYTES, size)) for start in range(0, size, _PIECE_BYTES))


def read_committed(folder: Folder, shard: int, manifest: Manifest) -> Receipt:
    """The receipt of a shard whose file has the size that it states; raises as ``Receipt.read``, and so."""
    receipt = Receipt.read(folder, shard, manifest)
    check_size(folder, shard_name(shard), receipt.size)
    return receipt


def check_size(folder: Folder, name: str, size: int) -> None:
    """Refuse a file that is absent or has another size than the documents state: ``cache-incomplete`` (CACHE-80)."""
    storage = open_storage(folder)
    path = storage.locate(name)
    with _present(path):
        actual = storage.size(name)
    if actual != size:
        raise _incomplete(path, f"it must have {size} bytes and has {actual}")


@contextlib.contextmanager
def _present(path: object) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise _incomplete(path, "it does not exist") from error


def _incomplete(path: object, problem: str) -> ShdError:
    return ShdError("cache-incomplete", f"{path}: {problem}: restore it, or run the same command again", "CACHE-80")


def check_file(folder: Folder, file: FormFile, data: Bytes | None = None) -> None:
    """Check every byte of a file, in bounded memory or as it was read: ``cache-incomplete``, ``cache-corrupt``."""
    checksum, stored = RunningHash(), StoredFile(folder, file.name)
    check_size(folder, file.name, file.size)
    for piece in stored.pieces(file.size) if data is None else [data]:
        checksum.update(piece)
    check_sum(stored.path, checksum, file.xxh3_128)


def check_sum(path: object, whole: RunningHash, expected: str, spec_id: str = "CACHE-192") -> None:
    """Refuse other bytes than the documents state: ``cache-corrupt``."""
    if (actual := whole.hexdigest()) != expected:
        message = f"{path}: XXH3-128 of the file must be {expected}; got {actual}"
        raise ShdError("cache-corrupt", f"{message}: restore it from a copy, or write it again", spec_id)
