"""The loss on logits (``specs/kd.md``, chapter KD): every check, what its rows are made of, and their terms.

Every kind of target becomes classes: those of the vocabulary, or k of them and the tail. A row's term is a
divergence over its classes; with sampled targets, a weighted sum of log-probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, Unpack, cast

import numpy as np
from numpy.typing import ArrayLike

from shd_ref.attention import Array, Mask, as_float, as_mask, check_option, check_temperature, dtype_name
from shd_ref.errors import ShdError
from shd_ref.integers import check_integer
from shd_ref.kd.records import Ids, SampledTargets, TopkTargets
from shd_ref.kd.targets import (
    as_logits,
    cut,
    cut_teacher,
    log_softmax,
    logsumexp,
)
from shd_ref.tolerances import row_sum_tolerance

Targets: TypeAlias = ArrayLike | TopkTargets | SampledTargets | Mapping[str, Any]

DIVERGENCES: tuple[str, ...] = ("kl", "reverse_kl", "jsd", "cross_entropy")
REDUCTIONS: tuple[str, ...] = ("mean", "sum", "batch_mean")


class KdKeywords(TypedDict, total=False):
    """The keywords of ``kd_loss``, which its gradients and the linear forms share."""

    divergence: str
    mixing: float
    temperature: float | None
    t_squared: bool
    loss_mask: ArrayLike | None
    reduction: str
    vocab_size: int | None


@dataclass(frozen=True)
class KdRows:
    """What the loss and its gradient are made of, rows flattened: R rows that count, of V classes.

    Attributes:
        shape: of the student's logits, classes that are cut included.
        counted: where the rows lie ``(R_all,)``.
        factor: of a row's divergence in the loss, ``T^2`` included.
        temperature: T.
        divergence: ``kl``, ``reverse_kl``, ``jsd`` or ``cross_entropy``, ends of ``jsd`` resolved (KD-18).
        mixing: the m of ``jsd``.
        log_q: ``(R, V)``, the student's whole rows.
        ids: ``(R, slots)``; None where the targets are logits.
        log_p: ``(R, C)`` over the row's classes, the tail last; of sampled targets, None.
        weights: ``(R, slots)`` of sampled targets.
        entropy: ``(R,)`` of sampled targets.
    """

    shape: tuple[int, ...]
    counted: Mask
    factor: float
    temperature: float
    divergence: str
    mixing: float
    log_q: Array
    ids: Ids | None = None
    log_p: Array | None = None
    weights: Array | None = None
    entropy: Array | None = None

    @property
    def class_log_q(self) -> Array:
        """The student's log-probabilities of the row's classes ``(R, C)`` (KD-16), or of the slots."""
        if self.ids is None:
            return self.log_q
        own = np.take_along_axis(self.log_q, self.ids, -1)
        if self.log_p is None or self.log_p.shape[-1] == self.ids.shape[-1]:
            return own
        return np.concatenate((own, self.log_tail[:, None]), axis=-1)

    @property
    def log_tail(self) -> Array:
        """The student's ``log Q_tail`` ``(R,)``: over the others, never one minus the rest."""
        assert self.ids is not None
        others = self.log_q.copy()
        np.put_along_axis(others, self.ids, -np.inf, -1)
        return logsumexp(others)


def kd_loss(targets: Targets, student_logits: ArrayLike, **keywords: Unpack[KdKeywords]) -> float:
    """A divergence between a teacher's rows and ``softmax(student_logits / T)``, times ``T^2`` (KD-1 to KD-21).

    Args:
        targets: the teacher's logits ``(..., V)``, ``TopkTargets`` or ``SampledTargets`` (or their fields by name).
        student_logits: z ``(..., V)``, of the same rows.
        **keywords:
            divergence: ``"kl"`` (teacher first), ``"reverse_kl"``, ``"jsd"`` or ``"cross_entropy"``.
            mixing: the m of ``jsd``, as the beta of GKD; default 0.5.
            temperature: T > 0; default that of the record, 1 for logits. Another than the record's is an error.
            t_squared: multiply by T^2, the default, or not.
            loss_mask: boolean, the shape of the rows, True = counts.
            reduction: ``"mean"`` over counted rows, ``"sum"``, or ``"batch_mean"``, the sum divided by B.
            vocab_size: read the first so many classes of either side; the others are padding.

    Returns:
        The loss in nats; 0 where no row counts.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``,
            ``support-mismatch`` (KD-20).
    """
    rows = kd_rows(targets, student_logits, **keywords)
    return float(rows.factor * row_divergence(rows).sum())


def linear_kd_loss(
    targets: Targets,
    hidden: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    **keywords: Unpack[KdKeywords],
) -> float:
    """``kd_loss`` on the logits ``hidden @ weight^T + bias`` (KD-25).

    Args:
        targets: as in ``kd_loss``.
        hidden: ``(..., D)``.
        weight: of the head, ``(V, D)``.
        bias: ``(V,)`` or None.
        **keywords: those of ``kd_loss``.

    Raises:
        ShdError: as ``kd_loss``.
    """
    return kd_loss(targets, head_logits(*check_head(hidden, weight, bias)), **keywords)


def row_divergence(rows: KdRows) -> Array:
    """The divergence of every row ``(R,)`` (KD-17, KD-19)."""
    log_q = rows.class_log_q
    if rows.log_p is None:
        assert rows.weights is not None
        assert rows.entropy is not None
        cross: Array = -(rows.weights * log_q).sum(axis=-1)
        return cross if rows.divergence == "cross_entropy" else cross - rows.entropy
    log_p = rows.log_p
    p, q = np.exp(log_p), np.exp(log_q)
    if rows.divergence == "cross_entropy":
        terms = -times_log(p, log_q)
    elif rows.divergence == "kl":
        terms = times_log(p, log_p) - times_log(p, log_q)
    elif rows.divergence == "reverse_kl":
        terms = times_log(q, log_q) - times_log(q, log_p)
    else:
        log_r = log_mixture(rows, log_q)
        m = rows.mixing
        terms = m * (times_log(p, log_p) - times_log(p, log_r))
        terms += (1 - m) * (times_log(q, log_q) - times_log(q, log_r))
    summed: Array = terms.sum(axis=-1)
    return summed


def log_mixture(rows: KdRows, log_q: Array) -> Array:
    """``log R`` with ``R = m P + (1 - m) Q``; m is neither 0 nor 1."""
    assert rows.log_p is not None
    mixed: Array = np.logaddexp(np.log(rows.mixing) + rows.log_p, np.log1p(-rows.mixing) + log_q)
    return mixed


def times_log(factor: Array, log: Array) -> Array:
    """``factor * log``, and 0 where the factor is 0 (KD-17)."""
    return factor * np.where(factor == 0.0, 0.0, log)


def kd_rows(
    targets: Targets,
    student_logits: ArrayLike,
    *,
    divergence: str = "kl",
    mixing: float = 0.5,
    temperature: float | None = None,
    t_squared: bool = True,
    loss_mask: ArrayLike | None = None,
    reduction: str = "mean",
    vocab_size: int | None = None,
) -> KdRows:
    """Every check of the loss, and its counted rows."""
    check_option("divergence", divergence, DIVERGENCES, "KD-17")
    check_option("reduction", reduction, REDUCTIONS, "KD-3")
    mixing = _check_mixing(mixing)
    if not isinstance(t_squared, bool):
        raise ShdError("argument-value", f"t_squared must be True or False; got {t_squared!r}", "KD-5")
    if divergence == "jsd" and mixing in (0.0, 1.0):
        divergence = "kl" if mixing == 0.0 else "reverse_kl"  # the convention of GKD (KD-18)
        asked = "jsd"
    else:
        asked = divergence
    whole = as_logits(student_logits, "student_logits")
    student = cut(whole, vocab_size, "student_logits")
    shape = student.shape[:-1]
    counted = np.ones(shape, np.bool_) if loss_mask is None else as_mask(loss_mask, "loss_mask", shape)
    record = as_record(targets)
    temperature = _resolve_temperature(temperature, record)
    if reduction == "mean":
        divisor = max(int(counted.sum()), 1)
    else:
        divisor = max(shape[0], 1) if reduction == "batch_mean" else 1
    made: dict[str, Any] = {
        "shape": whole.shape,
        "counted": counted.reshape(-1),
        "factor": (temperature**2 if t_squared else 1.0) / divisor,
        "temperature": temperature,
        "divergence": divergence,
        "mixing": mixing,
        "log_q": log_softmax(student[counted] / temperature),
    }
    if record is None:
        teacher = cut_teacher(
            as_logits(cast(ArrayLike, targets), "targets"), vocab_size, temperature, _same_rows(targets, counted)
        )
        if teacher.shape != student.shape:
            raise ShdError(
                "argument-shape",
                f"targets and student_logits must have one shape (..., V); got {teacher.shape} and {student.shape}: "
                "vocab_size cuts classes that are padding",
                "KD-7",
            )
        return KdRows(**made, log_p=log_softmax(teacher[counted] / temperature))
    ids = _check_ids(record, student.shape)
    if isinstance(record, SampledTargets):
        if asked in ("reverse_kl", "jsd"):
            raise ShdError(
                "argument-value",
                f"divergence must be kl or cross_entropy with sampled targets; got {asked}, of which they give a "
                "biased estimate: use targets from kd_targets_topk",
                "KD-19",
            )
        weights, entropy = _check_sampled(record, ids)
        return KdRows(**made, ids=ids[counted], weights=weights[counted], entropy=entropy[counted])
    log_p = _check_topk(record, ids, counted, student.shape[-1])
    if divergence == "reverse_kl" and np.isneginf(log_p[counted]).any():
        raise ShdError(
            "support-mismatch",
            "log_tail must be finite in rows that count, for reverse_kl is infinite where the teacher has nothing "
            "outside of its k classes; got -inf: use jsd, or targets with a tail",
            "KD-20",
        )
    return KdRows(**made, ids=ids[counted], log_p=log_p[counted])


def check_head(hidden: ArrayLike, weight: ArrayLike, bias: ArrayLike | None) -> tuple[Array, Array, Array | None]:
    """Hidden states and the head that reads them, finite and of shapes that fit (KD-25)."""
    h, w = as_float(hidden, "hidden"), as_float(weight, "weight", ndim=2)
    b = None if bias is None else as_float(bias, "bias")
    if h.ndim < 2 or h.shape[-1] != w.shape[1] or (b is not None and b.shape != w.shape[:1]):
        raise ShdError(
            "argument-shape",
            "hidden must be (..., D), weight (V, D) and bias (V,) or None; "
            f"got {h.shape}, {w.shape} and {None if b is None else b.shape}",
            "KD-25",
        )
    return h, w, b


def head_logits(hidden: Array, weight: Array, bias: Array | None) -> Array:
    """What the head makes of hidden states."""
    logits: Array = hidden @ weight.T
    return logits if bias is None else logits + bias


def as_record(targets: Targets) -> TopkTargets | SampledTargets | None:
    """A record from its fields, in an object or a mapping; None where the targets are logits."""
    for kind in (TopkTargets, SampledTargets):
        if isinstance(targets, kind):
            return targets
        if isinstance(targets, Mapping):
            if set(targets) == set(kind._fields):
                return kind(**targets)
        elif all(hasattr(targets, name) for name in kind._fields):
            return kind(*(getattr(targets, name) for name in kind._fields))
    if not isinstance(targets, Mapping) and _is_array_like(targets):
        return None
    got = ", ".join(map(str, targets)) if isinstance(targets, Mapping) else type(targets).__name__
    raise ShdError(
        "argument-value",
        f"targets must be logits, or have the fields {', '.join(TopkTargets._fields)}, or "
        f"{', '.join(SampledTargets._fields)}; got {got}",
        "KD-8",
    )


def _is_array_like(value: object) -> bool:
    """An array of any dtype, or numbers that make one."""
    if hasattr(value, "dtype"):
        return True
    try:
        return np.asarray(value).dtype.kind in "biufc"
    except ValueError:  # rows of different lengths
        return False


def _resolve_temperature(temperature: float | None, record: TopkTargets | SampledTargets | None) -> float:
    if record is None:
        return check_temperature(1.0 if temperature is None else temperature)
    own = check_temperature(record.temperature)
    if temperature is not None and check_temperature(temperature) != own:
        raise ShdError(
            "argument-value",
            f"temperature must be {own:g}, that of the targets: mass in a tail or in draws cannot be moved to "
            f"another; got {temperature!r}",
            "KD-6",
        )
    return own


def _check_mixing(mixing: Any) -> float:
    if isinstance(mixing, bool) or not isinstance(mixing, int | float) or not 0 <= mixing <= 1:
        raise ShdError("argument-value", f"mixing must be a number from 0 to 1; got {mixing!r}", "KD-18")
    return float(mixing)


def _same_rows(targets: Any, counted: Mask) -> Mask | None:
    """The mask where it fits the teacher's rows; where it does not, the shapes are refused next."""
    return counted if np.shape(targets)[:-1] == counted.shape else None


def _check_ids(record: TopkTargets | SampledTargets, shape: tuple[int, ...]) -> Ids:
    """Ids as integers within the vocabulary, for the rows of the student's logits (KD-7, KD-10)."""
    size = check_integer("vocab_size", record.vocab_size, 1, None, "KD-7")
    given = np.asarray(record.ids)
    if given.dtype.kind not in "iu":
        raise ShdError("argument-dtype", f"ids must be integers; got dtype {given.dtype}", "KD-10")
    if size != shape[-1] or given.ndim != len(shape) or given.shape[:-1] != shape[:-1] or not given.shape[-1]:
        raise ShdError(
            "argument-shape",
            f"ids must be {shape[:-1]} + (slots,) and vocab_size {shape[-1]}, as the student's logits; "
            f"got {given.shape} and {size}",
            "KD-7",
        )
    ids: Ids = given.astype(np.int64)
    if ids.size and not (ids.min() >= 0 and ids.max() < size):
        worst = ids.min() if ids.min() < 0 else ids.max()
        raise ShdError("argument-value", f"ids must lie in 0 to {size - 1}; got {worst}", "KD-10")
    return ids


def _check_sampled(record: SampledTargets, ids: Ids) -> tuple[Array, Array]:
    weights, entropy = as_float(record.weights, "weights"), as_float(record.entropy, "entropy")
    _check_fields(ids, weights=weights, entropy=entropy)
    if weights.size and weights.min() < 0.0:
        raise ShdError("not-a-distribution", f"weights must be at least 0; got {weights.min():.6g}", "KD-14")
    if entropy.size and entropy.min() < 0.0:
        raise ShdError("argument-value", f"entropy must be at least 0; got {entropy.min():.6g}", "KD-14")
    return weights, entropy


def _check_topk(record: TopkTargets, ids: Ids, counted: Mask, size: int) -> Array:
    """``log P`` over a row's classes, the tail last where there is one (KD-10, KD-16)."""
    tolerance = row_sum_tolerance(dtype_name(np.asarray(record.log_probs)))
    log_probs = as_float(record.log_probs, "log_probs")
    log_tail = as_float(record.log_tail, "log_tail", allow_minus_inf=True)
    _check_fields(ids, log_probs=log_probs, log_tail=log_tail)
    own = np.sort(ids[counted], axis=-1)
    if (own[:, 1:] == own[:, :-1]).any():
        raise ShdError("argument-value", "ids must differ within a row that counts; got one twice", "KD-10")
    with np.errstate(over="ignore"):  # an infinite sum is not a distribution either
        sums = (np.exp(log_probs).sum(axis=-1) + np.exp(log_tail))[counted]
    wrong = np.abs(sums - 1.0) > tolerance
    if wrong.any():
        raise ShdError(
            "not-a-distribution",
            f"exp(log_probs) and exp(log_tail) must sum to 1 within {tolerance:g} in rows that count; "
            f"got {sums[wrong][0]:.6g}",
            "KD-10",
        )
    if ids.shape[-1] == size:
        if not np.isneginf(log_tail[counted]).all():
            raise ShdError("not-a-distribution", "log_tail must be -inf where no class is left for it", "KD-10")
        return log_probs
    return np.concatenate((log_probs, log_tail[..., None]), axis=-1)


def _check_fields(ids: Ids, **fields: Array) -> None:
    """The first field is shaped as the ids, the second as their rows."""
    shapes = [ids.shape, ids.shape[:-1]]
    for (name, field), wanted in zip(fields.items(), shapes, strict=True):
        if field.shape != wanted:
            raise ShdError("argument-shape", f"{name} must have shape {wanted}; got {field.shape}", "KD-7")
