"""Models that a task trains for itself and keeps: teachers, classifiers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def kept_place(folder: Path, name: str, settings: Mapping[str, Any], *depends: str) -> Path:
    """Where a model is kept, by a hash of the settings that it depends on: after a change it is trained again.

    Among them is what says which samples it saw, lest it know those that students are judged on.
    """
    text = json.dumps({key: settings[key] for key in depends}, sort_keys=True)
    return folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.pt"


def keep_trained(
    path: Path,
    model: nn.Module,
    loss: Callable[[Any, Tensor], Tensor],
    *,
    size: int,
    steps: int,
    rate: float,
    batch: int = 32,
    example: Tensor | None = None,
    seed: int = 0,
) -> Any:
    """The model that the file holds, or this one, trained and written there; in evaluation mode, frozen.

    Args:
        path: of its weights, from ``kept_place``.
        model: as it starts.
        loss: of the model and the numbers of a batch's samples.
        size: number of samples.
        steps: of training, with a one-cycle schedule.
        rate: the largest one.
        batch: samples a step.
        example: an input, for a model with lazy layers.
        seed: draws the order of samples.
    """
    if example is not None:
        model(example)
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
        return model.eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        value = loss(model.train(), torch.randint(size, (batch,), generator=draw))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    torch.save(model.state_dict(), draft)
    draft.replace(path)
    return model.eval().requires_grad_(False)
