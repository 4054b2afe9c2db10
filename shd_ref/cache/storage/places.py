"""Where a cache lies: a folder of this machine, or an address in an object store."""

from __future__ import annotations

import os
import re
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
