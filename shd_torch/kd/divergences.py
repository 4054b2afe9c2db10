"""The rows of the loss on logits: every check of its arguments, and what one chunk of rows gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

import torch
from torch import Tensor

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_integer, check_number
from shd_ref.tolerances import row_sum_tolerance
from shd_torch.checks import (
    INTEGERS,
    check_dtype,
    check_mask,
    check_option,
    check_real,
    check_shape,
    check_temperature,
)
from shd_torch.kd.targets import ExactTargets, check_classes, check_exact, check_logits, cut_teacher, take_tail
from shd_torch.supervision.supervision import TopkTargets

Targets: TypeAlias = Tensor | TopkTargets | ExactTargets | Mapping[str, Any]

DIVERGENCES: tuple[str, ...] = ("kl", "reverse_kl", "jsd", "cross_entropy")
REDUCTIONS: tuple[str, ...] = ("mean", "sum", "batch_mean")

_IDS = INTEGERS | {torch.uint16, torch.uint32}


class KdKeywords(TypedDict, total=False):
    """The keywords of ``kd_loss``, which ``linear_kd_loss`` shares."""

    divergence: str
    mixing: float
    temperature: float | None
    t_squared: bool
    loss_mask: Tensor | None
    reduction: str
    vocab_size: int | None
    check: bool


@dataclass(frozen=True, eq=False)
class KdOptions:
    """``KdKeywords`` with their defaults, checked."""

    divergence: str = "kl"
    mixing: float = 0.5
    temperature: float | None = None
    t_squared: bool = True
    loss_mask: Tensor | None = None
    reduction: str = "mean"
    vocab_size: int | None = None
    check: bool = True

    def __post_init__(self) -> None:
        check_option("divergence", self.divergence, DIVERGENCES)
        check_option("reduction", self.reduction, REDUCTIONS)
        object.__setattr__(self, "mixing", check_number("mixing", self.mixing, least=0, most=1))
        is_flag = isinstance(self.t_squared, bool)
        need(is_flag, "argument-value", "t_squared", "be True or False", repr(self.t_squared))


@dataclass(frozen=True)
class KdRows:
    """What the loss is made of, rows flattened."""

    divergence: str  # kl, reverse_kl, jsd or cross_entropy, ends of jsd resolved
    mixing: float  # the m of jsd
    temperature: float  # T
    factor: Tensor  # (), of the sum over counted rows of their divergences, T^2 included
    counted: Tensor | None  # (R,) boolean, None where all rows count
    vocab_size: int  # V, after the cut
    taught: Tensor | ExactTargets | TopkTargets  # the teacher's logits (R, V) or what makes them, or its record

    def terms(self, z: Tensor, at: slice, *, wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """A chunk's divergences ``(r,)`` and, if wanted, their gradient with respect to ``z / T`` ``(r, V)``.

        ``z`` are the student's logits of the rows ``at``, ``(r, V)`` in a wide dtype; they are overwritten.
        """
        log_q = _log_softmax_(z, self.temperature)
        if isinstance(self.taught, TopkTargets):
            values, gradient = self._topk(self.taught, log_q, at, wants_gradient)
        else:
            exact = isinstance(self.taught, ExactTargets)
            logits = self.taught.rows(at) if isinstance(self.taught, ExactTargets) else self.taught[at]
            log_p = _log_softmax_(logits.to(log_q.dtype, copy=not exact), self.temperature)
            values, gradient = self._classes(log_p, log_q, wants_gradient)
        if self.counted is not None:
            uncounted = ~self.counted[at]
            values = values.masked_fill(uncounted, 0.0)
            if gradient is not None:
                gradient = gradient.masked_fill_(uncounted[:, None], 0.0)
        return values, gradient

    def _classes(self, log_p: Tensor, log_q: Tensor, wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """The divergence over classes and its slope; a term with a leading 0 is 0."""
        p, q = log_p.exp(), log_q.exp()
        m = self.mixing
        if self.divergence in ("kl", "cross_entropy"):
            values = -_times_log(p, log_q).sum(-1)
            if self.divergence == "kl":
                values = (_times_log(p, log_p) - _times_log(p, log_q)).sum(-1)
            return values, q.mul_(p.sum(-1, keepdim=True)).sub_(p) if wants_gradient else None
        if self.divergence == "reverse_kl":
            slope = log_q - log_p
            values = _times_log(q, slope).sum(-1)
        else:
            log_r = torch.logaddexp(log_p + math.log(m), log_q + math.log1p(-m))
            slope = (log_q - log_r).mul_(1 - m)
            values = m * _times_log(p, log_p - log_r).sum(-1) + _times_log(q, slope).sum(-1)
        if not wants_gradient:
            return values, None
        slope = slope.masked_fill(q == 0, 0.0)
        return values, slope.sub_((q * slope).sum(-1, keepdim=True)).mul_(q)

    def _topk(
        self, record: TopkTargets, log_q: Tensor, at: slice, wants_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        ids = record.ids[at].long()
        own = log_q.gather(-1, ids)
        if ids.shape[-1] == self.vocab_size:
            values, slope = self._classes(record.log_probs[at].to(own.dtype), own, wants_gradient)
            return values, None if slope is None else log_q.scatter_(-1, ids, slope)
        tail = take_tail(log_q, ids, own)[:, None]
        log_p = torch.cat((record.log_probs[at], record.log_tail[at][:, None]), -1).to(own.dtype)
        values, slope = self._classes(log_p, torch.cat((own, tail), -1), wants_gradient)
        if slope is None:
            return values, None
        spread = log_q.sub_(tail).exp_().mul_(slope[:, -1:])
        return values, spread.scatter_(-1, ids, slope[:, :-1])


def kd_rows(
    targets: Targets,
    rows: tuple[int, ...],
    num_classes: int,
    dtype: torch.dtype,
    device: torch.device,
    options: KdOptions,
) -> KdRows:
    """Every check of the loss but those of the student's side: ``rows`` of ``num_classes`` after the cut."""
    divergence, mixing, loss_mask, check = options.divergence, options.mixing, options.loss_mask, options.check
    if loss_mask is not None:
        check_mask(loss_mask, "loss_mask", rows)
    record = as_record(targets)
    if divergence == "jsd" and mixing in (0, 1):
        divergence = "kl" if mixing == 0 else "reverse_kl"  # the convention of GKD
    temperature = _resolve_temperature(options.temperature, record)
    counted = None if loss_mask is None else loss_mask.reshape(-1).to(device)
    divisor: Tensor | float = 1.0
    if options.reduction == "mean":
        divisor = float(max(math.prod(rows), 1)) if counted is None else counted.sum().clamp(min=1).to(dtype)
    elif options.reduction == "batch_mean":
        divisor = float(max(rows[0], 1))
    scale = torch.full((), temperature**2 if options.t_squared else 1.0, dtype=dtype, device=device)
    taught: Tensor | ExactTargets | TopkTargets
    if isinstance(targets, ExactTargets):
        sizes: dict[str, Any] = {"dtype": dtype, "device": device, "options": options, "temperature": temperature}
        taught = check_exact(targets, rows, num_classes, **sizes)
    elif record is None:
        assert isinstance(targets, Tensor)
        logits = _check_teacher(targets, (*rows, num_classes), temperature, options)
        taught = _flat(logits, len(rows), device)
    else:
        _check_ids(record, rows, num_classes, check=check)
        _check_topk(record, divergence, loss_mask, check=check)
        flat: dict[str, Any] = {
            name: _flat(field, len(rows), device) for name, field in zip(record._fields[:3], record[:3], strict=True)
        }
        taught = record._replace(**flat)
    return KdRows(
        divergence=divergence,
        mixing=mixing,
        temperature=temperature,
        factor=scale / divisor,
        counted=counted,
        vocab_size=num_classes,
        taught=taught,
    )


def as_record(targets: Targets) -> TopkTargets | None:
    """A record from its fields, in an object or a mapping; None where the targets are logits, or make them."""
    if isinstance(targets, Tensor | ExactTargets):
        return None
    names = TopkTargets._fields
    if isinstance(targets, Mapping):
        if set(targets) == set(names):
            return TopkTargets(**targets)
    elif all(hasattr(targets, name) for name in names):
        return TopkTargets(*(getattr(targets, name) for name in names))
    rule = f"targets must be logits, or have the fields {', '.join(names)}"
    raise ShdError("argument-value", f"{rule}; got {type(targets).__name__}")


def _log_softmax_(z: Tensor, temperature: float) -> Tensor:
    """In place; the peak goes first, so that large logits keep their small differences."""
    z.sub_(z.amax(-1, keepdim=True))
    if temperature != 1.0:
        z.div_(temperature)
    return z.sub_(z.logsumexp(-1, keepdim=True))


def _times_log(factor: Tensor, log: Tensor) -> Tensor:
    return factor * log.masked_fill(factor == 0, 0.0)


def _flat(value: Tensor, axes: int, device: torch.device) -> Tensor:
    return value.detach().flatten(0, axes - 1).to(device)


def _resolve_temperature(temperature: float | None, record: TopkTargets | None) -> float:
    if record is None:
        return check_temperature(1.0 if temperature is None else temperature)
    own = check_temperature(record.temperature)
    fits = temperature is None or check_temperature(temperature) == own
    rule = f"be {own:g}, that of the targets: mass in a tail cannot be moved to another"
    need(fits, "argument-value", "temperature", rule, repr(temperature))
    return own


def _check_teacher(logits: Tensor, shape: tuple[int, ...], temperature: float, options: KdOptions) -> Tensor:
    check_logits(logits, "targets", check=options.check)
    counted = options.loss_mask if tuple(logits.shape[:-1]) == shape[:-1] else None
    kept = cut_teacher(logits.detach(), options.vocab_size, temperature, check=options.check, counted=counted)
    check_classes("targets", kept.shape[-1], shape[-1])
    check_shape(kept, "targets, as the student's logits,", shape)
    return kept


def _check_ids(record: TopkTargets, rows: tuple[int, ...], vocab_size: int, *, check: bool) -> None:
    """Ids as integers within the vocabulary, and every field shaped as they are."""
    size = check_integer("vocab_size", record.vocab_size, 1, None)
    ids, by_slot, by_row = record[:3]
    for name, field in zip(record._fields[1:3], (by_slot, by_row), strict=True):
        need(isinstance(field, Tensor), "argument-dtype", name, "be a tensor", type(field).__name__)
    check_dtype(ids, _IDS, "ids must be integers")
    fits = ids.shape == by_slot.shape and tuple(by_row.shape) == tuple(ids.shape[:-1]) == rows and ids.shape[-1] > 0
    if not fits:  # the text has sizes in it, to which a compiled graph would be bound
        shapes = ", ".join(str(tuple(field.shape)) for field in (ids, by_slot, by_row))
        rule = f"{', '.join(record._fields[:3])} must be {rows} + (slots,), the same, and {rows}"
        raise ShdError("argument-shape", f"{rule}, as the student's logits; got {shapes}")
    check_classes("targets", size, vocab_size, can_cut=False)
    if check and ids.numel():
        low, high = (int(bound) for bound in ids.long().aminmax())
        worst = low if low < 0 else high
        need(0 <= worst < size, "argument-value", "ids", f"lie in 0 to {size - 1}", worst)


def _check_topk(record: TopkTargets, divergence: str, loss_mask: Tensor | None, *, check: bool) -> None:
    check_real(record.log_probs, "log_probs", check=check)
    check_real(record.log_tail, "log_tail", check=check, allow_minus_inf=True)
    if not check:
        return
    counted = torch.ones_like(record.log_tail, dtype=torch.bool) if loss_mask is None else loss_mask
    counted = counted.to(record.ids.device)
    ids = record.ids[counted].long().sort(-1).values
    differ = not bool((ids[:, 1:] == ids[:, :-1]).any())
    need(differ, "argument-value", "ids", "differ within a row that counts", "one twice")
    tolerance = row_sum_tolerance(str(record.log_probs.dtype).removeprefix("torch."))
    tails = record.log_tail[counted].double()
    sums = record.log_probs[counted].double().exp().sum(-1) + tails.exp()
    wrong = (sums - 1).abs() > tolerance
    if bool(wrong.any()):
        rule = f"exp(log_probs) and exp(log_tail) must sum to 1 within {tolerance:g} in rows that count"
        raise ShdError("not-a-distribution", f"{rule}; got {float(sums[wrong][0]):.6g}")
    whole = record.ids.shape[-1] == record.vocab_size
    if whole and not bool(torch.isneginf(tails).all()):
        raise ShdError("not-a-distribution", "log_tail must be -inf where no class is left for it")
    if not whole and divergence == "reverse_kl" and bool(torch.isneginf(tails).any()):
        raise ShdError(
            "support-mismatch",
            "log_tail must be finite in rows that count, for reverse_kl is infinite where the teacher has nothing "
            "outside of its k classes; got -inf: use jsd, or targets with a tail",
        )
