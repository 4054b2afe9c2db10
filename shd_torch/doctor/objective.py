"""The loss that a pair would be trained with beside SHD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import shd_torch.recipes as recipes
from shd_ref.errors import ShdError
from shd_torch.capture import capture_attention
from shd_torch.capture.outputs import read_logits
from shd_torch.recipes import SHD, Terms
from shd_torch.training.recipe import is_causal_model

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Objective:
    """A base loss.

    Attributes:
        recipe: of ``shd_torch.recipes``.
        measure: the term whose value on held-out data says how good a student is.
        labels: where they are from, in words.
        reason: why this one.
        options: its keywords.
    """

    recipe: str
    measure: str
    labels: str
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def terms(self, logits: Tensor, taught: Tensor | None, batch: Batch, shd: SHD | None = None) -> Terms:
        """Its terms on a batch.

        Args:
            logits: of the student.
            taught: of the teacher, where the recipe reads them.
            batch: inputs, and ``labels`` where they are given.
            shd: the term on attention.
        """
        labels = batch.get("labels")
        if labels is None and logits.ndim == 2:
            assert taught is not None  # choose_objective saw them
            labels = taught.argmax(-1)
        if labels is None:
            labels = batch["input_ids"]
            if "attention_mask" in batch:
                labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
        given = [] if self.recipe == "cross_entropy" else [taught]
        found: Terms = getattr(recipes, self.recipe)(logits, labels, *given, shd=shd, check=False, **self.options)
        return found


def choose_objective(student: Any, teacher: Any, batch: Batch) -> Objective:
    """The recipe for a pair, from what both return on a batch.

    Args:
        student: in evaluation mode.
        teacher: the same.
        batch: inputs of both, with ``labels`` where there are any.

    Raises:
        ShdError: ``argument-value`` for a student without a head, or with nothing to learn but attention.
    """
    with torch.no_grad():
        own, other = (read_logits(model(**inputs_of(batch))) for model in (student, teacher))
    if own is None:
        raise ShdError(
            "argument-value",
            f"student must have a head that returns logits to be trained; got {type(student).__name__}: name the "
            "class with a head in its config.json, as architectures",
        )
    same = other is not None and own.shape == other.shape
    has_labels = "labels" in batch
    if own.ndim == 2 and same:
        labels = "given" if has_labels else "the teacher's decisions"
        return Objective("image_kd", "cross_entropy", labels, "both have the same classes")
    if own.ndim == 2 and has_labels:
        return Objective("cross_entropy", "cross_entropy", "given", "the teacher has no logits of these classes")
    if own.ndim == 3 and is_causal_model(student):
        options: dict[str, Any] = {"shift": True}
        labels = "given" if has_labels else "the next tokens"
        if other is None or other.shape[:2] != own.shape[:2]:
            return Objective("cross_entropy", "cross_entropy", labels, "the teacher has no logits", options)
        if not same:
            options["vocab_size"] = min(own.shape[-1], other.shape[-1])
        return Objective("language_kd", "cross_entropy", labels, "both predict the next token", options)
    if own.ndim == 3 and same:
        return Objective("gkd", "jsd", "none", "both fill in tokens", {"mixing": 0.0})
    raise ShdError(
        "argument-value",
        "data must hold labels where the teacher's logits are not of the student's classes; got none: add an array "
        "labels to the .npz",
    )


def student_terms(objective: Objective, student: Any, taught: Any, batch: Batch, beta: float | None) -> Terms:
    """The terms of a student on a batch that the teacher has seen; beta None leaves SHD out."""
    inputs, logits = inputs_of(batch), read_logits(taught.output)
    if beta is None:
        return objective.terms(student(**inputs).logits, logits, batch)
    with capture_attention(student, layers=taught.layers) as captured:
        own = student(**inputs).logits
    mask = batch["attention_mask"].bool() if "attention_mask" in batch else None
    return objective.terms(own, logits, batch, SHD(captured, taught, beta, loss_mask=mask))


def inputs_of(batch: Batch) -> dict[str, Any]:
    """A batch without its labels, as keywords of a model."""
    return {name: part for name, part in batch.items() if name != "labels"}


def cut_batches(data: Batch, rows: Tensor, size: int) -> Iterator[dict[str, Tensor]]:
    """Batches of some rows, in their order."""
    for part in torch.split(rows, size):
        yield {name: array[part] for name, array in data.items()}
