"""Streams joined with a cache: every sample once, whatever reads it, and on from where it stopped."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cache.makers import job, length_of, write_cache
from torch.utils.data import DataLoader

from shd_torch import ShdError, SupervisedStream, attention_kl

NUM_SAMPLES = 11


class Tokens:
    """Starts anew each time; counts what it gave out."""

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


def test_samples_come_with_their_records_and_can_start_anew(cache: Path) -> None:
    stream = SupervisedStream(Tokens(), cache)
    for _ in range(2):
        pairs = list(stream)
        assert [record.index for _, record in pairs] == list(range(NUM_SAMPLES))
        assert [record.length for _, record in pairs] == [length_of(index) for index in range(NUM_SAMPLES)]


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


def test_ranks_share_the_stream(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    seen = []
    for rank in range(3):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        seen.append([record.index for _, record in SupervisedStream(Tokens(), cache)])
        whole = [record.index for _, record in SupervisedStream(Tokens(), cache, divide=False)]
        assert whole == list(range(NUM_SAMPLES))
    assert seen == [list(range(rank, NUM_SAMPLES, 3)) for rank in range(3)]


def test_a_spawned_worker_knows_its_rank(cache: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("torch.distributed.is_initialized", lambda: True)
        patched.setattr("torch.distributed.get_world_size", lambda: 3)
        patched.setattr("torch.distributed.get_rank", lambda: 1)
        sent = pickle.dumps(SupervisedStream(Tokens(), cache))
    received = [record.index for _, record in pickle.loads(sent)]  # where no process group runs
    assert received == list(range(1, NUM_SAMPLES, 3))


def test_goes_on_where_it_stopped(cache: Path) -> None:
    first = SupervisedStream(Tokens(), cache)
    pairs = iter(first)
    seen = [next(pairs)[1].index for _ in range(4)]
    state = first.state_dict()
    assert state == {"given": 4}
    second = SupervisedStream(Tokens(), cache)
    second.load_state_dict(state)
    assert second.state_dict() == state
    seen += [record.index for _, record in second]
    assert seen == list(range(NUM_SAMPLES))
    assert len(list(second)) == NUM_SAMPLES  # the pass after it starts at the beginning
    for wrong in ({}, {"given": -1}, {"given": 1.5}):
        with pytest.raises(ShdError, match="'given'"):
            second.load_state_dict(wrong)


def test_what_is_refused(cache: Path) -> None:
    with pytest.raises(ShdError, match="sample 11 with key") as missing:
        list(SupervisedStream(Tokens(extra=1), cache))
    assert missing.value.code == "sample-missing"
    with pytest.raises(ShdError, match="got the iterator") as once:
        SupervisedStream(iter(Tokens()), cache)
    assert once.value.code == "argument-value"
    with pytest.raises(ShdError, match="skipped must be"):
        SupervisedStream(Tokens(), cache, skipped="maybe")
    with pytest.raises(ShdError, match="inputs input_ids") as inputs:
        list(SupervisedStream([{"text": "x"}], cache))
    assert inputs.value.code == "inputs-invalid"


def test_model_inputs_find_the_key(cache: Path) -> None:
    data = [{"tokens": np.arange(3, 3 + length_of(3))}]
    stream = SupervisedStream(data, cache, model_inputs=lambda sample: {"input_ids": sample["tokens"]})
    assert [record.index for _, record in stream] == [3]
