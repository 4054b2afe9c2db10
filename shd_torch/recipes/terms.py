"""The terms of a recipe by name, the attention term that joins them, labels, and what each term is worth.

``scale_report`` measures terms in their value and in their gradient, so that beta is chosen, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_number
from shd_ref.tolerances import row_sum_tolerance
from shd_torch.capture.capture import Captured
from shd_torch.checks import INTEGERS, REALS, check_dtype, check_real, check_shape, check_shapes, compute_dtype
from shd_torch.kd import TopkTargets, kd_loss
from shd_torch.kd.targets import check_logits
from shd_torch.live.online import layer_kls
from shd_torch.supervision.supervision import Taught


class Term(NamedTuple):
    """One part of a loss."""

    value: Tensor  # (), before its weight
    weight: float


class Terms(dict[str, Term]):
    """The parts of a loss by name: ``{"cross_entropy": Term(value, weight), "kd": ...}``."""

    @property
    def total(self) -> Tensor:
        """The loss ``()``: ``sum of weight * value``, on the device of the first term."""
        values = [term.weight * term.value for term in self.values()]
        return torch.stack([value.to(values[0].device) for value in values]).sum()

    def __add__(self, other: Terms) -> Terms:
        """Both losses in one; a name that both have is an error: ``scaled`` can prefix it.

        Raises:
            ShdError: ``argument-value``.
        """
        twice, remedy = sorted(self.keys() & other.keys()), "terms.scaled(1.0, prefix='pretraining_')"
        got = f"{', '.join(twice)} in both: give one side a prefix, {remedy}"
        need(not twice, "argument-value", "terms that are added", "have different names", got)
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
    """The attention term of a recipe: the argument ``shd`` of each recipe.

    Attributes:
        captured: the student's attention in the forward pass that produced the recipe's logits.
        supervision: of the same batch, from a cache, a live ``OnlineTeacher``, or several of either.
        beta: weight of the term, at least 0; see ``scale_report``.
        loss_mask: as in ``layer_kls``.
        temperature: T_a of both maps.
        kl: more keywords of ``attention_kl``.

    Raises:
        ShdError: ``argument-value`` for beta; later what ``layer_kls`` raises.
    """

    captured: Captured
    supervision: Taught | Sequence[Taught]
    beta: float
    loss_mask: Tensor | Mapping[int, Tensor | None] | None = None
    temperature: float = 1.0
    kl: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_weight("beta", self.beta)

    def term(self) -> Term:
        """The sum of ``layer_kls``, in nats before beta."""
        terms = layer_kls(
            self.captured, self.supervision, loss_mask=self.loss_mask, temperature=self.temperature, **(self.kl or {})
        )
        values = list(terms.values())
        return Term(torch.stack([value.to(values[0].device) for value in values]).sum(), self.beta)


def join(shd: SHD | None, **terms: Term) -> Terms:
    return Terms(terms if shd is None else {**terms, "shd": shd.term()})


def check_weight(name: str, value: Any) -> float:
    """A weight of a term: a finite number of at least 0."""
    return check_number(name, value, least=0)


def check_share(name: str, value: Any) -> float:
    """A weight that divides a loss between two terms: a number from 0 to 1."""
    return check_number(name, value, least=0, most=1)


def check_integers(value: Any, name: str, shape: tuple[int, ...]) -> None:
    check_dtype(value, INTEGERS, f"{name} must be a tensor of integers")
    check_shape(value, name, shape)


def check_alike(axes: str, *, check: bool, **logits: Tensor) -> None:
    """Logits of two models or tokens, by the arguments' names, which share one shape."""
    for name, value in logits.items():
        check_logits(value, name, check=check)
    first, second = logits.values()
    rule = f"{' and '.join(logits)} must share one shape {axes}"
    check_shapes(first.shape == second.shape, rule, first, second)


IGNORED = -100
"""The hard label of a row that does not count."""


class Labels(NamedTuple):
    """Labels of rows ``(...)`` of C classes, on the device of the logits."""

    classes: Tensor  # (...), int64; -100 where the row does not count; of soft labels the first of the largest
    soft: Tensor | None  # (..., C)
    counted: Tensor | None  # (...), None where all rows count


def as_labels(
    labels: Tensor, logits: Tensor, *, check: bool, shift: bool = False, all_count: str | None = None
) -> Labels:
    """Checked classes ``(...)`` or distributions ``(..., C)`` for these logits ``(..., C)``.

    With ``shift`` row t of ``(B, L, C)`` has the label at t + 1; of a recipe ``all_count`` every row counts, so that
    -100 is refused in its name.
    """
    rows, size = tuple(logits.shape[:-1]), logits.shape[-1]
    check_dtype(labels, REALS, "labels must be a tensor of classes or of floats")
    if labels.dtype.is_floating_point and labels.shape == logits.shape:
        need(not shift, "argument-shape", "labels", "be hard, (B, L), to be shifted", "soft ones")
        check_real(labels, "labels", check=check)
        soft = labels.detach().to(logits.device, compute_dtype(logits))
        bound = row_sum_tolerance(str(labels.dtype).removeprefix("torch."))
        if check and bool(((soft < 0).any(-1) | ((soft.sum(-1) - 1).abs() > bound)).any()):
            rule = f"labels must be at least 0 and sum to 1 within {bound:g} in every row"
            raise ShdError("not-a-distribution", rule)
        return Labels(first_largest(soft), soft, None)
    check_dtype(labels, INTEGERS, "labels must be integers, or floats of the logits' shape")
    check_shape(labels, "labels", rows)
    classes = labels.to(logits.device, torch.int64)
    need(not shift or classes.ndim == 2, "argument-shape", "labels", "be (B, L) to be shifted", rows)
    outside = ((classes < 0) | (classes >= size)) & ((classes != IGNORED) | (all_count is not None))
    if check and outside.any():
        rule = f"as every row of {all_count} counts" if all_count else f"or {IGNORED} where a row does not count"
        message = f"labels must be 0 to {size - 1}, {rule}; got {int(classes[outside][0])}"
        raise ShdError("argument-value", message)
    if shift:
        classes = F.pad(classes[:, 1:], (0, 1), value=IGNORED)
    return Labels(classes, None, None if all_count else classes != IGNORED)


def label_loss(logits: Tensor, labels: Labels) -> Tensor:
    """The mean over counted rows of ``- log softmax(z)_y``, or of that over soft labels; 0 where no row counts.

    Hard labels are a teacher with one class and nothing outside of it: so the logits are not copied into a
    wide dtype as a whole.
    """
    if labels.soft is not None:
        return F.cross_entropy(logits.to(compute_dtype(logits)).flatten(0, -2), labels.soft.flatten(0, -2))
    sure = torch.zeros((*labels.classes.shape, 1), dtype=compute_dtype(logits), device=logits.device)
    targets = TopkTargets(
        labels.classes.clamp(min=0)[..., None], sure, torch.full_like(sure[..., 0], -math.inf), 1.0, logits.shape[-1]
    )
    return kd_loss(targets, logits, divergence="cross_entropy", loss_mask=labels.counted, check=False)


def first_largest(rows: Tensor) -> Tensor:
    """The first of the largest entries of each row; which of several ``argmax`` takes is not promised."""
    columns = torch.arange(rows.shape[-1], device=rows.device).expand_as(rows)
    return columns.masked_fill(rows < rows.amax(-1, keepdim=True), rows.shape[-1]).amin(-1)


@dataclass(frozen=True)
class TermScale:
    """One term of a loss on one batch."""

    value: float  # before its weight
    weight: float  # as in the loss
    loss_share: float  # |weight * value| over the sum of that over all terms
    gradient_norm: float  # of weight * value with respect to the parameters
    gradient_share: float  # that over the sum of it over all terms
    cosine: float  # of this gradient and that of all other terms together; NaN where one of them is zero


@dataclass(frozen=True)
class ScaleReport:
    """The terms of a loss side by side; ``print`` it.

    Attributes:
        terms: by name.
        products: inner products of the gradients of unweighted terms, by pair of names.
    """

    terms: Mapping[str, TermScale]
    products: Mapping[tuple[str, str], float]

    def weight_for(self, share: float, term: str = "shd") -> float:
        """The weight at which the gradient of ``term`` has ``share`` times the norm of all others' together.

        Raises:
            ShdError: ``argument-value`` for a missing term, or one whose gradient is zero.
        """
        share = check_weight("share", share)
        need(term in self.terms, "argument-value", "term", f"be one of {', '.join(self.terms)}", repr(term))
        norm = math.sqrt(max(self.products[term, term], 0.0))
        rule, got = "have a gradient to be weighed by it", f"{term}, whose gradient is 0"
        need(norm > 0, "argument-value", "term", rule, got)
        weights = {name: scaled.weight for name, scaled in self.terms.items() if name != term}
        squared = math.fsum(a * b * self.products[i, j] for i, a in weights.items() for j, b in weights.items())
        return share * math.sqrt(max(squared, 0.0)) / norm

    def __str__(self) -> str:
        width = max(len(name) for name in ("term", *self.terms))
        head = f"{'term':<{width}}       value     weight  of loss    gradient  of grad.  cosine"
        rows = [
            f"{name:<{width}}  {term.value:>10.4g}  {term.weight:>9.4g}  {term.loss_share:>7.1%}  "
            f"{term.gradient_norm:>10.4g}  {term.gradient_share:>8.1%}  {term.cosine:>6.2f}"
            for name, term in self.terms.items()
        ]
        return "\n".join([head, *rows])


def scale_report(terms: Mapping[str, Term], parameters: Iterable[Tensor]) -> ScaleReport:
    """Each term's share of the loss and of the gradient, on the batch of the terms.

    Call it before ``backward``: the graph is traversed once per term and retained. Gradients of all terms are in
    memory at once. Nothing is added to ``.grad``. A term with weight 0 is listed too, and ``weight_for`` computes a
    weight for it, so no initial guess is needed. With several ranks the report covers this rank's batch.

    Args:
        terms: of a recipe.
        parameters: of the student; those without gradient are ignored.

    Returns:
        The report; ``print(report)`` shows it as a table.

    Raises:
        ShdError: ``argument-value`` without a parameter that needs a gradient.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    need(bool(trained), "argument-value", "parameters", "hold some that need a gradient", "none")
    gradients = [_gradients(term.value, trained) for term in terms.values()]
    inner = np.zeros((len(terms), len(terms)))  # products of the gradients of unweighted terms
    for parts in zip(*gradients, strict=True):
        rows = torch.stack([part.flatten().double() for part in parts])
        inner += (rows @ rows.mT).cpu().numpy()
    weights = np.array([term.weight for term in terms.values()])
    shares = np.abs(weights * [float(term.value.detach()) for term in terms.values()])
    weighted = np.outer(weights, weights) * inner
    norms = np.sqrt(weighted.diagonal().clip(0.0))
    scales = {}
    for number, (name, term) in enumerate(terms.items()):
        others = np.arange(len(terms)) != number
        length = norms[number] * math.sqrt(max(weighted[np.ix_(others, others)].sum(), 0.0))
        scales[name] = TermScale(
            value=float(term.value.detach()),
            weight=term.weight,
            loss_share=float(shares[number] / (shares.sum() or 1.0)),
            gradient_norm=float(norms[number]),
            gradient_share=float(norms[number] / (norms.sum() or 1.0)),
            cosine=float(np.clip(weighted[number, others].sum() / length, -1.0, 1.0)) if length else math.nan,
        )
    pairs = {(a, b): float(inner[i, j]) for i, a in enumerate(terms) for j, b in enumerate(terms)}
    return ScaleReport(scales, pairs)


def _gradients(value: Tensor, parameters: list[Tensor]) -> Sequence[Tensor]:
    """Of each parameter, zeros where the value does not depend on it."""
    if not value.requires_grad:
        return [torch.zeros_like(parameter) for parameter in parameters]
    return torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
