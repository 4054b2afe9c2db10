"""Targets and losses on logits in a few lines of float64, to hold the implementation to.

Nothing is checked, chunked or cut for memory. ``tests/goldens/kd`` has the same meaning from an oracle.
"""

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


def plain_kd_loss(
    targets: Any,
    student_logits: Any,
    *,
    divergence: str = "kl",
    mixing: float = 0.5,
    temperature: float | None = None,
    t_squared: bool = True,
    loss_mask: Any = None,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> Any:
    """The loss of tensors, differentiable by autograd; arguments as in ``shd_torch.kd.kd_loss``."""
    import torch
    from torch.special import xlogy

    record = hasattr(targets, "ids")
    scale = float(targets.temperature if record else temperature or 1.0)
    log_q = (student_logits[..., :vocab_size] / scale).log_softmax(-1)
    if record:
        ids, (_, values, rest) = targets.ids.long(), targets[:3]
        other = torch.ones_like(log_q, dtype=torch.bool).scatter(-1, ids, False)
        tail = log_q.masked_fill(~other, -torch.inf).logsumexp(-1, keepdim=True)
        log_q = log_q.gather(-1, ids)
        log_p = values
        if ids.shape[-1] < targets.vocab_size:
            log_p, log_q = torch.cat((values, rest[..., None]), -1), torch.cat((log_q, tail), -1)
    else:
        log_p = (targets[..., :vocab_size] / scale).log_softmax(-1)
    p = log_p.exp()
    negative_entropy = xlogy(p, p).sum(-1)
    q, cross = log_q.exp(), -(p * log_q.where(p > 0, 0.0)).sum(-1)
    if divergence == "jsd" and mixing in (0, 1):
        divergence = "kl" if mixing == 0 else "reverse_kl"
    if divergence == "cross_entropy":
        rows = cross
    elif divergence == "kl":
        rows = cross + negative_entropy
    elif divergence == "reverse_kl":
        rows = (q * (log_q - log_p)).sum(-1)
    else:
        mean = mixing * p + (1 - mixing) * q
        rows = mixing * (xlogy(p, p) - xlogy(p, mean)).sum(-1) + (1 - mixing) * (q * (log_q - mean.log())).sum(-1)
    if loss_mask is not None:
        rows = rows.where(loss_mask, 0.0)
    counted = rows.numel() if loss_mask is None else int(loss_mask.sum())
    divisor = {"mean": max(counted, 1), "batch_mean": max(len(rows), 1), "sum": 1}[reduction]
    return rows.sum() * (scale**2 if t_squared else 1.0) / divisor
