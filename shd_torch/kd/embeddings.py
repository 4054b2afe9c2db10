"""Embeddings of texts: pooled from states, compared by a loss, and by how far student and teacher agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from shd_ref.cache.forms.rows import POOLINGS
from shd_ref.errors import need
from shd_torch.checks import check_mask, check_option, check_real, check_shapes, compute_dtype, without_autocast
from shd_torch.kd.chunks import hidden_loss, unit

DISTANCES: Final[tuple[str, ...]] = ("cosine", "mse", "similarity")

MOST_TEXTS: Final = 2048
"""Texts that are compared with each other at once: two million pairs."""
LEAST_TEXTS: Final = 3  # two texts are one pair, and a rank correlation needs several
_NEIGHBOURS: Final = 10


@without_autocast
def pool_states(states: Tensor, mask: Tensor | None, *, pooling: str = "mean", normalize: bool = False) -> Tensor:
    """The embedding of each text of a batch, as sentence-transformers pools it.

    Args:
        states: ``(B, L, D)``, such as a model's ``last_hidden_state``.
        mask: boolean ``(B, L)``, True = a position of the text; None: all are. A text without any gives zeros.
        pooling: ``"mean"``, ``"cls"`` (the first position of the text), ``"max"`` or ``"last"``.
        normalize: divide each embedding by its norm; one of zeros stays as it is.

    Returns:
        ``(B, D)``, float64 if ``states`` are, else float32.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``.

    Source: silent. Specification: CACHE-182.
    """
    check_option("pooling", pooling, POOLINGS, "CACHE-182")
    check_real(states, "states", check=False, ndim=3)
    mask = torch.ones(states.shape[:2], dtype=torch.bool) if mask is None else mask
    check_mask(mask, "mask", states.shape[:2])
    counted = mask.to(states.device)[..., None]
    wide = states.to(compute_dtype(states)).masked_fill(~counted, 0.0)
    if pooling == "mean":
        pooled = wide.sum(1) / counted.sum(1).clamp(min=1)
    elif pooling == "max":
        pooled = wide.masked_fill(~counted, -torch.inf).amax(1).masked_fill(~counted.any(1), 0.0)
    else:
        order = counted.int() if pooling == "cls" else counted.int().flip(1)
        first = order.argmax(1, keepdim=True)  # of equal numbers argmax gives the first
        position = first if pooling == "cls" else wide.shape[1] - 1 - first
        pooled = wide.gather(1, position.expand(-1, 1, wide.shape[2]))[:, 0]
    return unit(pooled) if normalize else pooled


@without_autocast
def embedding_loss(student: Tensor, teacher: Tensor, *, distance: str = "cosine", check: bool = True) -> Tensor:
    """The distance between embeddings of the same texts.

    Args:
        student: ``(B, D)``.
        teacher: ``(B, D)``, or of another width where ``distance`` is ``"similarity"``; on any device. No gradient
            reaches it.
        distance: ``"cosine"``, one minus the cosine of each text's two embeddings; ``"mse"``, the mean over
            components of their squared difference; ``"similarity"``, the squared difference between the cosines that
            student and teacher give a pair of texts of the batch, the mean over all pairs of two.
        check: validate the values, which costs a device sync.

    Returns:
        The mean over texts (or pairs) ``()``, float64 if the student's side is, else float32; in ``[0, 2]`` for
        ``"cosine"``, ``[0, 4]`` for ``"similarity"``, which is 0 for a single text.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.

    Source: the paper is silent. MSE: arXiv 2004.09813; cosines of pairs: relational distillation, arXiv 1904.05068,
    with the cosine as its relation and the squared error of arXiv 1907.09682 in place of Huber's.
    """
    check_option("distance", distance, DISTANCES)
    rule = "student must be (B, D), and teacher (B, D) of the same texts and width (project the student's, or take "
    rule += "distance='similarity')"
    fits = student.ndim == teacher.ndim == 2 and len(student) == len(teacher)
    check_shapes(fits and (distance == "similarity" or student.shape == teacher.shape), rule, student, teacher)
    if distance != "similarity":
        return hidden_loss(student, teacher, distance=distance, check=check)
    for name, vectors in (("student", student), ("teacher", teacher)):
        check_real(vectors, name, check=check)
    dtype = compute_dtype(student)
    of_student, of_teacher = _cosines(student.to(dtype)), _cosines(teacher.detach().to(student.device, dtype))
    # The diagonal is 1 on both sides, but for rounding.
    moved = (of_student - of_teacher).square().fill_diagonal_(0.0)
    return moved.sum() / max(len(student) * (len(student) - 1), 1)


@dataclass(frozen=True)
class EmbeddingAgreement:
    """How far a student's embeddings of some texts agree with a teacher's.

    Attributes:
        spearman: rank correlation between the cosines that both give all pairs of two texts, in [-1, 1]; 0 where
            all pairs are alike to one of them.
        neighbours: mean share of a text's ten nearest others by the teacher's cosine that are among the student's,
            in [0, 1].
        index: the same where the student's embedding searches among the teacher's of the other texts, as in an index
            that the teacher made; None where widths differ.
    """

    spearman: float
    neighbours: float
    index: float | None


@without_autocast
def compare_embeddings(teacher: Tensor, student: Tensor) -> EmbeddingAgreement:
    """How far two models agree on which texts are alike; their widths may differ.

    Args:
        teacher: ``(N, D_t)``, with N from 3 to 2048: take a sample of more texts, as all pairs are held in memory.
        student: ``(N, D_s)``, of the same texts.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.

    Source: silent. Specification: silent.
    """
    for name, vectors in (("teacher", teacher), ("student", student)):
        check_real(vectors, name, check=True, ndim=2)
    check_shapes(len(teacher) == len(student), "teacher and student must embed the same texts", teacher, student)
    count = len(teacher)
    rule = f"be {LEAST_TEXTS} to {MOST_TEXTS} to be compared"
    need(LEAST_TEXTS <= count <= MOST_TEXTS, "argument-value", "texts", rule, count)
    sides = [_cosines(vectors.detach().to(torch.float64)) for vectors in (teacher, student.to(teacher.device))]
    above = torch.ones_like(sides[0], dtype=torch.bool).triu(1)
    spearman = rank_correlation(*(cosines[above] for cosines in sides))
    k = min(_NEIGHBOURS, count - 1)
    expected, actual = (_nearest(cosines, k) for cosines in sides)
    shared, index = float((expected & actual).sum()) / (k * count), None
    if teacher.shape == student.shape:
        first, second = (unit(side.detach().to(torch.float64)) for side in (teacher, student.to(teacher.device)))
        index = float((expected & _nearest(second @ first.T, k)).sum()) / (k * count)
    return EmbeddingAgreement(spearman, shared, index)


def _nearest(cosines: Tensor, k: int) -> Tensor:
    """Booleans ``(N, N)``: which others are among the ``k`` nearest of each text."""
    off_diagonal = cosines.clone().fill_diagonal_(-torch.inf)
    return torch.zeros_like(off_diagonal, dtype=torch.bool).scatter_(1, off_diagonal.topk(k).indices, value=True)


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Spearman's coefficient of two vectors ``(N,)``; 0 where one of them holds equal numbers alone."""
    return float(torch.corrcoef(torch.stack([_ranks(first), _ranks(second)]))[0, 1].nan_to_num(0.0))


def _cosines(vectors: Tensor) -> Tensor:
    directions = unit(vectors)
    return directions @ directions.T


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 1, equal values sharing their mean."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0) - (counts - 1).double() / 2
    return ranks[inverse]
