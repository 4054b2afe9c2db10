"""MiniLLM: policy gradient of the reverse KL on text sampled from student and teacher together (REC-21 to REC-26).

The loss on pre-training text beside it is ``language_kd`` (REC-8).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.attention import Array, Mask, as_float, as_mask, check_option
from shd_ref.errors import ShdError
from shd_ref.kd.loss import kd_loss
from shd_ref.kd.targets import as_logits, log_softmax
from shd_ref.recipes.terms import Term, Terms, check_share, check_weight

WHITENINGS: tuple[str, ...] = ("biased", "unbiased", "none")
WHITENING_EPSILON = 1e-8


class Rollout(NamedTuple):
    """Sampled tokens and what is known of them when they are sampled (REC-22)."""

    tokens: NDArray[np.int64]  # (B, R)
    mask: Mask  # (B, R), True = the row counts
    log_probs: Array  # (B, R), of the student that sampled; 0 where the row does not count
    rewards: Array  # (B, R), 0 where the row does not count
    weights: Array  # (B, R), student over mixture; 1 where the row does not count


def minillm_rollout(
    student_logits: ArrayLike,
    teacher_logits: ArrayLike,
    tokens: ArrayLike,
    mask: ArrayLike,
    *,
    mix: float = 0.2,
    reward_scale: float = 0.5,
    reward_clip: float = 100.0,
) -> Rollout:
    """Rewards and importance weights of text that was drawn from ``(1 - mix) p_S + mix p_T`` (REC-21 to REC-23).

    Args:
        student_logits: rows that predict the tokens ``(B, R, V)``, of the student that sampled them.
        teacher_logits: the teacher's, on the same text.
        tokens: ``(B, R)``.
        mask: boolean ``(B, R)``, True = the row counts; the row that predicts the end of a text does.
        mix: the teacher's share of the mixture, 0 to 1.
        reward_scale: divides the rewards; above 0.
        reward_clip: the largest magnitude of a reward after that.

    Returns:
        The record.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    mix = check_share("mix", mix)
    for name, number in (("reward_scale", reward_scale), ("reward_clip", reward_clip)):
        if check_weight(name, number) == 0:
            raise ShdError("argument-value", f"{name} must be above 0; got {number!r}", "REC-22")
    z, u = as_logits(student_logits, "student_logits"), as_logits(teacher_logits, "teacher_logits")
    ids, counted = _check_text(z.shape, u.shape, tokens, mask)
    student, teacher = (_at(log_softmax(logits), ids, counted) for logits in (z, u))
    rewards = np.clip((teacher - student) / reward_scale, -reward_clip, reward_clip)
    with np.errstate(divide="ignore"):  # log 0 at the ends of mix
        mixture = np.logaddexp(np.log1p(-mix) + student, np.log(mix) + teacher)
    return Rollout(ids, counted, student, rewards, np.where(counted, np.exp(student - mixture), 1.0))


def minillm_advantages(
    rewards: ArrayLike, mask: ArrayLike, *, discount: float = 0.95, whitening: str = "biased"
) -> Array:
    """Discounted returns over the number of rows left, whitened over the whole batch (REC-24, REC-25).

    Args:
        rewards: ``(B, R)``, 0 where the row does not count.
        mask: boolean ``(B, R)``.
        discount: gamma, 0 to 1.
        whitening: ``"biased"`` (variance over n, as published), ``"unbiased"`` (over n - 1) or ``"none"``.

    Returns:
        Advantages ``(B, R)``.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    discount = check_share("discount", discount)
    check_option("whitening", whitening, WHITENINGS, "REC-25")
    given = as_float(rewards, "rewards", ndim=2)
    counted = as_mask(mask, "mask", given.shape)
    returns = np.zeros(given.shape)
    after = np.zeros(len(given))
    for position in reversed(range(given.shape[1])):
        after = given[:, position] + discount * after
        returns[:, position] = after
    left = counted[:, ::-1].cumsum(axis=1)[:, ::-1]
    normalised: Array = returns / np.maximum(left, 1)
    if whitening == "none":
        return normalised
    if whitening == "unbiased" and normalised.size < 2:
        raise ShdError(
            "argument-value", "whitening must be biased or none for a single number; got unbiased", "REC-25"
        )
    variance = normalised.var(ddof=1 if whitening == "unbiased" else 0)
    whitened: Array = (normalised - normalised.mean()) / np.sqrt(variance + WHITENING_EPSILON)
    return whitened


def minillm_policy(
    student_logits: ArrayLike,
    teacher_logits: ArrayLike,
    rollout: Rollout | Mapping[str, Any],
    *,
    clip: float = 0.2,
    discount: float = 0.95,
    whitening: str = "biased",
    reverse_kl_weight: float = 1.0,
) -> Terms:
    """``mean max(-A rho w, -A clip(rho w, 1 - c, 1 + c)) + b mean KL(p_S || p_T)`` over counted rows (REC-26).

    Args:
        student_logits: of the student that learns, on the rows of the rollout ``(B, R, V)``.
        teacher_logits: u ``(B, R, V)``.
        rollout: as ``minillm_rollout`` gives it, or its fields by name.
        clip: c, at least 0.
        discount: as in ``minillm_advantages``.
        whitening: as in ``minillm_advantages``.
        reverse_kl_weight: b, of the single-step term over the whole vocabulary.

    Returns:
        The terms ``policy`` (weight 1) and ``reverse_kl``.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    clip, weight = check_weight("clip", clip), check_weight("reverse_kl_weight", reverse_kl_weight)
    z, u = as_logits(student_logits, "student_logits"), as_logits(teacher_logits, "teacher_logits")
    rollout = Rollout(**rollout) if isinstance(rollout, Mapping) else rollout
    ids, counted = _check_text(z.shape, u.shape, rollout.tokens, rollout.mask)
    advantages = minillm_advantages(rollout.rewards, counted, discount=discount, whitening=whitening)
    ratio = np.exp(_at(log_softmax(z), ids, counted) - rollout.log_probs) * rollout.weights
    surrogate = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 1 - clip, 1 + clip))
    policy = float(surrogate[counted].sum() / max(counted.sum(), 1))
    reverse = kd_loss(u, z, divergence="reverse_kl", loss_mask=counted)
    return {"policy": Term(policy, 1.0), "reverse_kl": Term(reverse, weight)}


def _check_text(
    student: tuple[int, ...], teacher: tuple[int, ...], tokens: ArrayLike, mask: ArrayLike
) -> tuple[NDArray[np.int64], Mask]:
    if len(student) != 3 or student != teacher:
        raise ShdError(
            "argument-shape",
            f"student_logits and teacher_logits must share one shape (B, R, V); got {student} and {teacher}",
            "REC-21",
        )
    ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu":
        raise ShdError("argument-dtype", f"tokens must be integers; got dtype {ids.dtype}", "REC-21")
    if ids.shape != student[:2]:
        raise ShdError("argument-shape", f"tokens must be {student[:2]}; got {ids.shape}", "REC-21")
    counted = as_mask(mask, "mask", student[:2])
    outside = counted & ((ids < 0) | (ids >= student[2]))
    if outside.any():
        raise ShdError(
            "argument-value",
            f"tokens must be 0 to {student[2] - 1} where the row counts; got {ids[outside][0]}",
            "REC-21",
        )
    return np.where(counted, ids, 0).astype(np.int64), counted


def _at(log_probs: Array, ids: NDArray[np.int64], counted: Mask) -> Array:
    """Log-probabilities of tokens ``(B, R)``, 0 where the row does not count."""
    return np.where(counted, np.take_along_axis(log_probs, ids[..., None], -1)[..., 0], 0.0)
