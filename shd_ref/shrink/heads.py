"""Fewer heads: which of a layer's heads merge, with what weights, and the matrices of the student's.

The gram tensor of a layer gives the plan and the mixing C (``merge_heads``). The *merged attention* then gives every
teacher head t of the group of student head h the map ``softmax(sum_u C[h,u] z_u)`` and leaves values and output
projection as they are. One softmax of mixed logits is the normalised geometric mixture of the group's maps; chapter
MIX mixes arithmetically. A layer is *exact* when it equals its merged attention:

- groups inside key and value heads: ``mix_queries``, exact, also with rotary positions; with QK-norm approximate
- no rotary positions, and groups fit the student's head: ``concatenate_heads``, exact
- otherwise ``low_rank_heads``, approximate; a soft cap on the logits then caps the mixture
- ALiBi is refused: configurations fix its slopes by the number of heads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.attention import Array, Mask
from shd_ref.merging.gram import solve_alpha_from_gram
from shd_ref.merging.matching import match_pairs
from shd_ref.merging.mixing import compose_mixing
from shd_ref.merging.plans import MergePlan, Pair, merge_plan, plan_groups
from shd_ref.tolerances import tie_width

Forms: TypeAlias = NDArray[np.floating[Any] | np.complexfloating[Any, Any]]
"""Factors of bilinear forms; complex for entries that rotate."""

PLANS: tuple[str, ...] = ("auto", "matched", "balanced", "progressive")

RIDGE = 1e-6
"""Share of a moment's mean eigenvalue that is added to all: directions without data then have an inverse."""


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
        return len(self.query)

    @property
    def num_kv_heads(self) -> int:
        return len(self.key)

    @property
    def head_dim(self) -> int:
        return int(self.query.shape[2])

    @property
    def reads(self) -> list[int]:
        """For each query head the key and value head that it reads (MAP-6)."""
        heads_per_kv = self.num_heads // self.num_kv_heads
        return [head // heads_per_kv for head in range(self.num_heads)]

    @property
    def logit_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


def join_heads(heads: Array) -> Array:
    """Heads ``(H, D, d)`` side by side, as one matrix of rows ``(D, H * d)``."""
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)


def split_heads(matrix: Array, num_heads: int) -> Array:
    """A matrix ``(D, H * d)`` as its heads ``(H, D, d)``."""
    return matrix.reshape(len(matrix), num_heads, -1).swapaxes(0, 1)


@dataclass(frozen=True, eq=False)
class HeadMerge:
    """Groups of teacher heads and the weights of their logits."""

    mixing: Array  # C (H_s, H_t): rows convex, 0 outside the group. A member may weigh 0: its values still count
    groups: tuple[tuple[int, ...], ...]  # of each student head its teacher heads; every one in exactly one group
    plan: MergePlan = ()  # the rounds of pairs that gave both, empty where there were none

    @property
    def members(self) -> Array:
        """``(H_s, H_t)``: 1 where the teacher head is in the student head's group, else 0."""
        members = np.zeros(self.mixing.shape)
        for head, group in enumerate(self.groups):
            members[head, list(group)] = 1.0
        return members

    def shares_keys(self, num_kv_heads: int) -> bool:
        """Whether every student head merges heads of one key and value head, equally many each, in order."""
        student, teacher = self.mixing.shape
        if teacher % num_kv_heads or student % num_kv_heads:
            return False
        teacher_per_kv, student_per_kv = teacher // num_kv_heads, student // num_kv_heads
        return all(t // teacher_per_kv == h // student_per_kv for h, group in enumerate(self.groups) for t in group)


def merge_heads(gram: Array, num_student_heads: int, kind: str, num_kv_heads: int) -> HeadMerge:
    """A layer's merge by a ``"matched"`` (needs networkx), ``"balanced"`` or ``"progressive"`` plan.

    Where key heads do not divide H_s, any two heads may meet in a matched plan.
    """
    if kind != "matched":
        return pooled_mixing(gram, merge_plan(len(gram), num_student_heads, kind))
    inside = num_kv_heads if num_student_heads % num_kv_heads == 0 else 1
    return pooled_mixing(gram, grouped_plan(gram, num_student_heads, inside))


def pooled_mixing(gram: Array, plan: MergePlan) -> HeadMerge:
    """C with one alpha per pair over the whole calibration, and the plan's groups; the identity for the empty plan.

    Weights of a network are constants, so GRAM-2 to GRAM-4 run the plan on the gram tensor summed over samples,
    ``(H, H, H, H)``: before clipping, the alpha is the mean of the samples' alphas weighted with their ``||M||^2``.
    """
    pool, heads = gram[None], len(gram)
    alphas = []
    for one_round in plan:
        alphas.append(_solve_round(pool, one_round))
        pool = _merge_pool(pool, one_round, alphas[-1])
    mixing = compose_mixing(alphas, plan, heads)[0] if plan else np.eye(heads)
    return HeadMerge(mixing, plan_groups(plan, heads), plan)


def grouped_plan(gram: Array, num_student_heads: int, num_kv_heads: int) -> MergePlan:
    """The matched plan (PLAN-9, score ``- E(a*)``) whose pairs share a key and value head; needs networkx.

    ``num_kv_heads`` divides the heads of both sides; 1 lets any two heads meet. Each round lists its pairs by key and
    value head, then by first position.
    """
    pool, heads = gram[None], len(gram)
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
    """``E(a*)`` of a pair, summed over the calibration, from the pool's gram tensor ``(1, H, H, H, H)``.

    ``E(a) = || a (u + w) - u ||^2`` with ``u = (A_p - A_q) X_p`` and ``w = (A_p - A_q) X_q``.
    """
    pair = _pair_gram(gram, p, q)
    uu, uw, ww = (
        float(pair[0, 0, j, 0, k] - pair[0, 0, j, 1, k] - pair[0, 1, j, 0, k] + pair[0, 1, j, 1, k])
        for j, k in ((0, 0), (0, 1), (1, 1))
    )
    alpha = float(solve_alpha_from_gram(pair, 0, 1)[0])
    return alpha**2 * (uu + 2 * uw + ww) - 2 * alpha * (uu + uw) + uu


def _solve_round(gram: Array, one_round: Sequence[Pair]) -> Array:
    """The alphas of a round's pairs ``(1, pairs)``."""
    return np.stack([solve_alpha_from_gram(_pair_gram(gram, p, q), 0, 1) for p, q in one_round], axis=1)


def _pair_gram(gram: Array, p: int, q: int) -> Array:
    pair: Array = gram[np.ix_([0], *[[p, q]] * 4)]  # alone, so that checking it does not read the whole tensor
    return pair


def _merge_pool(gram: Array, one_round: Sequence[Pair], alpha: Array) -> Array:
    """The gram tensor after a round, in the order of PLAN-4: maps mix, value outputs add (GRAM-4)."""
    heads = gram.shape[1]
    merge = HeadMerge(compose_mixing([alpha], [one_round], heads)[0], plan_groups([one_round], heads))
    for axis, matrix in enumerate((merge.mixing, merge.members) * 2, start=1):
        gram = np.moveaxis(np.tensordot(matrix, gram, (1, axis)), 0, axis)
    return gram


def mix_queries(weights: HeadWeights, merge: HeadMerge, query_size: Array | None = None) -> HeadWeights:
    """Heads that share their keys and values, exactly: ``W_Q' = sum c_t W_Q,t``, ``W_O' = sum W_O,t``.

    With QK-norm, ``query_size`` is the root mean square of each head's queries ``(H,)``: queries are mixed at equal
    length, ``W_Q' = sum c_t W_Q,t / r_t``, and the result is approximate.
    """
    c = merge.mixing if query_size is None else merge.mixing / query_size
    return replace(
        weights,
        query=np.einsum("ht,tdk->hdk", c, weights.query),
        query_bias=None if weights.query_bias is None else c @ weights.query_bias,
        output=np.einsum("ht,tvd->hvd", merge.members, weights.output),
        scale=weights.logit_scale,
    )


def concatenate_heads(weights: HeadWeights, merge: HeadMerge, head_dim: int) -> HeadWeights:
    """Heads laid side by side in a longer one, exactly, where positions are not rotary.

    ``q' = [r c_t q_t]``, ``k' = [k_t]``, ``v' = [v_t]`` with ``r = sqrt(head_dim / d)`` for the usual scales, W_O
    stacked, and zeros where the group leaves room. The student has a key and value head for each query head.
    """
    c, groups = merge.mixing, merge.groups
    d, d_v = weights.query.shape[2], weights.value.shape[2]
    ratio = weights.logit_scale * head_dim**0.5
    num_heads, width = len(groups), weights.query.shape[1]
    output = np.zeros((num_heads, head_dim, width))
    merged: dict[str, Any] = {}
    for name in ("query", "key", "value"):
        merged[name] = np.zeros((num_heads, width, head_dim))
        if getattr(weights, f"{name}_bias") is not None:
            merged[f"{name}_bias"] = np.zeros((num_heads, head_dim))
    for head, group in enumerate(groups):
        for order, t in enumerate(group):
            kv = weights.reads[t]
            block, block_v = slice(order * d, order * d + d), slice(order * d_v, order * d_v + d_v)
            output[head, block_v] = weights.output[t]
            for name, source, factor, columns in (
                ("query", t, ratio * c[head, t], block),
                ("key", kv, 1.0, block),
                ("value", kv, 1.0, block_v),
            ):
                for field in {name, f"{name}_bias"} & merged.keys():
                    merged[field][head, ..., columns] = factor * getattr(weights, field)[source]
    return HeadWeights(**merged, output=output, output_bias=weights.output_bias)


def low_rank_heads(
    weights: HeadWeights,
    merge: HeadMerge,
    num_kv_heads: int,
    head_dim: int,
    moment: Array,
    key_moment: Array,
    *,
    slow: Mask | None = None,
    ridge: float = RIDGE,
) -> HeadWeights:
    """The nearest heads of a given length, by rank, under the inputs' second moment S (and S_k of the keys).

    The logits of student head h are of ``M_h = (s / s') sum c_t W_Q,t W_K,t^T``; heads that share a key head take
    the factors with the least ``sum_h || S^(1/2) (M_h - W_Q,h' W_K'^T) S_k^(1/2) ||^2``. With rotary positions each
    pair of entries is one complex number and gets rank one of ``w_Q w_K^H``, slow pairs together; without, S_k is
    centred, since the softmax ignores what is equal for all keys. Values alike: ``N_h = sum W_V,t W_O,t`` under S.
    Whitening uses ``S + ridge * mean eigenvalue * I``.

    Args:
        weights: of the teacher.
        merge: which heads, with what weights.
        num_kv_heads: of the student, a divisor of H_s.
        head_dim: d and d_v of the student; with rotary positions the teacher's.
        moment: mean of ``[x, 1]^T [x, 1]`` over calibration rows ``(D + 1, D + 1)``.
        key_moment: mean of ``(x - m)^T (x - m)`` with m the mean row of each sample ``(D, D)``: the softmax ignores
            what is the same for every key. Not used with rotary positions.
        slow: with rotary positions, one boolean a rotated pair (i, i + pairs): whether it barely rotates over
            the lengths that occur.
        ridge: see ``RIDGE``.

    Returns:
        Biases where the teacher has them: a key bias only with rotary positions, since it cancels without; the value
        bias moves to the output bias where there is one.
    """
    c, width = merge.mixing, weights.query.shape[1]
    scaled = weights.logit_scale * head_dim**0.5 * c
    reads, heads_per_kv = weights.reads, c.shape[0] // num_kv_heads
    root, inverse = moment_roots(moment, ridge)
    queries = root @ _with_bias(weights.query, weights.query_bias)
    values = (root @ _with_bias(weights.value, weights.value_bias if weights.output_bias is None else None))[reads]
    key_root, key_inverse = (root, inverse) if slow is not None else moment_roots(key_moment, ridge)
    keys = (key_root @ (weights.key if slow is None else _with_bias(weights.key, weights.key_bias)))[reads]
    outputs = weights.output.swapaxes(1, 2)
    query, key = np.zeros((c.shape[0], width + 1, head_dim)), np.zeros((num_kv_heads, len(key_root), head_dim))
    value, output = np.zeros((num_kv_heads, width + 1, head_dim)), np.zeros((c.shape[0], head_dim, width))
    for kv in range(num_kv_heads):
        heads = slice(kv * heads_per_kv, (kv + 1) * heads_per_kv)
        groups = merge.groups[heads]
        if slow is None:
            query[heads], key[kv] = _factor_groups(queries, keys, scaled[heads], groups, head_dim)
        else:
            _fill_rotary(query[heads], key[kv], queries, keys, scaled[heads], groups, slow)
        left, value[kv] = _factor_groups(outputs, values, merge.members[heads], groups, head_dim)
        output[heads] = left.swapaxes(1, 2)
    key = key_inverse @ key
    key = np.pad(key, ((0, 0), (0, width + 1 - key.shape[1]), (0, 0)))  # without positions a key bias cancels
    query, value = inverse @ query, inverse @ value
    out_bias, value_bias = weights.output_bias, None
    if weights.value_bias is not None:
        value_bias = value[:, -1]
        if out_bias is not None:  # it takes the value bias: rows of a map sum to one
            out_bias = out_bias + np.einsum("tv,tvd->d", weights.value_bias[weights.reads], weights.output)
            value_bias = np.zeros_like(value_bias)
    biased = weights.query_bias is not None or weights.key_bias is not None
    query_bias, key_bias = (query[:, -1], key[:, -1]) if biased else (None, None)
    return HeadWeights(query[:, :-1], key[:, :-1], value[:, :-1], output, query_bias, key_bias, value_bias, out_bias)


def _with_bias(matrix: Array, bias: Array | None) -> Array:
    """The bias as one more row, for inputs ``[x, 1]``: ``(H, D + 1, d)``."""
    row = np.zeros((len(matrix), matrix.shape[2])) if bias is None else bias
    return np.concatenate([matrix, row[:, None]], axis=1)


def _fill_rotary(
    query: Array, key: Array, queries: Array, keys: Array, c: Array, groups: Sequence[Sequence[int]], slow: Mask
) -> None:
    """Rank one for each rotated pair in complex numbers, real factors for entries that do not rotate."""
    first, second = np.arange(len(slow)), np.arange(len(slow), 2 * len(slow))
    for i, j in zip(first[~slow], second[~slow], strict=True):
        lefts, rights = (vectors[..., [i]] + 1j * vectors[..., [j]] for vectors in (queries, keys))
        left, right = _factor_groups(lefts, rights, c, groups, 1)
        query[..., i], query[..., j] = left[..., 0].real, left[..., 0].imag
        key[..., i], key[..., j] = right[..., 0].real, right[..., 0].imag
    fixed = np.concatenate([first[slow], second[slow], np.arange(2 * len(first), queries.shape[2])])
    if len(fixed):
        factors = _factor_groups(queries[..., fixed], keys[..., fixed], c, groups, len(fixed))
        query[..., fixed], key[..., fixed] = factors


def _factor_groups(
    lefts: Forms, rights: Forms, c: Array, groups: Sequence[Sequence[int]], rank: int
) -> tuple[Forms, Forms]:
    """Factors of ``sum_t c[h, t] lefts[t] rights[t]^H`` over the group of each of some student heads h."""
    return factor_forms(
        [np.concatenate([row[t] * lefts[t] for t in group], axis=1) for row, group in zip(c, groups, strict=True)],
        [np.concatenate([rights[t] for t in group], axis=1) for group in groups],
        rank,
    )


def factor_forms(lefts: Sequence[Forms], rights: Sequence[Forms], rank: int) -> tuple[Forms, Forms]:
    """The factors ``(G, D1, rank)`` and ``(D2, rank)`` nearest to ``M_h = lefts[h] @ rights[h]^H``, the right shared.

    Zeros beyond their rank. The forms, ``(D1, r_h)`` by ``(D2, r_h)``, are never made: one SVD of their core, as
    large as the columns of all ``rights``, is that of the stack.
    """
    basis, core = np.linalg.qr(np.concatenate(rights, axis=1))
    ends = np.cumsum([matrix.shape[1] for matrix in rights])[:-1]
    bases = [np.linalg.qr(matrix) for matrix in lefts]
    cores = [r @ matrix.conj().T for (_, r), matrix in zip(bases, np.split(core, ends, axis=1), strict=True)]
    u, singular, vh = np.linalg.svd(np.concatenate(cores), full_matrices=False)
    count = min(rank, len(singular))
    right = basis @ vh[:count].conj().T
    scale = np.sqrt(singular[:count]) * leading_phases(right)
    rows = np.split(u[:, :count] * scale, np.cumsum([len(matrix) for matrix in cores])[:-1])
    left = np.stack([q @ matrix for (q, _), matrix in zip(bases, rows, strict=True)])
    missing = rank - count
    return np.pad(left, ((0, 0), (0, 0), (0, missing))), np.pad(right * scale, ((0, 0), (0, missing)))


def leading_phases(vectors: Forms) -> Forms:
    """For each column ``(D, k)`` the number of length 1 that makes its largest entry positive.

    Signs of singular and eigenvectors are free; without a rule, rounding would choose them.
    """
    sizes = np.abs(vectors)
    first = (sizes >= (1.0 - tie_width()) * sizes.max(axis=0, initial=0.0)).argmax(axis=0)
    leading = vectors[first, np.arange(vectors.shape[1])]
    return np.where(leading == 0.0, 1.0, leading.conj() / np.where(leading == 0.0, 1.0, np.abs(leading)))


def moment_roots(moment: Array, ridge: float) -> tuple[Array, Array]:
    """The square root of a moment with its ridge, and the root's inverse."""
    values, vectors = np.linalg.eigh((moment + moment.T) / 2)
    floor = max(float(values.mean()), np.finfo(np.float64).tiny)
    raised = np.sqrt(np.maximum(values, 0.0) + ridge * floor)
    return (vectors * raised) @ vectors.T, (vectors / raised) @ vectors.T
