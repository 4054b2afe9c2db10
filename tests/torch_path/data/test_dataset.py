"""Cached supervision in PyTorch: joined by key, one buffer, decoded as the reference decodes."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.binding.store_loader import read_store
from support.makers import job, key_of, length_of, write_cache
from support.refusals import refusal
from support.started_processes import SERVER
from torch.utils.data import DataLoader

from shd_ref.cache import CacheReader, SampleInputs, dataset_fingerprint
from shd_torch import ShdError, SupervisedDataset, SupervisedStream

NUM_SAMPLES = 11


class TokenData(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(index + self.shift, index + self.shift + length_of(index)), "number": index}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_loader_reads_an_object_store_in_worker_processes(bucket: str, start: str) -> None:
    address = write_cache(f"{bucket}/cache", job(NUM_SAMPLES))
    process = SERVER.Process(target=read_store, args=(str(address), start, dict(os.environ)))
    process.start()
    process.join(300)
    assert process.exitcode == 0


def test_the_codes_of_a_batch_are_copied_nowhere(tmp_path: Path) -> None:
    """From the file into the buffer that the batch ends up with; a part or another order of it gets its own."""
    joined = SupervisedDataset(TokenData(), write_cache(tmp_path, job(NUM_SAMPLES)))
    pairs = joined.__getitems__([3, 0, 7])
    assert [record.index for _, record in pairs] == [3, 0, 7]
    place = pairs[0][1].parts["L01"].__array_interface__["data"][0]
    for chosen in ([0, 1, 2], [2, 1, 0], [0, 1]):
        batch = pairs if chosen == [0, 1, 2] else [pairs[number] for number in chosen]
        _, supervision = joined.collate_with(_numbers)(batch)
        assert (supervision.buffer.data_ptr() == place) == (batch is pairs)
        alone = [joined[(3, 0, 7)[number]][1].parts[f"L{layer:02d}"] for layer in (1, 2) for number in chosen]
        assert supervision.buffer.numpy().tobytes() == b"".join(blob.tobytes() for blob in alone)
    loader = DataLoader(joined, 3, num_workers=1, collate_fn=joined.collate_with(_numbers))
    assert all(supervision.buffer.is_shared() for _, supervision in loader)


class ChangingData(TokenData):
    """Data that change after they were joined, in one of the ways that data do."""

    def __init__(self) -> None:
        super().__init__()
        self.change, self.order = "", list(range(NUM_SAMPLES))

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(self.order[index])
        if self.change == "edited":
            sample["input_ids"][-1] += 1
        elif self.change == "random":
            sample["input_ids"] += torch.randint(1, 5, ())
        elif self.change == "retyped":
            sample["input_ids"] = sample["input_ids"].float()
        elif self.change == "reshaped":
            sample["input_ids"] = sample["input_ids"][None]
        return sample

    def set_epoch(self, epoch: int) -> None:
        self.order = self.order[epoch:] + self.order[:epoch]


READS = {
    "item": lambda joined, _: joined[4],
    "subset-items": lambda joined, _: torch.utils.data.Subset(joined, [4, 2]).__getitems__([0, 1]),
    "loader": lambda joined, loader: list(loader),
}


@pytest.mark.parametrize("read", READS)
def test_data_that_change_after_joining_are_refused(tmp_path: Path, read: str) -> None:
    """Keys are looked up once; when the data change afterwards, no sample gets another one's maps."""
    cache = CacheReader(write_cache(tmp_path, job(NUM_SAMPLES)))
    for change in ("set_epoch", "edited", "random", "retyped", "reshaped"):
        data = ChangingData()
        joined = SupervisedDataset(data, cache, preload=read == "item")
        loader = DataLoader(joined, 3, collate_fn=joined.collate_with(_numbers))
        READS[read](joined, loader)
        data.change = change
        if change == "set_epoch":
            data.set_epoch(1)
        with refusal("inputs-invalid", r"sample \d+ has key [0-9a-f]{32}, its record [0-9a-f]{32}"):
            READS[read](joined, loader)
        data.change, data.order = "", list(range(NUM_SAMPLES))
        READS[read](joined, loader)


class Renumbered(SupervisedDataset):
    """A user's subclass."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        sample, record = super().__getitem__(index)
        return sample | {"number": 1000 + sample["number"]}, record


def test_what_a_subclass_makes_of_an_item_reaches_the_loader(tmp_path: Path) -> None:
    joined = Renumbered(TokenData(), write_cache(tmp_path, job(NUM_SAMPLES)))
    batches = list(DataLoader(joined, 4, collate_fn=joined.collate_with(_numbers)))
    assert [number for batch, _ in batches for number in batch] == list(range(1000, 1000 + NUM_SAMPLES))
    assert joined.__getitems__(iter([2]))[0][0]["number"] == 1002


@pytest.mark.parametrize(
    ("read", "collate", "said"),
    [
        (SupervisedDataset, lambda _: None, "collate_fn=joined.collate for tensors"),
        (SupervisedStream, lambda _: None, "collate_fn=joined.collate for tensors"),
        (Renumbered, lambda _: None, "collate_fn=joined.collate for tensors"),
        (SupervisedDataset, lambda joined: joined.collate, r"got stack expects .*: use collate_with\(pad\)"),
    ],
)
def test_a_default_collation_names_what_to_use(tmp_path: Path, read: Any, collate: Any, said: str) -> None:
    """Lengths differ, of which PyTorch speaks first; those of ``Renumbered`` are pairs of a subclass's own making."""
    data = TokenData()
    joined = read([data[3]] * 4 if read is Renumbered else data, write_cache(tmp_path, job(NUM_SAMPLES)))
    with refusal("argument-value", said):
        next(iter(DataLoader(joined, 4, collate_fn=collate(joined))))
    with refusal("argument-value", r"got input_ids as a list: use collate_with\(pad\)"):
        joined.collate([({"input_ids": [1, 2]}, next(iter(joined))[1])])


def test_samples_that_the_cache_lacks_are_counted_before_the_first_step(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, job(NUM_SAMPLES))
    with refusal("sample-missing", r"11 of 11 are not in it, first sample 0"):
        SupervisedDataset(TokenData(shift=100), cache)
    with refusal("inputs-invalid", "must hold the teacher's inputs input_ids; got"):
        SupervisedDataset([{"image": 1}], cache)
    renamed = SupervisedDataset(
        [{"tokens": torch.arange(length_of(0))}], cache, model_inputs=lambda sample: {"input_ids": sample["tokens"]}
    )
    assert renamed.keys == [key_of(0)]
    with refusal("sample-missing"):
        renamed.cache.read(dataset_fingerprint([key_of(0)]))


def test_samples_that_the_teacher_failed_on_are_missing(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, job(NUM_SAMPLES, on_error="skip"))
    with refusal("sample-missing", "4 of 11 .* first sample 1 .*: head 1 gave NaN: leave it out"):
        SupervisedDataset(TokenData(), cache)


class Plain(torch.utils.data.Dataset[int]):
    """Samples before augmentation: their number."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> int:
        if index >= len(self.order):
            raise IndexError(index)
        return self.order[index]


def replay(number: int, seed: int) -> dict[str, Any]:
    """What the teacher saw depends on sample and seed; the cache was made from these very seeds."""
    shift = (seed - number) % 3**33
    return {"input_ids": torch.arange(number + shift, number + shift + length_of(number)), "seed": seed}


def test_augmentation_is_replayed_from_the_stored_seeds(tmp_path: Path) -> None:
    inputs = SampleInputs(("input_ids",), None, "augmentation")
    cache = write_cache(tmp_path, job(NUM_SAMPLES, inputs=inputs))
    order = list(range(NUM_SAMPLES))
    joined = SupervisedDataset(Plain(order), cache, augment=replay)
    assert len(joined) == NUM_SAMPLES
    for sample, record in joined:
        assert sample["seed"] == record.seed == 3**33 + record.index
        assert joined.cache.read(joined.keys[0]).seed == 3**33
    with pytest.raises(ShdError, match="10 of 11 are not in it"):  # the one in the middle stays where it was
        SupervisedDataset(Plain(order[::-1]), cache, augment=replay)
    calls = iter(range(100))
    with refusal("inputs-invalid", "must depend on the sample and its seed alone"):
        SupervisedDataset(
            Plain(order), cache, augment=lambda n, seed: replay(n, seed + (100 if next(calls) >= NUM_SAMPLES else 0))
        )[0]


def test_augmentation_needs_seeds(tmp_path: Path) -> None:
    with pytest.raises(ShdError, match="has none: precompute with --seed-column"):
        SupervisedDataset(Plain([0]), write_cache(tmp_path, job(NUM_SAMPLES)), augment=replay)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is page-locked for a CUDA device alone")
def test_a_pinned_buffer_reaches_the_device(tmp_path: Path) -> None:
    joined = SupervisedDataset(TokenData(), write_cache(tmp_path / "cache", job(NUM_SAMPLES)))
    loader = DataLoader(joined, 3, collate_fn=joined.collate_with(_numbers), pin_memory=True)
    for _, supervision in loader:
        assert supervision.buffer.is_pinned()
        moved = supervision.to("cuda", non_blocking=True)
        assert torch.equal(moved.buffer.cpu(), supervision.buffer)


def _numbers(samples: list[dict[str, Any]]) -> list[int]:
    return [int(sample["number"]) for sample in samples]
