"""The SHD loss (spec chapter LOSS): teach the student's maps with the merged ones.

``L = beta * sum_layers sum_heads mean_rows rho D(P, Q)``, with P the teacher's row, Q the student's, D by default
the Kullback-Leibler divergence (the teacher's entropy included, so that it is zero exactly where the maps are
equal) and rho the mass of the teacher's row. Differentiable in the student's logits only; gradients in closed form
(chapter GRAD) need no graph, and work on tensors of inference mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import check_number
from shd_torch.checks import (
    check_option,
    check_query_key,
    check_real,
    check_temperature,
    compute_dtype,
    without_autocast,
)
from shd_torch.maps.attention import temper
from shd_torch.maps.support import check_layer, check_support, find_violations, intersect

DIVERGENCES: tuple[str, ...] = ("kl", "reverse_kl", "js", "mse")


def row_divergence(p: Tensor, log_q: Tensor, may_attend: Tensor, divergence: str) -> Tensor:
    """The divergence ``(...)`` of each row of P and Q, differentiable in ``log_q`` (LOSS-11, LOSS-12).

    ``log_q`` is finite, and may be anything where ``may_attend`` is False and Q is 0.
    """
    if divergence == "kl":
        return (p * (_log(p) - log_q)).sum(-1)
    q = student_probs(log_q, may_attend)
    if divergence == "mse":
        return (p - q).square().sum(-1)
    log_p = _log(p)
    if divergence == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    log_r = _log_middle(p, log_p, log_q)
    return 0.5 * (p * (log_p - log_r) + q * (log_q - log_r)).sum(-1)


def row_gradient(p: Tensor, log_q: Tensor, may_attend: Tensor, divergence: str) -> Tensor:
    """The gradient of ``row_divergence`` in ``z / T``, of which Q is the softmax (GRAD-1): ``(..., S)``."""
    q = student_probs(log_q, may_attend)
    if divergence == "kl":
        return p.sum(-1, keepdim=True) * q - p
    if divergence == "reverse_kl":
        factor, r = 1.0, log_q - _log(p)
    elif divergence == "js":
        factor, r = 0.5, log_q - _log_middle(p, _log(p), log_q)
    else:
        factor, r = 2.0, q - p
    return factor * q * (r - (q * r).sum(-1, keepdim=True))


def student_probs(log_q: Tensor, may_attend: Tensor) -> Tensor:
    """Q, exactly 0 where the student may not attend."""
    return log_q.exp().masked_fill(~may_attend, 0.0)


def _log(p: Tensor) -> Tensor:
    return p.masked_fill(p == 0, 1.0).log()


def _log_middle(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """``log((P + Q) / 2)`` from the logarithms: Q may be too small for the dtype where P is 0."""
    return torch.where(p == 0, log_q, torch.logaddexp(log_p, log_q)) - math.log(2.0)


REDUCTIONS: tuple[str, ...] = ("sum", "mean")
SUPPORTS: tuple[str, ...] = ("error", "intersect")

Layers: TypeAlias = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class LossOptions:
    """The keywords of ``shd_loss``, documented there and checked here."""

    beta: float = 1.0
    loss_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    temperature: float = 1.0
    reduction: str = "sum"
    divergence: str = "kl"
    support: str = "error"
    row_sums: str = "one"
    check: bool = True

    def __post_init__(self) -> None:
        check_option("reduction", self.reduction, REDUCTIONS, "LOSS-5")
        check_option("divergence", self.divergence, DIVERGENCES, "LOSS-11")
        check_option("support", self.support, SUPPORTS, "LOSS-14")
        object.__setattr__(self, "beta", check_number("beta", self.beta, "LOSS-2", least=0))
        object.__setattr__(self, "temperature", check_temperature(self.temperature))


class LayerRows(NamedTuple):
    """The factors of one layer's loss and its gradient; rows that do not count are 0 in P, rho and log Q."""

    p: Tensor  # (B, H_s, L, S), the teacher's rows as distributions
    mass: Tensor  # (B, H_s, L), rho
    log_q: Tensor  # (B, H_s, L, S), finite; 0 where the student may not attend
    may_attend: Tensor  # (B, H_s, L, S), boolean; False on rows that do not count
    violated: Tensor  # (B, H_s, L), boolean: counted rows whose loss is infinite (only without checks)
    weight: Tensor  # (H_s, 1), beta over the number of rows (and of maps)


def shd_loss(
    supervision: Layers,
    student_logits: Layers,
    *,
    beta: float = 1.0,
    loss_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    temperature: float = 1.0,
    reduction: str = "sum",
    divergence: str = "kl",
    support: str = "error",
    row_sums: str = "one",
    check: bool = True,
) -> Tensor:
    """``beta * D(supervision || softmax(student_logits / T))``, teacher first (LOSS-1..18).

    Per map: the divergence of a row, then the mean over the rows that count in the whole batch. A row counts
    where ``loss_mask`` is True and the supervision has mass. A map with no such row contributes exactly 0.

    The gradient is that of ``shd_loss_gradient``: exactly 0 on rows that do not count, NaN or not.
    None reaches the supervision. The result is always attached to the student's graph.

    Args:
        supervision: A~ ``(B, H_s, L, S)``, or a list with one tensor per layer; already at this temperature.
        student_logits: before softmax, same shape(s); -inf marks a masked key.
        beta: weight of the term, at least 0.
        loss_mask: boolean ``(B, L)``, True = the row counts; apart from the attention mask.
        attn_mask: boolean, broadcastable to ``(B, H_s, L, S)``, True = may attend.
        temperature: T_a of both maps; the supervision is softened before mixing, the student's map here.
        reduction: ``"sum"`` over layers and heads (the source), or ``"mean"`` over both.
        divergence: ``"kl"`` (the source), ``"reverse_kl"``, ``"js"`` or ``"mse"`` (summed over keys).
        support: what teacher mass is where the student may not attend: an ``"error"``, or left out of the
            supervision (``"intersect"``, see ``intersect_support``).
        row_sums: ``"one"``, or ``"at_most_one"`` for maps with attention sinks: a row weighs its mass.
        check: validate the values (finite, distributions, support), which costs a device sync.
            Without it a violation ends in an infinite or NaN loss instead of an error, and
            ``torch.compile(fullgraph=True)`` works.

    Returns:
        The loss ``()``, in nats times beta; float64 if an argument is, else float32.

    Raises:
        ShdError: ``support-mismatch`` (the teacher has mass where the student may not attend: LOSS-6; or, with
            ``reverse_kl``, none where it may: LOSS-13), ``argument-shape``, ``argument-value``,
            ``argument-dtype``, ``not-finite``, ``not-a-distribution``.

    Source: Eq. 11. Decisions: D-13 to D-17.
    """
    options = LossOptions(beta, loss_mask, attn_mask, temperature, reduction, divergence, support, row_sums, check)
    terms = []
    for rows in layer_rows(supervision, student_logits, options):
        by_row = rows.mass * row_divergence(rows.p, rows.log_q, rows.may_attend, divergence)
        terms.append((rows.weight * by_row.masked_fill(rows.violated, math.inf).sum((0, 2))[:, None]).sum())
    return torch.stack([term.to(terms[0].device) for term in terms]).sum()


def layer_rows(supervision: Layers, student_logits: Layers, options: LossOptions) -> list[LayerRows]:
    """Check the maps of the loss and make each layer's rows; see ``shd_loss``."""
    teachers, students = match_layers(supervision=supervision, student_logits=student_logits)
    layers = []
    for layer, (source, logits) in enumerate(zip(teachers, students, strict=True)):
        teacher, masked, mask = check_layer(
            source,
            logits,
            loss_mask=options.loss_mask,
            attn_mask=options.attn_mask,
            row_sums=options.row_sums,
            check=options.check,
            layer=layer,
        )
        may_attend = ~torch.isneginf(masked)
        if options.support == "intersect":
            teacher = intersect(teacher, may_attend).supervision
        counted = teacher.sum(-1) != 0  # (B, H_s, L)
        if mask is not None:
            counted = counted & mask[:, None, :]
        violations = find_violations(teacher, may_attend, counted, options.divergence)
        if options.check:
            check_support(teacher, violations, layer)
        rows = _safe_rows(teacher, masked, may_attend, counted, violations.any(-1), options)
        layers.append(rows._replace(weight=options.beta * rows.weight))
    if options.reduction == "mean":
        num_maps = sum(student.shape[1] for student in students)
        layers = [rows._replace(weight=rows.weight / num_maps) for rows in layers]
    return layers


def _safe_rows(
    teacher: Tensor, logits: Tensor, may_attend: Tensor, counted: Tensor, violated: Tensor, options: LossOptions
) -> LayerRows:
    """Rows in which nothing is infinite; what does not count is cut off before any function could give NaN."""
    number = counted.sum((0, 2)).clamp(min=1).to(teacher.dtype)
    usable_rows = counted & ~violated
    usable = usable_rows[..., None]
    teacher = teacher.masked_fill(~usable, 0.0)
    mass = usable_rows.to(teacher.dtype)
    if options.row_sums == "at_most_one":
        mass = teacher.sum(-1)
        teacher = teacher / mass.masked_fill(~usable_rows, 1.0)[..., None]
    # A row that plays no part becomes one of zeros: its softmax is finite, and its gradient is cut off.
    may_attend = may_attend & usable
    blocked = ~may_attend & usable
    safe = logits.masked_fill(~may_attend, 0.0)
    exact = safe.detach()
    tempered = temper(exact, exact.masked_fill(blocked, -math.inf), options.temperature)
    # What overflows is held at the lowest number; the zero that is added carries the gradient all the same (LOSS-12).
    tempered = tempered.clamp_(min=torch.finfo(tempered.dtype).min).masked_fill_(blocked, -math.inf)
    carrier = safe - exact if options.temperature == 1.0 else (safe - exact) / options.temperature
    log_q = (tempered + carrier).log_softmax(-1).masked_fill(~may_attend, 0.0)
    return LayerRows(teacher, mass, log_q, may_attend, violated, number.reciprocal()[:, None])


def match_layers(**arguments: Any) -> tuple[list[Any], ...]:
    """The layers of several arguments: one of each, or lists of one length, at least 1 (LOSS-3)."""
    layers = tuple(as_layers(value) for value in arguments.values())
    counts = {len(sequence) for sequence in layers}
    forms = {isinstance(value, Sequence) for value in arguments.values()}
    if len(counts) > 1 or len(forms) > 1 or 0 in counts:
        counted = ", ".join(
            f"{name}: {f'a list of {len(value)}' if isinstance(value, Sequence) else 'one'}"
            for name, value in arguments.items()
        )
        rule = f"{' and '.join(arguments)} must be one each, or lists of one length, at least 1"
        raise ShdError("argument-shape", f"{rule}; got {counted}", "LOSS-3")
    return layers


def as_layers(value: Any) -> list[Any]:
    """One tensor or supervision is one layer; a sequence holds one per layer (LOSS-3)."""
    return list(value) if isinstance(value, Sequence) else [value]


Gradients: TypeAlias = Tensor | list[Tensor]


@torch.no_grad()
def shd_loss_gradient(supervision: Layers, student_logits: Layers, **keywords: Any) -> Gradients:
    """The gradient of ``shd_loss`` with respect to the student's logits as given (GRAD-1..3, GRAD-9).

    Keywords are those of ``shd_loss``, errors those of ``shd_ref.shd_loss_gradient``.

    Returns:
        ``dz``, shaped as the logits: a tensor for a tensor, a list for a list; float64 or float32. Exactly 0 on
        rows that do not count and on masked keys.
    """
    options = LossOptions(**keywords)
    gradients = []
    for rows in layer_rows(supervision, student_logits, options):
        factor = rows.weight * rows.mass / options.temperature  # (B, H_s, L)
        slope = row_gradient(rows.p, rows.log_q, rows.may_attend, options.divergence)
        gradients.append(factor[..., None] * slope)
    return gradients[0] if isinstance(student_logits, Tensor) else gradients


@torch.no_grad()
@without_autocast
def shd_loss_gradient_qk(
    supervision: Layers, queries: Layers, keys: Layers, *, scale: float, **keywords: Any
) -> tuple[Gradients, Gradients]:
    """The gradients of ``shd_loss`` where the logits are ``scale * q k^T`` (GRAD-4..9).

    Keywords are those of ``shd_loss``, errors those of ``shd_ref.shd_loss_gradient_qk``.

    Returns:
        ``dq`` and ``dk``, shaped as queries and keys: tensors for tensors, lists for lists; float64 or float32.
    """
    scale = check_number("scale", scale, "GRAD-8")
    check = keywords.get("check", True)
    teachers, all_queries, all_keys = match_layers(supervision=supervision, queries=queries, keys=keys)
    pairs = [_check_qk(q, k, layer, check) for layer, (q, k) in enumerate(zip(all_queries, all_keys, strict=True))]
    logits = [scale * torch.einsum("bgrld,bgsd->bgrls", q, k).flatten(1, 2) for q, k in pairs]
    gradients = as_layers(shd_loss_gradient(teachers, logits, **keywords))
    dq, dk = [], []
    for (q, k), dz in zip(pairs, gradients, strict=True):
        by_group = scale * dz.to(q.dtype).reshape(*q.shape[:3], *dz.shape[2:])  # (B, H_kv, H_s / H_kv, L, S)
        dq.append(torch.einsum("bgrls,bgsd->bgrld", by_group, k).flatten(1, 2))
        dk.append(torch.einsum("bgrls,bgrld->bgsd", by_group, q))
    return dq[0] if isinstance(queries, Tensor) else dq, dk[0] if isinstance(keys, Tensor) else dk


def _check_qk(queries: Tensor, keys: Tensor, layer: int, check: bool) -> tuple[Tensor, Tensor]:
    """Queries ``(B, H_kv, H_s / H_kv, L, d)`` by the key head that they read, and keys, in one dtype (GRAD-5)."""
    check_real(queries, "queries", check=check, ndim=4, layer=layer)
    check_real(keys, "keys", check=check, ndim=4, layer=layer)
    check_query_key(queries, keys, f"queries and keys of layer {layer}")
    batch, _, rows, width = queries.shape
    dtype = compute_dtype(queries, keys)
    return queries.to(dtype).reshape(batch, keys.shape[1], -1, rows, width), keys.to(dtype)
