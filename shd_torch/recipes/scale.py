"""What each term of a loss is worth, in its value and in its gradient: so that beta is chosen, not guessed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from shd_ref.errors import need
from shd_torch.recipes.terms import Term, check_weight


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
        own = math.sqrt(max(self.products[term, term], 0.0))
        rule, got = "have a gradient to be weighed by it", f"{term}, whose gradient is 0"
        need(own > 0, "argument-value", "term", rule, got)
        weights = {name: scaled.weight for name, scaled in self.terms.items() if name != term}
        squared = math.fsum(a * b * self.products[i, j] for i, a in weights.items() for j, b in weights.items())
        return share * math.sqrt(max(squared, 0.0)) / own

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
    gradients = {name: _gradient(term.value, trained) for name, term in terms.items()}
    products: dict[tuple[str, str], float] = {}
    for first, second in combinations_with_replacement(terms, 2):
        products[first, second] = products[second, first] = _product(gradients[first], gradients[second])
    values = {name: float(term.value.detach()) for name, term in terms.items()}
    weights = {name: term.weight for name, term in terms.items()}
    norms = {name: weight * math.sqrt(max(products[name, name], 0.0)) for name, weight in weights.items()}
    whole = math.fsum(abs(value * weights[name]) for name, value in values.items())
    scales = {}
    for name, value in values.items():
        weight = weights[name]
        others = [other for other in terms if other != name]
        inner = math.fsum(weight * weights[other] * products[name, other] for other in others)
        squared = math.fsum(weights[a] * weights[b] * products[a, b] for a in others for b in others)
        length = norms[name] * math.sqrt(max(squared, 0.0))
        scales[name] = TermScale(
            value=value,
            weight=weight,
            loss_share=abs(value * weight) / whole if whole else 0.0,
            gradient_norm=norms[name],
            gradient_share=norms[name] / sum(norms.values()) if any(norms.values()) else 0.0,
            cosine=min(max(inner / length, -1.0), 1.0) if length else math.nan,
        )
    return ScaleReport(scales, products)


def _gradient(value: Tensor, parameters: list[Tensor]) -> list[Tensor | None]:
    if not value.requires_grad:
        return [None] * len(parameters)
    return list(torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True))


def _product(left: list[Tensor | None], right: list[Tensor | None]) -> float:
    pairs = ((a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None)
    # One number a tensor, and one wait for the device.
    products = [torch.dot(a.flatten().double(), b.flatten().double()) for a, b in pairs]
    return float(torch.stack([product.to(products[0].device) for product in products]).sum()) if products else 0.0
