"""A stream of samples joined with a supervision cache, by sample key, that can go on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from shd_ref.cache import CacheReader, SampleRecord
from shd_ref.errors import ShdError, need
from shd_torch.checks import check_option
from shd_torch.data.dataset import CacheJoin, ModelInputs, Pair

REMAINDERS: tuple[str, ...] = ("repeat", "drop", "keep")
"""What becomes of samples that are too few for all ranks."""


class SupervisedStream(CacheJoin, IterableDataset[tuple[Any, SampleRecord]]):
    """Pairs every sample of an iterable with its record in a cache; ``SupervisedDataset`` for data without a length.

    Each rank takes every n-th sample of the same stream, and each worker of its ``DataLoader`` every m-th of those.
    All ranks get equally many, or they would wait for each other; see ``remainder``. For an iterable that is already
    divided, as by Hugging Face's ``split_dataset_by_node``, set ``divide=False``; its shares must be equal too.

    After an interruption, ``load_state_dict`` skips the samples already returned, without reading their records. This
    works in the process that reads: the main process without workers, or every worker of torchdata's
    ``StatefulDataLoader``, whose state includes theirs. Samples that a loader read ahead (Accelerate's: one batch)
    count as returned, unless its state accounts for them, as ``StatefulDataLoader``'s does.

    Args:
        data: an iterable that restarts on each iteration, in the same order until ``set_epoch`` changes it.
        cache: a sealed cache, its folder, address or reader.
        model_inputs: as for ``SupervisedDataset``.
        layers: student layers to read; default: all in the cache.
        skipped: as for ``SupervisedDataset``.
        logits: as there.
        hidden: as there.
        divide: whether to divide the samples among ranks and workers; False if ``data`` is already divided.
        remainder: handling of the last samples if they are too few for all ranks: ``"repeat"`` gives the other ranks
            the first samples again, ``"drop"`` omits them (both as in PyTorch's ``DistributedSampler``), and
            ``"keep"`` gives some ranks one more than others, for a loop that handles this, such as ``SHDTrainer``.

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
        skipped: str = "error",
        logits: bool = True,
        hidden: Iterable[int] | None = None,
        divide: bool = True,
        remainder: str = "repeat",
    ) -> None:
        check_option("remainder", remainder, REMAINDERS)
        super().__init__(cache, model_inputs, layers, skipped, logits, hidden)
        again, got = iter(data) is not data, f"the iterator {type(data).__name__}"
        remedy = "give the list, the data set or an object with __iter__"
        need(again, "argument-value", "data", "be an iterable that can be iterated again", got, remedy=remedy)
        self.data = data
        self._divide = divide
        self._remainder = remainder
        self._epoch = _make_shared(torch.int64)
        self._heard = 0  # the epoch that this process's data were told of
        self._given = 0  # samples of this process's share, of the pass that is running
        self._resume = 0
        self._saved_epoch: int | None = None
        self._saved_among: tuple[int, int] | None = None  # ranks and workers when the loaded state was saved
        self._place: tuple[int, int] | None = None
        self._read_by_workers = _make_shared(torch.bool)

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned, not forked, does not know which rank started it.
        return self.__dict__ | {"_place": _find_rank() or self._place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._read_by_workers.untyped_storage().is_shared():  # a copy with other workers
            self._read_by_workers = _make_shared(torch.bool)
            self._epoch = _make_shared(torch.int64).copy_(self._epoch)

    def __iter__(self) -> Iterator[tuple[Any, SampleRecord]]:
        # Not when the first sample is asked for: a loader asks for the state before that.
        share, epoch = self._find_share(), int(self._epoch)
        if epoch != self._heard:  # in a worker, whose data were there before the epoch was set
            self._heard = epoch
            self.data.set_epoch(epoch)  # type: ignore[attr-defined]  # an epoch is only set where there is one
        saved, among = self._saved_epoch, self._saved_among
        rule = f"be of the epoch that is read now, {epoch}"
        advice = f"call set_epoch({saved}) first, that of the loader where Accelerate made it"
        need(saved in (None, epoch), "argument-value", "state", rule, f"one of {saved}", remedy=advice)
        rule = f"be of as many ranks and workers as read now, {(share.ranks, share.workers)}"
        advice, fits = (
            "load it where they are as many, or start the pass over",
            among in (None, (share.ranks, share.workers)),
        )
        need(fits, "argument-value", "state", rule, f"one of {among}", remedy=advice)
        self._given, self._resume, self._saved_among, self._saved_epoch = self._resume, 0, None, None
        self._read_by_workers.fill_(get_worker_info() is not None)
        return self._read(share)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, so that the data can reshuffle; ``SHDTrainer`` and Accelerate call it.

        It is passed to ``data.set_epoch`` if it exists, as in streams of ``datasets``, including persistent workers;
        other data are unchanged. To resume a pass, set its epoch again.
        """
        if hasattr(self.data, "set_epoch"):
            self._epoch.fill_(epoch)
            self._heard = epoch
            self.data.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The number of samples that the current pass has returned in this process, and the number of shares.

        Includes the last epoch given to ``set_epoch`` (default 0), which determines the order.

        Raises:
            ShdError: ``argument-value`` in a process whose ``DataLoader`` has workers, which do the reading.
        """
        if get_worker_info() is None and self._read_by_workers:
            rule = "state_dict must be asked where the stream is read; got the process beside a DataLoader's workers"
            advice = "use torchdata's StatefulDataLoader and its state_dict, or num_workers=0"
            raise ShdError("argument-value", f"{rule}: {advice}")
        share = self._find_share()
        return {"given": self._given, "epoch": int(self._epoch), "ranks": share.ranks, "workers": share.workers}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the next pass after that many samples; ranks, workers and epoch must be the same.

        Raises:
            ShdError: ``argument-value``; also from the next pass, if ranks, workers or the epoch differ.
        """
        numbers = [state.get(name) for name in ("given", "epoch", "ranks", "workers")]
        least = (0, 0, 1, 1)
        if any(type(n) is not int or n < bound for n, bound in zip(numbers, least, strict=True)):
            rule = "state must hold 'given' and 'epoch', at least 0, 'ranks' and 'workers', at least 1"
            raise ShdError("argument-value", f"{rule}, as state_dict returned it; got {dict(state)}")
        self._resume = self._given = state["given"]
        self._saved_among = state["ranks"], state["workers"]
        self._saved_epoch = state["epoch"] if state["given"] else None  # at the start of a pass any will do
        self._read_by_workers.zero_()

    def _read(self, share: _Share) -> Iterator[tuple[Any, SampleRecord]]:
        start = share.worker + self._given * share.workers
        for number, sample in islice(self._rank_share(share.rank, share.ranks), start, None, share.workers):
            self._given += 1
            key = self.key(sample)
            if key not in self.cache:
                rule = f"{self.cache.folder} must hold every sample; it lacks sample {number}"
                raise ShdError("sample-missing", f"{rule} with {self._advice(key)}", "CACHE-82")
            yield Pair((sample, self._record(key)))
        # A worker stays at its end: others may not have got there yet, and the loader's state holds all of them.
        if get_worker_info() is None:
            self._given = 0

    def _rank_share(self, rank: int, ranks: int) -> Iterator[tuple[int, Any]]:
        mine: list[tuple[int, Any]] = []
        total = 0
        for total, entry in enumerate(self._entries(), 1):
            if (total - 1) % ranks == rank:
                mine.append(entry)
            if total % ranks == 0:  # every rank has got one
                yield mine.pop()
        left = total % ranks
        if left and self._remainder != "drop":
            yield from mine
            if self._remainder == "repeat" and not mine:
                yield next(islice(self._entries(), (rank - left) % total, None))

    def _entries(self) -> Iterator[tuple[int, Any]]:
        """The samples that are not dropped, numbered as they stand: what is left can be shared out equally."""
        drops = self._drops and bool(self.cache.skipped)  # else no key is made here
        return (entry for entry in enumerate(self.data) if not drops or not self._is_dropped(self.key(entry[1])))

    def _find_share(self) -> _Share:
        if not self._divide:
            return _Share(0, 1, 0, 1)
        rank, ranks = _find_rank() or self._place or (0, 1)
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return _Share(rank, ranks, number, workers)


class _Share(NamedTuple):
    """Which part of the stream a process reads."""

    rank: int
    ranks: int
    worker: int
    workers: int


def _make_shared(dtype: torch.dtype) -> Tensor:
    """Zero, in memory that workers share."""
    number = torch.zeros((), dtype=dtype)
    number.untyped_storage().share_memory_()
    return number


def _find_rank() -> tuple[int, int] | None:
    """This process's rank and how many there are; None outside of a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None
