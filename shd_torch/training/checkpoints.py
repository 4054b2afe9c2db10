"""Checkpoints that were written to their end, as a file says that is written last: no run resumes from others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

from shd_ref.cache.storage.documents import read_json
from shd_ref.cache.storage.drafts import hash_files, put, settle, sync

MARKER: Final = "shd_checkpoint.json"
"""Hashes of a checkpoint's files; empty until all of them are on the disk."""


def finish_checkpoint(folder: Path, *, is_shared: bool) -> None:
    """Mark a checkpoint as whole; without hashes where other machines wrote some of its files."""
    draft = folder / f".{MARKER}"
    draft.write_text(json.dumps({} if is_shared else _hash(folder)), encoding="utf-8")
    settle(folder)
    put(draft, folder / MARKER)
    sync(folder.parent)


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint is finished and as it was then."""
    try:
        return read_json(folder / MARKER) in ({}, _hash(folder))
    except (OSError, ValueError):
        return False


def _hash(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in hash_files(folder, "**/*").items() if not name.endswith(MARKER)}


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole one; newer ones of this trainer, which are of no use, are removed."""
    numbers = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    found = [path for path in numbers if numbers[path].isdecimal() and (path / MARKER).exists()]
    for path in sorted(found, key=lambda path: -int(numbers[path])):
        if is_whole(path):
            return path
        shutil.rmtree(path, ignore_errors=True)
    return None
