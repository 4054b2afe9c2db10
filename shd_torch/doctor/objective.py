"""The loss that a pair would be trained with beside SHD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import shd_torch.recipes as recipes
from shd_ref.errors import ShdError
from shd_torch.capture import capture_attention
from shd_torch.capture.outputs import read_logits, read_output
from shd_torch.kd import embedding_loss, hidden_loss, pool_states
from shd_torch.recipes import SHD, Term, Terms
from shd_torch.recipes.terms import join
from shd_torch.training.recipe import is_causal_model

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Objective:
    """A base loss."""

    recipe: str  # of shd_torch.recipes; hidden_loss or embedding_loss for a student without a head
    measure: str  # the term whose value on held-out data says how good a student is
    labels: str  # where they are from, in words
    reason: str  # why this one
    options: Mapping[str, Any] = field(default_factory=dict)

    def terms(self, output: Any, taught_output: Any, batch: Batch, shd: SHD | None = None) -> Terms:
        """Its terms on the outputs of student and teacher for a batch, and the term on attention."""
        if self.recipe == "hidden_loss":
            states = output.last_hidden_state, taught_output.last_hidden_state
            value = hidden_loss(*states, distance="cosine", loss_mask=mask_of(batch), check=False)
            return join(shd, **{self.measure: Term(value, 1.0)})
        if self.recipe == "embedding_loss":
            states = output.last_hidden_state, taught_output.last_hidden_state
            pooled = [pool_states(one, mask_of(batch), pooling=self.options["pooling"]) for one in states]
            value = embedding_loss(*pooled, distance=self.options["distance"], check=False)
            return join(shd, **{self.measure: Term(value, 1.0)})
        logits, taught = output.logits, read_logits(taught_output)
        labels = batch.get("labels")
        if labels is None and logits.ndim == 2:
            assert taught is not None  # choose_objective saw them
            labels = taught.argmax(-1)
        if labels is None:
            labels = batch["input_ids"]
            if "attention_mask" in batch:
                labels = labels.masked_fill(batch["attention_mask"] == 0, -100)
        extra = [] if self.recipe == "cross_entropy" else [taught]
        result: Terms = getattr(recipes, self.recipe)(logits, labels, *extra, shd=shd, check=False, **self.options)
        return result


def choose_objective(student: Any, teacher: Any, batch: Batch, pooling: str | None = None) -> Objective | None:
    """The recipe for a pair, from what both return on a batch; ``pooling`` is a sentence encoder's.

    None for a student without a head whose last hidden states are not of the teacher's shape, so that nothing could
    say how good it is.
    """
    with torch.no_grad():
        outputs = [model(**inputs_of(batch)) for model in (student, teacher)]
    own, other = map(read_logits, outputs)
    options: dict[str, Any]
    if own is None:
        shapes = [getattr(read_output(output, "last_hidden_state"), "shape", None) for output in outputs]
        if pooling is not None and None not in shapes:
            options = {"pooling": pooling, "distance": "cosine" if shapes[0] == shapes[1] else "similarity"}
            reason = "a sentence encoder: shd precompute --embeddings stores the teacher's embeddings"
            return Objective("embedding_loss", "embedding_distance", "none", reason, options)
        if shapes[0] is None or shapes[0] != shapes[1]:
            return None
        reason = "no head; the last hidden states of both are compared"
        return Objective("hidden_loss", "hidden_distance", "none", reason)
    same = other is not None and own.shape == other.shape
    has_labels = "labels" in batch
    if own.ndim == 2 and same:
        labels = "given" if has_labels else "the teacher's decisions"
        return Objective("image_kd", "cross_entropy", labels, "both have the same classes")
    if own.ndim == 2 and has_labels:
        return Objective("cross_entropy", "cross_entropy", "given", "the teacher has no logits of these classes")
    if own.ndim == 3 and is_causal_model(student):
        options = {"shift": True}
        labels = "given" if has_labels else "the next tokens"
        if other is None or other.shape[:2] != own.shape[:2]:
            return Objective("cross_entropy", "cross_entropy", labels, "the teacher has no logits", options)
        if not same:
            options["vocab_size"] = min(own.shape[-1], other.shape[-1])
        return Objective("language_kd", "cross_entropy", labels, "both predict the next token", options)
    if own.ndim == 3 and same:
        return Objective("gkd", "jsd", "none", "both fill in tokens", {"mixing": 0.0})
    rule = "data must hold labels where the teacher's logits are not of the student's classes"
    raise ShdError("argument-value", f"{rule}; got none: add an array labels to the .npz")


def student_terms(objective: Objective, student: Any, taught: Any, batch: Batch, beta: float | None) -> Terms:
    """The terms of a student on a batch that the teacher has seen; beta None leaves SHD out."""
    inputs = inputs_of(batch)
    if beta is None:
        return objective.terms(student(**inputs), taught.output, batch)
    with capture_attention(student, layers=taught.layers) as captured:
        own = student(**inputs)
    return objective.terms(own, taught.output, batch, SHD(captured, taught, beta, loss_mask=mask_of(batch)))


def mask_of(batch: Batch) -> Tensor | None:
    """``(B, L)``, True = a position of the sample; None where all are."""
    return batch["attention_mask"].bool() if "attention_mask" in batch else None


def inputs_of(batch: Batch) -> dict[str, Any]:
    """A batch without its labels, as keywords of a model."""
    return {name: array for name, array in batch.items() if name != "labels"}
