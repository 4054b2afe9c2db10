"""Where a cache lies, a folder or an address in an object store, and names in it (CACHE-1 to CACHE-4)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from shd_ref.cache.storage.storage import Storage, check_path

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")  # two letters at least: C:// is a drive


Folder = str | os.PathLike[str] | Storage
"""A cache: path of a local folder, address such as ``s3://bucket/cache``, or an open storage."""


def is_address(folder: Folder) -> bool:
    """Whether this is an address (``s3://...``), not a path."""
    return isinstance(folder, str) and bool(_URL.match(folder))


def subfolder(folder: str | os.PathLike[str], name: str) -> Path | str:
    """A folder inside a folder, or an address below an address."""
    if isinstance(folder, str) and is_address(folder):
        return f"{folder.rstrip('/')}/{name}"
    return Path(folder) / name


def open_storage(folder: Folder) -> Storage:
    """The storage behind a path or an address (``file://`` is a path): ``dependency-missing``, ``argument-value``."""
    if isinstance(folder, Storage):
        return folder
    if isinstance(folder, str) and folder.startswith("file://"):
        folder = unquote(urlsplit(folder).path)
    if isinstance(folder, str) and is_address(folder):
        from shd_ref.cache.storage.remote import RemoteStorage

        return RemoteStorage(folder)
    from shd_ref.cache.storage.local import LocalStorage

    return LocalStorage(Path(check_path(folder)))


MANIFEST_NAME: Final = "manifest.json"
SEAL_NAME: Final = "SEALED.json"
RECEIPTS_NAME: Final = "receipts"
SHARDS_NAME: Final = "shards"
LOCK_NAME: Final = ".lock"
HUB_NAMES: Final = ("README.md", ".gitattributes")
"""Files of a cache on a hub, for people and for the hub: never read here (CACHE-180)."""

MAX_SAMPLES: Final = 10**8
MAX_SHARDS: Final = 10**6
MAX_LAYERS: Final = 1000

_RECEIPT_FORM: Final = re.compile(r"receipts/([0-9]{6})\.json")


def shard_name(shard: int) -> str:
    """``shards/23/000123.safetensors``: the last two digits spread the files over a hundred folders."""
    return f"{SHARDS_NAME}/{shard % 100:02d}/{shard:06d}.safetensors"


def receipt_name(shard: int) -> str:
    """``receipts/000123.json``."""
    return f"{RECEIPTS_NAME}/{shard:06d}.json"


def committed_shards(names: Iterable[str]) -> list[int]:
    """Shards whose receipts are among these names, ascending; other names (temporary files) are passed over."""
    matches = [_RECEIPT_FORM.fullmatch(name) for name in names]
    return sorted(int(name[1]) for name in matches if name)


def tensor_name(index: int, part: str) -> str:
    """``00001234/L03``: a part of one sample's record."""
    return f"{index:08d}/{part}"
