"""A stream of samples joined with a supervision cache, by sample key, that can go on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from shd_ref.cache import CacheReader, StoredRecord
from shd_ref.errors import ShdError
from shd_torch.dataset import CacheJoin, ModelInputs


class SupervisedStream(CacheJoin, IterableDataset[tuple[Any, StoredRecord]]):
    """Pairs every sample of an iterable with its record in a cache; ``SupervisedDataset`` for data without a length.

    Each rank and each worker of a ``DataLoader`` takes every n-th sample of the same stream, so that none is read
    twice. For an iterable that divides itself, as Hugging Face's ``split_dataset_by_node`` does, say so.

    After an interruption, ``load_state_dict`` skips what was given out, without reading its records: with
    torchdata's ``StatefulDataLoader`` from each worker's own place, and with a plain ``DataLoader`` and no worker
    from this object's.

    Args:
        data: an iterable that starts anew each time it is iterated, in the same order.
        cache: a sealed cache, its folder, address or reader.
        model_inputs: as for ``SupervisedDataset``.
        layers: student layers to read; default all of the cache.
        skipped: as for ``SupervisedDataset``.
        divide: whether ranks and workers share out the samples; False where ``data`` does it.

    Raises:
        ShdError: ``argument-value``, and whatever opening the cache raises; while it is iterated ``sample-missing``
            and ``inputs-invalid``.
    """

    def __init__(
        self,
        data: Iterable[Any],
        cache: CacheReader | str | Path,
        *,
        model_inputs: Callable[[Any], ModelInputs] | None = None,
        layers: Sequence[int] | None = None,
        skipped: str = "error",
        divide: bool = True,
    ) -> None:
        super().__init__(cache, model_inputs, layers, skipped)
        if iter(data) is data:
            raise ShdError(
                "argument-value",
                f"data must be an iterable that can start anew; got the iterator {type(data).__name__}: give the "
                "list, the data set or an object with __iter__",
            )
        self.data = data
        self._divide = divide
        self._given = 0  # samples of this process's share, of the pass that is running
        self._resume = 0
        self._place: tuple[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned, not forked, does not know which rank started it.
        return self.__dict__ | {"_place": _find_rank() or self._place}

    def __iter__(self) -> Iterator[tuple[Any, StoredRecord]]:
        part, parts = _find_part(self._place) if self._divide else (0, 1)
        self._given, self._resume = self._resume, 0
        for position, sample in enumerate(islice(self.data, part + self._given * parts, None, parts), self._given):
            self._given = position + 1
            key = self.key(sample)
            if self._is_dropped(key):
                continue
            if key not in self.cache:
                raise ShdError(
                    "sample-missing",
                    f"{self.cache.folder} must hold every sample; sample {part + position * parts} with key {key} "
                    f"is not in it: {self._advice(key)}",
                    "CACHE-83",
                )
            yield sample, self.cache.read(key, self.layers)
        self._given = 0

    def state_dict(self) -> dict[str, int]:
        """How many samples of this process's share the pass that is running has given out."""
        return {"given": self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next pass goes on behind so many samples; ranks and workers must be as many as they were.

        Raises:
            ShdError: ``argument-value``.
        """
        given = state.get("given")
        if not isinstance(given, int) or given < 0:
            raise ShdError("argument-value", f"state must hold 'given', a number of at least 0; got {dict(state)}")
        self._resume = self._given = given


def _find_rank() -> tuple[int, int] | None:
    """This process's rank and how many there are; None outside of a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


def _find_part(place: tuple[int, int] | None) -> tuple[int, int]:
    """Which share this process has, of how many: workers of ranks."""
    rank, ranks = _find_rank() or place or (0, 1)
    worker = get_worker_info()
    if worker is None:
        return rank, ranks
    return rank * worker.num_workers + worker.id, ranks * worker.num_workers
