"""Files that a form keeps once per cache, outside the shards, such as the teacher's head (CACHE-192)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.forms.form import FormFile
from shd_ref.cache.storage.checksums import RunningHash, xxh3_128
from shd_ref.cache.storage.places import Folder, open_storage
from shd_ref.errors import ShdError

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


def read_pieces(folder: Folder, file: FormFile) -> Iterator[NDArray[np.uint8]]:
    """Its bytes, some at a time."""
    opened = open_storage(folder).open(file.name)
    for start in range(0, file.size, _PIECE_BYTES):
        yield opened.read(start, min(start + _PIECE_BYTES, file.size))


def hash_file(folder: Folder, file: FormFile) -> str:
    """XXH3-128 of a file as it is now, in bounded memory."""
    check_file_size(folder, file)
    checksum = RunningHash()
    for piece in read_pieces(folder, file):
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
