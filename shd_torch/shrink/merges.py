"""Which heads merge and with what weights (HEAD-3..5), from a gram tensor summed over the calibration set."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.merging.plans import MergePlan, Pair, merge_plan, plan_groups
from shd_ref.tolerances import tie_width
from shd_torch.maps.gram import merge_gram, solve_gram_pair

PLANS: tuple[str, ...] = ("auto", "matched", "balanced", "progressive")


@dataclass(frozen=True, eq=False)
class HeadMerge:
    """Groups and C of a layer (HEAD-1).

    Attributes:
        plan: rounds of pairs.
        groups: for each student head its teacher heads.
        mixing: C ``(H_s, H_t)``, float64.
    """

    plan: MergePlan
    groups: tuple[tuple[int, ...], ...]
    mixing: Tensor

    @property
    def members(self) -> Tensor:
        """``(H_s, H_t)``: 1 where the teacher head is in the group."""
        found = torch.zeros_like(self.mixing)
        for head, group in enumerate(self.groups):
            found[head, list(group)] = 1.0
        return found

    def shares_keys(self, num_kv_heads: int) -> bool:
        """Whether groups stay inside key and value heads, equally many each and in order (HEAD-7)."""
        student, teacher = self.mixing.shape
        if teacher % num_kv_heads or student % num_kv_heads:
            return False
        return all(
            t * num_kv_heads // teacher == h * num_kv_heads // student
            for h, group in enumerate(self.groups)
            for t in group
        )


def merge_heads(gram: Tensor, num_student_heads: int, kind: str, num_kv_heads: int) -> HeadMerge:
    """The merge of a layer (HEAD-3, HEAD-4).

    Args:
        gram: ``(H, H, H, H)``, summed over the calibration set.
        num_student_heads: H_s.
        kind: ``"matched"`` inside ``num_kv_heads`` groups, ``"balanced"`` or ``"progressive"``.
        num_kv_heads: of the teacher; where they do not divide H_s, any two heads may meet.
    """
    heads = gram.shape[0]
    if kind == "matched":
        plan, alphas = _match_rounds(
            gram[None], num_student_heads, num_kv_heads if num_student_heads % num_kv_heads == 0 else 1
        )
    else:
        plan = merge_plan(heads, num_student_heads, kind)
        pool, alphas = gram[None], []
        for pairs in plan:
            pool, alpha = _run_round(pool, pairs)
            alphas.append(alpha)
    mixing = torch.eye(heads, dtype=gram.dtype, device=gram.device)
    for pairs, alpha in zip(plan, alphas, strict=True):
        merged = torch.stack([a * mixing[p] + (1 - a) * mixing[q] for (p, q), a in zip(pairs, alpha, strict=True)])
        mixing = torch.cat([merged, mixing[_unused(pairs, len(mixing))]])
    return HeadMerge(plan, plan_groups(plan, heads), mixing)


def _match_rounds(pool: Tensor, num_student_heads: int, num_kv_heads: int) -> tuple[MergePlan, list[list[float]]]:
    per = pool.shape[1] // num_kv_heads
    groups = [list(range(start, start + per)) for start in range(0, pool.shape[1], per)]
    goal = num_student_heads // num_kv_heads
    rounds: list[tuple[Pair, ...]] = []
    alphas: list[list[float]] = []
    while len(groups[0]) > goal:
        count = min(len(groups[0]) // 2, len(groups[0]) - goal)
        pairs = [pair for group in groups for pair in _match_group(pool, group, count)]
        rest = _unused(pairs, pool.shape[1])
        groups = [
            [*range(number * count, (number + 1) * count), *(len(pairs) + rest.index(h) for h in group if h in rest)]
            for number, group in enumerate(groups)
        ]
        pool, alpha = _run_round(pool, pairs)
        rounds.append(tuple(pairs))
        alphas.append(alpha)
    return tuple(rounds), alphas


def _match_group(pool: Tensor, group: list[int], count: int) -> list[Pair]:
    """``count`` disjoint pairs of a group with the least sum of errors, the first of several (PLAN-9)."""
    try:
        import networkx
    except ImportError:
        raise ShdError(
            "dependency-missing", "plan='matched' needs networkx: pip install 'squeezing-heads[oracles]'", "ERR-5"
        ) from None
    graph = networkx.Graph()
    edges = [(p, q) for i, p in enumerate(group) for q in group[i + 1 :]]
    errors = {pair: _pair_error(pool, *pair) for pair in edges}
    size = max(map(abs, errors.values()), default=0.0) or 1.0
    least = -math.inf
    for pair in sorted(edges, key=errors.__getitem__):
        if errors[pair] - least > tie_width() * size:
            least = errors[pair]
        # Exact, and of equally good sets of pairs the first has the largest sum (PLAN-9).
        first = 2 ** (len(edges) - 1 - edges.index(pair))
        graph.add_edge(*pair, weight=first - (round(least / size * 2**40) << len(edges)))
    # One extra vertex for each head that stays alone: a perfect matching then has `count` pairs of heads.
    for number in range(len(group) - 2 * count):
        graph.add_weighted_edges_from((head, ("alone", number), 0) for head in group)
    matching = networkx.max_weight_matching(graph, maxcardinality=True)
    pairs = [tuple(pair) for pair in matching if not any(isinstance(end, tuple) for end in pair)]
    return sorted((min(pair), max(pair)) for pair in pairs)


def _pair_error(pool: Tensor, p: int, q: int) -> float:
    """``E(a*)`` over the calibration set."""
    u, cross, w = (
        pool[0, p, j, p, k] - pool[0, p, j, q, k] - pool[0, q, j, p, k] + pool[0, q, j, q, k]
        for j, k in ((p, p), (p, q), (q, q))
    )
    a = solve_gram_pair(pool, p, q, "least_squares").clipped[0]
    return float(a * a * (u + 2 * cross + w) - 2 * a * (u + cross) + u)


def _run_round(pool: Tensor, pairs: list[Pair] | tuple[Pair, ...]) -> tuple[Tensor, list[float]]:
    """The pool after a round, in the order of PLAN-4, and the round's alphas."""
    found = [solve_gram_pair(pool, p, q, "least_squares").clipped for p, q in pairs]
    names: list[object] = list(range(pool.shape[1]))
    for number in reversed(range(len(pairs))):
        p, q = pairs[number]
        pool = merge_gram(pool, names.index(p), names.index(q), found[number], check=False)
        names = [("merged", number), *(name for name in names if name not in (p, q))]
    return pool, [float(alpha[0]) for alpha in found]


def _unused(pairs: list[Pair] | tuple[Pair, ...], heads: int) -> list[int]:
    used = {head for pair in pairs for head in pair}
    return [head for head in range(heads) if head not in used]
