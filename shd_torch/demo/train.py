"""A readable training loop: a student, its base loss, and the maps of a cache.

``L = base loss + beta * KL(merged map || student map)``. For image classifiers whose data fit in memory; every part
of it (``SupervisedDataset``, ``capture_attention``, ``layer_kls``) can be called from your own loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shd_ref.cache import CacheReader
from shd_ref.errors import ShdError
from shd_torch.capture.capture import capture_attention
from shd_torch.data.batches import CodedSupervision
from shd_torch.data.dataset import SupervisedDataset, check_cache
from shd_torch.supervision.factored_codes import FactoredCodes
from shd_torch.teacher.online import layer_kls


@dataclass(frozen=True)
class TrainOptions:
    """How a student is trained.

    Attributes:
        steps: optimiser steps.
        batch_size: samples a step, drawn with replacement where the data hold fewer.
        learning_rate: peak of a one-cycle schedule for AdamW.
        weight_decay: of AdamW.
        kd_weight: share of knowledge distillation in the base loss, 0 to 1: ``(1 - w) CE + w KD``.
        kd_temperature: of both models' logits in KD.
        beta: weight of the SHD term; 0 switches it off.
        seed: of initial order and batches; the caller seeds the student's own initial weights.
    """

    steps: int = 300
    batch_size: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    kd_weight: float = 0.0
    kd_temperature: float = 2.0
    beta: float = 0.0
    seed: int = 0


@dataclass
class History:
    """Loss terms step by step: ``ce``, ``kd`` and ``shd`` unweighted, ``total`` as optimised."""

    ce: list[float] = field(default_factory=list)
    kd: list[float] = field(default_factory=list)
    shd: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


class ArrayDataset(Dataset[dict[str, Tensor]]):
    """Arrays with a common first axis as samples: mappings from name to tensor."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        sizes = {name: len(array) for name, array in arrays.items()}
        if len(set(sizes.values())) != 1:
            raise ShdError("inputs-invalid", f"arrays must share one first axis; got {sizes}")
        self.arrays = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.arrays.items()}


def train_student(
    student: nn.Module,
    data: ArrayDataset,
    options: TrainOptions,
    *,
    cache: CacheReader | None = None,
    device: str = "cpu",
) -> History:
    """Train an image classifier on ``data``, with the cache's attention where ``options.beta`` is above 0.

    Everything that could disagree is compared before the first step: the cache with the student (heads, layers),
    and every sample with the cache.

    Args:
        student: maps ``image`` ``(B, ...)`` to class logits ``(B, C)``; its attention must show queries and keys.
        data: samples with ``image``, ``label`` and, for KD, ``teacher_logits`` ``(C,)``.
        options: see ``TrainOptions``.
        cache: the supervision; needed where beta is above 0.
        device: where the student trains; codes are decoded there.

    Raises:
        ShdError: ``cache-mismatch``, ``sample-missing``, ``inputs-invalid``, ``capture-failed``.
    """
    joined = _join(data, options, cache)
    student.to(device).train()
    if joined is not None:
        check_student(student, joined, device=device)
    generator = torch.Generator().manual_seed(options.seed)
    sampler = torch.utils.data.RandomSampler(
        data, replacement=True, num_samples=options.steps * options.batch_size, generator=generator
    )
    optimizer = torch.optim.AdamW(
        student.parameters(), options.learning_rate, weight_decay=options.weight_decay, fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, options.steps)
    history = History()
    for step, (batch, supervision) in enumerate(_batches(data, joined, options, sampler)):
        images, labels = batch["image"].to(device), batch["label"].to(device)
        if supervision is None:
            logits = student(images)
            shd = None
        else:
            with capture_attention(student, layers=supervision.layers) as captured:
                logits = student(images)
            # Values are looked at once; after that only shapes are, which costs no wait for the device.
            terms = layer_kls(captured, supervision.to(device), check=step == 0)
            shd = torch.stack(list(terms.values())).sum()
        ce = F.cross_entropy(logits, labels)
        loss = (1 - options.kd_weight) * ce
        if options.kd_weight:
            kd = kd_loss(logits, batch["teacher_logits"].to(device), options.kd_temperature)
            history.kd.append(float(kd.detach()))
            loss = loss + options.kd_weight * kd
        if shd is not None:
            history.shd.append(float(shd.detach()))
            loss = loss + options.beta * shd
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without a type
        optimizer.step()
        schedule.step()
        history.ce.append(float(ce.detach()))
        history.total.append(float(loss.detach()))
    student.eval()
    return history


def kd_loss(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 2.0) -> Tensor:
    """Knowledge distillation on logits ``(B, C)``: ``T^2 KL(teacher / T || student / T)``, mean over samples."""
    teacher = (teacher_logits.detach() / temperature).log_softmax(-1)
    student = (student_logits / temperature).log_softmax(-1)
    return temperature**2 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)


@torch.no_grad()
def measure_accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images whose largest logit is their label."""
    model.eval()
    return float((model(images).argmax(-1) == labels).float().mean())


def check_student(student: nn.Module, joined: SupervisedDataset, *, device: str = "cpu") -> None:
    """Run one sample through the student and compare its attention with the cache's: heads, layers, positions.

    Raises:
        ShdError: ``cache-mismatch``, ``capture-failed``.
    """
    sample, supervision = joined.collate([joined[0]])
    with torch.no_grad(), capture_attention(student) as captured:
        student(sample["image"].to(device))
    check_cache(
        joined.cache,
        num_student_heads=captured.calls[0].num_heads,
        num_student_layers=captured.num_calls,
        temperature=1.0,
    )
    for layer in supervision.layers:
        positions = captured.layer(layer).key.shape[2]
        if positions != supervision.lengths[0]:
            raise ShdError(
                "cache-mismatch",
                f"the student must see {supervision.lengths[0]} positions in layer {layer}, as its teacher did; got "
                f"{positions}: use the teacher's patch size and tokens",
            )


def _join(data: ArrayDataset, options: TrainOptions, cache: CacheReader | None) -> SupervisedDataset | None:
    needed = {"image", "label"} | ({"teacher_logits"} if options.kd_weight else set())
    missing = sorted(needed - data.arrays.keys())
    if missing:
        raise ShdError("inputs-invalid", f"data must hold {', '.join(sorted(needed))}; missing {', '.join(missing)}")
    if options.beta == 0:
        return None
    if cache is None:
        raise ShdError(
            "argument-value", f"beta={options.beta} needs a cache; got none: give one, or beta=0", "LOSS-2"
        )
    return SupervisedDataset(data, cache, preload=True)


def _batches(
    data: ArrayDataset, joined: SupervisedDataset | None, options: TrainOptions, sampler: Any
) -> Iterator[tuple[dict[str, Tensor], CodedSupervision | FactoredCodes | None]]:
    if joined is None:
        for batch in DataLoader(data, options.batch_size, sampler=sampler):
            yield batch, None
    else:
        yield from DataLoader(joined, options.batch_size, sampler=sampler, collate_fn=joined.collate)
