"""Which samples run together: batches of similar length, the same for the same samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.errors import ShdError

WINDOW_BATCHES: Final = 4
"""Batches over which samples are sorted by length: enough that little is padded, few enough to hold their maps."""


def group_samples(
    indices: Iterable[int],
    lengths: NDArray[np.int64],
    batch_size: int,
    *,
    batch_tokens: int | None = None,
    equal: NDArray[np.int64] | None = None,
) -> Iterator[tuple[int, ...]]:
    """Batches of samples by descending length, equal lengths by index.

    Longest first, because an inference arena grows to its largest batch and never shrinks.

    Args:
        indices: the samples.
        lengths: of all samples, by index.
        batch_size: samples in a batch, at most.
        batch_tokens: in place of ``batch_size``: samples times the longest of them, at most; a longer one runs alone.
        equal: ``(N, k)``: only samples for which these are the same run together, because nothing may be padded.
    """
    chosen = np.fromiter(indices, dtype=np.int64)
    columns = [] if equal is None else [-equal[chosen, column] for column in reversed(range(equal.shape[1]))]
    ordered = chosen[np.lexsort((chosen, *columns, -lengths[chosen]))]
    start = 0
    while start < len(ordered):
        longest = max(int(lengths[ordered[start]]), 1)
        size = batch_size if batch_tokens is None else max(1, batch_tokens // longest)
        batch = ordered[start : start + size]
        if equal is not None:
            same = (equal[batch] == equal[batch[0]]).all(axis=1)
            batch = batch[: len(batch) if same.all() else int(same.argmin())]
        yield tuple(batch.tolist())
        start += len(batch)


def share_shards(num_shards: int, part: int, parts: int) -> range:
    """One of equal parts of a job's shards: neighbours, as they share batches and folders.

    Args:
        num_shards: of the job.
        part: which one, 0 to ``parts - 1``.
        parts: how many.

    Raises:
        ShdError: ``argument-value``.
    """
    if not 0 <= part < parts:
        raise ShdError("argument-value", f"shards must be i/n with 0 <= i < n; got {part}/{parts}: count from 0")
    return range(part * num_shards // parts, (part + 1) * num_shards // parts)


def group_shards(
    shards: Sequence[int], samples_per_shard: int, samples_per_batch: int, max_shards: int
) -> Iterator[Sequence[int]]:
    """Runs of shards whose samples are batched together, so that small shards do not mean padded batches.

    They depend on the list of shards alone, not on what is written already, so a resumed job repeats its batches.

    Args:
        shards: all shards of a job, ascending.
        samples_per_shard: of the shard plan.
        samples_per_batch: about.
        max_shards: as many as memory may hold.
    """
    size = max(1, min(math.ceil(WINDOW_BATCHES * samples_per_batch / samples_per_shard), max_shards))
    for start in range(0, len(shards), size):
        yield shards[start : start + size]
