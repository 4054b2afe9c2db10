"""A stream of samples joined with a supervision cache, by sample key: what each rank and each worker reads of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from shd_ref.cache import CacheReader, SampleRecord
from shd_ref.errors import ShdError, need
from shd_torch.data.dataset import CacheJoin, ModelInputs, Pair


class SupervisedStream(CacheJoin, IterableDataset[tuple[Any, SampleRecord]]):
    """Pairs every sample of an iterable with its record in a cache; ``SupervisedDataset`` for data without a length.

    Each rank takes every n-th sample of the same stream, and each worker of its ``DataLoader`` every m-th of those.
    All ranks get equally many, or they would wait for each other: at the end some get the first samples again, as by
    PyTorch's ``DistributedSampler``.

    An interrupted pass continues with torchdata's ``StatefulDataLoader``, in the order that ``set_epoch`` set.

    Args:
        data: an iterable that restarts on each iteration, in the same order until ``set_epoch`` changes it.
        cache: a sealed cache, its folder, address or reader.
        model_inputs: as for ``SupervisedDataset``.
        layers: student layers to read; default: all in the cache.
        logits: as for ``SupervisedDataset``.
        hidden: as there.

    Raises:
        ShdError: ``argument-value``, and what opening the cache raises; while it is iterated ``sample-missing``
            and ``inputs-invalid``.
    """

    def __init__(
        self,
        data: Iterable[Any],
        cache: CacheReader | str | Path,
        *,
        model_inputs: Callable[[Any], ModelInputs] | None = None,
        layers: Sequence[int] | None = None,
        logits: bool = True,
        hidden: Iterable[int] | None = None,
    ) -> None:
        super().__init__(cache, model_inputs, layers, logits, hidden)
        again, got = iter(data) is not data, f"the iterator {type(data).__name__}"
        remedy = "give the list, the data set or an object with __iter__"
        need(again, "argument-value", "data", "be an iterable that can be iterated again", got, remedy=remedy)
        self.data = data
        self._epoch = _make_shared()
        self._data_epoch = 0  # that this process has set in its data
        self._rank: tuple[int, int] | None = None  # and how many there are, where a worker cannot know

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned, not forked, does not know which rank started it.
        return self.__dict__ | {"_rank": _find_rank() or self._rank}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._epoch.untyped_storage().is_shared():  # a copy, which will have other workers
            self._epoch = _make_shared().copy_(self._epoch)

    def __iter__(self) -> Iterator[tuple[Any, SampleRecord]]:
        epoch = int(self._epoch)
        if epoch != self._data_epoch:  # in a worker, whose data were there before the epoch was set
            self._data_epoch = epoch
            self.data.set_epoch(epoch)  # type: ignore[attr-defined]  # an epoch is only set where there is one
        rank, ranks, worker, workers = self._find_share()
        for number, sample in islice(self._rank_share(rank, ranks), worker, None, workers):
            key = self.key(sample)
            if key not in self.cache:
                rule = f"{self.cache.folder} must hold every sample; it lacks sample {number}"
                raise ShdError("sample-missing", f"{rule} with {self._advice(key)}", "CACHE-82")
            yield Pair((sample, self._record(key)))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, so that the data can reshuffle; ``SHDTrainer`` and Accelerate call it.

        It is passed to ``data.set_epoch`` if it exists, as in streams of ``datasets``, including persistent workers;
        other data are unchanged. To resume a pass, set its epoch again.
        """
        if hasattr(self.data, "set_epoch"):
            self._epoch.fill_(epoch)
            self._data_epoch = epoch
            self.data.set_epoch(epoch)

    def _rank_share(self, rank: int, ranks: int) -> Iterator[tuple[int, Any]]:
        waiting: list[tuple[int, Any]] = []
        total = 0
        for total, sample in enumerate(self.data, 1):
            if (total - 1) % ranks == rank:
                waiting.append((total - 1, sample))
            if total % ranks == 0:  # every rank has got one
                yield waiting.pop()
        if remaining := total % ranks:
            yield from waiting
            if not waiting:
                yield next(islice(enumerate(self.data), (rank - remaining) % total, None))

    def _find_share(self) -> tuple[int, int, int, int]:
        """This process's rank, how many there are, its worker's number in the rank, and how many there are."""
        worker = get_worker_info()
        of_worker = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return *(_find_rank() or self._rank or (0, 1)), *of_worker


def _make_shared() -> Tensor:
    """Zero, in memory that workers share."""
    number = torch.zeros((), dtype=torch.int64)
    number.untyped_storage().share_memory_()
    return number


def _find_rank() -> tuple[int, int] | None:
    """This process's rank and how many there are; None outside of a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None
