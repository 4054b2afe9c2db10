"""Streams joined with a cache: every sample once with every loader, and on from where it stopped."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.makers import job, length_of, write_cache
from support.refusals import refusal
from support.started_processes import SERVER
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler

from shd_torch import SupervisedStream, attention_kl

NUM_SAMPLES = 11


class Tokens:
    """Starts from the beginning each time; counts what it gave out."""

    def __init__(self, extra: int = 0) -> None:
        self.extra = extra

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(NUM_SAMPLES + self.extra):
            yield {"input_ids": torch.arange(index, index + length_of(index)), "number": index}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return Path(write_cache(tmp_path / "cache", job(NUM_SAMPLES)))


def numbers(samples: list[dict[str, Any]]) -> list[int]:
    return [int(sample["number"]) for sample in samples]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_once(cache: Path, workers: int) -> None:
    stream = SupervisedStream(Tokens(), cache, layers=[2])
    loader = DataLoader(stream, 3, num_workers=workers, collate_fn=stream.collate_with(numbers))
    seen = []
    for batch, supervision in loader:
        seen += batch
        assert supervision.layers == (2,)
        assert supervision.lengths == tuple(length_of(index) for index in batch)
        (coded,) = supervision.supervise()
        q = torch.zeros(*coded.shape[:3], 4)
        assert attention_kl(q, q, coded) > 0
    assert sorted(seen) == list(range(NUM_SAMPLES))


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """In a process group whose other ranks are nowhere."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_ranks_share_the_stream_as_a_distributed_sampler_does(cache: Path, ranks: int) -> None:
    for rank in range(ranks):
        with as_rank(rank, ranks):
            seen = [record.index for _, record in SupervisedStream(Tokens(), cache)]
        assert seen == list(DistributedSampler(range(NUM_SAMPLES), ranks, rank, shuffle=False))


def test_workers_of_all_ranks_give_equally_many_batches(cache: Path) -> None:
    seen: list[list[list[int]]] = []
    for rank in range(2):
        with as_rank(rank, 2):
            stream = SupervisedStream(Tokens(), cache)
            loader = DataLoader(stream, 2, num_workers=2, collate_fn=stream.collate_with(numbers))
            seen.append([batch for batch, _ in loader])
    assert [len(batch) for batch in seen[0]] == [len(batch) for batch in seen[1]]
    assert sorted(index for batches in seen for batch in batches for index in batch) == sorted([*range(11), 0])


def test_a_spawned_worker_knows_its_rank(cache: Path) -> None:
    with as_rank(1, 3):
        sent = pickle.dumps(SupervisedStream(Tokens(), cache))
    received = [record.index for _, record in pickle.loads(sent)]  # where no process group runs
    assert received == [1, 4, 7, 10]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize(("workers", "num_batches"), [(0, 0), (0, 4), (2, 1), (2, 6)])
def test_a_stateful_loader_goes_on_where_it_stopped(cache: Path, workers: int, num_batches: int) -> None:
    """Its state says what training has seen, not what workers have read ahead."""
    torchdata = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="the loader that holds its workers' state"
    )

    def make_loader() -> Any:
        stream = SupervisedStream(Tokens(), cache)
        return torchdata.StatefulDataLoader(
            stream, 2, num_workers=workers, collate_fn=stream.collate_with(numbers), prefetch_factor=workers or None
        )

    loader = make_loader()
    whole = [batch for batch, _ in make_loader()]
    assert sorted(index for batch in whole for index in batch) == list(range(NUM_SAMPLES))
    assert len(whole) == 6
    batches = iter(loader)
    seen = [next(batches)[0] for _ in range(num_batches)]
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict())
    del batches
    seen += [batch for batch, _ in resumed]
    assert seen == whole
    assert [batch for batch, _ in resumed] == whole  # the pass after it


def test_what_is_refused(cache: Path) -> None:
    with refusal("sample-missing", "sample 11 with key"):
        list(SupervisedStream(Tokens(extra=1), cache))
    with refusal("argument-value", "got the iterator"):
        SupervisedStream(iter(Tokens()), cache)
    with refusal("inputs-invalid", "inputs input_ids"):
        list(SupervisedStream([{"text": "x"}], cache))


def test_every_epoch_has_the_order_of_its_data(cache: Path) -> None:
    """Shuffled streams of Hugging Face datasets, through Accelerate's loader."""
    datasets = pytest.importorskip("datasets", reason="streams of Hugging Face need the package datasets")
    accelerate = pytest.importorskip("accelerate", reason="Accelerate's loaders need the package accelerate")
    rows = datasets.Dataset.from_dict(
        {"input_ids": [sample["input_ids"].tolist() for sample in Tokens()], "number": list(range(NUM_SAMPLES))}
    )
    data = rows.to_iterable_dataset().shuffle(seed=3, buffer_size=NUM_SAMPLES)

    def tokens(sample: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": np.asarray(sample["input_ids"])}

    stream = SupervisedStream(data, cache, model_inputs=tokens)
    orders = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        pairs = list(stream)
        orders.append([int(sample["number"]) for sample, _ in pairs])
        assert [record.index for _, record in pairs] == orders[-1]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(NUM_SAMPLES))

    def prepare(stream: SupervisedStream, **options: Any) -> Any:
        loader = DataLoader(stream, 2, collate_fn=stream.collate_with(numbers), **options)
        return accelerate.data_loader.prepare_data_loader(loader, num_processes=1, process_index=0)

    loader = prepare(stream)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        assert [number for batch, _ in loader for number in batch] == orders[epoch]

    SupervisedStream(Tokens(), cache).set_epoch(1)  # whose order does not change


class Turning(Tokens):
    """Every other epoch from behind; told of it as an attribute, which workers that stay do not see."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        samples = list(super().__iter__())
        return iter(samples[:: -1 if self.epoch % 2 else 1])


@pytest.mark.slow
@pytest.mark.parametrize(("start", "persistent"), [("fork", False), (SERVER, True)])
def test_workers_hear_of_every_epoch(cache: Path, start: Any, persistent: bool) -> None:
    stream = SupervisedStream(Turning(), cache)
    options = {"num_workers": 1, "persistent_workers": persistent, "multiprocessing_context": start}
    loader = DataLoader(stream, 2, collate_fn=stream.collate_with(numbers), **options)
    for epoch in (0, 1, 1, 2):
        stream.set_epoch(epoch)
        order = list(range(NUM_SAMPLES))[:: -1 if epoch == 1 else 1]
        assert [number for batch, _ in loader for number in batch] == order
