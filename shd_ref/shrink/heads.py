"""Fewer heads: the weights of a student head that stands for a group of the teacher's.

The *merged attention* gives every teacher head t of the group of student head h the map ``softmax(sum_u C[h,u] z_u)``
and leaves values and output projection as they are. One softmax of mixed logits is the normalised geometric mixture
of the group's maps; chapter MIX mixes arithmetically. A layer is *exact* when it equals its merged attention:

- groups inside key and value heads: ``mix_queries``, exact, also with rotary positions; with QK-norm approximate
- no rotary positions, and groups fit the student's head: ``concatenate_heads``, exact
- otherwise ``low_rank_heads``, approximate; a soft cap on the logits then caps the mixture
- ALiBi is refused: configurations fix its slopes by the number of heads
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.attention import Array, as_float, mask_logits, softmax
from shd_ref.errors import ShdError
from shd_ref.integers import check_integer, check_number
from shd_ref.shrink.merges import HeadMerge, HeadWeights, Rotary, as_merge, as_rotary, as_weights
from shd_ref.tolerances import tie_width

Forms: TypeAlias = NDArray[np.floating[Any] | np.complexfloating[Any, Any]]

RIDGE = 1e-6
"""Share of a moment's mean eigenvalue that is added to all: directions without data then have an inverse."""


class Factors(NamedTuple):
    """``M_h ~ left[h] @ right^H`` with one right factor for all forms."""

    left: Forms  # (G, D1, rank)
    right: Forms  # (D2, rank)
    error: float  # sum_h || M_h - left[h] right^H ||^2 over the same of M_h; 0 for 0 / 0


def factor_forms(lefts: Sequence[Forms], rights: Sequence[Forms], rank: int) -> Factors:
    """The factors with the least error of ``M_h = lefts[h] @ rights[h]^H``, zeros beyond their rank.

    The forms, ``(D1, r_h)`` by ``(D2, r_h)``, are never made: one SVD of their core, as large as the columns of all
    ``rights``, is that of the stack.
    """
    basis, core = np.linalg.qr(np.concatenate(rights, axis=1))
    ends = np.cumsum([matrix.shape[1] for matrix in rights])[:-1]
    sides = [np.linalg.qr(matrix) for matrix in lefts]
    cores = [side @ matrix.conj().T for (_, side), matrix in zip(sides, np.split(core, ends, axis=1), strict=True)]
    u, singular, v = np.linalg.svd(np.concatenate(cores), full_matrices=False)
    kept = min(rank, len(singular))
    half = np.sqrt(singular[:kept])
    right = basis @ v[:kept].conj().T
    turn = leading_phases(right)
    rows = np.split(u[:, :kept] * (turn * half), np.cumsum([len(matrix) for matrix in cores])[:-1])
    left = np.stack([side @ matrix for (side, _), matrix in zip(sides, rows, strict=True)])
    missing = rank - kept
    left = np.pad(left, ((0, 0), (0, 0), (0, missing)))
    right = np.pad(right * (turn * half), ((0, 0), (0, missing)))
    total = float((singular**2).sum())
    return Factors(left, right, float((singular[kept:] ** 2).sum()) / total if total > 0.0 else 0.0)


def leading_phases(vectors: Forms) -> Forms:
    """For each column ``(D, k)`` the number of length 1 that makes its largest entry positive."""
    sizes = np.abs(vectors)
    first = (sizes >= (1.0 - tie_width()) * sizes.max(axis=0, initial=0.0)).argmax(axis=0)
    leading = vectors[first, np.arange(vectors.shape[1])]
    return np.where(leading == 0.0, 1.0, leading.conj() / np.where(leading == 0.0, 1.0, np.abs(leading)))


def moment_roots(moment: Array, ridge: float = RIDGE) -> tuple[Array, Array]:
    """The square root of a moment with its ridge, and the root's inverse."""
    values, vectors = np.linalg.eigh((moment + moment.T) / 2)
    floor = max(float(values.mean()), np.finfo(np.float64).tiny)
    raised = np.sqrt(np.maximum(values, 0.0) + ridge * floor)
    return (vectors * raised) @ vectors.T, (vectors / raised) @ vectors.T


Record = Mapping[str, Any]


def attend(
    inputs: ArrayLike,
    weights: HeadWeights | Record,
    *,
    merge: HeadMerge | Record | None = None,
    attn_mask: ArrayLike | None = None,
    rotary: Rotary | Record | None = None,
) -> Array:
    """What a layer gives; with ``merge``, the merged attention, which exact squeezing must equal.

    Args:
        inputs: rows ``(B, L, D)``.
        weights: of the teacher, or of the student; records may be mappings with the fields' names, here and below.
        merge: each teacher head's map becomes the softmax of its group's mixed logits.
        attn_mask: boolean ``(..., L, L)``, True = may attend.
        rotary: positions, or None where there is none.

    Returns:
        ``(B, L, D)``.
    """
    weights, rotary = as_weights(weights), None if rotary is None else as_rotary(rotary)
    merge = None if merge is None else _fitting(merge, weights)
    x = as_float(inputs, "inputs", ndim=3)[:, None]
    if x.shape[3] != weights.query.shape[1]:
        message = f"inputs must have {weights.query.shape[1]} channels; got {x.shape[3]}"
        raise ShdError("argument-shape", message)
    biases = (weights.query_bias, weights.key_bias, weights.value_bias)
    query, key, value = (
        x @ matrix + (0.0 if bias is None else bias[:, None])  # (B, H or H_kv, L, d)
        for matrix, bias in zip((weights.query, weights.key, weights.value), biases, strict=True)
    )
    if rotary is not None:
        query, key = rotary.turn(query), rotary.turn(key)
    reads = weights.reads
    logits = weights.logit_scale * query @ key[:, reads].swapaxes(2, 3)
    if merge is not None:
        logits = np.einsum("ht,btls->bhls", merge.mixing, logits)[:, merge.homes]
    probs = softmax(mask_logits(logits, attn_mask))
    out: Array = (probs @ value[:, reads] @ weights.output).sum(axis=1)
    return out if weights.output_bias is None else out + weights.output_bias


def mix_queries(
    weights: HeadWeights | Record, merge: HeadMerge | Record, query_size: ArrayLike | None = None
) -> HeadWeights:
    """Heads that share their keys and values, exactly: ``W_Q' = sum c_t W_Q,t``, ``W_O' = sum W_O,t``.

    Args:
        weights: of the teacher.
        merge: along key and value heads.
        query_size: with QK-norm, the root mean square of each head's queries ``(H,)``, above 0: queries are mixed
            at equal length, ``W_Q' = sum c_t W_Q,t / r_t``, and the result is approximate.

    Raises:
        ShdError: ``shrink-unsupported`` where groups leave their key heads, ``argument-shape``, ``argument-value``.
    """
    weights = as_weights(weights)
    merge = _fitting(merge, weights)
    c = merge.mixing
    if query_size is not None:
        size = as_float(query_size, "query_size", ndim=1)
        if len(size) != weights.num_heads:
            message = f"query_size must be ({weights.num_heads},); got {size.shape}"
            raise ShdError("argument-shape", message)
        if not (size > 0.0).all():
            raise ShdError("argument-value", f"query_size must be above 0; got {size.min():g}")
        c = c / size
    if not merge.shares_keys(weights.num_kv_heads):
        rule = f"merge must stay inside the {weights.num_kv_heads} key and value heads"
        rule += ", with equally many student heads for each, in order"
        remedy = "take the plan of grouped_plan, or low_rank_heads"
        raise ShdError("shrink-unsupported", f"{rule}; got groups {merge.groups}: {remedy}")
    return replace(
        weights,
        query=np.einsum("ht,tdk->hdk", c, weights.query),
        query_bias=None if weights.query_bias is None else c @ weights.query_bias,
        output=np.einsum("ht,tvd->hvd", merge.members, weights.output),
        scale=weights.logit_scale,
    )


def concatenate_heads(weights: HeadWeights | Record, merge: HeadMerge | Record, head_dim: int) -> HeadWeights:
    """Heads laid side by side in a longer one, exactly, where positions are not rotary.

    ``q' = [r c_t q_t]``, ``k' = [k_t]``, ``v' = [v_t]`` with ``r = sqrt(head_dim / d)`` for the usual scales, W_O
    stacked, and zeros where the group leaves room. The student has a key and value head for each query head.

    Args:
        weights: of the teacher.
        merge: which heads, with what weights.
        head_dim: d of the student, at least the longest group's ``|g| d``; its values are as long.

    Raises:
        ShdError: ``argument-value`` where a group does not fit, ``argument-shape``.
    """
    weights = as_weights(weights)
    merge = _fitting(merge, weights)
    c, groups = merge.mixing, merge.groups
    d, d_v = weights.query.shape[2], weights.value.shape[2]
    longest = max(len(group) for group in groups) * max(d, d_v)  # its heads side by side
    head_dim = check_integer("head_dim", head_dim, longest, None)
    ratio = weights.logit_scale * head_dim**0.5
    size, rows = len(groups), weights.query.shape[1]
    output = np.zeros((size, head_dim, weights.output.shape[2]))
    made: dict[str, Array] = {}
    for name in ("query", "key", "value"):
        made[name] = np.zeros((size, rows, head_dim))
        if getattr(weights, f"{name}_bias") is not None:
            made[f"{name}_bias"] = np.zeros((size, head_dim))
    for head, group in enumerate(groups):
        for order, t in enumerate(group):
            kv = weights.reads[t]
            at, at_v = slice(order * d, order * d + d), slice(order * d_v, order * d_v + d_v)
            output[head, at_v] = weights.output[t]
            for name, source, factor, columns in (
                ("query", t, ratio * c[head, t], at),
                ("key", kv, 1.0, at),
                ("value", kv, 1.0, at_v),
            ):
                for field in {name, f"{name}_bias"} & made.keys():
                    made[field][head, ..., columns] = factor * getattr(weights, field)[source]
    return HeadWeights(**made, output=output, output_bias=weights.output_bias, scale=None)


def low_rank_heads(
    weights: HeadWeights | Record,
    merge: HeadMerge | Record,
    num_kv_heads: int,
    head_dim: int,
    moment: ArrayLike,
    *,
    key_moment: ArrayLike | None = None,
    rotary: Rotary | Record | None = None,
    ridge: float = RIDGE,
) -> HeadWeights:
    """The nearest heads of a given length, by rank, under the inputs' second moment S (and S_k of the keys).

    The logits of student head h ask for ``M_h = (s / s') sum c_t W_Q,t W_K,t^T``; heads that share a key head take
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
            what is the same for every key. Not used with rotary positions. Default: from ``moment``.
        rotary: the teacher's positions.
        ridge: see ``RIDGE``.

    Returns:
        Biases where the teacher has them: a key bias only with rotary positions, since it cancels without; the value
        bias moves to the output bias where there is one.
    """
    weights, rotary = as_weights(weights), None if rotary is None else as_rotary(rotary)
    merge = _fitting(merge, weights)
    c = merge.mixing
    num_kv_heads = check_integer("num_kv_heads", num_kv_heads, 1, c.shape[0])
    head_dim = check_integer("head_dim", head_dim, 1, None)
    ridge = check_number("ridge", ridge, above=0)
    s = as_float(moment, "moment", ndim=2)
    width = weights.query.shape[1]
    if c.shape[0] % num_kv_heads:
        message = f"num_kv_heads must be a divisor of {c.shape[0]}; got {num_kv_heads}"
        raise ShdError("argument-value", message)
    if s.shape != (width + 1, width + 1):
        raise ShdError("argument-shape", f"moment must be ({width + 1}, {width + 1}); got {s.shape}")
    spread = None if key_moment is None else as_float(key_moment, "key_moment", ndim=2)
    if spread is not None and spread.shape != (width, width):
        raise ShdError("argument-shape", f"key_moment must be ({width}, {width}); got {spread.shape}")
    if rotary is not None and head_dim != weights.query.shape[2]:
        rule = f"head_dim must stay {weights.query.shape[2]} with rotary positions, whose frequencies depend on it"
        raise ShdError("shrink-unsupported", f"{rule}; got {head_dim}")
    mean = s[-1, :-1]
    centred = s[:-1, :-1] - np.outer(mean, mean) if spread is None else spread
    scaled = weights.logit_scale * head_dim**0.5 * c
    reads, per = weights.reads, c.shape[0] // num_kv_heads
    root, inverse = moment_roots(s, ridge)
    queries = root @ _with_bias(weights.query, weights.query_bias)
    values = (root @ _with_bias(weights.value, weights.value_bias if weights.output_bias is None else None))[reads]
    key_root, key_inverse = (root, inverse) if rotary is not None else moment_roots(centred, ridge)
    keys = (key_root @ (weights.key if rotary is None else _with_bias(weights.key, weights.key_bias)))[reads]
    outputs = weights.output.swapaxes(1, 2)
    query, key = np.zeros((c.shape[0], width + 1, head_dim)), np.zeros((num_kv_heads, len(key_root), head_dim))
    value, output = np.zeros((num_kv_heads, width + 1, head_dim)), np.zeros((c.shape[0], head_dim, width))
    for kv in range(num_kv_heads):
        heads = slice(kv * per, kv * per + per)
        groups = merge.groups[heads]
        if rotary is None:
            query[heads], key[kv], _ = _factor_groups(queries, keys, scaled[heads], groups, head_dim)
        else:
            _fill_rotary(query[heads], key[kv], queries, keys, scaled[heads], groups, rotary)
        left, value[kv], _ = _factor_groups(outputs, values, merge.members[heads], groups, head_dim)
        output[heads] = left.swapaxes(1, 2)
    key = key_inverse @ key
    key = np.pad(key, ((0, 0), (0, width + 1 - key.shape[1]), (0, 0)))  # without positions a key bias cancels
    return _split_biases(weights, inverse @ query, key, inverse @ value, output)


def _factor_groups(lefts: Forms, rights: Forms, c: Array, groups: Sequence[Sequence[int]], rank: int) -> Factors:
    """Factors of ``sum_t c[h, t] lefts[t] rights[t]^H`` over the group of each of some student heads h."""
    return factor_forms(
        [np.concatenate([row[t] * lefts[t] for t in group], axis=1) for row, group in zip(c, groups, strict=True)],
        [np.concatenate([rights[t] for t in group], axis=1) for group in groups],
        rank,
    )


def _fill_rotary(
    query: Array, key: Array, queries: Array, keys: Array, c: Array, groups: Sequence[Sequence[int]], rotary: Rotary
) -> None:
    """Rank one for each turning pair in complex numbers, real factors for what does not turn."""
    first, second = rotary.entries()
    slow = np.zeros(len(first), dtype=bool) if rotary.slow is None else np.asarray(rotary.slow, dtype=bool)
    for i, j in zip(first[~slow], second[~slow], strict=True):
        turning, facing = (vectors[..., [i]] + 1j * vectors[..., [j]] for vectors in (queries, keys))
        left, right, _ = _factor_groups(turning, facing, c, groups, 1)
        query[..., i], query[..., j] = left[..., 0].real, left[..., 0].imag
        key[..., i], key[..., j] = right[..., 0].real, right[..., 0].imag
    still = np.concatenate([first[slow], second[slow], np.arange(2 * len(first), queries.shape[2])])
    if len(still):
        left, right, _ = _factor_groups(queries[..., still], keys[..., still], c, groups, len(still))
        query[..., still], key[..., still] = left, right


def _with_bias(matrix: Array, bias: Array | None) -> Array:
    """The bias as one more row, for inputs ``[x, 1]``: ``(H, D + 1, d)``."""
    row = np.zeros((len(matrix), matrix.shape[2])) if bias is None else bias
    return np.concatenate([matrix, row[:, None]], axis=1)


def _split_biases(weights: HeadWeights, query: Array, key: Array, value: Array, output: Array) -> HeadWeights:
    """The last rows as biases; a value bias goes to the output bias where there is one: rows of a map sum to one."""
    out_bias, value_bias = weights.output_bias, None
    if weights.value_bias is not None:
        value_bias = value[:, -1]
        if out_bias is not None:
            out_bias = out_bias + np.einsum("tv,tvd->d", weights.value_bias[weights.reads], weights.output)
            value_bias = np.zeros_like(value_bias)
    biased = weights.query_bias is not None or weights.key_bias is not None
    query_bias, key_bias = (query[:, -1], key[:, -1]) if biased else (None, None)
    return HeadWeights(query[:, :-1], key[:, :-1], value[:, :-1], output, query_bias, key_bias, value_bias, out_bias)


def _fitting(merge: HeadMerge | Record, weights: HeadWeights) -> HeadMerge:
    checked = as_merge(merge)
    heads = checked.mixing.shape[1]
    if heads != weights.num_heads:
        raise ShdError("argument-shape", f"merge must be of {weights.num_heads} heads; got {heads}")
    return checked
