"""The losses on logits, a chunk of rows at a time, and on hidden states.

No wide copy of all logits is made: ``kd_loss`` computes its gradient when it is asked for, ``linear_kd_loss`` in one
pass with its value, and keeps gradients of its arguments alone.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from shd_torch.checks import check_mask, check_option, check_real, check_shapes, compute_dtype, without_autocast
from shd_torch.kd.divergences import KdKeywords, KdOptions, KdRows, Targets, kd_rows
from shd_torch.kd.targets import check_logits, check_rows, cut, row_chunks
from shd_torch.kl.gradient import once, refuse_transforms
from shd_torch.maps.loss import Layers, match_layers

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
        targets: the teacher's logits ``(..., V)``, ``TopkTargets`` (or its fields by name), on any device; or
            ``ExactTargets``, whose head is on the student's device: its logits are made a chunk at a time, in the
            forward and in the backward pass.
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
    check_shapes(
        fit and tuple(layer[-1].shape[:1]) == tuple(weight.shape[:1]) and (bias is None or bias.ndim == 1),
        "hidden must be (..., D), weight (V, D) and bias (V,) or None",
        hidden,
        *layer,
    )
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
        for at in row_chunks(len(z), rows.vocab_size, z.device):
            total += rows.terms(z[at].to(total.dtype, copy=True), at, wants_gradient=False)[0].sum()
        return total.mul_(rows.factor)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (z,), rows = ctx.saved_tensors, ctx.rows
        factor = upstream.detach() * rows.factor / rows.temperature
        dz = torch.empty_like(z)
        for at in row_chunks(len(z), rows.vocab_size, z.device):
            slope = rows.terms(z.detach()[at].to(factor.dtype, copy=True), at, wants_gradient=True)[1]
            dz[at] = slope.mul_(factor).to(z.dtype)
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
        for at in row_chunks(len(hidden), rows.vocab_size, hidden.device):
            read = hidden[at].to(product)
            logits = (read @ head.mT).to(wide)
            if bias is not None:
                logits += bias.to(wide)
            values, slope = rows.terms(logits, at, wants_gradient=any(wants[:3]))
            total += values.sum()
            if slope is None:
                continue
            narrow = slope.to(product)
            if dhidden is not None:
                dhidden[at] = (narrow @ head).to(wide)
            if dweight is not None:
                dweight += narrow.mT @ read
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
    """What the head's products are made in: autocast's dtype where it is on, as for any linear layer."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind) if torch.float64 not in (hidden.dtype, weight.dtype) else torch.float64
    both = torch.promote_types(hidden.dtype, weight.dtype)
    return both if both.is_floating_point else torch.float32


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
