"""Two ranks on shares of a cache, or with a live teacher each, train as one process on the same global batches."""

from pathlib import Path

import pytest
import torch
from support.binding.loader_ranks import RANKS, SAMPLES, WAYS, make_model, run_rank, train
from support.makers import job, write_cache
from support.started_processes import run_ranks


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = write_cache(tmp_path_factory.mktemp("loader") / "cache", job(SAMPLES, support="causal"))
    return folder


@pytest.fixture(scope="module")
def by_two_ranks(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("loader_ranks")
    run_ranks(run_rank, (str(folder), str(cache)), RANKS)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_are_one(way: str, cache: Path, by_two_ranks: Path) -> None:
    together = torch.load(by_two_ranks / f"{way}.pt", weights_only=True)
    alone, before = train(way, str(cache)), make_model(2, seed=0).state_dict()
    assert together.keys() == alone.keys()
    for name, expected in alone.items():
        torch.testing.assert_close(together[name], expected, rtol=1e-5, atol=1e-6, msg=name)
    for layer in (1, 2):
        name = f"layers.{layer}.wq.weight"
        assert not torch.allclose(alone[name], before[name], atol=1e-3)
