"""Squeezing a teacher whose maps are never formed: ``squeeze_heads`` from queries, keys and values.

Alphas, mixing and residual need products ``A_i V_j`` of heads that merge into one another, nothing else. Fused
attention makes them, with memory linear in the length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shd_ref.merging.plans import MergePlan, merge_plan, plan_groups
from shd_torch.checks import without_autocast
from shd_torch.maps.alpha import (
    AlphaSolution,
    constant_alphas,
    gram_of_products,
    merge_gram,
    solve_gram_pair,
    split_projection,
)
from shd_torch.maps.mixing import SqueezeReport, check_strategy, compose_rounds, relative_error, report_squeeze
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.mask import expand_heads


@dataclass(frozen=True, eq=False)
class FactoredSqueeze(SqueezeReport):
    """The result of ``squeeze_factored``: the report of the merging, and the teacher with its mixing."""

    supervision: Factored  # at any temperature


@torch.no_grad()
@without_autocast
def squeeze_factored(
    teacher: Factored,
    values: Tensor,
    output_projection: Tensor,
    num_student_heads: int,
    *,
    plan: str | Iterable[Iterable[Sequence[int]]] | None = None,
    strategy: str = "shd",
    query_mask: Tensor | None = None,
    alpha_rule: str = "least_squares",
    check: bool = True,
) -> FactoredSqueeze:
    """``squeeze_heads`` without maps: the mixing of any strategy from gram tensors (GRAM-1..5, MIX-1..17).

    Alphas are solved on the maps at temperature 1; the supervision is softened where it is used (TEMP-3). Options and
    errors are those of ``squeeze_heads``.

    Args:
        teacher: its queries, keys and masks, see ``Factored.teacher``; the mixing plays no part.
        values: V ``(B, H_kv, S, d_v)``; query head i reads value head ``i // (H_t / H_kv)``.
        output_projection: W_o ``(H_t * d_v, D)``; ``torch.nn.Linear`` stores the transpose.

    Source: Algorithm 1, Eq. 5-10. Deviations: D-1, D-2, D-22.
    """
    check_strategy(strategy, alpha_rule)
    maps = (*teacher.queries.shape[:3], teacher.keys.shape[2])
    projection = split_projection(maps, values, output_projection, query_mask, check=check)
    if check:
        teacher.check(None, 0)  # also rows that do not count (MAP-5)
    teacher = teacher.unmixed()
    rounds = merge_plan(teacher.num_heads, num_student_heads, "progressive" if plan is None else plan)
    groups = plan_groups(rounds, teacher.num_heads)
    values = expand_heads(values, teacher.num_heads)
    products = None if strategy == "mean" else _group_products(teacher, values, groups)
    solutions: list[AlphaSolution] = []
    if strategy == "constant":
        solutions = constant_alphas(rounds, teacher.mixing)
    elif products is not None:
        grams = [
            gram_of_products(product.double(), projection[list(group)], query_mask)
            for product, group in zip(products, groups, strict=True)
        ]
        solutions = _solve_rounds(grams, groups, rounds, strategy, alpha_rule)
    if products is None:  # an unmixed teacher's mixing is the identity
        mixing = teacher.mixing.mean(1, keepdim=True).expand(-1, num_student_heads, -1)
        supervision = replace(teacher, mixing=mixing, groups=(tuple(range(teacher.num_heads)),) * num_student_heads)
    else:
        mixing = compose_rounds([solution.clipped for solution in solutions], rounds, teacher.mixing)
        supervision = replace(teacher, mixing=mixing, groups=groups)
    residual = _residual(supervision, teacher, values, projection, products, groups, query_mask)
    return FactoredSqueeze(**report_squeeze(mixing, solutions, residual, rounds), supervision=supervision)


def _group_products(teacher: Factored, values: Tensor, groups: Sequence[Sequence[int]]) -> list[Tensor]:
    """For each group of k heads the products ``A_i V_j`` of its members, ``(B, k, k, L, d_v)``."""
    group_of = {member: group for group in groups for member in group}
    slots = []
    for slot in range(max(len(group) for group in groups)):
        # Every head reads the values of its group's member number `slot`, the last one where there are fewer.
        members = [group_of[head][min(slot, len(group_of[head]) - 1)] for head in range(teacher.num_heads)]
        slots.append(teacher.apply_to(values[:, members]))
    return [torch.stack([product[:, list(group)] for product in slots[: len(group)]], dim=2) for group in groups]


def _solve_rounds(
    grams: list[Tensor], groups: Sequence[Sequence[int]], rounds: MergePlan, strategy: str, alpha_rule: str
) -> list[AlphaSolution]:
    """Run the plan on the groups' gram tensors (GRAM-4, MIX-4, MIX-5)."""
    # A merged head takes the next free number: positions in the plan's pool and in a gram tensor change each round.
    group_of = {member: number for number, group in enumerate(groups) for member in group}
    orders = [list(group) for group in groups]  # the heads of each gram tensor
    pool, merged_head = sorted(group_of), len(group_of)
    solutions = []
    for one_round in rounds:
        round_solutions, merged = [], []
        for p, q in one_round:
            first, second = pool[p], pool[q]
            number = group_of[first]
            order, gram = orders[number], grams[number]
            places = order.index(first), order.index(second)
            solution = solve_gram_pair(gram, *places, alpha_rule)
            if strategy == "hard":
                solution = solution.hardened()
            round_solutions.append(solution)
            grams[number] = merge_gram(gram, *places, solution.clipped, check=False)
            orders[number] = [merged_head, *(head for head in order if head not in (first, second))]
            group_of[merged_head] = number
            merged.append(merged_head)
            merged_head += 1
        used = {pool[position] for pair in one_round for position in pair}
        pool = merged + [head for head in pool if head not in used]
        solutions.append(AlphaSolution(*(torch.stack(parts, dim=1) for parts in zip(*round_solutions, strict=True))))
    return solutions


def _residual(
    supervision: Factored,
    teacher: Factored,
    values: Tensor,
    projection: Tensor,
    products: list[Tensor] | None,
    groups: Sequence[Sequence[int]],
    query_mask: Tensor | None,
) -> Tensor:
    """Relative Frobenius error of the merged output per sample (MIX-8), as ``sum_t (A~_h(t) - A_t) X_t``."""
    target = values.new_zeros((len(values), teacher.shape[2], projection.shape[2]), dtype=torch.float64)
    error = torch.zeros_like(target)
    for head, group in enumerate(groups):
        members = list(group)
        if products is None:
            unmerged = teacher.apply_to(values)[:, members]
            # One map for all: each head's values, read with the mean of all maps.
            reads = [teacher.apply_to(values[:, member : member + 1]).mean(1) for member in members]
            merged = torch.stack(reads, dim=1)
        else:
            unmerged = products[head].diagonal(dim1=1, dim2=2).movedim(-1, 1)  # (B, k, L, d_v)
            weights = supervision.mixing[:, head, members].to(unmerged.dtype)
            merged = torch.einsum("bi,bijld->bjld", weights, products[head])
        error += torch.einsum("bjld,jdm->blm", (merged - unmerged).double(), projection[members])
        target += torch.einsum("bjld,jdm->blm", unmerged.double(), projection[members])
    return relative_error(error, target, query_mask).to(teacher.dtype)
