"""Names inside a cache (CACHE-1 to CACHE-4). They are made from numbers, never read from a file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

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
