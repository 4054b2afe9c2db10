"""Fewer key and value heads under query heads that stay: rotated towards each other, averaged, then refined.

Rotations, any orthogonal matrices here, change nothing that an attention gives: one of a value head is undone in W_O,
one of a key head in the queries that read it. With rotary positions only an angle for each rotated pair commutes with
them; where queries and keys are normed with a scale for each entry, an angle only on pairs of equal scales, else a
sign. A group's heads are rotated by generalised orthogonal Procrustes under the inputs' moment, so heads that are
equal, or rotations of each other, merge without any error. Others are averaged, and what a calibration saw refines
the average (``share_heads``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shd_ref.attention import Array, Mask
from shd_ref.shrink.heads import RIDGE, Forms, HeadMerge, HeadWeights, moment_roots
from shd_ref.tolerances import tie_width

SWEEPS = 30
"""Over the heads of a group, each rotated towards the sum of the others. Ten end within 1e-10 of the least distance
where noise is as large as what heads share, thirty within 1e-7 where it is three times as large."""
ROUNDS = 4
"""Of alternating least squares; more fit the model of the error better than the error itself."""
STEPS = 12
"""Of conjugate gradients, for the values of a round: random heads end 1% to 14% above the converged error."""


@dataclass(frozen=True)
class Group:
    """Key and value heads that become one, with their readers."""

    heads: tuple[int, ...]  # query heads that will read it
    members: tuple[int, ...]  # key and value heads that they read now
    homes: tuple[int, ...]  # for each of heads the position in members


@dataclass(frozen=True, eq=False)
class SeenGroup:
    """Second moments for the query heads of a group of rotated keys and values, summed over calibration rows.

    A logit is ``sum_g b_g f_g`` with ``f_g`` the products of the entries of a query and of member g's key: for each
    rotated pair, as complex numbers, the real and the negative imaginary part of ``conj(q) k``, then other entries.
    """

    keys: Array  # (heads, G * d, G * d): variance of f under a row's own map, twice its KL divergence to second order
    values: Array  # (heads, G * d_v, G * d_v): of the members' values under the head's map


def group_heads(weights: HeadWeights, merge: HeadMerge, num_kv_heads: int) -> list[Group]:
    """The groups of a student with so many key and value heads, in its order."""
    heads_per_group, reads, groups = len(merge.groups) // num_kv_heads, weights.reads, []
    for start in range(0, len(merge.groups), heads_per_group):
        heads = tuple(sorted(head for group in merge.groups[start : start + heads_per_group] for head in group))
        members = tuple(sorted({reads[head] for head in heads}))
        groups.append(Group(heads, members, tuple(members.index(reads[head]) for head in heads)))
    return groups


def find_rotations(
    weights: HeadWeights, groups: Sequence[Group], moment: Array, pairs: int, free: Mask | None = None
) -> tuple[Array, Array]:
    """Orthogonal changes of basis that bring the keys, and the values, of each group together.

    Args:
        weights: of the teacher.
        groups: as ``group_heads`` makes them.
        moment: mean of ``[x, 1]^T [x, 1]`` over calibration rows ``(D + 1, D + 1)``.
        pairs: how many pairs of entries (i, i + pairs) positions rotate; 0 without rotary positions.
        free: where queries and keys are normed, one boolean a pair: whether any angle commutes with their scales.

    Returns:
        Rotations of keys ``(M, d, d)`` and of values ``(M, d_v, d_v)``, of the members of all groups in order.
    """
    root, _ = moment_roots(moment, RIDGE)
    keys, values = (root @ _rows(weights, name) for name in ("key", "value"))
    members_of = [list(group.members) for group in groups]
    of_keys = [_rotate_keys(keys[members], pairs, free) for members in members_of]
    return np.concatenate(of_keys), np.concatenate([_rotate_frames(values[members]) for members in members_of])


def rotate_heads(weights: HeadWeights, groups: Sequence[Group], rotations: tuple[Array, Array]) -> HeadWeights:
    """The same attention with keys and values rotated, and queries and W_O with them.

    It has a key and value head for each member of each group, group by group; query heads, in the teacher's order,
    read the one of their ``homes``.
    """
    members = [member for group in groups for member in group.members]
    key, value = (
        _rows(weights, name)[members] @ matrices for name, matrices in zip(("key", "value"), rotations, strict=True)
    )
    query, output, start = _rows(weights, "query"), weights.output.copy(), 0
    for group in groups:
        for head, home in zip(group.heads, group.homes, strict=True):
            query[head] = query[head] @ rotations[0][start + home]
            output[head] = rotations[1][start + home].T @ output[head]
        start += len(group.members)
    return _with_rows(weights, query, key, value, output)


def share_heads(
    rotated: HeadWeights,
    groups: Sequence[Group],
    pairs: int,
    seen: Sequence[SeenGroup] | None = None,
    *,
    normed: bool = False,
) -> tuple[HeadWeights, bool]:
    """One key and value head for each group of ``rotate_heads``, and whether that is exact.

    Keys become ``sum_g a_g k_g`` and the queries of head t ``c_t q_t``, with a number for each entry, complex for a
    rotated pair. From the average, ``seen`` refines both by alternating least squares, for the least variance of the
    logits' error under each head's own map. Values become ``sum_g v_g B_g`` and W_O follows, for the least error of
    what each head gives. Without ``seen``, and where keys are ``normed``, the average stays, of keys of equal length.
    """
    query, output, start, is_exact = _rows(rotated, "query"), rotated.output.copy(), 0, True
    keys, values, merged = _rows(rotated, "key"), _rows(rotated, "value"), []
    for number, group in enumerate(groups):
        size, readers = len(group.members), list(group.heads)
        key, value = keys[start : start + size], values[start : start + size]
        start += size
        key_mix = np.tile(np.eye(key.shape[2]) / size, (size, 1))
        value_mix = np.tile(np.eye(value.shape[2]) / size, (size, 1))
        if not _is_equal(key):
            is_exact = False
            if normed:  # the norm divides by a key's length, so a longer member must not weigh more
                lengths = np.linalg.norm(key, axis=(1, 2), keepdims=True)
                key = key * (lengths.mean() / np.maximum(lengths, np.finfo(np.float64).tiny))
            elif seen is not None:
                key_mix, scales = fit_keys(seen[number].keys, group.homes, size, pairs)
                query[readers] = query[readers] @ scales
        if not _is_equal(value):
            is_exact = False
            if seen is not None:
                moments = seen[number].values
                value_mix, output[readers] = fit_values(moments, group.homes, value_mix, output[readers])
        mixes = (key, key_mix), (value, value_mix)
        merged.append([np.concatenate(list(rows), axis=1) @ mix for rows, mix in mixes])
    shared_key, shared_value = (np.stack(heads) for heads in zip(*merged, strict=True))
    return _with_rows(rotated, query, shared_key, shared_value, output), is_exact


def _rows(weights: HeadWeights, name: str) -> Array:
    """Heads with their biases, or zeros, as last rows ``(H, D + 1, d)``."""
    heads, bias = getattr(weights, name), getattr(weights, f"{name}_bias")
    row = np.zeros((len(heads), heads.shape[2])) if bias is None else bias
    return np.concatenate([heads, row[:, None]], axis=1)


def _with_rows(weights: HeadWeights, query: Array, key: Array, value: Array, output: Array) -> HeadWeights:
    """The attention with rows as ``_rows`` gives them; biases that it lacked stay None."""
    parts: dict[str, Any] = {"query": query[:, :-1], "key": key[:, :-1], "value": value[:, :-1], "output": output}
    for name, rows in (("query_bias", query), ("key_bias", key), ("value_bias", value)):
        parts[name] = None if getattr(weights, name) is None else rows[:, -1]
    return replace(weights, **parts)


def _is_equal(members: Array) -> bool:
    """Whether all members are equal, up to rounding."""
    return bool(np.linalg.norm(members - members.mean(axis=0)) <= tie_width() * np.linalg.norm(members))


def _rotate_keys(sides: Array, pairs: int, free: Mask | None) -> Array:
    """For keys ``(G, rows, d)`` the rotations ``(G, d, d)`` that commute with positions, and with norms."""
    rotations = np.tile(np.eye(sides.shape[2]), (len(sides), 1, 1))
    for i, j in zip(range(pairs), range(pairs, 2 * pairs), strict=True):
        parts = sides[..., [i]], sides[..., [j]]
        # A complex column is rotated by an angle. Where only signs commute, both entries make one real column, which
        # is multiplied by 1 or -1.
        column = parts[0] + 1j * parts[1] if free is None or free[i] else np.concatenate(parts, axis=1)
        angle = _rotate_frames(column)[:, 0, 0]
        rotations[:, i, i] = rotations[:, j, j] = angle.real
        rotations[:, i, j], rotations[:, j, i] = angle.imag, -angle.imag
    if free is None and sides.shape[2] > 2 * pairs:
        rotations[:, 2 * pairs :, 2 * pairs :] = _rotate_frames(sides[..., 2 * pairs :])
    return rotations


def _rotate_frames(sides: Forms) -> Forms:
    """Orthogonal, or unitary, rotations ``(G, n, n)`` that bring sides ``(G, rows, n)`` together (Procrustes).

    From each side rotated to the first, which is the answer for two of them and where all are rotations of one.
    """
    gram = np.tensordot(sides.conj(), sides, (1, 1)).swapaxes(1, 2)  # (G, G, n, n)
    members = range(len(sides))
    rotations = np.stack([_polar(gram[member, 0]) for member in members])
    for _ in range(SWEEPS if len(sides) > 2 else 0):
        for member in members:
            others = (gram[member, other] @ rotations[other] for other in members if other != member)
            rotations[member] = _polar(sum(others))
    return rotations


def _polar(matrix: Any) -> Forms:
    """The orthogonal, or unitary, factor of the polar decomposition, which solves Procrustes."""
    left, _, right = np.linalg.svd(matrix)
    return np.asarray(left @ right)


def _product(factor: Array, pairs: int) -> Array:
    """The matrix of a product with the numbers ``factor`` ``(d,)``: real parts, imaginary parts, the rest."""
    matrix, first, second = np.diag(factor), np.arange(pairs), np.arange(pairs, 2 * pairs)
    matrix[second, second] = factor[first]
    matrix[second, first], matrix[first, second] = factor[second], -factor[second]
    return matrix


def fit_keys(moments: Array, homes: Sequence[int], size: int, pairs: int) -> tuple[Array, Array]:
    """Matrices ``(size * d, d)`` and ``(heads, d, d)`` for the rows of keys side by side, and of queries.

    The logits' form is ``b_g = conj(c) a_g`` for ``b = 1`` at a head's own member.
    """
    d = moments.shape[1] // size
    unit = np.ones(d)
    unit[pairs : 2 * pairs] = 0.0  # imaginary parts
    factors = np.tile(unit / size, (size, 1))  # a_g, from the average
    targets = [moment[:, home * d : home * d + d] @ unit for moment, home in zip(moments, homes, strict=True)]
    for _ in range(ROUNDS):
        forms = np.concatenate([_product(a, pairs) for a in factors])
        scales = [_solve(forms.T @ m @ forms, forms.T @ target) for m, target in zip(moments, targets, strict=True)]
        blocks = [np.kron(np.eye(size), _product(scale, pairs)) for scale in scales]
        gram = sum(block.T @ m @ block for block, m in zip(blocks, moments, strict=True))
        summed = sum(block.T @ target for block, target in zip(blocks, targets, strict=True))
        factors = _solve(gram, summed).reshape(size, d)
    # Rows are multiplied by the transposes, and the transpose of a number's matrix is that of its conjugate.
    keys = np.concatenate([_product(a, pairs).T for a in factors])
    return keys, np.stack([_product(scale, pairs) for scale in scales])


def fit_values(moments: Array, homes: Sequence[int], mix: Array, outputs: Array) -> tuple[Array, Array]:
    """Refined B ``(G * d_v, d_v)`` and W_O ``(heads, d_v, D)``: ``N_t`` is W_O in the rows of its member.

    For the least ``sum_t || C_t^(1/2) (N_t - B W_O,t') ||^2``: W_O' is solved for, B takes conjugate gradients.
    """
    d = mix.shape[1]
    targets = [c[:, h * d : h * d + d] @ o for c, h, o in zip(moments, homes, outputs, strict=True)]  # C_t N_t
    for number in range(ROUNDS):
        if number:
            summed = np.einsum("tnD,tvD->nv", np.stack(targets), outputs)
            descended = _descend(moments, outputs @ outputs.swapaxes(1, 2), summed, mix)
            mix = np.linalg.qr(descended)[0]  # any basis of its columns will do: W_O' is solved for next
        outputs = np.stack([_solve(mix.T @ c @ mix, mix.T @ rows) for c, rows in zip(moments, targets, strict=True)])
    return mix, outputs


def _descend(moments: Array, squares: Array, target: Array, start: Array) -> Array:
    """Conjugate gradients towards ``sum_t C_t B S_t = target``, from ``start``."""
    solution, residual = start, target - (moments @ start @ squares).sum(axis=0)
    direction, size = residual, np.square(residual).sum()
    for _ in range(STEPS):
        if size <= tie_width() ** 2 * np.square(target).sum():
            break
        image = (moments @ direction @ squares).sum(axis=0)
        step = size / (direction * image).sum()
        solution, residual = solution + step * direction, residual - step * image
        previous, size = size, np.square(residual).sum()
        direction = residual + size / previous * direction
    return solution


def _solve(matrix: Any, target: Any) -> Array:
    """Solve with a small ridge, as an entry that is 0 in every row makes the matrix singular."""
    ridge = RIDGE * max(float(matrix.trace()) / len(matrix), np.finfo(np.float64).tiny)
    return np.asarray(np.linalg.solve(matrix + ridge * np.eye(len(matrix)), target))
