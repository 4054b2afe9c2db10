"""SHDTrainer by two ranks trains and logs as one process does on the same global batches."""

import json
from pathlib import Path

import pytest
import torch
from support.binding.trainer_cases import CLOSE, assert_same, make_model, weights
from support.binding.trainer_ranks import RANKS, WAYS, make_way, run_rank
from support.started_processes import run_ranks

LOGGED = {"loss", "base_loss", "shd_loss", "shd_loss_layer_0", "shd_loss_layer_1", "beta", "clipped_alphas"}


@pytest.fixture(scope="module")
def by_two_ranks(trainer_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer_ranks")
    run_ranks(run_rank, (str(folder), str(trainer_cache)), RANKS)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_are_one(way: str, by_two_ranks: Path, trainer_cache: Path, tmp_path: Path) -> None:
    alone = make_way(way, trainer_cache, tmp_path, ranks=1)
    alone.train()
    together = torch.load(by_two_ranks / f"{way}.pt", weights_only=True)
    assert_same(together, weights(alone), **CLOSE)
    projectors = torch.load(by_two_ranks / f"{way}-projectors.pt", weights_only=True)
    assert_same(projectors, alone.projectors.state_dict(), **CLOSE)
    before = make_model(2, seed=2).state_dict()
    assert not torch.equal(
        together["model.layers.0.self_attn.q_proj.weight"], before["model.layers.0.self_attn.q_proj.weight"]
    )
    logged, expected_log = json.loads((by_two_ranks / f"{way}.json").read_text()), alone.state.log_history[0]
    assert logged.keys() == expected_log.keys() >= LOGGED
    for key in LOGGED | ({"kd_loss", "hidden_loss"} if way.startswith("terms") else set()):
        assert logged[key] == pytest.approx(expected_log[key], rel=1e-4), key
    assert logged["wait_seconds"] > 0
