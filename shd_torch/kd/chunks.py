"""The losses on logits, a chunk of rows at a time, and on hidden states.

First every check of the arguments, and what one chunk of rows gives; then the losses. No wide copy of all logits is
made: ``kd_loss`` computes its gradient in the backward pass, ``linear_kd_loss`` in one pass with its value, and keeps
gradients of its arguments alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict, Unpack

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
    check_shapes,
    check_temperature,
    compute_dtype,
    without_autocast,
)
from shd_torch.kd.targets import (
    ExactTargets,
    check_classes,
    check_exact,
    check_logits,
    check_rows,
    cut,
    cut_teacher,
    row_chunks,
    take_tail,
)
from shd_torch.kl.gradient import once, refuse_transforms
from shd_torch.maps.loss import Layers, match_layers
from shd_torch.supervision.supervision import TopkTargets

Targets: TypeAlias = Tensor | TopkTargets | ExactTargets

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
    """The checked arguments of the loss, rows flattened."""

    divergence: str  # kl, reverse_kl, jsd or cross_entropy, ends of jsd resolved
    mixing: float  # the m of jsd
    temperature: float  # T
    factor: Tensor  # (), of the sum over counted rows of their divergences, T^2 included
    counted: Tensor | None  # (R,) boolean, None where all rows count
    vocab_size: int  # V, after the cut
    teacher: Tensor | ExactTargets | TopkTargets  # its logits (R, V), its last states and head, or its record

    def terms(self, z: Tensor, chunk: slice, *, wants_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """A chunk's divergences ``(r,)`` and, if wanted, their gradient with respect to ``z / T`` ``(r, V)``.

        ``z`` are the student's logits of the rows ``chunk``, ``(r, V)`` in a wide dtype; they are overwritten.
        """
        log_q = _log_softmax_(z, self.temperature)
        if isinstance(self.teacher, TopkTargets):
            values, gradient = self._topk(self.teacher, log_q, chunk, wants_gradient)
        else:
            # What a head makes is new; the caller's logits must not be overwritten.
            is_new = isinstance(self.teacher, ExactTargets)
            logits = self.teacher.rows(chunk) if isinstance(self.teacher, ExactTargets) else self.teacher[chunk]
            log_p = _log_softmax_(logits.to(log_q.dtype, copy=not is_new), self.temperature)
            values, gradient = self._classes(log_p, log_q, wants_gradient)
        if self.counted is not None:
            uncounted = ~self.counted[chunk]
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
        # A tail without mass has a slope of -inf, and 0 times that would be NaN.
        slope = slope.masked_fill(q == 0, 0.0)
        return values, slope.sub_((q * slope).sum(-1, keepdim=True)).mul_(q)

    def _topk(
        self, record: TopkTargets, log_q: Tensor, chunk: slice, wants_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        ids = record.ids[chunk].long()
        log_q_head = log_q.gather(-1, ids)
        if ids.shape[-1] == self.vocab_size:
            values, slope = self._classes(record.log_probs[chunk].to(log_q_head.dtype), log_q_head, wants_gradient)
            return values, None if slope is None else log_q.scatter_(-1, ids, slope)
        tail = take_tail(log_q, ids, log_q_head)[:, None]
        log_p = torch.cat((record.log_probs[chunk], record.log_tail[chunk][:, None]), -1).to(log_q_head.dtype)
        values, slope = self._classes(log_p, torch.cat((log_q_head, tail), -1), wants_gradient)
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
    is_known = isinstance(targets, Tensor | TopkTargets | ExactTargets)
    need(is_known, "argument-value", "targets", "be logits, TopkTargets or ExactTargets", type(targets).__name__)
    record = targets if isinstance(targets, TopkTargets) else None
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
    teacher: Tensor | ExactTargets | TopkTargets
    if isinstance(targets, ExactTargets):
        teacher = check_exact(
            targets, rows, num_classes, dtype=dtype, device=device, options=options, temperature=temperature
        )
    elif record is None:
        assert isinstance(targets, Tensor)
        teacher = _flat(_check_teacher(targets, (*rows, num_classes), temperature, options), len(rows), device)
    else:
        _check_ids(record, rows, num_classes, check=check)
        _check_topk(record, divergence, loss_mask, check=check)
        ids, log_probs, log_tail = (_flat(field, len(rows), device) for field in record[:3])
        teacher = record._replace(ids=ids, log_probs=log_probs, log_tail=log_tail)
    return KdRows(divergence, mixing, temperature, scale / divisor, counted, num_classes, teacher)


def _log_softmax_(z: Tensor, temperature: float) -> Tensor:
    """In place; the peak goes first, so that large logits keep their small differences."""
    z.sub_(z.amax(-1, keepdim=True))
    if temperature != 1.0:
        z.div_(temperature)
    return z.sub_(z.logsumexp(-1, keepdim=True))


def _times_log(factor: Tensor, log: Tensor) -> Tensor:
    return factor * log.masked_fill(factor == 0, 0.0)  # 0 times -inf would be NaN


def _flat(value: Tensor, axes: int, device: torch.device) -> Tensor:
    return value.detach().flatten(0, axes - 1).to(device)


def _resolve_temperature(temperature: float | None, record: TopkTargets | None) -> float:
    if record is None:
        return check_temperature(1.0 if temperature is None else temperature)
    of_record = check_temperature(record.temperature)
    fits = temperature is None or check_temperature(temperature) == of_record
    rule = f"be {of_record:g}, that of the targets: mass in a tail cannot be moved to another"
    need(fits, "argument-value", "temperature", rule, repr(temperature))
    return of_record


def _check_teacher(logits: Tensor, shape: tuple[int, ...], temperature: float, options: KdOptions) -> Tensor:
    check_logits(logits, "targets", check=options.check)
    counted = options.loss_mask if tuple(logits.shape[:-1]) == shape[:-1] else None
    classes = cut_teacher(logits.detach(), options.vocab_size, temperature, check=options.check, counted=counted)
    check_classes("targets", classes.shape[-1], shape[-1])
    check_shape(classes, "targets, as the student's logits,", shape)
    return classes


def _check_ids(record: TopkTargets, rows: tuple[int, ...], vocab_size: int, *, check: bool) -> None:
    """Ids as integers within the vocabulary, and every field shaped as they are."""
    size = check_integer("vocab_size", record.vocab_size, 1, None)
    ids, by_slot, by_row = record[:3]
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
    has_all = record.ids.shape[-1] == record.vocab_size
    if has_all and not bool(torch.isneginf(tails).all()):
        raise ShdError("not-a-distribution", "log_tail must be -inf where no class is left for it")
    if not has_all and divergence == "reverse_kl" and bool(torch.isneginf(tails).any()):
        rule = "log_tail must be finite in rows that count, for reverse_kl is infinite where the teacher has nothing"
        message = f"{rule} outside of its k classes; got -inf: use jsd, or targets with a tail"
        raise ShdError("support-mismatch", message)


_REMEDY = "torch.nn.functional.kl_div on whole rows has derivatives of every order and mode"


@without_autocast
def kd_loss(targets: Targets, student_logits: Tensor, **keywords: Unpack[KdKeywords]) -> Tensor:
    """A divergence between a teacher's rows and ``softmax(student_logits / T)``, times ``T^2``.

    With P and Q the rows of teacher and student at T, a sum over classes c (a term with a leading factor 0 is 0):
    ``kl`` is ``sum P_c (log P_c - log Q_c)``, ``reverse_kl`` ``sum Q_c (log Q_c - log P_c)``, ``cross_entropy``
    ``- sum P_c log Q_c``, and ``jsd`` ``m KL(P || R) + (1 - m) KL(Q || R)`` with ``R = m P + (1 - m) Q``. At m = 0
    ``jsd`` is ``kl`` and at m = 1 ``reverse_kl``, which are not its limits: this is GKD's convention.
    With top-k targets all other classes are one more class, the tail, with the masses ``exp(log_tail)`` and
    ``sum Q_j`` over them. ``kl`` is then at most that of whole rows, and equal where Q has the teacher's proportions
    within the tail. ``reverse_kl`` of a tail without mass would be infinite, and is refused.
    Gradient: ``z_j`` gets ``g_j`` of its class, or its share ``g_tail Q_j / Q_tail`` of the tail's.

    Args:
        targets: the teacher's logits ``(..., V)`` or ``TopkTargets``, on any device; or ``ExactTargets``, whose head
            is on the student's device: its logits are made a chunk at a time, in the forward and in the backward
            pass.
        student_logits: z ``(..., V)``, for the same rows: no position is shifted.
        **keywords:
            divergence: ``"kl"`` (teacher first), ``"reverse_kl"``, ``"jsd"`` or ``"cross_entropy"``.
            mixing: the m of ``jsd``, as the beta of GKD; default 0.5.
            temperature: T > 0; default that of the record, 1 for logits. A temperature other than the record's is an
                error.
            t_squared: multiply by T^2, the default, or not.
            loss_mask: boolean, the shape of the rows, True = counts.
            reduction: ``"mean"`` over counted rows, ``"sum"``, or ``"batch_mean"``, the sum divided by B.
            vocab_size: number of classes to read on either side; the others are padding.
            check: validate the values, which costs a device sync; default True.

    Returns:
        The loss ``()`` in nats, float64 if the logits are, else float32; 0 where no row counts. Only first-order
        reverse mode is supported; no gradient flows into the targets.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``, ``not-a-distribution``,
            ``support-mismatch``.

    Source: Hinton, Vinyals, Dean (arXiv 1503.02531) for ``T^2``; GKD (arXiv 2306.13649) for ``jsd``. Deviation: the
    tail is a class, since renormalising the top k would teach that nothing else is possible.
    """
    options = KdOptions(**keywords)
    refuse_transforms(student_logits, name="kd_loss", remedy=_REMEDY)
    check_logits(student_logits, "student_logits", check=options.check)
    student = cut(student_logits, options.vocab_size, "student_logits")
    shape, dtype = tuple(student.shape), compute_dtype(student)
    rows = kd_rows(targets, shape[:-1], shape[-1], dtype, student.device, options)
    loss: Tensor = _LossOnLogits.apply(student.flatten(0, -2), rows)  # type: ignore[no-untyped-call]
    return loss


def linear_kd_loss(
    targets: Targets, hidden: Tensor, weight: Tensor, bias: Tensor | None = None, **keywords: Unpack[KdKeywords]
) -> Tensor:
    """``kd_loss`` on the logits ``hidden @ weight^T + bias``, without materialising all of them.

    Products are in the dtype of ``hidden`` and ``weight``, or autocast's; logits are widened before the softmax, and
    gradients are summed over chunks in float32 or wider.

    Args:
        targets: as in ``kd_loss``.
        hidden: ``(..., D)``, the input of the student's output layer.
        weight: of the output layer ``(V, D)``.
        bias: ``(V,)`` or None.
        **keywords: those of ``kd_loss``.

    Returns:
        The loss, as ``kd_loss``.

    Raises:
        ShdError: as ``kd_loss``.
    """
    options = KdOptions(**keywords)
    refuse_transforms(hidden, weight, bias, name="linear_kd_loss", remedy=_REMEDY)
    for name, value in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if value is not None:
            check_rows(value, name, check=options.check, ndim={"weight": 2}.get(name))
    fit = hidden.ndim >= 2 and hidden.shape[-1] == weight.shape[1]
    layer = [weight] if bias is None else [weight, bias]
    fit = fit and tuple(layer[-1].shape[:1]) == tuple(weight.shape[:1]) and (bias is None or bias.ndim == 1)
    check_shapes(fit, "hidden must be (..., D), weight (V, D) and bias (V,) or None", hidden, *layer)
    if options.vocab_size is not None:
        weight = cut(weight.mT, options.vocab_size, "weight").mT
        bias = None if bias is None else bias[: options.vocab_size]
    product = _product_dtype(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):
        dtype = compute_dtype(hidden, weight)
        rows = kd_rows(targets, tuple(hidden.shape[:-1]), weight.shape[0], dtype, hidden.device, options)
        loss: Tensor = _LossOfHead.apply(hidden.flatten(0, -2), weight, bias, rows, product)  # type: ignore[no-untyped-call]
    return loss


class _LossOnLogits(torch.autograd.Function):
    """The loss of rows ``(R, V)``; its backward pass goes over the chunks again, and so holds nothing in between."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, rows: KdRows) -> Tensor:
        ctx.save_for_backward(z)
        ctx.rows = rows
        total = torch.zeros((), dtype=rows.factor.dtype, device=z.device)
        for chunk in row_chunks(len(z), rows.vocab_size, z.device):
            total += rows.terms(z[chunk].to(total.dtype, copy=True), chunk, wants_gradient=False)[0].sum()
        return total.mul_(rows.factor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (z,), rows = ctx.saved_tensors, ctx.rows
        factor = upstream.detach() * rows.factor / rows.temperature
        dz = torch.empty_like(z)
        for chunk in row_chunks(len(z), rows.vocab_size, z.device):
            slope = rows.terms(z.detach()[chunk].to(factor.dtype, copy=True), chunk, wants_gradient=True)[1]
            dz[chunk] = slope.mul_(factor).to(z.dtype)
        return once(dz, upstream, z), None


class _LossOfHead(torch.autograd.Function):
    """The loss of hidden states ``(R, D)`` and a head; value and gradients come from one pass over chunks."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: KdRows, product: torch.dtype
    ) -> Tensor:
        wide, wants = rows.factor.dtype, ctx.needs_input_grad
        total = torch.zeros((), dtype=wide, device=hidden.device)
        dhidden, dweight, dbias = (
            torch.zeros(value.shape, dtype=wide, device=value.device) if value is not None and expected else None
            for value, expected in zip((hidden, weight, bias), wants[:3], strict=True)
        )
        head = weight.to(product)
        for chunk in row_chunks(len(hidden), rows.vocab_size, hidden.device):
            states = hidden[chunk].to(product)
            logits = (states @ head.mT).to(wide)
            if bias is not None:
                logits += bias.to(wide)
            values, slope = rows.terms(logits, chunk, wants_gradient=any(wants[:3]))
            total += values.sum()
            if slope is None:
                continue
            narrow = slope.to(product)
            if dhidden is not None:
                dhidden[chunk] = (narrow @ head).to(wide)
            if dweight is not None:
                dweight += narrow.mT @ states
            if dbias is not None:
                dbias += slope.sum(0)
        # Slopes are of order one: in half precision the factor comes after the products, so that nothing underflows.
        for gradient in (dhidden, dweight, dbias):
            if gradient is not None:
                gradient.mul_(rows.factor / rows.temperature)
        ctx.save_for_backward(hidden, weight, bias, dhidden, dweight, dbias)
        return total.mul_(rows.factor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        arguments, gradients = saved[:3], saved[3:]
        roots = [argument for argument in arguments if argument is not None]
        scaled = [
            None if gradient is None else once((upstream.detach() * gradient).to(argument.dtype), upstream, *roots)
            for argument, gradient in zip(arguments, gradients, strict=True)
        ]
        return *scaled, None, None


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the head's products: autocast's where it is on, as for any linear layer."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind) if torch.float64 not in (hidden.dtype, weight.dtype) else torch.float64
    promoted = torch.promote_types(hidden.dtype, weight.dtype)
    return promoted if promoted.is_floating_point else torch.float32


DISTANCES: tuple[str, ...] = ("mse", "cosine", "normalized_mse")


@without_autocast
def hidden_loss(
    student_hidden: Layers,
    teacher_hidden: Layers,
    *,
    distance: str = "mse",
    loss_mask: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """The distance between hidden states: the mean over counted rows, the sum over layers.

    Args:
        student_hidden: ``(..., D)``, or a list with one per layer; the caller projects to the teacher's width.
        teacher_hidden: the same shape(s), on any device; no gradient reaches it.
        distance: ``"mse"`` (mean over features), ``"cosine"`` (one minus the cosine), or ``"normalized_mse"``
            (squared distance of the unit vectors; that of a zero vector is zero).
        loss_mask: boolean, the shape of the rows, for all layers; True = counts.
        check: validate the values, which costs a device sync.

    Returns:
        The loss ``()``, float64 if the student's side is, else float32; 0 where no row counts. Rows that do not count
        have a gradient of exactly 0.

    Raises:
        ShdError: ``argument-value``, ``argument-shape``, ``argument-dtype``, ``not-finite``.
    """
    check_option("distance", distance, DISTANCES)
    students, teachers = match_layers(student_hidden=student_hidden, teacher_hidden=teacher_hidden)
    terms = []
    for number, (student, teacher) in enumerate(zip(students, teachers, strict=True)):
        check_real(student, "student_hidden", check=check, layer=number)
        check_real(teacher, "teacher_hidden", check=check, layer=number)
        rule = f"student_hidden, projected if need be, must have teacher_hidden's shape (..., D) in layer {number}"
        check_shapes(student.ndim >= 2 and student.shape == teacher.shape, rule, student, teacher)
        if loss_mask is not None:
            check_mask(loss_mask, "loss_mask", student.shape[:-1])
        terms.append(_layer_loss(student, teacher, loss_mask, distance))
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def _layer_loss(student: Tensor, teacher: Tensor, loss_mask: Tensor | None, distance: str) -> Tensor:
    dtype = compute_dtype(student)
    s, t = student.to(dtype), teacher.detach().to(student.device, dtype)
    rows = float(max(s[..., 0].numel(), 1))
    divisor: Tensor | float = rows
    if loss_mask is not None:
        counted = loss_mask.to(s.device)
        divisor = counted.sum().clamp(min=1).to(dtype)
        # What does not count is zero on both sides, before anything is computed of it.
        s, t = (side.masked_fill(~counted[..., None], 0.0) for side in (s, t))
    if distance == "mse":
        terms = (s - t).square().mean(-1)
    elif distance == "cosine":
        terms = 1 - (unit(s) * unit(t)).sum(-1)
        terms = terms - terms.detach().clamp(max=0)  # rounding can leave -1e-7; the gradient stays
    else:
        terms = (unit(s) - unit(t)).square().sum(-1)
    if loss_mask is not None:
        terms = terms.masked_fill(~counted, 0.0)
    return terms.sum() / divisor


def unit(vectors: Tensor) -> Tensor:
    """Unit vectors, of which no square over- or underflows; a zero vector stays zero, with no gradient."""
    largest = vectors.detach().abs().amax(-1, keepdim=True)
    zero = largest == 0
    scaled = vectors / largest.masked_fill(zero, 1.0)
    length = scaled.square().sum(-1, keepdim=True).masked_fill(zero, 1.0).sqrt()
    return (scaled / length).masked_fill(zero, 0.0)
