"""Best shared factors of several bilinear forms (spec chapter HEAD, HEAD-13): one SVD under the inputs' moments.

Factors are unique up to an invertible matrix between them: compare products, never factors.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shd_ref.attention import Array
from shd_ref.errors import ShdError
from shd_ref.tolerances import tie_width

Forms: TypeAlias = NDArray[np.floating[Any] | np.complexfloating[Any, Any]]

RIDGE = 1e-6
"""Share of a moment's mean eigenvalue that is added to all: directions without data then have an inverse."""


class Factors(NamedTuple):
    """``M_h ~ left[h] @ right^H`` with one right factor for all forms.

    Attributes:
        left: ``(G, D1, rank)``.
        right: ``(D2, rank)``.
        error: ``sum_h || S1^(1/2) (M_h - left[h] right^H) S2^(1/2) ||^2`` over the same of ``M_h``; 0 for 0 / 0.
    """

    left: Forms
    right: Forms
    error: float


def factor_forms(forms: Forms, rank: int, left_moment: Array, right_moment: Array, ridge: float = RIDGE) -> Factors:
    """The factors with the least weighted error, by one SVD of the stacked, whitened forms (HEAD-13).

    Args:
        forms: M ``(G, D1, D2)``, real or complex.
        rank: at least 1. More than the forms have is filled with zeros.
        left_moment: S1 ``(D1, D1)``, the second moment of what multiplies from the left.
        right_moment: S2 ``(D2, D2)``.
        ridge: see ``RIDGE``.
    """
    if forms.ndim != 3 or left_moment.shape != (forms.shape[1],) * 2 or right_moment.shape != (forms.shape[2],) * 2:
        raise ShdError(
            "argument-shape",
            f"forms (G, D1, D2) must fit the moments (D1, D1) and (D2, D2); got {forms.shape}, "
            f"{left_moment.shape} and {right_moment.shape}",
            "HEAD-13",
        )
    (root1, inverse1), (root2, inverse2) = _root(left_moment, ridge), _root(right_moment, ridge)
    groups, rows, _ = forms.shape
    whitened = (root1 @ forms @ root2).reshape(groups * rows, -1)
    u, singular, v = np.linalg.svd(whitened, full_matrices=False)
    turn = leading_phases(v.conj().T)
    u, v = u * turn, v * turn.conj()[:, None]
    kept = min(rank, len(singular))
    half = np.sqrt(singular[:kept])
    left = inverse1 @ (u[:, :kept] * half).reshape(groups, rows, kept)
    right = inverse2 @ (v[:kept].conj().T * half)
    missing = rank - kept
    left, right = np.pad(left, ((0, 0), (0, 0), (0, missing))), np.pad(right, ((0, 0), (0, missing)))
    total = float((singular**2).sum())
    return Factors(left, right, float((singular[kept:] ** 2).sum()) / total if total > 0.0 else 0.0)


def leading_phases(vectors: Forms) -> Forms:
    """For each column ``(D, k)`` the number of length 1 that makes its largest entry positive (HEAD-13)."""
    sizes = np.abs(vectors)
    first = (sizes >= (1.0 - tie_width()) * sizes.max(axis=0, initial=0.0)).argmax(axis=0)
    leading = vectors[first, np.arange(vectors.shape[1])]
    return np.where(leading == 0.0, 1.0, leading.conj() / np.where(leading == 0.0, 1.0, np.abs(leading)))


def _root(moment: Array, ridge: float) -> tuple[Array, Array]:
    """The square root of a moment with its ridge, and the root's inverse."""
    values, vectors = np.linalg.eigh((moment + moment.T) / 2)
    floor = max(float(values.mean()), np.finfo(np.float64).tiny)
    raised = np.sqrt(np.maximum(values, 0.0) + ridge * floor)
    return (vectors * raised) @ vectors.T, (vectors / raised) @ vectors.T
