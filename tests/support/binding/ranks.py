"""One training step of a small student, by one process or by ranks; see ``test_ranks``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shd_torch import attention_kl, batch_share, capture_attention
from shd_torch.recipes import minillm_advantages
from support.binding.stories import Stories

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this PyTorch has no gloo, by which ranks on the CPU speak", allow_module_level=True)

SAMPLES, LENGTH, HEADS, LAYERS = 4, 9, 2, 2
WAYS = ("ddp", "fsdp2")
LENGTHS = (9, 4, 6, 2)  # the ranks hold different numbers of rows
WHITENINGS = ("biased", "unbiased", "none")


@contextmanager
def process_group(rank: int, ranks: int, folder: str) -> Iterator[None]:
    """A process that is one of several on the CPU; they leave together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def make_student() -> Stories:
    torch.manual_seed(0)
    return Stories(
        width=16, hidden=24, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=HEADS, vocabulary=20, length=LENGTH
    )


def make_batch() -> tuple[Tensor, list[Tensor], Tensor]:
    """Tokens, causal maps a layer, and which positions count."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 20, (SAMPLES, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    maps = []
    for _ in range(LAYERS):
        logits = torch.randn(SAMPLES, HEADS, LENGTH, LENGTH, generator=generator)
        logits = logits.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)
        maps.append(torch.softmax(logits, -1) * mask[:, None, :, None])
    return tokens, maps, mask


def accumulate(model: nn.Module, parts: list[list[int]], *, ranks: int, synchronise: Any = None) -> Tensor:
    """Backward through the micro-batches of one step; the term of this process."""
    tokens, maps, mask = make_batch()
    rows = [int(mask[part].sum()) for part in parts]
    total = torch.zeros(())
    for number, part in enumerate(parts):
        if synchronise is not None:
            synchronise(number == len(parts) - 1)
        with capture_attention(model, LAYERS) as captured:
            logits = model(tokens[part])
        calls = captured.calls
        term = attention_kl(
            [call.query for call in calls],
            [call.key for call in calls],
            [layer[part] for layer in maps],
            loss_mask=mask[part],
            **calls[0].mask_keywords,
        )
        base = logits.square().mean((1, 2)).sum() * ranks / SAMPLES
        loss = base + 0.5 * batch_share(rows[number], num_rows_in_all=sum(rows)) * term
        loss.backward()
        total += loss.detach()
    return total


def run_rank(rank: int, ranks: int, folder: str) -> None:
    """One SGD step in each of ``WAYS``, of which rank 0 writes the parameters; and MiniLLM's advantages."""
    with process_group(rank, ranks, folder):
        texts = slice(0, 4) if rank == 0 else slice(4, 6)
        rewards, mask = (whole[texts] for whole in make_rewards())
        advantages = {name: minillm_advantages(rewards, mask, whitening=name) for name in WHITENINGS}
        torch.save(advantages, Path(folder) / f"advantages-{rank}.pt")
        for way in WAYS:
            state = train(rank, ranks, way)
            if rank == 0:
                torch.save(state, Path(folder) / f"{way}.pt")


def make_rewards() -> tuple[Tensor, Tensor]:
    """Rewards of six texts, and which of their rows count."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 4, 5, 2])[:, None]
    return torch.randn(6, 5, generator=generator, dtype=torch.float64) * mask, mask


def train(rank: int, ranks: int, way: str) -> dict[str, Tensor]:
    """One step as DDP, in two micro-batches, or as FSDP2, in one: whole parameters, mean loss."""
    student = make_student()
    mine = list(range(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks))
    parts = [[index] for index in mine] if way == "ddp" else [mine]
    model: Any
    if way == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for layer in student.layers:
            fully_shard(layer, mesh=mesh)
        model, synchronise = fully_shard(student, mesh=mesh), None
    else:
        model = nn.parallel.DistributedDataParallel(student)
        synchronise = lambda last: setattr(model, "require_backward_grad_sync", last)  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = accumulate(model, parts, ranks=ranks, synchronise=synchronise)
    dist.all_reduce(loss)
    optimizer.step()
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in student.state_dict().items()
    }
    return {"loss": loss / ranks, **state}
