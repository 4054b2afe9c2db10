"""Names inside a cache folder (CACHE-1 to CACHE-4). Paths are made from numbers, never read from a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

MANIFEST_NAME: Final = "manifest.json"
SEAL_NAME: Final = "SEALED.json"
RECEIPTS_NAME: Final = "receipts"
SHARDS_NAME: Final = "shards"
LOCK_NAME: Final = ".lock"

MAX_SAMPLES: Final = 10**8
MAX_SHARDS: Final = 10**6
MAX_LAYERS: Final = 1000

_RECEIPT_FORM: Final = re.compile(r"([0-9]{6})\.json")


def manifest_path(folder: Path) -> Path:
    """``manifest.json``."""
    return folder / MANIFEST_NAME


def seal_path(folder: Path) -> Path:
    """``SEALED.json``."""
    return folder / SEAL_NAME


def shard_path(folder: Path, shard: int) -> Path:
    """``shards/23/000123.safetensors``: the last two digits spread the files over a hundred folders."""
    return folder / SHARDS_NAME / f"{shard % 100:02d}" / f"{shard:06d}.safetensors"


def receipt_path(folder: Path, shard: int) -> Path:
    """``receipts/000123.json``."""
    return folder / RECEIPTS_NAME / f"{shard:06d}.json"


def committed_shards(folder: Path) -> list[int]:
    """Shards that have a receipt, ascending; other names (temporary files) are passed over."""
    names = [_RECEIPT_FORM.fullmatch(path.name) for path in (folder / RECEIPTS_NAME).glob("*.json")]
    return sorted(int(name[1]) for name in names if name)


def layer_blob(index: int, student_layer: int) -> str:
    """``00001234/L03``: the codes of one sample and student layer."""
    return f"{index:08d}/L{student_layer:02d}"


def alphas_blob(index: int) -> str:
    """``00001234/alphas``."""
    return f"{index:08d}/alphas"


def mixing_blob(index: int) -> str:
    """``00001234/mixing``."""
    return f"{index:08d}/mixing"
