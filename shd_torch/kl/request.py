"""One layer of the loss as every backend reads it: checked, on one device, with the weight of each row."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.integers import check_number
from shd_torch.checks import (
    check_mask,
    check_option,
    check_query_key,
    check_real,
    check_shape,
    check_temperature,
    compute_dtype,
)
from shd_torch.maps.attention import temper
from shd_torch.maps.loss import REDUCTIONS, SUPPORTS
from shd_torch.maps.support import rescale_rows, support_mismatch
from shd_torch.supervision.mask import AttentionRule, RuleKeywords
from shd_torch.supervision.supervision import Supervision

VALUES: tuple[str, ...] = ("exact", "surrogate")
PRODUCT_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class KlKeywords(RuleKeywords, total=False):
    """The keywords of ``attention_kl``, which ``explain_backend`` shares."""

    loss_mask: Tensor | None
    temperature: float
    beta: float
    reduction: str
    support: str
    value: str
    backend: str
    product_dtype: torch.dtype | None
    check: bool


_OF_THE_RULE = tuple(RuleKeywords.__annotations__)
_KEYWORDS = tuple(KlKeywords.__annotations__)


@dataclass(frozen=True, eq=False)
class KlOptions:
    """The keywords of ``attention_kl`` that are not the student's ``AttentionRule``; documented there."""

    loss_mask: Tensor | None = None
    temperature: float = 1.0
    beta: float = 1.0
    reduction: str = "sum"
    support: str = "error"
    value: str = "exact"
    backend: str = "auto"
    product_dtype: torch.dtype | None = None
    check: bool = True

    def __post_init__(self) -> None:
        check_option("reduction", self.reduction, REDUCTIONS, "LOSS-5")
        check_option("support", self.support, SUPPORTS, "LOSS-14")
        check_option("value", self.value, VALUES, "LOSS-1")
        object.__setattr__(self, "temperature", check_temperature(self.temperature))
        object.__setattr__(self, "beta", check_number("beta", self.beta, "LOSS-2", least=0))
        dtype = self.product_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in PRODUCT_DTYPES):
            names = ", ".join(map(str, PRODUCT_DTYPES))
            raise ShdError("argument-dtype", f"product_dtype must be one of {names}, or None; got {dtype!r}")


def read_keywords(keywords: KlKeywords) -> tuple[AttentionRule, KlOptions]:
    """The student's rule and the options of the loss, from the keywords of ``attention_kl``."""
    fields: dict[str, Any] = dict(keywords)
    unknown = [name for name in fields if name not in _KEYWORDS]
    if unknown:
        raise ShdError("argument-value", f"keywords must be of {', '.join(_KEYWORDS)}; got {', '.join(unknown)}")
    rule = AttentionRule(**{name: value for name, value in fields.items() if name in _OF_THE_RULE})
    return rule, KlOptions(**{name: value for name, value in fields.items() if name not in _OF_THE_RULE})


@dataclass(frozen=True, eq=False)
class KlRequest:
    """One layer's work."""

    queries: Tensor  # the student's (B, H_s, L, d), detached; zero in rows that do not count
    keys: Tensor  # (B, H_kv, S, d), detached
    supervision: Supervision  # on the same device
    rule: AttentionRule  # how the student makes its logits, and who may attend; fits (B, H_s, L, S)
    temperature: float  # T_a of both maps
    weights: Tensor  # (B, H_s, L), beta over the number of counted rows (and of maps); 0 where a row does not count
    mass: Tensor  # (B, H_s, L), what the supervision's rows sum to
    support: str  # "error", or "intersect"
    wants_value: bool  # whether the divergence itself is wanted
    wants_gradient: bool  # whether the gradients of queries and keys are; at least one of the two is
    wants_bias_gradient: bool  # whether the gradient of an added mask is
    product_dtype: torch.dtype | None  # of fused attention calls; None leaves it to the backend

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums: float64 if an argument is, else float32."""
        return self.weights.dtype

    @property
    def scale(self) -> float:
        return self.rule.scale_for(self.queries.shape[3])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.supervision.shape

    def key_range(self, rows: slice) -> slice:
        """The keys that student or teacher may attend to in these rows."""
        every = slice(0, self.shape[3])
        student, teacher = self.rule.key_range(rows, self.shape[3]), self.supervision.key_range(rows)
        if self.support == "intersect":
            return every  # the mass to drop may lie on any key
        if teacher == every:
            return student  # the teacher says nothing of its keys; its mass is where the student's is (LOSS-6)
        return slice(min(student.start, teacher.start), max(student.stop, teacher.stop))

    @property
    def mass_term(self) -> Tensor:
        """The part of the value due to rows with less mass than one: ``- sum w rho log rho`` (LOSS-11)."""
        if self.supervision.row_sums == "one":
            return self.weights.new_zeros(())
        return -(self.weights * torch.xlogy(self.mass, self.mass)).sum()

    def log_probs(self, samples: slice, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """A tile of the student's ``log Q``, and the derivative of its soft cap if it has one.

        -inf where the student may not attend; anything finite in a row without keys.
        """
        queries = self.queries[samples, :, rows].to(self.dtype)
        tile_keys = self.keys[samples, :, keys].to(self.dtype)
        logits, slope = self.rule.narrow(samples).tile_logits(queries, tile_keys, rows, keys)
        if self.temperature != 1.0:
            logits = temper(logits, logits, self.temperature)
        return torch.log_softmax(logits, -1, out=logits), slope

    def teacher_probs(self, tile: Supervision, samples: slice, rows: slice, keys: slice) -> Tensor:
        """A tile of the supervision; with ``support="intersect"`` without what the student may not attend to."""
        probs = tile.probs(rows, keys, temperature=self.temperature).to(self.dtype)
        if self.support != "intersect":
            return probs
        allowed = self.rule.narrow(samples).allowed(rows, keys, probs.device)
        if allowed is None:
            return probs
        allowed_probs = probs.masked_fill(~allowed, 0.0)
        return rescale_rows(allowed_probs, self.mass[samples, :, rows], probs.sum(-1) - allowed_probs.sum(-1))


def make_request(
    queries: Tensor,
    keys: Tensor,
    supervision: Supervision,
    rule: AttentionRule,
    options: KlOptions,
    *,
    beta: float,
    layer: int,
) -> tuple[KlRequest, Tensor]:
    """Check one layer's arguments and find the weight of each of its rows; ``beta`` is the weight of each map.

    Returns:
        The request, and ``()`` that is infinite where a counted row of the student may attend to nothing, else 0.
    """
    check_real(queries, "student_q", check=False, ndim=4, layer=layer)
    check_real(keys, "student_k", check=options.check, ndim=4, layer=layer)
    check_query_key(queries, keys, f"student_q and student_k of layer {layer}")
    shape = (*queries.shape[:3], keys.shape[2])
    check_shape(supervision, f"supervision of layer {layer}, as its student_q and student_k,", shape, "LOSS-3")
    supervision.check_temperature(options.temperature)
    supervision, loss_mask = _place(supervision, queries, options, layer)
    rule = rule.fit(queries, keys)
    if options.check and rule.attn_mask is not None and rule.attn_mask.dtype != torch.bool:
        check_real(rule.attn_mask.detach(), "attn_mask", check=True, allow_minus_inf=True, layer=layer)
    wants_bias_gradient = torch.is_grad_enabled() and rule.attn_mask is not None and rule.attn_mask.requires_grad
    wants_gradient = wants_bias_gradient or (
        torch.is_grad_enabled() and (queries.requires_grad or keys.requires_grad)
    )
    dtype = torch.promote_types(compute_dtype(queries, keys), supervision.dtype)
    mass = supervision.mass().to(dtype)
    counted = mass != 0 if loss_mask is None else (mass != 0) & loss_mask[:, None, :]
    request = KlRequest(
        queries=queries.detach(),
        keys=keys.detach(),
        supervision=supervision,
        rule=rule,
        temperature=float(options.temperature),
        weights=counted.to(dtype),
        mass=mass,
        support=options.support,
        wants_value=options.value == "exact" or not wants_gradient,
        wants_gradient=wants_gradient,
        wants_bias_gradient=wants_bias_gradient,
        product_dtype=options.product_dtype,
    )
    if options.support == "intersect":
        counted = counted & _keeps_mass(request)
    elif options.check:
        check_support(request, layer)
    return _weigh(request, counted, beta)


def _place(
    supervision: Supervision, queries: Tensor, options: KlOptions, layer: int
) -> tuple[Supervision, Tensor | None]:
    """Supervision and loss mask on the student's device, checked if ``check``, without rows that do not count."""
    device, loss_mask = queries.device, options.loss_mask
    supervision = supervision if supervision.device == device else supervision.to(device)
    if loss_mask is not None:
        check_mask(loss_mask, "loss_mask", (queries.shape[0], queries.shape[2]))
        loss_mask = loss_mask.to(device)
    if options.check:
        counted = queries if loss_mask is None else queries.masked_fill(~loss_mask[:, None, :, None], 0)
        check_real(counted, "student_q", check=True, layer=layer)
        supervision.check(loss_mask, layer)
    return supervision if loss_mask is None else supervision.drop_rows(loss_mask), loss_mask


def _weigh(request: KlRequest, counted: Tensor, beta: float) -> tuple[KlRequest, Tensor]:
    """The request with its rows weighed, its queries cleared where they do not count, and the penalty."""
    _, _, rows, keys = request.shape
    number = counted.sum((0, 2)).clamp(min=1).to(request.dtype)
    live = request.rule.live_rows(rows, keys, counted.device)
    penalty = torch.zeros((), dtype=request.dtype, device=counted.device)
    if live is not None:
        lost = counted & ~live
        penalty = penalty.masked_fill(lost.any(), math.inf)
        counted = counted & ~lost
    weights = counted * (beta / number)[:, None]
    # A row that does not count may hold anything, NaN included: it must not reach a sum.
    queries = request.queries.masked_fill(~counted[..., None], 0.0)
    mass = request.mass.masked_fill(~counted, 0.0)
    return replace(request, queries=queries, weights=weights, mass=mass), penalty


def _keeps_mass(request: KlRequest) -> Tensor:
    """Rows ``(B, H_s, L)`` of which something is left where the student may attend (LOSS-15)."""
    has_mass = torch.zeros(request.shape[:3], dtype=torch.bool, device=request.mass.device)
    for tile, samples, rows in request.supervision.tiles():
        probs = request.teacher_probs(tile, samples, rows, slice(0, request.shape[3]))
        has_mass[samples, :, rows] = (probs != 0).any(-1)
    return has_mass


def check_support(request: KlRequest, layer: int) -> None:
    """No counted row may have mass where the student may not attend (LOSS-6); waits for the device if it might."""
    if not _may_differ(request):
        return
    everywhere = slice(0, request.shape[3])
    for tile, samples, rows in request.supervision.tiles():
        allowed = request.rule.narrow(samples).allowed(rows, everywhere, request.weights.device)
        if allowed is None:
            continue
        mass = tile.probs(rows, everywhere, temperature=request.temperature) != 0
        wrong = mass & ~allowed & (request.weights[samples, :, rows, None] != 0)
        if wrong.any():
            b, h, i, j = (int(index) for index in wrong.nonzero()[0])
            place = f"layer {layer}, sample {b + samples.start}, head {h}, row {i + rows.start}, key {j}"
            raise support_mismatch(f"it has mass at {place}")


def _may_differ(request: KlRequest) -> bool:
    student, teacher = request.rule, getattr(request.supervision, "rule", None)
    if student.attn_mask is not None or not isinstance(teacher, AttentionRule):
        return student.attn_mask is not None or student.is_causal or student.window is not None
    return (student.is_causal and not teacher.is_causal) or (
        student.window is not None and (teacher.window is None or teacher.window > student.window)
    )
