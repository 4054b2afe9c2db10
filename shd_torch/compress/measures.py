"""How far scores, orders and labels agree: no student that knows nothing has more than about 0, the teacher has 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from shd_torch.kd.embeddings import rank_correlation

_TOP: Final = 10  # places that NDCG counts


def correlate(first: Tensor, second: Tensor) -> list[float]:
    """Rank correlation of each column of ``(N, K)`` in which ``first`` differs between rows."""
    pairs = zip(first.T, second.T, strict=True)
    return [rank_correlation(a, b) for a, b in pairs if bool((a != a[0]).any())]


def compare_orders(teacher: Tensor, student: Tensor, queries: Tensor) -> dict[str, float]:
    """Means over queries whose pairs the teacher tells apart, of scores ``(N,)``; nothing where there are none.

    ``kendall``: of the pairs of pairs that it tells apart, the share in its order less the share in the other.
    ``ndcg``: its scores, discounted by place in the student's order and summed over ten places; 0 for a random order,
    1 for its own. No unit or zero of the scores matters.
    """
    kendall, ndcg = [], []
    for at in _of_queries(queries):
        own, other = teacher[at].double(), student[at]
        signs = torch.sign(own[:, None] - own)
        if bool(signs.any()):
            kendall.append(float((signs * torch.sign(other[:, None] - other)).sum() / signs.abs().sum()))
            best, random = _discounted(own, own), _discounted(own, torch.zeros_like(own))
            ndcg.append((_discounted(own, other) - random) / (best - random))
    return {"kendall": _mean(kendall), "ndcg": _mean(ndcg)} if kendall else {}


def _discounted(gains: Tensor, scores: Tensor) -> float:
    """The sum over the first places by score; places of equal scores share their gains."""
    _, ties, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    shared = (torch.zeros_like(gains[: len(counts)]).index_add(0, ties, gains) / counts)[ties]
    top = shared[scores.argsort(descending=True)[:_TOP]]
    return float((top / torch.arange(2, len(top) + 2).log2()).sum())


def rank_relevant(scores: Tensor, is_relevant: Tensor, queries: Tensor) -> dict[str, float]:
    """MAP and MRR over the queries with relevant texts and others; of equal scores the relevant come last."""
    precisions, firsts = [], []
    for at in _of_queries(queries):
        worst_first = at[is_relevant[at].int().argsort(stable=True)]
        ranked = worst_first[scores[worst_first].argsort(descending=True, stable=True)]
        places = is_relevant[ranked].nonzero()[:, 0] + 1
        if 0 < len(places) < len(at):
            precisions.append(float((torch.arange(1, len(places) + 1) / places).mean()))
            firsts.append(1 / int(places[0]))
    return {"map": _mean(precisions), "mrr": _mean(firsts)} if precisions else {}


def compare_labels(teacher: Tensor, student: Tensor) -> dict[str, float]:
    """Of booleans ``(N, C)``, True = has the label; all but ``agreement`` are 0 where the teacher never differs.

    ``kappa``: agreement beyond that of independent draws at both rates, as a share of what is possible, over all
    labels together; ``worst``: the least of a label; ``agreement``: the share of equal labels.
    """
    varies = (teacher != teacher[0]).any(0)
    equal, rates = (teacher == student).double().mean(0), [side.double().mean(0) for side in (teacher, student)]
    chance = rates[0] * rates[1] + (1 - rates[0]) * (1 - rates[1])
    beyond, room = (equal - chance)[varies], (1 - chance)[varies]
    kappa, worst = (float(beyond.sum() / room.sum()), float((beyond / room).min())) if len(room) else (0.0, 0.0)
    return {"kappa": kappa, "worst": worst, "agreement": float(equal.mean())}


def _of_queries(queries: Tensor) -> Iterator[Tensor]:
    return ((queries == number).nonzero()[:, 0] for number in torch.unique(queries))


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)
