"""Two ranks, or many micro-batches, train as one process does on the whole batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.binding.ranks import SAMPLES, WAYS, WHITENINGS, accumulate, make_rewards, make_student, run_rank
from support.started_processes import run_ranks

from shd_torch import batch_share
from shd_torch.recipes import minillm_advantages


def one_process() -> dict[str, torch.Tensor]:
    student = make_student()
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    loss = accumulate(student, [list(range(SAMPLES))], ranks=1)
    optimizer.step()
    return {"loss": loss, **student.state_dict()}


@pytest.fixture(scope="module")
def by_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, (2, str(folder)), 2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_are_one(way: str, by_two_ranks: Path) -> None:
    together = torch.load(by_two_ranks / f"{way}.pt", weights_only=True)
    alone, before = one_process(), make_student().state_dict()
    assert together.keys() == alone.keys()
    for name, expected in alone.items():
        torch.testing.assert_close(together[name], expected, rtol=1e-5, atol=1e-6, msg=name)
    assert not torch.equal(alone["layers.0.wq.weight"], before["layers.0.wq.weight"])


@pytest.mark.slow
def test_advantages_are_whitened_over_all_ranks(by_two_ranks: Path) -> None:
    parts = [torch.load(by_two_ranks / f"advantages-{rank}.pt", weights_only=True) for rank in range(2)]
    for whitening in WHITENINGS:
        whole = minillm_advantages(*make_rewards(), whitening=whitening)
        torch.testing.assert_close(torch.cat([part[whitening] for part in parts]), whole)


def test_shares() -> None:
    assert batch_share(5) == 1.0
    assert batch_share(torch.tensor(3), num_rows_in_all=12) == 0.25
    assert batch_share(0) == 0.0
    assert batch_share(np.int64(3), num_rows_in_all=np.float32(12)) == 0.25
