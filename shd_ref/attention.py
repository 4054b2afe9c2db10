"""Attention maps ``(B, H, L, S)`` (spec chapter MAP): masked softmax, checks, temperature, value outputs, in float64.

A boolean mask is True where attending is allowed or where a row counts.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.errors import ShdError
from shd_ref.integers import check_number, check_option
from shd_ref.tolerances import row_sum_tolerance

Array: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

ROW_SUMS: tuple[str, ...] = ("one", "at_most_one")


def softmax(attn_logits: ArrayLike, attn_mask: ArrayLike | None = None, *, temperature: float = 1.0) -> Array:
    """``softmax(attn_logits / temperature)`` over keys; a fully masked row is all zeros (MAP-1, MAP-2).

    Args:
        attn_logits: ``(..., L, S)``; -inf marks a masked key.
        attn_mask: boolean, broadcastable to the logits; True = may attend.
        temperature: T_a > 0.

    Returns:
        ``attn_probs`` of the same shape; masked entries are exactly 0.

    Source: Eq. 10.
    """
    logits = as_float(attn_logits, "attn_logits", allow_minus_inf=True)
    check_axes(logits, "attn_logits")
    logits, temperature = mask_logits(logits, attn_mask), check_temperature(temperature)
    peak = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    # Decide which rows are empty before computing, so that -inf minus -inf never happens.
    with np.errstate(over="ignore"):  # a difference beyond the largest number is probability 0 as well
        exps = np.exp((logits - np.where(np.isneginf(peak), 0.0, peak)) / temperature)
    sums = exps.sum(axis=-1, keepdims=True)
    return exps / np.where(sums == 0.0, 1.0, sums)


def mask_logits(logits: Array, attn_mask: ArrayLike | None) -> Array:
    """Logits with -inf where ``attn_mask`` is False (MAP-2)."""
    if attn_mask is None:
        return logits
    mask = as_mask(attn_mask, "attn_mask")
    try:
        mask = np.broadcast_to(mask, logits.shape)
    except ValueError:
        message = f"attn_mask must broadcast to the logits' shape {logits.shape}; got {mask.shape}"
        raise ShdError("argument-shape", message, "MAP-2") from None
    return np.where(mask, logits, -np.inf)


def soften(attn_probs: ArrayLike, temperature: float, *, row_sums: str = "one") -> Array:
    """``softmax(logits / T)`` from the probabilities alone: ``A^(1/T) / rowsum`` per head (TEMP-2, TEMP-5..7).

    Args:
        attn_probs: ``(..., L, S)``, at least 0, rows summing to one or to zero.
        temperature: T_a > 0; above 1 softens, below 1 sharpens.
        row_sums: ``"one"``, or ``"at_most_one"`` for maps with attention sinks: a row then keeps its own mass.

    Returns:
        The softened maps, same shape; at T = 1 the maps as given.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``.

    Source: Eq. 10. Deviation: from probabilities; sinks (D-12).
    """
    temperature = check_temperature(temperature)
    probs = check_probs(attn_probs, "attn_probs", ndim=None, row_sums=row_sums)
    return in_dtype_of(attn_probs, soften_rows(probs, temperature, row_sums=row_sums))


def soften_rows(probs: Array, temperature: float, *, row_sums: str) -> Array:
    """``soften`` on checked arrays, whose rows that do not count may have any sum."""
    if temperature == 1.0:
        return probs
    # Relative to the row's maximum, so that a large 1/T cannot underflow a whole row.
    peak = probs.max(axis=-1, keepdims=True, initial=0.0)
    powers = (probs / np.where(peak == 0.0, 1.0, peak)) ** (1.0 / temperature)
    sums = powers.sum(axis=-1, keepdims=True)
    softened = powers / np.where(sums == 0.0, 1.0, sums)
    # What the sink took at temperature 1 stays taken (TEMP-5).
    return softened * probs.sum(axis=-1, keepdims=True) if row_sums == "at_most_one" else softened


def value_outputs(values: ArrayLike, output_projection: ArrayLike) -> Array:
    """``X_i = V_i W_i``: each head's values after the output projection (MAP-6).

    Args:
        values: V ``(B, H_kv, S, d_v)``; with grouped queries H_kv divides H_t, and query head i reads
            value head ``i // (H_t / H_kv)``.
        output_projection: W_o ``(H_t * d_v, D)``; rows ``i * d_v .. (i + 1) * d_v`` belong to head i.

    Returns:
        X ``(B, H_t, S, D)``.

    Source: Eq. 4.
    """
    v = as_float(values, "values", ndim=4)
    w = as_float(output_projection, "output_projection", ndim=2)
    num_kv_heads, d_v = v.shape[1], v.shape[3]
    if w.shape[0] == 0 or w.shape[0] % (num_kv_heads * d_v):
        rule = f"output_projection must have a multiple of H_kv * d_v = {num_kv_heads} * {d_v} rows"
        raise ShdError("argument-shape", f"{rule}; got {w.shape[0]}", "MAP-6")
    num_heads = w.shape[0] // d_v
    v = np.repeat(v, num_heads // num_kv_heads, axis=1)  # (B, H_t, S, d_v)
    outputs: Array = np.einsum("bhsv,hvd->bhsd", v, w.reshape(num_heads, d_v, -1))
    return outputs


def check_probs(
    attn_probs: ArrayLike,
    name: str,
    *,
    ndim: int | None = 4,
    query_mask: Mask | None = None,
    layer: int | None = None,
    row_sums: str = "one",
) -> Array:
    """Attention maps as float64 after the checks of MAP-3..5 and MAP-9.

    Rows outside ``query_mask`` may have any sum. With ``ndim=None`` the maps may have any leading axes, and no mask.
    """
    check_option("row_sums", row_sums, ROW_SUMS, "MAP-9")
    raw = np.asarray(attn_probs)
    tolerance = row_sum_tolerance(dtype_name(raw))
    probs = as_float(raw, name, ndim=ndim, layer=layer)
    check_axes(probs, name)
    if probs.size and probs.min() < 0.0:
        where = first_of(probs < 0.0)
        message = f"{name} must be at least 0; got {probs[where]:.6g} at {place_of(where, probs.ndim, layer)}"
        raise ShdError("not-a-distribution", message, "MAP-3")
    sums = probs.sum(axis=-1)  # (..., L)
    wrong = sums - 1.0 > tolerance
    if row_sums == "one":
        wrong |= (1.0 - sums > tolerance) & (sums != 0.0)
    if query_mask is not None:
        wrong &= query_mask[:, None, :]
    if wrong.any():
        rule, spec_id = f"rows that sum to 1 within {tolerance:g}, or to exactly 0 where fully masked", "MAP-3"
        if row_sums == "at_most_one":
            rule, spec_id = f"rows that sum to at most 1 within {tolerance:g}", "MAP-9"
        where = first_of(wrong)
        position = place_of(where, probs.ndim, layer)
        raise ShdError("not-a-distribution", f"{name} must have {rule}; got {sums[where]:.6g} at {position}", spec_id)
    return probs


def as_float(
    value: ArrayLike, name: str, *, ndim: int | None = None, allow_minus_inf: bool = False, layer: int | None = None
) -> Array:
    """A finite float64 copy of the argument, or the error that names where it is not (MAP-5)."""
    raw = np.asarray(value)
    if not (dtype_name(raw) in ("float64", "float32", "float16", "bfloat16") or raw.dtype.kind in "iu"):
        raise ShdError("argument-dtype", f"{name} must be a real array; got dtype {raw.dtype}", "MAP-5")
    array: Array = np.array(raw, dtype=np.float64)
    if ndim is not None and array.ndim != ndim:
        raise ShdError("argument-shape", f"{name} must have {ndim} axes; got shape {array.shape}", "MAP-4")
    bad = np.isnan(array) | np.isposinf(array) if allow_minus_inf else ~np.isfinite(array)
    if bad.any():
        where = first_of(bad)
        position = place_of(where, array.ndim, layer)
        raise ShdError("not-finite", f"{name} must be finite; got {array[where]} at {position}", "MAP-5")
    return array


def in_dtype_of(source: ArrayLike, maps: Array) -> Array:
    """Maps made from ``source``, in its dtype, which decides their ROW_SUM (MAP-14); integers give float64."""
    dtype = np.asarray(source).dtype
    return maps if dtype.kind in "iu" else maps.astype(dtype, copy=False)


def check_axes(array: Array, name: str) -> None:
    """Maps and logits have rows and keys as their last axes (MAP-13)."""
    if array.ndim < 2:
        raise ShdError("argument-shape", f"{name} must be (..., L, S); got shape {array.shape}", "MAP-13")


def as_mask(value: ArrayLike, name: str, shape: tuple[int, ...] | None = None) -> Mask:
    """A boolean mask of the given shape; integers and floats are refused, never guessed (MAP-7)."""
    mask = np.asarray(value)
    if mask.dtype != np.bool_:
        message = f"{name} must be boolean (True = counts / may attend); got dtype {mask.dtype}"
        raise ShdError("argument-dtype", message, "MAP-7")
    if shape is not None and mask.shape != shape:
        raise ShdError("argument-shape", f"{name} must have shape {shape}; got {mask.shape}", "MAP-7")
    return mask


def check_temperature(temperature: Any) -> float:
    return check_number("temperature", temperature, "TEMP-1", above=0)


def dtype_name(array: NDArray[Any]) -> str:
    """The dtype's name as in the tolerances file (``bfloat16`` comes from the ml_dtypes package)."""
    return str(array.dtype.name)


def first_of(where: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(where)[0])


def place_of(where: tuple[int, ...], num_axes: int, layer: int | None) -> str:
    """An index of maps in words."""
    names = ("sample", "head", "row", "key")
    if num_axes == 4:
        coordinates = [f"{n} {i}" for n, i in zip(names, where, strict=False)]
    else:
        coordinates = [f"sample {where[0]}"] * (num_axes > 2) + [f"index {where}"]
    return ", ".join([f"layer {layer}"] * (layer is not None) + coordinates)
