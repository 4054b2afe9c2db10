"""Shard files: safetensors whose header follows from manifest and receipt alone (CACHE-40 to CACHE-42, CACHE-80).

Beside them lie files that a form keeps once per cache, such as the teacher's head (CACHE-192).
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.documents.keys import check_key
from shd_ref.cache.documents.manifest import FORMAT_VERSION, Manifest
from shd_ref.cache.documents.receipts import Blob, Errors, Receipt, Record, Skipped
from shd_ref.cache.forms.form import F32, U8, FormFile, SampleRecord, misfit
from shd_ref.cache.storage.documents import MAX_INTEGER
from shd_ref.cache.storage.storage import (
    Folder,
    PendingFile,
    RangeFile,
    RunningHash,
    hex_64,
    open_storage,
    shard_name,
    tensor_name,
    xxh3_64,
    xxh3_128,
)
from shd_ref.errors import ShdError

Bytes: TypeAlias = NDArray[np.uint8]
_ALIGNMENT: Final = 8
_Held = TypeVar("_Held")


def shard_header(manifest: Manifest, shard: int, records: Sequence[Record]) -> bytes:
    """Eight bytes of header length, then the JSON header padded with spaces (CACHE-41).

    Float32 tensors come first, aligned, as readers map them in place (CACHE-40).
    """
    about = {"format": f"shd-cache-{FORMAT_VERSION}", "manifest": manifest.id, "shard": str(shard)}
    members: dict[str, Any] = {"__metadata__": about}
    position = 0
    shapes = [manifest.part_shapes(record.extent) for record in records]
    for dtype in (F32, U8):
        for record, of_parts in zip(records, shapes, strict=True):
            for part, shape, size in zip(manifest.parts, of_parts, record.sizes, strict=True):
                if part.dtype == dtype and size is not None:
                    offsets, position = (position, position + size), position + size
                    held = shape if dtype == F32 else (size,)
                    name = tensor_name(record.index, part.name)
                    members[name] = {"dtype": dtype, "shape": held, "data_offsets": offsets}
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
    for form in manifest.forms:
        form.check(record)
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
    """Write a shard and make its receipt; one blob is in memory at a time."""
    for record in records:
        check_record(record, manifest)
    floats = [[_bytes_of(v) for form in manifest.forms for v in form.floats(record)] for record in records]
    drafts = [_draft(manifest, *parts) for parts in zip(records, floats, strict=True)]
    stream = _HashedStream(file)
    stream.write(shard_header(manifest, shard, drafts))
    float_places = [[None if data is None else stream.write(data) for data in values] for values in floats]
    coded_places = [
        [stream.write(data) for form in manifest.forms for data in form.pack(record)] for record in records
    ]
    return Receipt(
        manifest=manifest.id,
        shard=shard,
        size=stream.position,
        xxh3_128=stream.hash.hexdigest(),
        errors=errors,
        records=tuple(
            replace(draft, blobs=_in_order(manifest, values, codes))
            for draft, values, codes in zip(drafts, float_places, coded_places, strict=True)
        ),
        skipped=tuple(skipped),
    )


def _bytes_of(values: NDArray[np.float32] | None) -> Bytes | None:
    return None if values is None else np.ascontiguousarray(values, dtype="<f4").reshape(-1).view(np.uint8)


def _draft(manifest: Manifest, record: SampleRecord, floats: list[Bytes | None]) -> Record:
    """The record with its parts' sizes alone, without making codes."""
    sized = zip(manifest.parts, manifest.part_shapes(record.extent), strict=True)
    sizes = (shape[0] for part, shape in sized if part.dtype == U8)
    held = _in_order(manifest, [None if data is None else len(data) for data in floats], sizes)
    parts = tuple(None if size is None else Blob(0, size, "") for size in held)
    length, first, shapes, decoder = astuple(record.extent)
    return Record(record.index, record.key, length, parts, record.seed, first, shapes, decoder)


def _in_order(manifest: Manifest, floats: Iterable[_Held | None], codes: Iterable[_Held]) -> tuple[_Held | None, ...]:
    """What belongs to the float32 parts and to the coded ones, in the order of all parts."""
    rest = {F32: iter(floats), U8: iter(codes)}
    return tuple(next(rest[part.dtype]) for part in manifest.parts)


class _HashedStream:
    """Writes blobs one after another, and notes where each lies and what it hashes to."""

    def __init__(self, file: PendingFile) -> None:
        self._file = file
        self.hash = RunningHash()
        self.position = 0

    def write(self, data: bytes | Bytes) -> Blob:
        self._file.write(data)
        self.hash.update(data)
        start, self.position = self.position, self.position + len(data)
        return Blob(start, self.position, hex_64(xxh3_64(data)))


class ShardFile:
    """An open shard. Reads name their position, so processes and threads may share it."""

    def __init__(self, folder: Folder, shard: int) -> None:
        storage = open_storage(folder)
        self.path = storage.locate(shard_name(shard))
        with _present(self.path):  # an object store tells at the first read
            self._file = storage.open(shard_name(shard))

    def read(self, start: int, end: int) -> Bytes:
        with _present(self.path):
            data = self._file.read(start, end)
        self._check_length(start, len(data), end - start)
        return data

    def read_into(self, start: int, parts: Sequence[Bytes]) -> None:
        """Fill these arrays, one after another, with the bytes from ``start`` on."""
        with _present(self.path):
            count = self._file.read_into(start, parts)
        self._check_length(start, count, sum(map(len, parts)))

    def _check_length(self, start: int, count: int, least: int) -> None:
        if count < least:
            raise _incomplete(self.path, f"it ends at byte {start + count} of at least {start + least}")


def read_committed(folder: Folder, shard: int, manifest: Manifest) -> Receipt:
    """The receipt of a shard whose file has the size that it states; raises as ``Receipt.read``, and so."""
    receipt = Receipt.read(folder, shard, manifest)
    check_shard_size(folder, receipt)
    return receipt


def check_shard_size(folder: Folder, receipt: Receipt) -> None:
    """Refuse a shard file that is absent or has another size than its receipt states (CACHE-80)."""
    storage = open_storage(folder)
    path = storage.locate(shard_name(receipt.shard))
    with _present(path):
        size = storage.size(shard_name(receipt.shard))
    if size != receipt.size:
        raise _incomplete(path, f"it must have {receipt.size} bytes and has {size}")


@contextlib.contextmanager
def _present(path: object) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise _incomplete(path, "it does not exist") from error


def _incomplete(path: object, problem: str) -> ShdError:
    return ShdError("cache-incomplete", f"{path}: {problem}: restore it, or write the shard again", "CACHE-80")


_PIECE_BYTES: Final = 2**23


def check_file_size(folder: Folder, file: FormFile) -> None:
    """Refuse a file that is absent or has another size than the manifest implies: ``cache-incomplete``."""
    storage = open_storage(folder)
    try:
        size = storage.size(file.name)
    except FileNotFoundError:
        size = None
    if size != file.size:
        problem = "it does not exist" if size is None else f"it has {size}"
        message = f"{storage.locate(file.name)} must have {file.size} bytes; {problem}"
        raise ShdError("cache-incomplete", f"{message}: restore it, or run the same command again", "CACHE-192")


def read_pieces(file: RangeFile | ShardFile, size: int) -> Iterator[Bytes]:
    """A whole file, in bounded memory."""
    return (file.read(start, min(start + _PIECE_BYTES, size)) for start in range(0, size, _PIECE_BYTES))


def hash_file(folder: Folder, file: FormFile) -> str:
    """XXH3-128 of a file as it is now, in bounded memory."""
    check_file_size(folder, file)
    checksum = RunningHash()
    for piece in read_pieces(open_storage(folder).open(file.name), file.size):
        checksum.update(piece)
    return checksum.hexdigest()


def read_file(folder: Folder, file: FormFile) -> NDArray[np.uint8]:
    """All its bytes, checked: ``cache-incomplete``, ``cache-corrupt``."""
    storage = open_storage(folder)
    check_file_size(storage, file)
    data = storage.open(file.name).read(0, file.size)
    if (actual := xxh3_128(data)) != file.xxh3_128:
        raise damaged_file(storage.locate(file.name), file, actual)
    return data


def damaged_file(path: object, file: FormFile, actual: str) -> ShdError:
    """The error for other bytes than the manifest's: ``cache-corrupt``."""
    message = f"{path}: XXH3-128 of the file must be {file.xxh3_128}; got {actual}: restore it from a copy"
    return ShdError("cache-corrupt", message, "CACHE-192")
