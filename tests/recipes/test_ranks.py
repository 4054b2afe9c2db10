"""Advantages are whitened over all ranks: two of them have those of one process with the whole batch."""

from pathlib import Path

import pytest
import torch
from support.binding.recipe_ranks import RANKS, WHITENINGS, make_rewards, run_rank
from support.started_processes import run_ranks

from shd_torch.recipes import minillm_advantages


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path: Path) -> None:
    run_ranks(run_rank, (str(tmp_path),), RANKS)
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
    for whitening in WHITENINGS:
        whole = minillm_advantages(*make_rewards(), whitening=whitening)
        torch.testing.assert_close(torch.cat([part[whitening] for part in parts]), whole)
