"""A user's samples joined with a supervision cache, by sample key: a data set, or a stream of any length.

Of a stream each rank reads its share, and each worker a part of that. Texts of a file are such a data set too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from shd_ref.cache import CacheReader, Factors, Manifest, SampleRecord, sample_key, trim_inputs
from shd_ref.errors import ShdError, need
from shd_ref.teacher.sources import open_source
from shd_ref.teacher.sources.text import GROUPS_COLUMN
from shd_ref.tokens import span_groups
from shd_torch.supervision.cached import CachedSupervision, pack_records, taught_layers

ModelInputs: TypeAlias = Mapping[str, Tensor | NDArray[Any]]


class Pair(tuple[Any, SampleRecord]):
    """A sample with its record: its own type, so that PyTorch's default collation says what to use instead."""

    __slots__ = ()


def _refuse_default(batch: Any, **_: Any) -> Any:
    rule = "a loader of supervised data must have a collation that takes records; got PyTorch's default_collate"
    advice = "collate_fn=joined.collate for tensors of one shape, or joined.collate_with(pad) with what pads samples"
    raise ShdError("argument-value", f"{rule}: give it {advice} (docs/training.md)")


default_collate_fn_map[Pair] = default_collate_fn_map[SampleRecord] = _refuse_default


class ReadBatch(tuple[tuple[Any, SampleRecord], ...]):
    """Samples and records as ``__getitems__`` read them together, with the buffer that holds all codes."""

    buffer: Tensor
    layers: tuple[int, ...]


def pack_batch(
    batch: Sequence[tuple[Any, SampleRecord]], manifest: Manifest, layers: Sequence[int]
) -> CachedSupervision:
    """The records of a batch in one buffer, which they may have been read into."""
    buffer = batch.buffer if isinstance(batch, ReadBatch) and batch.layers == tuple(layers) else None
    return pack_records([record for _, record in batch], manifest, layers, buffer)


def allocate_codes(size: int) -> Tensor:
    """Memory for the codes of a batch; in a worker of a ``DataLoader`` what it shares with the training process."""
    if get_worker_info() is None:
        # From 4 MB on NumPy asks the kernel for huge pages, as PyTorch does not: fewer page faults while they fill.
        return torch.from_numpy(np.empty(size, np.uint8))
    # As PyTorch's own collation does it: a tensor that is shared only afterwards is copied.
    storage = torch.UntypedStorage._new_shared(size, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class CacheJoin:
    """What joins samples with a cache: by a hash of what the teacher saw, never by position.

    Attributes:
        cache: the open cache.
        layers: student layers that are read, with how many the student was meant to have.
        logits: form of the logits that are read; None where the cache has none, or they are left out.
        hidden_layers: the teacher's hidden states that are read, by their numbers.
    """

    def __init__(
        self,
        cache: CacheReader | str | Path,
        model_inputs: Callable[[Any], ModelInputs] | None,
        layers: Sequence[int] | None,
        logits: bool,
        hidden: Iterable[int] | None,
    ) -> None:
        self.cache = cache if isinstance(cache, CacheReader) else CacheReader(cache)
        manifest = self.cache.manifest
        self.layers = taught_layers(manifest, layers)
        self.logits = manifest.logits if logits else None
        stored = [] if manifest.hidden is None else manifest.hidden.teacher_layers
        self.hidden_layers = tuple(stored if hidden is None else sorted(set(hidden)))
        self._model_inputs = model_inputs

    def collate(self, batch: Sequence[tuple[Any, SampleRecord]]) -> tuple[Any, CachedSupervision]:
        """For a ``DataLoader``: the samples by PyTorch's default collation, the records in one buffer."""
        return self.collate_with(partial(_stack, names=self.cache.manifest.inputs.names))(batch)

    def collate_with(
        self, collate: Callable[[list[Any]], Any]
    ) -> Callable[[Sequence[tuple[Any, SampleRecord]]], tuple[Any, CachedSupervision]]:
        """Like ``collate``, with another collation of the samples, such as one that pads them (on the right).

        Args:
            collate: from a list of samples to a batch; where it can be pickled, so can the result.
        """
        return partial(_collate, collate=collate, manifest=self.cache.manifest, layers=self.layers)

    def key(self, sample: Any) -> str:
        """The key of a sample in the cache.

        Raises:
            ShdError: ``inputs-invalid`` for a sample without the teacher's inputs.
        """
        inputs = self.cache.manifest.inputs
        model_inputs = sample if self._model_inputs is None else self._model_inputs(sample)
        if not isinstance(model_inputs, Mapping) or not set(inputs.names) <= model_inputs.keys():
            is_mapping = isinstance(model_inputs, Mapping)
            names = sorted(map(str, model_inputs)) if is_mapping else type(model_inputs).__name__
            rule = f"a sample must hold the teacher's inputs {', '.join(inputs.names)}"
            raise ShdError("inputs-invalid", f"{rule}; got {names}: give model_inputs", "CACHE-30")
        arrays = {name: np.asarray(model_inputs[name]) for name in inputs.names}
        return sample_key(trim_inputs(arrays, inputs.mask, inputs.decoder, inputs.decoder_mask)[0])

    def _record(self, key: str) -> SampleRecord:
        return self.cache.read(key, self.layers, logits=self.logits is not None, hidden=self.hidden_layers)

    def _advice(self, key: str) -> str:
        """The key of a sample that the cache lacks, and what to do about it."""
        reason = self.cache.skipped.get(key)
        advice = "precompute from these very inputs" if reason is None else f"{reason}: leave it out of the data"
        return f"key {key}: {advice}"


class SupervisedDataset(CacheJoin, Dataset[tuple[Any, SampleRecord]]):
    """Pairs every sample of a map-style data set with its record in a cache.

    Records are found by a hash of the teacher's inputs, never by position: shuffles, subsets, ranks and a changed
    tokenizer cannot misalign them. All keys are looked up when the data set is created and compared at every read:
    data that change afterwards raise an error (CACHE-84).

    Args:
        data: map-style, with ``len``; a sample may be anything.
        cache: a sealed cache: its folder, its address such as ``s3://bucket/cache``, or a reader.
        model_inputs: function from one sample to the teacher's inputs by name, without batch axis; by default the
            sample is a mapping with these inputs.
        layers: student layers to read; default: all in the cache.
        preload: read every record once, now, and keep its codes in memory; for small data sets.
        augment: function from a sample and its seed to the sample that the teacher saw, for a cache with seeds:
            sample i gets the seed of the i-th precomputed sample. It must depend only on its arguments; records are
            found by the hash of its result, so a different order of samples is detected.
        logits: whether to read the teacher's logits, if the cache has them.
        hidden: the teacher's hidden states to read, by number; default: all in the cache.

    Raises:
        ShdError: ``sample-missing`` with the number of samples that are not in the cache and the first of them;
            ``inputs-invalid`` for a sample without the teacher's inputs; ``argument-value``; what opening the cache
            raises. Reading a sample raises ``inputs-invalid`` if it has changed.
    """

    def __init__(
        self,
        data: Any,
        cache: CacheReader | str | Path,
        *,
        model_inputs: Callable[[Any], ModelInputs] | None = None,
        layers: Sequence[int] | None = None,
        preload: bool = False,
        augment: Callable[[Any, int], Any] | None = None,
        logits: bool = True,
        hidden: Iterable[int] | None = None,
    ) -> None:
        super().__init__(cache, model_inputs, layers, logits, hidden)
        self.data = data
        self._augment, self._seeds = augment, self.cache.seeds()
        fits, rule = augment is None or bool(self._seeds), "be left out where the cache has no seeds"
        got = f"{self.cache.folder}, which has none: precompute with --seed-column"
        need(fits, "argument-value", "augment", rule, got, spec_id="CACHE-35")
        self.keys = [self.key(self.sample(index)) for index in range(len(data))]
        missing = [index for index, key in enumerate(self.keys) if key not in self.cache]
        if missing:
            rule = f"{self.cache.folder} must hold every sample; {len(missing)} of {len(self.keys)} are not in it"
            message = f"{rule}, first sample {missing[0]} with {self._advice(self.keys[missing[0]])}"
            raise ShdError("sample-missing", message, "CACHE-82")
        self._records = {key: self._record(key) for key in set(self.keys)} if preload else None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[Any, SampleRecord]:
        key = self.keys[index]
        record = self._record(key) if self._records is None else self._records[key]
        return Pair((self._seen_sample(index), record))

    def __getitems__(self, indices: Iterable[int]) -> Sequence[tuple[Any, SampleRecord]]:
        """Several pairs, as a ``DataLoader`` asks for them: their codes are read into one buffer, in its order.

        The records are views of it. A collation that is given another list of them copies their codes.
        """
        numbers = list(indices)
        # Queries and keys are taken apart again; records in memory, or of a subclass's own making, have no buffer.
        is_own = type(self).__getitem__ is SupervisedDataset.__getitem__
        if not is_own or self._records is not None or self.cache.manifest.find(Factors) is not None:
            return [self[index] for index in numbers]
        buffers: list[Tensor] = []

        def allocate(size: int) -> NDArray[np.uint8]:
            buffers.append(allocate_codes(size))
            return buffers[0].numpy()

        records = self.cache.read_batch(
            [self.keys[index] for index in numbers],
            self.layers,
            logits=self.logits is not None,
            hidden=self.hidden_layers,
            allocate=allocate,
        )
        pairs = zip(map(self._seen_sample, numbers), records, strict=True)
        batch = ReadBatch(map(Pair, pairs))
        batch.buffer, batch.layers = buffers[0], self.layers
        return batch

    def _seen_sample(self, index: int) -> Any:
        sample = self.sample(index)
        key = self.key(sample)
        if key == self.keys[index]:
            return sample
        if self._augment is not None:
            rule = "augment must depend on the sample and its seed alone"
            message = f"{rule}; sample {index} came out another way than before: seed every random choice in it"
            raise ShdError("inputs-invalid", message, "CACHE-35")
        rule = f"data must give at every read what they gave when they were joined with {self.cache.folder}"
        advice = "shuffle with a sampler, not the data, and keep random transforms after the join, or use augment"
        message = f"{rule}; sample {index} has key {key}, its record {self.keys[index]}: {advice}"
        raise ShdError("inputs-invalid", message, "CACHE-84")

    def sample(self, index: int) -> Any:
        """A sample without its record, augmented as for the teacher."""
        # A sample beyond the precomputed data set has no seed, and no record either.
        if self._augment is None or index not in self._seeds:
            return self.data[index]
        return self._augment(self.data[index], self._seeds[index])


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


def read_texts(
    path: str | Path,
    tokenizer: Callable[..., Mapping[str, Any]],
    *,
    text_column: str = "text",
    max_length: int | None = None,
    teacher_tokenizer: Callable[..., Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """The samples of a file that ``shd precompute --inputs`` reads, tokenised, for a ``SupervisedDataset``.

    Args:
        path: JSON lines, Parquet or Arrow with a text column, or a folder of such files.
        tokenizer: a Hugging Face tokenizer, from the folder given to ``--tokenizer``.
        text_column: as ``--text-column``.
        max_length: as ``--max-length``; by default the tokenizer's ``model_max_length``.
        teacher_tokenizer: of a teacher with another tokenizer, from the folder given to ``--tokenizer``; then
            ``tokenizer`` is the student's, given to ``--student-tokenizer``, and ``max_length`` the teacher's. Both
            are fast ones.

    Returns:
        For each text the tokenizer's result: ``input_ids`` and ``attention_mask``, not padded. With a teacher's
        tokenizer also ``teacher``, its result and ``token_groups``: what a ``SupervisedDataset`` of a cache with
        pooled maps is told by ``model_inputs=operator.itemgetter("teacher")``.

    Raises:
        ShdError: ``inputs-invalid`` for a file that cannot be read, without the column, or with anything but text in
            it; ``dependency-missing`` naming the extra that brings its reader.

    Source: silent. Specification: silent.
    """
    source = open_source(path)
    rule = f"be one of {', '.join(source.columns)}, the columns of {path}"
    need(text_column in source.columns, "inputs-invalid", "text_column", rule, repr(text_column))
    samples = []
    for number, row in enumerate(source.rows([text_column])):
        text = row[text_column]
        if not isinstance(text, str):
            raise source.refuse(f"{text_column} must be text; got {type(text).__name__}", number)
        if teacher_tokenizer is None:
            samples.append(dict(tokenizer(text, truncation=True, max_length=max_length)))
            continue
        teacher = dict(teacher_tokenizer(text, truncation=True, max_length=max_length, return_offsets_mapping=True))
        student = dict(tokenizer(text, truncation=True, return_offsets_mapping=True))
        groups = span_groups(teacher.pop("offset_mapping"), student.pop("offset_mapping"))
        samples.append(student | {"teacher": teacher | {GROUPS_COLUMN: groups.T.astype(np.int64)}})
    return samples


def _stack(samples: list[Any], *, names: tuple[str, ...]) -> Any:
    """PyTorch's default collation, of tensors of one shape; it turns rows of lists into columns."""
    listed = [name for name in names if isinstance(samples[0], Mapping) and isinstance(samples[0].get(name), list)]
    problem: object = f"{listed[0]} as a list" if listed else ""
    try:
        if not listed:
            return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        problem = error
    rule = "samples must hold tensors or arrays of one shape for collate"
    advice = "use collate_with(pad) with what pads them (docs/training.md)"
    raise ShdError("argument-value", f"{rule}; got {problem}: {advice}")


def _collate(
    batch: Sequence[tuple[Any, SampleRecord]],
    *,
    collate: Callable[[list[Any]], Any],
    manifest: Manifest,
    layers: tuple[int, ...],
) -> tuple[Any, CachedSupervision]:
    return collate([sample for sample, _ in batch]), pack_batch(batch, manifest, layers)
