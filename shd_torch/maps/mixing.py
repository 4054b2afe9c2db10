"""Mixing (spec chapter MIX): every strategy returns a mixing matrix; everything after it is shared.

``mixing`` C is ``(B, H_s, H_t)``; its entries are at least 0 and sum to one over the teacher's heads. The
student's maps are ``A~_h = sum_t C[h, t] A_t``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shd_ref.errors import ShdError
from shd_ref.merging.plans import MergePlan, check_count, check_plan, merge_plan, plan_groups
from shd_ref.tolerances import row_sum_tolerance
from shd_torch.checks import (
    check_mask,
    check_option,
    check_probs,
    check_real,
    check_shapes,
    check_temperature,
    check_weights,
    compute_dtype,
    map_dtype,
    without_autocast,
)
from shd_torch.maps.alpha import ALPHA_RULES, AlphaSolution, constant_alphas, solve_pairs
from shd_torch.maps.attention import soften_probs

STRATEGIES: tuple[str, ...] = ("shd", "constant", "hard", "mean")
ALPHA_FROM: tuple[str, ...] = ("teacher", "softened")


@dataclass(frozen=True, eq=False)
class SqueezeReport:
    """How heads were merged; float64 if an argument was, else float32 (MIX-9).

    Attributes:
        mixing: C ``(B, H_s, H_t)``.
        alphas: one tensor ``(B, num_pairs)`` per round, clipped; empty for the strategy ``mean``, which has no
            pairwise weights.
        residual: ``(B,)``, relative error of the merged attention output at temperature 1 over counted rows:
            ``|| sum_h A~_h X'_h - sum_t A_t X_t ||_F / || sum_t A_t X_t ||_F``.
        num_clipped: how many alphas lay outside [0, 1] before clipping; ``()`` on the device, to avoid a device sync
            if it is not read (``int(...)`` syncs).
        num_degenerate: how many pairs had no preferred alpha; ``()`` on the device.
        plan: the rounds that were run.
    """

    mixing: Tensor
    alphas: tuple[Tensor, ...]
    residual: Tensor
    num_clipped: Tensor
    num_degenerate: Tensor
    plan: MergePlan


@dataclass(frozen=True, eq=False)
class SqueezeResult(SqueezeReport):
    """The result of ``squeeze_heads``: the report of the merging, and the merged maps.

    Attributes:
        probs: ``(B, H_s, L, S)``, at the requested temperature, in the dtype of the teacher's.
    """

    probs: Tensor


def report_squeeze(
    mixing: Tensor, solutions: Sequence[AlphaSolution], residual: Tensor, plan: MergePlan
) -> dict[str, Any]:
    """The fields of a ``SqueezeReport``."""
    none = torch.zeros((), dtype=torch.int64, device=mixing.device)
    return {
        "mixing": mixing,
        "alphas": tuple(solution.clipped.to(residual.dtype) for solution in solutions),
        "residual": residual,
        "num_clipped": sum((((s.raw < 0) | (s.raw > 1)).sum() for s in solutions), none),
        "num_degenerate": sum((s.degenerate.sum() for s in solutions), none),
        "plan": plan,
    }


@torch.no_grad()
@without_autocast
def squeeze_heads(
    teacher_probs: Tensor,
    value_outputs: Tensor,
    num_student_heads: int,
    *,
    plan: str | Iterable[Iterable[Sequence[int]]] | None = None,
    strategy: str = "shd",
    query_mask: Tensor | None = None,
    temperature: float = 1.0,
    alpha_rule: str = "least_squares",
    alpha_from: str = "teacher",
    row_sums: str = "one",
    check: bool = True,
) -> SqueezeResult:
    """Merge a teacher's maps into as many as the student has heads (MIX-1..17); runs without gradient.

    Arguments and errors are those of ``shd_ref.squeeze_heads``.

    Source: Algorithm 1, Eq. 5-10. Deviations: D-1, D-2.
    """
    check_strategy(strategy, alpha_rule)
    check_option("alpha_from", alpha_from, ALPHA_FROM, "TEMP-3")
    temperature = check_temperature(temperature)
    _check_maps(teacher_probs, value_outputs, query_mask, row_sums, check=check)
    batch, num_heads = teacher_probs.shape[:2]
    rounds = merge_plan(num_heads, num_student_heads, "progressive" if plan is None else plan)
    groups = plan_groups(rounds, num_heads)

    dtype = compute_dtype(teacher_probs, value_outputs)
    probs, outputs = teacher_probs.to(dtype), value_outputs.to(dtype)
    softened = soften_probs(probs, temperature, row_sums)
    solved_on = softened if alpha_from == "softened" else probs
    solutions: list[AlphaSolution] = []
    if strategy == "mean":
        mixing = probs.new_full((batch, num_student_heads, num_heads), 1.0 / num_heads)
    else:
        solutions = (
            constant_alphas(rounds, probs)
            if strategy == "constant"
            else _solve_rounds(solved_on, outputs, rounds, strategy, query_mask, alpha_rule)
        )
        identity = torch.eye(num_heads, dtype=dtype, device=probs.device).expand(batch, -1, -1)
        mixing = compose_rounds([s.clipped for s in solutions], rounds, identity)
    merged = _mix(softened, mixing)
    # The residual is defined on the maps at temperature 1, also where softened ones supervise.
    residual = _residual(probs, outputs, merged if temperature == 1.0 else _mix(probs, mixing), groups, query_mask)
    report = report_squeeze(mixing, solutions, residual, rounds)
    return SqueezeResult(probs=merged.to(map_dtype(teacher_probs)), **report)


@without_autocast
def mix_heads(teacher_probs: Tensor, mixing: Tensor, *, check: bool = True) -> Tensor:
    """``A~_h = sum_t C[h, t] A_t`` (MIX-3).

    Arguments and errors are those of ``shd_ref.mix_heads``.

    Returns:
        ``(B, H_s, L, S)`` in the dtype of ``teacher_probs``.

    Source: Eq. 5, for any number of heads at once.
    """
    check_probs(teacher_probs, "teacher_probs", check=check, row_sums="at_most_one")
    check_real(mixing, "mixing", check=check)
    fit = mixing.ndim == 3 and mixing.shape[::2] == teacher_probs.shape[:2]
    rule = "maps (B, H_t, L, S) must have a mixing (B, H_s, H_t)"
    check_shapes(fit, rule, teacher_probs, mixing, spec_id="MIX-3")
    dtype = compute_dtype(teacher_probs, mixing)
    weights = mixing.to(dtype)
    if check:
        check_convex(weights, row_sum_tolerance(str(mixing.dtype).removeprefix("torch.")))
    return _mix(teacher_probs.to(dtype), weights).to(map_dtype(teacher_probs))


def check_strategy(strategy: str, alpha_rule: str) -> None:
    check_option("strategy", strategy, STRATEGIES, "MIX-2")
    check_option("alpha_rule", alpha_rule, ALPHA_RULES, "ALPHA-4")


def _check_maps(
    teacher_probs: Tensor, value_outputs: Tensor, query_mask: Tensor | None, row_sums: str, *, check: bool
) -> None:
    """Maps ``(B, H_t, L, S)``, value outputs ``(B, H_t, S, D)`` and query mask ``(B, L)`` must fit (MIX-1)."""
    check_real(value_outputs, "value_outputs", check=check, ndim=4)
    check_real(teacher_probs, "teacher_probs", check=False, ndim=4)
    batch, num_heads, rows, keys = teacher_probs.shape
    if value_outputs.shape[:3] != (batch, num_heads, keys):
        rule = f"value_outputs must be (B, H_t, S, D) with B={batch}, H_t={num_heads}, S={keys}"
        raise ShdError("argument-shape", f"{rule}; got {tuple(value_outputs.shape)}", "MIX-1")
    if query_mask is not None:
        check_mask(query_mask, "query_mask", (batch, rows))
    check_probs(teacher_probs, "teacher_probs", check=check, query_mask=query_mask, row_sums=row_sums)


def _mix(probs: Tensor, mixing: Tensor) -> Tensor:
    return torch.einsum("bht,btls->bhls", mixing, probs)


def check_convex(weights: Tensor, tolerance: float) -> None:
    """Mixing weights must be convex over the teacher's heads (MIX-3); waits for the device."""
    sums = weights.sum(dim=2)
    if ((weights < 0).any() | ((sums - 1).abs() > tolerance).any()).item():
        rule = f"mixing must be at least 0 and sum to 1 over the teacher's heads within {tolerance:g}"
        got = f"{weights.min().item():.6g} and sums from {sums.min().item():.6g} to {sums.max().item():.6g}"
        raise ShdError("mixing-invalid", f"{rule}; got a minimum of {got}", "MIX-3")


def compose_mixing(
    alphas: Sequence[Tensor], plan: MergePlan, num_teacher_heads: int, *, check: bool = True
) -> Tensor:
    """The mixing matrix of a plan and the alphas of its rounds (MIX-13).

    Arguments and errors are those of ``shd_ref.compose_mixing``.

    Returns:
        C ``(B, H_s, H_t)``, float64 or float32.
    """
    check_count("num_teacher_heads", num_teacher_heads)
    rounds = check_plan(plan, num_teacher_heads, num_teacher_heads - sum(len(one_round) for one_round in plan))
    for alpha in alphas:
        check_real(alpha, "alphas", check=check)
        if check:
            check_weights(alpha, "alphas", "MIX-13")
    shapes = [tuple(alpha.shape) for alpha in alphas]
    if not shapes or shapes != [(*shapes[0][:1], len(one_round)) for one_round in rounds]:
        rule = f"alphas must hold one tensor (B, num_pairs) for each of {len(rounds)} rounds, and at least one"
        raise ShdError("argument-shape", f"{rule}; got {shapes}", "MIX-13")
    identity = torch.eye(num_teacher_heads, dtype=compute_dtype(*alphas), device=alphas[0].device)
    return compose_rounds(alphas, rounds, identity.expand(shapes[0][0], -1, -1))


def compose_rounds(alphas: Sequence[Tensor], rounds: MergePlan, mixing: Tensor) -> Tensor:
    """``compose_mixing`` from the identity ``(B, H_t, H_t)``, a round at once."""
    for alpha, one_round in zip(alphas, rounds, strict=True):
        mixing = _merge_round(mixing, one_round, alpha.to(mixing.dtype)[..., None])
    return mixing


def _merge_round(pool: Tensor, one_round: Sequence[tuple[int, int]], weight: Tensor | None) -> Tensor:
    """A pool ``(B, H, ...)`` after a round: merged heads first, then the untouched (PLAN-4); None sums them."""
    first, second = [p for p, _ in one_round], [q for _, q in one_round]
    used = {*first, *second}
    untouched = [head for head in range(pool.shape[1]) if head not in used]
    a, b = pool[:, first], pool[:, second]
    return torch.cat((a + b if weight is None else torch.lerp(b, a, weight), pool[:, untouched]), dim=1)


def _solve_rounds(
    probs: Tensor, outputs: Tensor, rounds: MergePlan, strategy: str, query_mask: Tensor | None, alpha_rule: str
) -> list[AlphaSolution]:
    solutions = []
    for number, one_round in enumerate(rounds):
        first, second = [p for p, _ in one_round], [q for _, q in one_round]
        pairs = [side[:, heads] for side in (probs, outputs) for heads in (first, second)]
        solution = solve_pairs(*pairs, query_mask=query_mask, rule=alpha_rule)
        if strategy == "hard":
            solution = solution.hardened()
        solutions.append(solution)
        if number + 1 < len(rounds):  # only alphas of a later round read the pool
            probs = _merge_round(probs, one_round, solution.clipped[..., None, None])
            outputs = _merge_round(outputs, one_round, None)
    return solutions


def _residual(
    probs: Tensor, outputs: Tensor, merged: Tensor, groups: Sequence[Sequence[int]], query_mask: Tensor | None
) -> Tensor:
    """Error of the merged output (MIX-8) as ``sum_t (A~_h(t) - A_t) X_t``: exactly 0 where nothing changed."""
    student_head = [next(h for h, group in enumerate(groups) if t in group) for t in range(probs.shape[1])]
    target = torch.einsum("btls,btsd->bld", probs, outputs)
    error = torch.einsum("btls,btsd->bld", merged[:, student_head] - probs, outputs)
    return relative_error(error, target, query_mask)


def relative_error(error: Tensor, target: Tensor, query_mask: Tensor | None) -> Tensor:
    """The Frobenius norm of an error over that of its target ``(B, L, D)``, per sample over counted rows."""
    if query_mask is not None:
        target, error = (t.masked_fill(~query_mask[:, :, None], 0.0) for t in (target, error))
    error_norm, norm = (torch.linalg.vector_norm(t, dim=(1, 2)) for t in (error, target))
    # 0 / 0 is no error; anything else over 0 stays infinite.
    return torch.where((norm == 0) & (error_norm == 0), error_norm, error_norm / norm)
