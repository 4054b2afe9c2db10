"""Best shared factors of several bilinear forms (spec chapter HEAD, HEAD-13): one SVD under the inputs' moments.

Factors are unique up to an invertible matrix between them: compare products, never factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.attention import Array
from shd_ref.tolerances import tie_width

Forms: TypeAlias = NDArray[np.floating[Any] | np.complexfloating[Any, Any]]

RIDGE = 1e-6
"""Share of a moment's mean eigenvalue that is added to all: directions without data then have an inverse."""


class Factors(NamedTuple):
    """``M_h ~ left[h] @ right^H`` with one right factor for all forms.

    Attributes:
        left: ``(G, D1, rank)``.
        right: ``(D2, rank)``.
        error: ``sum_h || M_h - left[h] right^H ||^2`` over the same of ``M_h``; 0 for 0 / 0.
    """

    left: Forms
    right: Forms
    error: float


def factor_forms(lefts: Sequence[Forms], rights: Sequence[Forms], rank: int) -> Factors:
    """The factors with the least error of the forms ``M_h = lefts[h] @ rights[h]^H`` (HEAD-13).

    The forms are never made: one SVD of their core, as large as the columns of all ``rights``, is that of the stack.

    Args:
        lefts: ``(D1, r_h)`` each, real or complex, times the root of what they multiply (``moment_roots``).
        rights: ``(D2, r_h)`` each, also.
        rank: at least 1. More than the forms have is filled with zeros.
    """
    basis, core = np.linalg.qr(np.concatenate(rights, axis=1))
    ends = np.cumsum([part.shape[1] for part in rights])[:-1]
    sides = [np.linalg.qr(part) for part in lefts]
    cores = [side @ part.conj().T for (_, side), part in zip(sides, np.split(core, ends, axis=1), strict=True)]
    u, singular, v = np.linalg.svd(np.concatenate(cores), full_matrices=False)
    kept = min(rank, len(singular))
    half = np.sqrt(singular[:kept])
    right = basis @ v[:kept].conj().T
    turn = leading_phases(right)
    rows = np.split(u[:, :kept] * (turn * half), np.cumsum([len(part) for part in cores])[:-1])
    left = np.stack([side @ part for (side, _), part in zip(sides, rows, strict=True)])
    missing = rank - kept
    left = np.pad(left, ((0, 0), (0, 0), (0, missing)))
    right = np.pad(right * (turn * half), ((0, 0), (0, missing)))
    total = float((singular**2).sum())
    return Factors(left, right, float((singular[kept:] ** 2).sum()) / total if total > 0.0 else 0.0)


def leading_phases(vectors: Forms) -> Forms:
    """For each column ``(D, k)`` the number of length 1 that makes its largest entry positive (HEAD-13)."""
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
