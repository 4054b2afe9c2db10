"""Advantages of a batch that two ranks share; see ``tests/recipes/test_ranks.py``."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shd_torch.recipes import minillm_advantages

RANKS = 2
WHITENINGS = ("biased", "unbiased", "none")


def make_rewards() -> tuple[Tensor, Tensor]:
    """Rewards of six texts, and which of their rows count."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 4, 5, 2])[:, None]
    return torch.randn(6, 5, generator=generator, dtype=torch.float64) * mask, mask


def run_rank(rank: int, folder: str) -> None:
    """A rank: advantages of its texts, four on the first rank and two on the second."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    texts = slice(0, 4) if rank == 0 else slice(4, 6)
    rewards, mask = make_rewards()
    found = {name: minillm_advantages(rewards[texts], mask[texts], whitening=name) for name in WHITENINGS}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
