"""What a precompute run did and found, read back from the cache's receipts, one shard in memory at a time."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import Attention, Errors, Manifest, Receipt, list_cache
from shd_ref.cache.shards import ShardFile
from shd_ref.cache.storage.places import is_address, open_storage
from shd_ref.teacher.precompute.compare import Comparison

MAX_ALPHAS: Final = 2**20
"""Alphas that a summary looks at, at least one shard's: enough for any quantile."""


@dataclass(frozen=True)
class PrecomputeSummary:
    """What ``precompute`` did and found.

    Attributes:
        samples, skipped: in the cache; without a record, because the teacher failed on them.
        missing_shards: that other processes have yet to write; the cache is sealed once no shard is missing.
        written, resumed: samples whose records this run wrote; those of its shards that were there already.
        written_by_others: samples of its shards that other processes wrote meanwhile.
        seconds: of this run.
        coded_bytes: of all codes in the cache; ``float32_bytes`` is what they teach, unpadded, as float32.
        alphas: before clipping ``(n,)``, of the first shards; ``num_clipped``, ``num_degenerate`` count over them.
        errors: coding errors, over the measured rows.
        compared_samples, comparison: how many of the first batch the reference squeezed too, and what that showed.
        remarks: what is to be known of the records, such as that they depend on the batches they were made in.
        supplied: what was fed beside the data (CACHE-36), in a line; empty for nothing.
        remark: what the reading process said of the data, such as how many texts were cut; None for nothing.
    """

    folder: Path | str
    samples: int
    missing_shards: int
    written: int
    resumed: int
    written_by_others: int
    skipped: int
    seconds: float
    coded_bytes: int
    float32_bytes: int
    alphas: NDArray[np.float32] = field(repr=False)
    num_clipped: int
    num_degenerate: int
    errors: Errors
    compared_samples: int
    comparison: Comparison | None
    remarks: tuple[str, ...] = ()
    supplied: str = ""
    remark: str | None = None


def summarise(folder: str | os.PathLike[str], manifest: Manifest, **told: Any) -> PrecomputeSummary:
    """The summary of what is committed in a cache, with the members that the run knows."""
    listing, storage = list_cache(folder), open_storage(folder)
    alphas: list[NDArray[np.float32]] = []
    for shard in listing.written:
        if sum(map(len, alphas)) < MAX_ALPHAS:
            file, parts = ShardFile(storage, shard), Receipt.read(storage, shard, manifest).stored_parts(manifest)
            alphas += [
                file.read(blob.start, blob.end).view("<f4") for _, part, blob in parts if part.name == "alphas"
            ]
    values = np.concatenate([*alphas, np.empty(0, np.float32)])
    attention = manifest.find(Attention)
    solved = attention is not None and attention.strategy == "shd"
    return PrecomputeSummary(
        folder=folder if isinstance(folder, str) and is_address(folder) else Path(folder),
        samples=listing.samples,
        skipped=listing.skipped,
        coded_bytes=listing.coded_bytes,
        float32_bytes=listing.float32_bytes,
        alphas=values,
        num_clipped=int(((values < 0) | (values > 1)).sum()),
        num_degenerate=int((values == 0.5).sum()) if solved else 0,
        errors=listing.errors,
        **told,
    )
