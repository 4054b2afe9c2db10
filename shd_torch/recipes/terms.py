"""What a recipe gives: its terms by name, and the attention term that joins them (REC-1 to REC-3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import check_number
from shd_torch.capture.capture import Captured
from shd_torch.teacher.online import LayerKeywords, OnlineSupervision, Teaching, layer_kls


class Term(NamedTuple):
    """One part of a loss."""

    value: Tensor  # (), before its weight
    weight: float


class Terms(dict[str, Term]):
    """The parts of a loss by name: ``{"cross_entropy": Term(value, weight), "kd": ...}`` (REC-1)."""

    @property
    def total(self) -> Tensor:
        """The loss ``()``: ``sum of weight * value``, on the device of the first term."""
        parts = [term.weight * term.value for term in self.values()]
        return torch.stack([part.to(parts[0].device) for part in parts]).sum()

    def __add__(self, other: Terms) -> Terms:
        """Both losses in one; a name that both have is an error: ``scaled`` can prefix it.

        Raises:
            ShdError: ``argument-value``.
        """
        twice = sorted(self.keys() & other.keys())
        if twice:
            raise ShdError(
                "argument-value",
                f"terms that are added must have different names; both have {', '.join(twice)}: "
                "give one side a prefix, terms.scaled(1.0, prefix='pretraining_')",
                "REC-1",
            )
        return Terms({**self, **other})

    def scaled(self, weight: float, *, prefix: str = "") -> Terms:
        """The same terms with their weights multiplied, under longer names.

        Raises:
            ShdError: ``argument-value`` unless the weight is a finite number of at least 0.
        """
        weight = check_weight("weight", weight)
        return Terms({prefix + name: Term(term.value, weight * term.weight) for name, term in self.items()})


@dataclass(frozen=True, eq=False)
class SHD:
    """The attention term beside a recipe: the argument ``shd`` of each of them (REC-3).

    Attributes:
        captured: the student's attention in the forward pass that gave the recipe its logits.
        taught: of the same batch, from a cache (``supervision``), a live ``OnlineTeacher``, or several of either.
        beta: weight of the term, at least 0; ``scale_report`` says what it is worth.
        loss_mask: as in ``layer_kls``.
        temperature: T_a of both maps.
        reduction: ``"sum"`` over layers and heads, or ``"mean"``.
        kl: more keywords of ``attention_kl``.

    Raises:
        ShdError: ``argument-value`` for beta; later what ``layer_kls`` raises.
    """

    captured: Captured
    taught: Teaching | Sequence[Teaching]
    beta: float
    loss_mask: Tensor | Mapping[int, Tensor | None] | None = None
    temperature: float = 1.0
    reduction: str = "sum"
    kl: LayerKeywords | None = None

    def __post_init__(self) -> None:
        check_weight("beta", self.beta)

    @property
    def is_live(self) -> bool:
        """Whether every teacher saw this very batch, rather than a cache that was made before."""
        teachers = self.taught if isinstance(self.taught, Sequence) else [self.taught]
        return all(isinstance(teacher, OnlineSupervision) for teacher in teachers)

    def term(self) -> Term:
        """The sum of ``layer_kls``, in nats before beta."""
        terms = layer_kls(
            self.captured,
            self.taught,
            loss_mask=self.loss_mask,
            temperature=self.temperature,
            reduction=self.reduction,
            **(self.kl or {}),
        )
        parts = list(terms.values())
        return Term(torch.stack([part.to(parts[0].device) for part in parts]).sum(), self.beta)


def join(shd: SHD | None, **terms: Term) -> Terms:
    """A recipe's terms, and ``shd`` after them where it is given (REC-3)."""
    return Terms(terms if shd is None else {**terms, "shd": shd.term()})


def check_weight(name: str, value: Any) -> float:
    """A weight of a term: a finite number of at least 0 (REC-2)."""
    return check_number(name, value, "REC-2", least=0)


def check_share(name: str, value: Any) -> float:
    """A weight that divides a loss between two terms: a number from 0 to 1 (REC-2)."""
    share = check_weight(name, value)
    if share > 1:
        raise ShdError(
            "argument-value", f"{name} must be at most 1, as the other term has the rest; got {value!r}", "REC-2"
        )
    return share


def check_above_zero(name: str, value: Any, spec_id: str) -> float:
    """A finite number above 0."""
    if check_weight(name, value) == 0:
        raise ShdError("argument-value", f"{name} must be above 0; got {value!r}", spec_id)
    return float(value)
