"""Targets of logits in a few lines of float64, to hold the implementation to."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.cache.codecs.logits import TopkTargets

Array = NDArray[Any]


def log_softmax(logits: ArrayLike) -> Array:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    normalised: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


def topk_targets(logits: ArrayLike, k: int, *, temperature: float = 1.0) -> TopkTargets:
    """The k largest classes by ascending id, with the mass of the rest."""
    log_p = log_softmax(np.asarray(logits, np.float64) / temperature)
    ids = np.sort(np.argsort(-log_p, axis=-1, kind="stable")[..., :k], axis=-1)
    rest = np.exp(log_p)
    np.put_along_axis(rest, ids, 0.0, -1)
    with np.errstate(divide="ignore"):
        tail = np.log(rest.sum(-1))
    return TopkTargets(ids, np.take_along_axis(log_p, ids, -1), tail, temperature, log_p.shape[-1])
