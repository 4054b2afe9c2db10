"""Merge plans (spec chapter PLAN): rounds of pairs of positions in the current pool of heads.

After a round the pool is the merged heads in the order listed, then the untouched ones in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from shd_ref.errors import ShdError
from shd_ref.integers import as_index, check_integer

Pair: TypeAlias = tuple[int, int]
MergePlan: TypeAlias = tuple[tuple[Pair, ...], ...]
PlanKind: TypeAlias = Literal["progressive", "balanced"]
PLAN_KINDS: tuple[str, ...] = ("progressive", "balanced")


def merge_plan(
    num_teacher_heads: int, num_student_heads: int, kind: str | Iterable[Iterable[Sequence[int]]] = "progressive"
) -> MergePlan:
    """The rounds of pairwise merges that lead from the teacher's heads to the student's (PLAN-1..8).

    Args:
        num_teacher_heads: H_t, at least 1.
        num_student_heads: H_s, from 1 to H_t.
        kind: ``"progressive"`` (the source's Algorithm 1 without its overshoot: a round merges the first
            ``min(H // 2, H - H_s)`` adjacent pairs), ``"balanced"`` (H_s contiguous groups whose sizes
            differ by at most one, larger groups first), or explicit rounds of pairs, which are checked.

    Returns:
        A tuple of rounds, each a tuple of ``(p, q)`` positions in that round's pool; ``()`` when H_s = H_t.

    Raises:
        ShdError: ``heads-exceed`` (PLAN-2), ``argument-value`` (PLAN-1), ``plan-invalid`` (PLAN-7).

    Source: Algorithm 1. Deviation: as printed it merges every pair of a round and misses H_s (16 -> 6
    gives 4); see the spec's Decisions, D-2.
    """
    check_counts(num_teacher_heads, num_student_heads)
    if isinstance(kind, str):
        if kind == "progressive":
            return _progressive(num_teacher_heads, num_student_heads)
        if kind == "balanced":
            return _balanced(num_teacher_heads, num_student_heads)
        message = f"kind must be one of {', '.join(PLAN_KINDS)} or explicit rounds of pairs; got {kind!r}"
        raise ShdError("argument-value", message, "PLAN-1")
    return check_plan(kind, num_teacher_heads, num_student_heads)


def check_counts(num_teacher_heads: int, num_student_heads: int) -> None:
    """Both counts are at least 1, and the student's is not the larger (PLAN-1, PLAN-2)."""
    check_count("num_teacher_heads", num_teacher_heads)
    check_count("num_student_heads", num_student_heads)
    if num_student_heads > num_teacher_heads:
        message = f"num_student_heads must be at most num_teacher_heads={num_teacher_heads}; got {num_student_heads}"
        raise ShdError("heads-exceed", message, "PLAN-2")


def check_plan(
    rounds: Iterable[Iterable[Sequence[int]]], num_teacher_heads: int, num_student_heads: int | None = None
) -> MergePlan:
    """Explicit rounds in canonical form, after checking every pair and, where given, the final count (PLAN-7)."""
    try:
        plan = tuple(tuple((as_index(p), as_index(q)) for p, q in one_round) for one_round in rounds)
    except (TypeError, ValueError):
        raise _invalid(f" must be rounds of pairs of integers; got {rounds!r}") from None
    heads = num_teacher_heads
    for number, one_round in enumerate(plan):
        used = [head for pair in one_round for head in pair]
        if not used:
            raise _invalid(f" round {number} must hold at least one pair; got none")
        for head in used:
            if not 0 <= head < heads:
                raise _invalid(f" round {number} must use positions 0..{heads - 1}; got {head}")
            if used.count(head) > 1:
                raise _invalid(f" round {number} must use each position at most once; got {head} twice")
        heads -= len(one_round)
    if num_student_heads is not None and heads != num_student_heads:
        raise _invalid(f" must leave num_student_heads={num_student_heads} of {num_teacher_heads} heads; got {heads}")
    return plan


def _invalid(problem: str) -> ShdError:
    return ShdError("plan-invalid", f"plan{problem}", "PLAN-7")


def plan_groups(plan: Iterable[Iterable[Sequence[int]]], num_teacher_heads: int) -> tuple[tuple[int, ...], ...]:
    """The teacher heads behind each student head, in student order (PLAN-6).

    Args:
        plan: explicit rounds, as from ``merge_plan``; they may leave any number of heads.
        num_teacher_heads: H_t.

    Raises:
        ShdError: ``argument-value`` (PLAN-1), ``plan-invalid`` (PLAN-7).
    """
    check_count("num_teacher_heads", num_teacher_heads)
    pool: list[tuple[int, ...]] = [(head,) for head in range(num_teacher_heads)]
    for one_round in check_plan(plan, num_teacher_heads):
        pool = merge_pool(pool, one_round)
    return tuple(pool)


def merge_pool(pool: Sequence[tuple[int, ...]], one_round: Sequence[Pair]) -> list[tuple[int, ...]]:
    """One round on a pool of tuples: merged ones first, then the untouched, in order (PLAN-4)."""
    used = {head for pair in one_round for head in pair}
    merged = [pool[p] + pool[q] for p, q in one_round]
    return merged + [head for position, head in enumerate(pool) if position not in used]


def _progressive(heads: int, num_student_heads: int) -> MergePlan:
    rounds = []
    while heads > num_student_heads:
        num_pairs = min(heads // 2, heads - num_student_heads)
        rounds.append(tuple((2 * i, 2 * i + 1) for i in range(num_pairs)))
        heads -= num_pairs
    return tuple(rounds)


def _balanced(num_teacher_heads: int, num_student_heads: int) -> MergePlan:
    small, num_large = divmod(num_teacher_heads, num_student_heads)
    # The group of each pool position.
    group_of = [group for group in range(num_student_heads) for _ in range(small + (group < num_large))]
    rounds = []
    while len(group_of) > num_student_heads:
        pairs: list[Pair] = []
        for group in range(num_student_heads):
            members = [position for position, g in enumerate(group_of) if g == group]
            pairs += [(members[i], members[i + 1]) for i in range(0, len(members) - 1, 2)]
        used = {position for pair in pairs for position in pair}
        group_of = [group_of[p] for p, _ in pairs] + [g for i, g in enumerate(group_of) if i not in used]
        rounds.append(tuple(pairs))
    return tuple(rounds)


def check_count(name: str, value: object) -> None:
    check_integer(name, value, 1, None, "PLAN-1")
