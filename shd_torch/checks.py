"""Checks of arguments that all functions share; codes and ids are those of ``specs/shd.md``.

Types, shapes and options are always checked: they cost nothing. Looking at *values* (finite, a distribution)
makes the host wait for the device, so those checks depend on the keyword ``check`` of every public function. What is
computed keeps its own dtypes, also inside a training step's ``torch.autocast``, which would make every product in
bfloat16 and lose a small divergence in the difference of two rounded maps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import check_number
from shd_ref.tolerances import row_sum_tolerance

ROW_SUMS: tuple[str, ...] = ("one", "at_most_one")

INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
REALS = INTEGERS | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_ADDED_MASKS = REALS - INTEGERS | {torch.bool}
_AXES = {4: ("sample", "head", "row", "key"), 3: ("sample", "head", "row")}


def check_option(name: str, value: object, options: tuple[str, ...], spec_id: str | None = None) -> None:
    if value not in options:
        raise ShdError("argument-value", f"{name} must be one of {', '.join(options)}; got {value!r}", spec_id)


def check_weights(weights: Tensor, name: str, spec_id: str) -> None:
    """Merge weights must lie in [0, 1] (MIX-13, GRAM-6); waits for the device."""
    check_entries(weights, (weights < 0) | (weights > 1), "mixing-invalid", f"{name} must lie in [0, 1]", spec_id)


def check_shape(value: Any, name: str, shape: Sequence[int], spec_id: str | None = None, *, remedy: str = "") -> None:
    if tuple(value.shape) != tuple(shape):
        got = f"{tuple(value.shape)}{remedy}"
        raise ShdError("argument-shape", f"{name} must have shape {tuple(shape)}; got {got}", spec_id)


def check_shapes(fit: bool, rule: str, *tensors: Tensor, spec_id: str | None = None) -> None:
    """Shapes must fit together, by a rule without numbers: a compiled graph would be bound to them."""
    if not fit:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ShdError("argument-shape", f"{rule}; got {shapes}", spec_id)


def check_temperature(temperature: object) -> float:
    """T_a as a float above zero (TEMP-1)."""
    return check_number("temperature", temperature, "TEMP-1", above=0)


def check_real(
    value: Tensor,
    name: str,
    *,
    check: bool,
    ndim: int | None = None,
    allow_minus_inf: bool = False,
    layer: int | None = None,
) -> None:
    """The argument must be a real tensor with ``ndim`` axes and, with ``check``, finite entries (MAP-4, MAP-5)."""
    check_dtype(value, REALS, f"{name} must be a tensor of integers or of floating point above 8 bits", "MAP-5")
    check_shapes(ndim is None or value.ndim == ndim, f"{name} must have {ndim} axes", value, spec_id="MAP-4")
    if check:
        bad = torch.isnan(value) | torch.isposinf(value) if allow_minus_inf else ~torch.isfinite(value)
        check_entries(value, bad, "not-finite", f"{name} must be finite", "MAP-5", layer)


def check_probs(
    attn_probs: Tensor,
    name: str,
    *,
    check: bool,
    query_mask: Tensor | None = None,
    layer: int | None = None,
    row_sums: str | None = "one",
    ndim: int | None = 4,
) -> None:
    """The argument must be attention maps ``(B, H, L, S)`` (MAP-3..5, MAP-9).

    With ``check``, every entry must be finite and at least 0, and every row that counts must sum to one within
    the tolerance of its dtype, or be all zeros (a fully masked row); with ``row_sums="at_most_one"`` to anything
    up to one, and with None to anything.
    """
    if row_sums is not None:
        check_option("row_sums", row_sums, ROW_SUMS, "MAP-9")
    check_real(attn_probs, name, check=check, ndim=ndim, layer=layer)
    if not check:
        return
    check_entries(attn_probs, attn_probs < 0, "not-a-distribution", f"{name} must be at least 0", "MAP-3", layer)
    if row_sums is None:
        return
    tolerance = row_sum_tolerance(str(attn_probs.dtype).removeprefix("torch."))
    sums = attn_probs.sum(-1, dtype=compute_dtype(attn_probs))  # (B, H, L)
    wrong = sums > 1 + tolerance
    if row_sums == "one":
        wrong |= (sums < 1 - tolerance) & (sums != 0)
    if query_mask is not None:
        wrong &= query_mask[:, None, :]
    rule, spec_id = f"{name} must have rows that sum to at most 1 within {tolerance:g}", "MAP-9"
    if row_sums == "one":
        rule = (
            f"{name} must have rows that sum to 1 within {tolerance:g}, or to exactly 0 where fully masked "
            "(row_sums='at_most_one' is for attention sinks)"
        )
        spec_id = "MAP-3"
    check_entries(sums, wrong, "not-a-distribution", rule, spec_id, layer)


def check_mask(mask: Tensor, name: str, shape: Sequence[int]) -> None:
    """A mask must be boolean and of exactly this shape; other dtypes are refused, never guessed (MAP-7)."""
    check_dtype(mask, (torch.bool,), f"{name} must be a boolean tensor (True = counts / may attend)", "MAP-7")
    check_shape(mask, name, shape, "MAP-7")


def check_attn_mask(attn_mask: Tensor, shape: Sequence[int], *, may_add: bool = False) -> None:
    """An attention mask must broadcast to the logits' shape; boolean, or one that is added (MAP-7, MAP-10)."""
    rule = f"attn_mask must be a boolean tensor (True = may attend){' or a floating-point one' * may_add}"
    check_dtype(attn_mask, _ADDED_MASKS if may_add else (torch.bool,), rule, "MAP-7")
    pairs = zip(reversed(attn_mask.shape), reversed(shape), strict=False)
    fits = attn_mask.ndim <= len(shape) and all(size in (1, full) for size, full in pairs)
    if not fits:
        rule = f"attn_mask must broadcast to the logits' shape {tuple(shape)}"
        raise ShdError("argument-shape", f"{rule}; got {tuple(attn_mask.shape)}", "MAP-10")


def check_query_key(
    queries: Tensor, keys: Tensor, names: str = "queries and keys", *, code: str = "argument-shape"
) -> None:
    """Queries and keys must make one product: query head h reads key head ``h // (H / H_kv)`` (GRAD-5)."""
    fits = queries.ndim == keys.ndim == 4 and queries.shape[0] == keys.shape[0] and queries.shape[3] == keys.shape[3]
    if not fits or keys.shape[1] == 0 or queries.shape[1] % keys.shape[1]:
        raise ShdError(
            code,
            f"{names} must be (B, H, L, d) and (B, H_kv, S, d) with H_kv a divisor of H; "
            f"got {tuple(queries.shape)} and {tuple(keys.shape)}",
            "GRAD-5",
        )


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any argument is, else float32: half precision is for storage, never for sums."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def map_dtype(attn_probs: Tensor) -> torch.dtype:
    """The dtype maps are returned in: the one they came in, float32 for integers."""
    return attn_probs.dtype if attn_probs.dtype.is_floating_point else torch.float32


def check_dtype(value: object, dtypes: Collection[torch.dtype], rule: str, spec_id: str | None = None) -> None:
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise ShdError("argument-dtype", f"{rule}; got {kind}", spec_id)


def check_entries(
    values: Tensor, wrong: Tensor, code: str, rule: str, spec_id: str, layer: int | None = None
) -> None:
    """No entry may be wrong: the error names the first, with its place; waits for the device."""
    if wrong.any():
        index = tuple(int(i) for i in wrong.nonzero()[0])
        names = _AXES.get(len(index))
        words = [f"{n} {i}" for n, i in zip(names, index, strict=True)] if names else [f"index {index}"]
        position = ", ".join([f"layer {layer}"] * (layer is not None) + words)
        raise ShdError(code, f"{rule}; got {values[index].item():.6g} at {position}", spec_id)


P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with autocast off for the device of its first argument that has one, or is a list of tensors."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device_type = _device_type([*args, *kwargs.values()])
        if device_type is None or not torch.is_autocast_enabled(device_type):
            return function(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    return run


def _device_type(arguments: Iterable[Any]) -> str | None:
    for argument in arguments:
        first = argument[0] if isinstance(argument, list | tuple) and argument else argument
        device = getattr(first, "device", None)
        if isinstance(device, torch.device):
            return device.type
    return None
