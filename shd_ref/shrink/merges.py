"""Which heads merge, with what weights: records of a layer, plans and C from one gram tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.attention import Array, Mask, as_float, check_option
from shd_ref.errors import ShdError
from shd_ref.integers import as_index, check_integer, check_number
from shd_ref.merging.gram import solve_alpha_from_gram
from shd_ref.merging.matching import match_pairs
from shd_ref.merging.mixing import compose_mixing
from shd_ref.merging.plans import MergePlan, Pair, check_plan, merge_plan, plan_groups
from shd_ref.tolerances import row_sum_tolerance

LAYOUTS: tuple[str, ...] = ("half", "adjacent")


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """One layer of attention, head by head; inputs are rows."""

    query: Array  # (H, D, d)
    key: Array  # (H_kv, D, d); query head i reads key and value head i // (H / H_kv)
    value: Array  # (H_kv, D, d_v)
    output: Array  # (H, d_v, D)
    query_bias: Array | None = None  # (H, d), or None without one
    key_bias: Array | None = None  # (H_kv, d)
    value_bias: Array | None = None  # (H_kv, d_v)
    output_bias: Array | None = None  # (D,)
    scale: float | None = None  # logits are scale * q k^T; default d ** -0.5

    @property
    def num_heads(self) -> int:
        """H."""
        return len(self.query)

    @property
    def num_kv_heads(self) -> int:
        """H_kv."""
        return len(self.key)

    @property
    def head_dim(self) -> int:
        """Entries of a query."""
        return int(self.query.shape[2])

    @property
    def reads(self) -> list[int]:
        """For each query head the key and value head that it reads (MAP-6)."""
        per = self.num_heads // self.num_kv_heads
        return [head // per for head in range(self.num_heads)]

    @property
    def logit_scale(self) -> float:
        """The factor of ``q k^T``."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class Rotary:
    """Rotary positions."""

    # radians a position, one a rotated pair; the remaining d - 2 * len(frequencies) entries of a head are not rotated
    frequencies: Array
    layout: str = "half"  # "half" pairs entry i with i + len(frequencies), "adjacent" pairs 2 i with 2 i + 1
    # boolean, one per pair: True where the pair barely turns over the lengths that occur
    slow: Mask | None = None

    def entries(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Positions in a head of each pair's first and second entry."""
        pairs = np.arange(len(self.frequencies))
        return (pairs, pairs + len(pairs)) if self.layout == "half" else (2 * pairs, 2 * pairs + 1)

    def turn(self, rows: Array) -> Array:
        """Queries or keys ``(..., L, d)`` turned to their positions 0 .. L - 1."""
        first, second = self.entries()
        angles = np.arange(rows.shape[-2])[:, None] * self.frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        turned = rows.copy()
        turned[..., first] = rows[..., first] * cos - rows[..., second] * sin
        turned[..., second] = rows[..., first] * sin + rows[..., second] * cos
        return turned


def join_heads(heads: Array) -> Array:
    """Heads ``(H, D, d)`` side by side, as one matrix of rows ``(D, H * d)``."""
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)


def split_heads(matrix: Array, num_heads: int) -> Array:
    """A matrix ``(D, H * d)`` as its heads ``(H, D, d)``."""
    return matrix.reshape(len(matrix), num_heads, -1).swapaxes(0, 1)


def as_weights(weights: HeadWeights | Mapping[str, Any]) -> HeadWeights:
    """A layer's weights in float64, checked, from the record or a mapping of its fields."""
    fields = weights if isinstance(weights, Mapping) else vars(weights)
    query, key, value, output = (as_float(fields[name], name, ndim=3) for name in ("query", "key", "value", "output"))
    heads, width, dim = query.shape
    kv_heads, value_dim = len(key), value.shape[2]
    shapes: dict[str, tuple[int, ...]] = {
        "key": (kv_heads, width, dim),
        "value": (kv_heads, width, value_dim),
        "output": (heads, value_dim, output.shape[2]),
        "query_bias": (heads, dim),
        "key_bias": (kv_heads, dim),
        "value_bias": (kv_heads, value_dim),
        "output_bias": output.shape[2:],
    }
    present = [name for name in shapes if "bias" in name and fields.get(name) is not None]
    biases = {name: as_float(fields[name], name) for name in present}
    for name, array in {"key": key, "value": value, "output": output, **biases}.items():
        if array.shape != shapes[name]:
            message = f"{name} must be {shapes[name]} with a query {query.shape}; got {array.shape}"
            raise ShdError("argument-shape", message)
    if not kv_heads or heads % kv_heads or not dim:
        message = f"query must have a multiple of the {kv_heads} key heads; got {query.shape}"
        raise ShdError("argument-shape", message)
    scale = fields.get("scale")
    scale = None if scale is None else check_number("scale", scale, above=0)
    return HeadWeights(query, key, value, output, **biases, scale=scale)


def as_rotary(fields: Rotary | Mapping[str, Any]) -> Rotary:
    """Rotary positions, from the record or a mapping of its fields; checked."""
    rotary = fields if isinstance(fields, Rotary) else Rotary(**fields)
    check_option("layout", rotary.layout, LAYOUTS)
    frequencies = as_float(rotary.frequencies, "frequencies", ndim=1)
    slow = None if rotary.slow is None else np.asarray(rotary.slow)
    if slow is not None and (slow.shape != frequencies.shape or slow.dtype != np.bool_):
        message = f"slow must be {len(frequencies)} booleans, one per pair; got {slow.shape}"
        raise ShdError("argument-shape", message)
    return Rotary(frequencies, rotary.layout, slow)


PLANS: tuple[str, ...] = ("auto", "matched", "balanced", "progressive")


@dataclass(frozen=True, eq=False)
class HeadMerge:
    """Groups of teacher heads and the weights of their logits."""

    mixing: Array  # C (H_s, H_t): rows convex, 0 outside the group. A member may weigh 0: its values still count
    # for each student head its teacher heads; every teacher head in exactly one group
    groups: tuple[tuple[int, ...], ...]
    plan: MergePlan = ()  # the rounds of pairs that gave both, empty where there were none

    def __post_init__(self) -> None:
        c = as_float(self.mixing, "mixing", ndim=2)
        heads = sorted(head for group in self.groups for head in group)
        if c.shape[0] != len(self.groups) or heads != list(range(c.shape[1])) or not all(self.groups):
            rule = f"groups must hold each of the {c.shape[1]} teacher heads once, in {c.shape[0]} groups"
            raise ShdError("argument-shape", f"{rule}; got {self.groups}")
        sums = c.sum(axis=1)
        outside = np.abs(c * (1.0 - self.members)).max()
        if (c < 0.0).any() or (np.abs(sums - 1.0) > row_sum_tolerance("float64")).any() or outside > 0.0:
            rule = "mixing must be at least 0, sum to 1 over each group and be 0 outside"
            got = f"a minimum of {c.min():.6g}, sums from {sums.min():.6g} to {sums.max():.6g}"
            raise ShdError("mixing-invalid", f"{rule}; got {got}, and up to {outside:.6g} outside")

    @property
    def members(self) -> Array:
        """``(H_s, H_t)``: 1 where the teacher head is in the student head's group, else 0."""
        members = np.zeros(self.mixing.shape)
        for head, group in enumerate(self.groups):
            members[head, list(group)] = 1.0
        return members

    @property
    def homes(self) -> list[int]:
        """For each teacher head, the student head whose group it is in."""
        return [int(head) for head in self.members.argmax(axis=0)]

    def shares_keys(self, num_kv_heads: int) -> bool:
        """Whether every student head merges heads of one key and value head, equally many each, in order."""
        student, teacher = self.mixing.shape
        if teacher % num_kv_heads or student % num_kv_heads:
            return False
        before, after = teacher // num_kv_heads, student // num_kv_heads
        return all(t // before == h // after for h, group in enumerate(self.groups) for t in group)


def as_merge(merge: HeadMerge | Mapping[str, Any]) -> HeadMerge:
    """A merge, from the record or a mapping of its fields; checked."""
    if isinstance(merge, HeadMerge):
        return merge
    try:
        groups = tuple(tuple(as_index(head) for head in group) for group in merge["groups"])
    except TypeError:
        message = f"groups must be lists of heads; got {merge['groups']!r}"
        raise ShdError("argument-shape", message) from None
    return HeadMerge(as_float(merge["mixing"], "mixing", ndim=2), groups)


def merge_heads(gram: ArrayLike, num_student_heads: int, kind: str, num_kv_heads: int) -> HeadMerge:
    """A layer's merge by a ``"matched"`` (needs networkx), ``"balanced"`` or ``"progressive"`` plan.

    Where key heads do not divide H_s, any two heads may meet in a matched plan.
    """
    if kind != "matched":
        return pooled_mixing(gram, merge_plan(len(np.asarray(gram)), num_student_heads, kind))
    inside = num_kv_heads if num_student_heads % num_kv_heads == 0 else 1
    return pooled_mixing(gram, grouped_plan(gram, num_student_heads, inside))


def pooled_mixing(gram: ArrayLike, plan: Iterable[Iterable[Sequence[int]]]) -> HeadMerge:
    """C with one alpha per pair over the whole calibration, and the plan's groups.

    Weights of a network are constants, so GRAM-2 to GRAM-4 run the plan on the sum over samples: before clipping, the
    alpha is the mean of the samples' alphas weighted with their ``||M||^2``.

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
        alphas.append(_solve_round(pool, one_round))
        pool = _merge_pool(pool, one_round, alphas[-1])
    mixing = compose_mixing(alphas, rounds, heads)[0] if rounds else np.eye(heads)
    return HeadMerge(mixing, plan_groups(rounds, heads), rounds)


def grouped_plan(gram: ArrayLike, num_student_heads: int, num_kv_heads: int) -> MergePlan:
    """The matched plan (PLAN-9, score ``- E(a*)``) whose pairs share a key and value head; needs networkx.

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
    num_student_heads = check_integer("num_student_heads", num_student_heads, 1, heads)
    num_kv_heads = check_integer("num_kv_heads", num_kv_heads, 1, num_student_heads)
    if heads % num_kv_heads or num_student_heads % num_kv_heads:
        rule = f"num_student_heads and the {heads} heads must be multiples of num_kv_heads"
        raise ShdError("argument-value", f"{rule}; got {num_student_heads} and {num_kv_heads}")
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
                    scores[i, j] = -_pooled_error(pool, p, group[j])
            pairs += [(group[i], group[j]) for i, j in match_pairs(scores, count)]
        # Positions after the round: the merged heads in the round's order, then the untouched ones (PLAN-4).
        used = {head for pair in pairs for head in pair}
        rest = [head for head in range(pool.shape[1]) if head not in used]
        groups = [
            [number * count + i for i in range(count)]
            + [len(pairs) + rest.index(head) for head in group if head not in used]
            for number, group in enumerate(groups)
        ]
        pool = _merge_pool(pool, pairs, _solve_round(pool, pairs))
        rounds.append(tuple(pairs))
    return tuple(rounds)


def _pooled_error(gram: Array, p: int, q: int) -> float:
    """``E(a*)`` of a pair, summed over the calibration, from the pool's gram tensor ``(1, H, H, H, H)``."""
    pair = _pair_gram(gram, p, q)
    u, uw, w = (
        float(pair[0, 0, j, 0, k] - pair[0, 0, j, 1, k] - pair[0, 1, j, 0, k] + pair[0, 1, j, 1, k])
        for j, k in ((0, 0), (0, 1), (1, 1))
    )
    alpha = float(solve_alpha_from_gram(pair, 0, 1)[0])
    return alpha**2 * (u + 2 * uw + w) - 2 * alpha * (u + uw) + u  # || a (u + w) - u ||^2


def _solve_round(gram: Array, one_round: Sequence[Pair]) -> Array:
    """The alphas of a round's pairs ``(1, pairs)``."""
    return np.stack([solve_alpha_from_gram(_pair_gram(gram, p, q), 0, 1) for p, q in one_round], axis=1)


def _pair_gram(gram: Array, p: int, q: int) -> Array:
    """The pair's entries alone, so that checking them does not read the whole tensor."""
    pair: Array = gram[np.ix_([0], *[[p, q]] * 4)]
    return pair


def _merge_pool(gram: Array, one_round: Sequence[Pair], alpha: Array) -> Array:
    """The gram tensor after a round, in the order of PLAN-4: maps mix, value outputs add (GRAM-4)."""
    heads = gram.shape[1]
    merge = HeadMerge(compose_mixing([alpha], [one_round], heads)[0], plan_groups([one_round], heads))
    for axis, matrix in enumerate((merge.mixing, merge.members) * 2, start=1):
        gram = np.moveaxis(np.tensordot(matrix, gram, (1, axis)), 0, axis)
    return gram


def _check_gram(gram: ArrayLike) -> Array:
    g = as_float(gram, "gram")
    if g.ndim != 4 or len(set(g.shape)) != 1:
        raise ShdError("argument-shape", f"gram must be (H, H, H, H), summed over samples; got {g.shape}")
    return g[None]
