"""Some steps on a cache, a stream of it, or a live teacher, by one process or by ranks; see ``test_loader_ranks``."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from shd_torch import OnlineTeacher, SupervisedDataset, SupervisedStream, batch_share, capture_attention, layer_kls
from support.binding.ranks import process_group
from support.binding.stories import Stories
from support.makers import MAX_LENGTH, length_of

RANKS, SAMPLES, BATCH, EPOCHS = 2, 8, 4, 2  # BATCH is of all ranks together
WAYS = ("sampler", "stream", "live")


def make_model(num_heads: int, seed: int) -> Stories:
    torch.manual_seed(seed)
    return Stories(
        width=16, hidden=24, num_layers=3, num_heads=num_heads, num_kv_heads=2, vocabulary=20, length=MAX_LENGTH
    )


def make_samples() -> list[dict[str, Tensor]]:
    """What ``support.makers`` has the keys of."""
    return [{"input_ids": torch.arange(index, index + length_of(index))} for index in range(SAMPLES)]


def pad(samples: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Tokens ``(B, L)``, and which of them are there."""
    tokens = torch.zeros(len(samples), MAX_LENGTH, dtype=torch.int64)
    mask = torch.zeros(len(samples), MAX_LENGTH, dtype=torch.bool)
    for row, sample in enumerate(samples):
        tokens[row, : len(sample["input_ids"])] = sample["input_ids"]
        mask[row, : len(sample["input_ids"])] = True
    return tokens, mask


def make_batches(way: str, cache: str, rank: int, ranks: int) -> Iterable[tuple[tuple[Tensor, Tensor], Any]]:
    if way == "stream":
        stream = SupervisedStream(make_samples(), cache)
        loader: DataLoader[Any] = DataLoader(stream, BATCH // ranks, collate_fn=stream.collate_with(pad))
        for _ in range(EPOCHS):
            yield from loader
        return
    joined = SupervisedDataset(make_samples(), cache)
    sampler = DistributedSampler(joined, ranks, rank, seed=3)
    loader = DataLoader(joined, BATCH // ranks, sampler=sampler, collate_fn=joined.collate_with(pad))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        yield from loader


def train(way: str, cache: str, *, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
    """The parameters after all steps, and the loss of all steps together."""
    student = make_model(2, seed=0)
    model: nn.Module = student if ranks == 1 else nn.parallel.DistributedDataParallel(student)
    teacher = OnlineTeacher(make_model(4, seed=1), 2, [(1, 1), (2, 2)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    total = torch.zeros(())
    for (tokens, mask), supervision in make_batches(way, cache, rank, ranks):
        taught = teacher(tokens, query_mask=mask) if way == "live" else supervision
        with capture_attention(model, taught.layers) as captured:
            logits = model(tokens)
        terms = layer_kls(captured, taught, loss_mask=mask, beta=0.5)
        base = (logits.square().mean(-1) * mask).sum() * ranks / (BATCH * MAX_LENGTH)
        loss = base + batch_share(mask.sum()) * torch.stack(list(terms.values())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    if ranks > 1:
        dist.all_reduce(total)
    return {"loss": total / ranks, **student.state_dict()}


def run_rank(rank: int, folder: str, cache: str) -> None:
    """Train in each of ``WAYS``; rank 0 writes what comes of it."""
    with process_group(rank, RANKS, folder):
        for way in WAYS:
            state = train(way, cache, rank=rank, ranks=RANKS)
            if rank == 0:
                torch.save(state, Path(folder) / f"{way}.pt")
