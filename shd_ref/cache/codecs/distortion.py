"""What coding costs: errors of decoded rows, as receipts state them (CACHE-54, CACHE-120, CACHE-121)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.codecs.codecs import SMALLEST_PROB, code_dtype
from shd_ref.errors import need


class RowError:
    """What coding cost rows: a dataclass of numbers whose names end in ``_mean`` or ``_max``, and ``rows``."""

    rows: int

    def describe(self) -> str:
        """For a listing and a report."""
        raise NotImplementedError


@dataclass(frozen=True)
class CodecError(RowError):
    """Error measured over rows that have mass.

    Attributes:
        kl_mean: mean KL(exact || decoded), in nats per row.
        kl_max: the largest such KL, in nats.
        tv_mean: mean total variation, half the sum of absolute differences, in [0, 1].
        rows: how many rows were measured; with 0 the other numbers are 0.
    """

    kl_mean: float
    kl_max: float
    tv_mean: float
    rows: int

    def describe(self) -> str:
        return f"KL {self.kl_mean:.2g} nats per row, at most {self.kl_max:.2g}; total variation {self.tv_mean:.2%}"


@dataclass(frozen=True)
class LogitsError(RowError):
    """Error of rows of logits that count (CACHE-170).

    Attributes:
        kl_mean: mean KL(exact || stored) in nats, over the classes that a record tells apart: all of them, or those
            of the head and the rest as one. So it is what rounding costs.
        kl_max: the largest such KL.
        tv_mean: mean total variation over the same classes, in [0, 1].
        gradient_mean: mean of ``|p' - p| / |p|``, with p the teacher's whole row and p' what the record says of it:
            what is left out costs too. That is the error of the gradient of forward KL by the logits, relative to
            the teacher's part of it, for a student that spreads its own tail evenly.
        rows: how many rows were measured; with 0 the other numbers are 0.
    """

    kl_mean: float
    kl_max: float
    tv_mean: float
    gradient_mean: float
    rows: int

    def describe(self) -> str:
        return f"KL {self.kl_mean:.2g} nats per row from rounding; gradient {self.gradient_mean:.2%} of a row's"


@dataclass(frozen=True)
class HiddenError(RowError):
    """Error of rows of hidden states that count, over all layers (CACHE-178).

    Attributes:
        relative_mean: mean of ``|x' - x| / |x|``, with x' as decoded; 0 for a row of zeros.
        relative_max: the largest such number.
        rows: how many rows were measured; with 0 the other numbers are 0.
    """

    relative_mean: float
    relative_max: float
    rows: int

    def describe(self) -> str:
        return f"{self.relative_mean:.2%} of a row's norm, at most {self.relative_max:.2%}"


_TILE_BYTES: Final = 2**24
"""Rows that are compared in float64 at once."""

_Error = TypeVar("_Error", bound=RowError)


def kl_bound(codec: str, num_positive: Any, largest: Any) -> Any:
    """The most that a codec can cost a row, in nats, stated before anything is coded (CACHE-121).

    Before normalisation ``KL <= sum (p log(p/q) - p + q)``. ``sqrt8-row``: with x = 255 sqrt(p/m), a term in units of
    m / 255^2 is about 2 e^2 for codes from 2 on, |e| <= 1/2, and below 0.98 for code 1. ``u4``: with
    x = 15 (p/m)^(1/3), in units of m / 15^3 about 4.5 c e^2, at most 16.4.

    Args:
        codec: one of ``CODECS``.
        num_positive: S, how many entries of the row are positive; a number or an array of rows.
        largest: m, the largest of them.

    Raises:
        ShdError: ``argument-value`` (codec).
    """
    code_dtype(codec)
    bounds = {
        "float32": 0.0 * num_positive,
        "sqrt8-row": num_positive * largest / 255**2,
        "u4": num_positive * largest / 206,
    }
    return bounds[codec]


def row_tv_bound(codec: str, probs: NDArray[Any]) -> NDArray[np.float64]:
    """Bound on the total variation of each row ``(..., L)``: Pinsker's inequality on ``kl_bound`` (CACHE-121)."""
    bound = kl_bound(codec, (probs >= SMALLEST_PROB).sum(axis=-1), probs.max(axis=-1, initial=0.0).astype(np.float64))
    return np.asarray(np.sqrt(bound / 2), dtype=np.float64)


def codec_error(probs: NDArray[Any], decoded: NDArray[Any]) -> CodecError:
    """Compare exact rows with decoded ones, in float64 (CACHE-120).

    Args:
        probs: ``(..., L, S)`` exact rows; rows without mass are not measured.
        decoded: the same shape, from ``decode``.

    Returns:
        The error; ``kl_max`` is infinite if a decoder lost part of the support.

    Raises:
        ShdError: ``argument-shape``.
    """
    fits, rule = probs.shape == decoded.shape, f"have the shape of probs {probs.shape}"
    need(fits, "argument-shape", "decoded", rule, decoded.shape, spec_id="CACHE-120")
    exact, coded = (maps.reshape(-1, maps.shape[-1]) for maps in (probs, decoded))
    size = max(1, _TILE_BYTES // (8 * max(exact.shape[-1], 1)))
    tiles = [_row_errors(exact[row : row + size], coded[row : row + size]) for row in range(0, len(exact), size)]
    kl, tv = (np.concatenate(rows) for rows in zip(*tiles, strict=True)) if tiles else (np.empty(0), np.empty(0))
    if not len(kl):
        return CodecError(0.0, 0.0, 0.0, 0)
    return CodecError(float(kl.mean()), float(kl.max()), float(tv.mean()), len(kl))


def _row_errors(probs: NDArray[Any], decoded: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Divergence and total variation of the rows ``(rows, S)`` that have mass."""
    exact = probs.astype(np.float64)
    exact[exact < SMALLEST_PROB] = 0.0
    counted = exact.sum(axis=-1) > 0
    exact, coded = exact[counted], decoded[counted].astype(np.float64)
    exact /= exact.sum(axis=-1, keepdims=True)
    ratios = np.ones_like(exact)
    with np.errstate(divide="ignore"):
        np.divide(exact, coded, out=ratios, where=exact > 0)
    log_ratios = np.log(ratios, out=ratios)
    kl = np.maximum((exact * log_ratios).sum(axis=-1), 0.0)  # rounding can leave -1e-17
    return kl, 0.5 * np.abs(exact - coded).sum(axis=-1)


def merge_errors(kind: type[_Error], errors: Iterable[_Error]) -> _Error:
    """The error over all rows of several measurements: means are weighted by rows; of no row every number is 0."""
    parts = list(errors)
    rows = sum(error.rows for error in parts)
    numbers: dict[str, float] = {}
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if field.name.endswith("_mean"):
            numbers[field.name] = sum(getattr(error, field.name) * error.rows for error in parts) / max(rows, 1)
        elif field.name.endswith("_max"):
            numbers[field.name] = max((getattr(error, field.name) for error in parts if error.rows), default=0.0)
    return kind(rows=rows, **numbers)  # type: ignore[call-arg]
