"""A few steps of SHDTrainer by one process or by two ranks; see ``test_trainer_ranks``."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from shd_torch import HiddenTerm, KdTerm, OnlineTeacher, SHDTrainer, SupervisedDataset, SupervisedStream
from support.binding.ranks import process_group
from support.binding.trainer_cases import make_model, make_samples, make_trainer, weights

RANKS = 2
BATCH = 4  # samples of a step, however many processes make it
WAYS = ("uneven", "live", "stream-accumulated")
WAYS += ("terms-accumulated",)  # on logits and, through projectors, on hidden states


def make_way(way: str, cache: Path, out: Path, *, ranks: int) -> SHDTrainer:
    """Two steps, the same for any number of ranks; 4 + 3 samples where it is uneven."""
    samples = make_samples()
    if way == "uneven":
        samples = samples[:7]
    micro = 2 if way.endswith("accumulated") else 1
    options: dict[str, Any] = {}
    train: Any = SupervisedDataset(samples, cache)
    if way.startswith("stream"):
        train = SupervisedStream(samples, cache)
    if way == "live":
        train, options["teacher"] = samples, OnlineTeacher(make_model(4, seed=1), 2, 2)
    if way.startswith("terms"):
        for number, sample in enumerate(samples):
            sample["labels"] = sample["labels"].clone()
            sample["labels"][: number % 3] = -100  # rows of logits that count are others than those of attention
        wide = make_model(4, seed=1, width=24)
        train, options["teacher"] = samples, OnlineTeacher(wide, 2, 2, hidden_layers=[1])
        options |= {"kd": KdTerm(rows="next_labels"), "hidden": HiddenTerm([(1, 1)])}
    arguments = {
        "max_steps": 2,
        "logging_steps": 2,
        "per_device_train_batch_size": BATCH // (ranks * micro),
        "gradient_accumulation_steps": micro,
        "accelerator_config": {"even_batches": False},
    }
    return make_trainer(out, train=train, beta=0.5, arguments=arguments, **options)


def run_rank(rank: int, folder: str, cache: str) -> None:
    """Train in each of ``WAYS``; rank 0 writes weights and logs."""
    # What torchrun sets; the rendezvous by a file needs no free port.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with process_group(rank, RANKS, folder):
        for way in WAYS:
            trainer = make_way(way, Path(cache), Path(folder) / way, ranks=RANKS)
            assert trainer.accelerator.num_processes == RANKS
            trainer.train()
            if rank == 0:
                torch.save(weights(trainer), Path(folder) / f"{way}.pt")
                torch.save(trainer.projectors.state_dict(), Path(folder) / f"{way}-projectors.pt")
                logged = json.dumps(trainer.state.log_history[0])
                (Path(folder) / f"{way}.json").write_text(logged, encoding="utf-8")
