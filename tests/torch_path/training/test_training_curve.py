"""Two hundred steps by either backend are one curve: same student, same live teacher, same batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.binding.models import PlainBlock
from torch import Tensor, nn

from shd_ref.conformance import load_tolerances
from shd_torch import OnlineTeacher, capture_attention, layer_kls

STEPS = 200


class TinyLanguageModel(nn.Module):
    def __init__(self, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(PlainBlock(16, num_heads, causal=True) for _ in range(num_layers))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(hidden, self.embed.weight)


def train(backend: str, dtype: torch.dtype) -> Tensor:
    """Base loss and SHD term at every step ``(STEPS, 2)``."""
    torch.manual_seed(0)
    online = OnlineTeacher(TinyLanguageModel(3, 4).to(dtype), 2, 2)
    student = TinyLanguageModel(2, 2).to(dtype)
    optimizer = torch.optim.AdamW(student.parameters(), 3e-3)
    curve = []
    for _ in range(STEPS):
        ids = torch.randint(0, 20, (4, 12)).cumsum(1) % 20
        with capture_attention(student, 2) as captured:
            logits = student(ids)
        base = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        terms = layer_kls(captured, online(ids), beta=0.1, backend=backend, check=False)
        shd = torch.stack(list(terms.values())).sum()
        optimizer.zero_grad()
        (base + shd).backward()
        optimizer.step()
        curve.append(torch.stack([base, shd]).detach())
    return torch.stack(curve)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.nightly)], ids=str)
def test_dense_and_sdpa_give_the_same_curve(dtype: torch.dtype) -> None:
    dense, sdpa = train("dense", dtype), train("sdpa", dtype)
    tolerance = load_tolerances()["agreement"][str(dtype).removeprefix("torch.")]["loss"]
    torch.testing.assert_close(dense, sdpa, **tolerance)
    assert dense[-20:, 1].mean() < 0.8 * dense[:20, 1].mean()
