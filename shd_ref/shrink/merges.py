"""Which heads merge, with what weights (spec chapter HEAD): plans and C from one gram tensor of the calibration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, as_float
from shd_ref.errors import ShdError
from shd_ref.integers import as_index, check_integer
from shd_ref.merging.gram import merge_gram, solve_alpha_from_gram
from shd_ref.merging.matching import match_pairs
from shd_ref.merging.mixing import compose_mixing
from shd_ref.merging.plans import MergePlan, Pair, check_plan, plan_groups
from shd_ref.tolerances import row_sum_tolerance


@dataclass(frozen=True)
class HeadMerge:
    """Groups of teacher heads and the weights of their logits (HEAD-1).

    Attributes:
        mixing: C ``(H_s, H_t)``: rows convex, 0 outside the group. A member may weigh 0: its values still count.
        groups: for each student head its teacher heads; every teacher head in exactly one group.
    """

    mixing: Array
    groups: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        c = as_float(self.mixing, "mixing", ndim=2)
        heads = sorted(head for group in self.groups for head in group)
        if c.shape[0] != len(self.groups) or heads != list(range(c.shape[1])) or not all(self.groups):
            raise ShdError(
                "argument-shape",
                f"groups must hold each of the {c.shape[1]} teacher heads once, in {c.shape[0]} groups; "
                f"got {self.groups}",
                "HEAD-1",
            )
        sums = c.sum(axis=1)
        outside = np.abs(c * (1.0 - self.members)).max()
        if (c < 0.0).any() or (np.abs(sums - 1.0) > row_sum_tolerance("float64")).any() or outside > 0.0:
            raise ShdError(
                "mixing-invalid",
                f"mixing must be at least 0, sum to 1 over each group and be 0 outside; "
                f"got a minimum of {c.min():.6g}, sums from {sums.min():.6g} to {sums.max():.6g}, and up to "
                f"{outside:.6g} outside",
                "HEAD-1",
            )

    @property
    def members(self) -> Array:
        """``(H_s, H_t)``: 1 where the teacher head is in the student head's group, else 0."""
        found = np.zeros(self.mixing.shape)
        for head, group in enumerate(self.groups):
            found[head, list(group)] = 1.0
        return found

    @property
    def homes(self) -> list[int]:
        """For each teacher head, the student head whose group it is in."""
        return [int(head) for head in self.members.argmax(axis=0)]


def as_merge(given: HeadMerge | Mapping[str, Any]) -> HeadMerge:
    """A merge, from the record or a mapping of its fields; checked (HEAD-1)."""
    if isinstance(given, HeadMerge):
        return given
    try:
        groups = tuple(tuple(as_index(head) for head in group) for group in given["groups"])
    except TypeError:
        raise ShdError(
            "argument-shape", f"groups must be lists of heads; got {given['groups']!r}", "HEAD-1"
        ) from None
    return HeadMerge(as_float(given["mixing"], "mixing", ndim=2), groups)


def pooled_mixing(gram: ArrayLike, plan: Iterable[Iterable[Sequence[int]]]) -> HeadMerge:
    """C with one alpha a pair over the whole calibration, and the plan's groups (HEAD-3).

    Args:
        gram: the gram tensor summed over every calibration sample of the layer ``(H, H, H, H)``.
        plan: rounds of pairs.

    Returns:
        The merge; the identity for the empty plan.

    Raises:
        ShdError: ``plan-invalid``, ``argument-shape``, ``not-finite``.
    """
    pool = _check_gram(gram)
    heads = pool.shape[1]
    rounds = check_plan(plan, heads)
    alphas = []
    for one_round in rounds:
        alphas.append(np.stack([solve_alpha_from_gram(pool, p, q) for p, q in one_round], axis=1))
        pool = merge_pool(pool, one_round, alphas[-1])
    mixing = compose_mixing(alphas, rounds, heads)[0] if rounds else np.eye(heads)
    return HeadMerge(mixing, plan_groups(rounds, heads))


def grouped_plan(gram: ArrayLike, num_student_heads: int, num_kv_heads: int) -> MergePlan:
    """The matched plan whose pairs share a key and value head (HEAD-4, HEAD-5); needs networkx.

    Args:
        gram: as in ``pooled_mixing``.
        num_student_heads: H_s, a multiple of ``num_kv_heads``.
        num_kv_heads: H_kv of teacher and student; 1 lets any two heads meet.

    Returns:
        Rounds; each lists its pairs by key and value head, then by first position.

    Raises:
        ShdError: ``argument-value``, ``dependency-missing``, ``argument-shape``, ``not-finite``.
    """
    pool = _check_gram(gram)
    heads = pool.shape[1]
    num_student_heads = check_integer("num_student_heads", num_student_heads, 1, heads, "HEAD-4")
    num_kv_heads = check_integer("num_kv_heads", num_kv_heads, 1, num_student_heads, "HEAD-4")
    if heads % num_kv_heads or num_student_heads % num_kv_heads:
        raise ShdError(
            "argument-value",
            f"num_student_heads and the {heads} heads must be multiples of num_kv_heads; "
            f"got {num_student_heads} and {num_kv_heads}",
            "HEAD-4",
        )
    groups = [list(range(start, start + heads // num_kv_heads)) for start in range(0, heads, heads // num_kv_heads)]
    goal = num_student_heads // num_kv_heads
    rounds: list[tuple[Pair, ...]] = []
    while len(groups[0]) > goal:
        count = min(len(groups[0]) // 2, len(groups[0]) - goal)
        pairs: list[Pair] = []
        for group in groups:
            scores = np.zeros((len(group), len(group)))
            for i, p in enumerate(group):
                for j in range(i + 1, len(group)):
                    scores[i, j] = -pooled_error(pool, p, group[j])
            pairs += [(group[i], group[j]) for i, j in match_pairs(scores, count)]
        alpha = np.stack([solve_alpha_from_gram(pool, p, q) for p, q in pairs], axis=1)
        # Positions after the round: the merged heads in the round's order, then the untouched ones (PLAN-4).
        used = {head for pair in pairs for head in pair}
        rest = [head for head in range(pool.shape[1]) if head not in used]
        groups = [
            [number * count + i for i in range(count)]
            + [len(pairs) + rest.index(head) for head in group if head not in used]
            for number, group in enumerate(groups)
        ]
        pool = merge_pool(pool, pairs, alpha)
        rounds.append(tuple(pairs))
    return tuple(rounds)


def pooled_error(gram: Array, p: int, q: int) -> float:
    """``E(a*)`` of a pair, summed over the calibration, from its gram tensor ``(1, H, H, H, H)``."""
    u, uw, w = (
        float(gram[0, p, j, p, k] - gram[0, p, j, q, k] - gram[0, q, j, p, k] + gram[0, q, j, q, k])
        for j, k in ((p, p), (p, q), (q, q))
    )
    alpha = float(solve_alpha_from_gram(gram, p, q)[0])
    return alpha**2 * (u + 2 * uw + w) - 2 * alpha * (u + uw) + u  # || a (u + w) - u ||^2


def merge_pool(gram: Array, one_round: Sequence[Pair], alpha: Array) -> Array:
    """The gram tensor ``(1, H, ...)`` after a round with alphas ``(1, pairs)``, heads in the order of PLAN-4."""
    names: list[object] = list(range(gram.shape[1]))
    for number, (p, q) in reversed(list(enumerate(one_round))):
        first, second = names.index(p), names.index(q)
        gram = merge_gram(gram, first, second, alpha[:, number])
        names = [("merged", number), *(name for name in names if name not in (p, q))]
    return gram


def _check_gram(gram: ArrayLike) -> Array:
    g = as_float(gram, "gram")
    if g.ndim != 4 or len(set(g.shape)) != 1:
        raise ShdError("argument-shape", f"gram must be (H, H, H, H), summed over samples; got {g.shape}", "HEAD-3")
    return g[None]
