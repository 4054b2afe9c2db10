"""ViTKD: mimic the first layers, generate the last one from half of its tokens (REC-16 to REC-18)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, as_float
from shd_ref.errors import ShdError
from shd_ref.recipes.terms import Term, Terms, check_weight


def vitkd(
    student_layers: Sequence[ArrayLike],
    student_last: ArrayLike,
    teacher_layers: Sequence[ArrayLike],
    teacher_last: ArrayLike,
    parameters: Mapping[str, ArrayLike],
    noise: ArrayLike,
    *,
    mimic_weight: float = 3e-5,
    generate_weight: float = 3e-6,
    removed: float = 0.5,
    grid: tuple[int, int] | None = None,
) -> Terms:
    """``a / B sum_l ||F_l(S_l) - T_l||^2 + b / (r B) ||M (G(mask(F(S))) - T)||^2`` (REC-16 to REC-18).

    Args:
        student_layers: patch tokens of the first layers, each ``(B, N, D_s)``.
        student_last: patch tokens after the final norm ``(B, N, D_s)``.
        teacher_layers: as many, each ``(B, N, D_t)``.
        teacher_last: ``(B, N, D_t)``.
        parameters: of the projector by name (REC-16).
        noise: ``(B, N)``, one number a token: those with the largest are removed.
        mimic_weight: a.
        generate_weight: b.
        removed: r, the part of the tokens that is removed, in (0, 1).
        grid: rows and columns of patches; default a square.

    Returns:
        The terms ``mimic`` (weight a) and ``generate`` (weight b / r). The cross entropy is not among them.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    weights = check_weight("mimic_weight", mimic_weight), check_weight("generate_weight", generate_weight)
    part = check_removed(removed)
    given = {name: as_float(value, f"parameters[{name!r}]") for name, value in parameters.items()}
    _check_parameters(given, len(student_layers))
    last = as_float(student_last, "student_last", ndim=3)
    wanted = as_float(teacher_last, "teacher_last", ndim=3)
    batch, tokens, _ = last.shape
    if len(student_layers) != len(teacher_layers) or wanted.shape[:2] != (batch, tokens):
        raise ShdError(
            "argument-shape",
            "teacher_layers and teacher_last must be as many as the student's, with its tokens; "
            f"got {len(teacher_layers)} for {len(student_layers)}, and {wanted.shape[:2]} for {(batch, tokens)}",
            "REC-16",
        )
    mimic = 0.0
    for number, (student, teacher) in enumerate(zip(student_layers, teacher_layers, strict=True)):
        projected = _linear(as_float(student, f"student_layers[{number}]", ndim=3), given, f"mimic_{number}")
        target = as_float(teacher, f"teacher_layers[{number}]", ndim=3)
        if projected.shape != target.shape:
            raise ShdError(
                "argument-shape",
                f"teacher_layers[{number}] must be {projected.shape}; got {target.shape}",
                "REC-16",
            )
        mimic += float(((projected - target) ** 2).sum()) / batch
    gone = _removed_tokens(as_float(noise, "noise", ndim=2), (batch, tokens), part)
    masked = np.where(gone[..., None], given["mask_token"], _linear(last, given, "project"))
    height, width = check_grid(grid, tokens)
    picture = masked.transpose(0, 2, 1).reshape(batch, -1, height, width)
    hidden = np.maximum(_convolve(picture, given["generate_0_weight"], given["generate_0_bias"]), 0.0)
    made = _convolve(hidden, given["generate_2_weight"], given["generate_2_bias"])
    error = ((made.reshape(batch, -1, tokens).transpose(0, 2, 1) - wanted) ** 2).sum(axis=-1)
    return {
        "mimic": Term(mimic, weights[0]),
        "generate": Term(float(error[gone].sum()) / batch, weights[1] / part),
    }


def _check_parameters(given: Mapping[str, Array], layers: int) -> None:
    linear = [*(f"mimic_{layer}" for layer in range(layers)), "project", "generate_0", "generate_2"]
    wanted = {"mask_token", *(f"{name}_{part}" for name in linear for part in ("weight", "bias"))}
    if not wanted <= given.keys():
        missing = ", ".join(sorted(wanted - given.keys()))
        raise ShdError("argument-value", f"parameters must hold {missing} as well", "REC-16")


def check_removed(removed: object) -> float:
    """The part of the tokens that is removed (REC-17)."""
    if isinstance(removed, bool) or not isinstance(removed, int | float) or not 0 < removed < 1:
        raise ShdError("argument-value", f"removed must lie between 0 and 1; got {removed!r}", "REC-17")
    return float(removed)


def check_grid(grid: tuple[int, int] | None, tokens: int) -> tuple[int, int]:
    """Rows and columns of patches (REC-18)."""
    side = math.isqrt(tokens)
    height, width = (side, side) if grid is None else grid
    if height * width != tokens:
        raise ShdError(
            "argument-shape",
            f"grid must hold the {tokens} patch tokens, in rows and columns; got {grid or 'none, and no square'}",
            "REC-18",
        )
    return height, width


def _removed_tokens(
    noise: Array, shape: tuple[int, int], part: float
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    if noise.shape != shape:
        raise ShdError("argument-shape", f"noise must be one number a token {shape}; got {noise.shape}", "REC-17")
    kept = int(shape[1] * (1 - part))
    gone = np.ones(shape, dtype=np.bool_)
    np.put_along_axis(gone, noise.argsort(axis=1, kind="stable")[:, :kept], False, 1)
    return gone


def _linear(x: Array, given: Mapping[str, Array], name: str) -> Array:
    projected: Array = x @ given[f"{name}_weight"].T + given[f"{name}_bias"]
    return projected


def _convolve(x: Array, weight: Array, bias: Array) -> Array:
    """A convolution ``3 x 3`` with a border of zeros: ``(B, C, h, w)`` and ``(D, C, 3, 3)`` give ``(B, D, h, w)``."""
    height, width = x.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    total = np.zeros((len(x), len(weight), height, width))
    for i in range(3):
        for j in range(3):
            total += np.einsum("bchw,dc->bdhw", padded[:, :, i : i + height, j : j + width], weight[:, :, i, j])
    return total + bias[:, None, None]
