"""What ``squeeze_heads`` answers, judged link by link (NUM-6), so that one flat alpha does not condemn the rest.

Each round's alphas are judged against the pool that the implementation's own earlier alphas made, ``mixing`` against
the composition of its own alphas, ``probs`` and ``residual`` against its own ``mixing``. Plain float64 NumPy:
nothing here is shared with the reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance.compare import Difference, abbreviate, as_numbers, as_plain, compare_close
from shd_ref.conformance.specification import agreement
from shd_ref.conformance.variants import compute, next_pool, soften_maps
from shd_ref.tolerances import degenerate_threshold

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """Two heads of a pool: what a merge weight of theirs does. Every array ``(B, 1)``, or ``(B, L)`` per row."""

    best: Array  # before clipping; 1/2 where degenerate or not counted
    counted: NDArray[np.bool_]
    degenerate: NDArray[np.bool_]  # where every alpha is as good, among counted rows (ALPHA-6, ALPHA-9)
    flatness: Array  # ||M||^2 over ||A_p X||^2 + ||A_q X||^2, what ALPHA-6 compares
    m: Array  # (B, L, D), zero on rows that do not count
    n: Array  # (B, L, D), as m
    target: Array  # ||A_p X_p + A_q X_q||^2

    @classmethod
    def of(
        cls,
        p: Array,
        q: Array,
        x_p: Array,
        x_q: Array,
        mask: NDArray[np.bool_] | None,
        *,
        per_row: bool,
        printed: bool = False,
    ) -> Pair:
        """From maps ``(B, L, S)`` and value outputs ``(B, S, D)``; ``printed`` takes the misprinted N (ALPHA-4)."""
        counts = np.ones(p.shape[:2]) if mask is None else mask.astype(np.float64)
        both, weight = x_p + x_q, counts[..., None]
        m = (p - q) @ both * weight
        n = (q @ x_p - p @ x_q if printed else (q - p) @ x_p) * weight
        squares = (m * m, n * m, ((p @ both) ** 2 + (q @ both) ** 2) * weight, (p @ x_p + q @ x_q) ** 2 * weight)
        curvature, slope, scale, target = (_sum_rows(terms, per_row) for terms in squares)
        counted = counts > 0 if per_row else np.ones(curvature.shape, dtype=np.bool_)
        degenerate = curvature <= degenerate_threshold() * scale
        best = np.where(degenerate, 0.5, -slope / np.where(degenerate, 1.0, curvature))
        flatness = curvature / np.where(scale == 0.0, 1.0, scale)
        return cls(best, counted, degenerate & counted, flatness, m, n, target)

    @classmethod
    def of_inputs(cls, inputs: Mapping[str, Any]) -> Pair:
        """From the arguments of ``solve_alpha``."""
        names = ("probs_p", "probs_q", "value_outputs_p", "value_outputs_q")
        per_row, printed = inputs.get("alpha_per") == "row", inputs.get("rule") == "as_printed"
        p, q, x, y = (np.asarray(inputs[name], dtype=np.float64) for name in names)
        return cls.of(p, q, x, y, inputs.get("query_mask"), per_row=per_row, printed=printed)

    @property
    def clipped(self) -> Array:
        """The right alphas."""
        return np.clip(self.best, 0.0, 1.0)

    def squared_error(self, alpha: Array) -> Array:
        """E at these alphas, from the vectors themselves: expanded into squares it would cancel near 0."""
        return _sum_rows((alpha[..., None] * self.m + self.n) ** 2, per_row=alpha.shape[1] > 1)

    def error(self, alpha: Array) -> Array:
        """``e(alpha)`` of NUM-5: the root of E, relative to the attention output of the two heads."""
        return _relative(self.squared_error(alpha), self.target)


def check_alpha(pair: Pair, alpha: Array, dtype: str, *, flat: bool) -> Difference | None:
    """Alphas by value (NUM-4), or where the objective is ``flat`` by range and effect (NUM-5)."""
    difference = compare_close(pair.clipped, alpha, *agreement(dtype, "alpha"))
    if difference is None or not flat:
        return difference
    return check_effect(pair, pair.clipped, alpha, dtype)


def check_effect(pair: Pair, wanted: Array, alpha: Array, dtype: str) -> Difference | None:
    """Alphas in [0, 1] whose error exceeds that of ``wanted`` by no more than a residual may (NUM-5)."""
    if not bool(((alpha >= 0.0) & (alpha <= 1.0)).all()):
        return Difference("must lie in [0, 1]", abbreviate(wanted), abbreviate(alpha))
    atol, rtol = agreement(dtype, "residual")
    reached, possible = pair.error(alpha), pair.error(wanted)
    if bool((reached <= possible + atol + rtol * possible).all()):
        return None
    worst = tuple(int(i) for i in np.unravel_index(int((reached - possible).argmax()), reached.shape))
    return Difference(
        f"gives the relative error {reached[worst]:.6g} at index {list(worst)}; {possible[worst]:.6g} is possible",
        abbreviate(wanted),
        abbreviate(alpha),
    )


def check_chain(
    inputs: Mapping[str, Any], got: Mapping[str, Any], dtype: str, *, flat: bool = False
) -> tuple[str, Difference] | None:
    """The first output of ``squeeze_heads`` that does not follow from its inputs and its earlier outputs.

    ``flat`` alphas may be ill-conditioned and are judged by their effect.
    """
    maps, outputs = (np.asarray(inputs[name], dtype=np.float64) for name in ("teacher_probs", "value_outputs"))
    strategy, per_row = inputs.get("strategy", "shd"), inputs.get("alpha_per", "map") == "row"
    softened = soften_maps(maps, inputs.get("temperature", 1.0), inputs.get("row_sums", "one"))
    solved_on = softened if inputs.get("alpha_from", "teacher") == "softened" else maps
    mask = inputs.get("query_mask")
    batch, heads, rows, _ = maps.shape
    plan = as_plain(got["plan"])
    groups = compute("plan_groups", {"plan": plan, "num_teacher_heads": heads})["groups"]
    if len(groups) != inputs["num_student_heads"]:
        wanted_heads = f"{inputs['num_student_heads']} heads"
        return "plan", Difference("does not lead to the student's heads", wanted_heads, f"{len(groups)} heads")
    shape = (batch, len(groups), heads, *((rows,) if per_row else ()))
    difference = _check_shape(got["mixing"], shape)
    if difference:
        return "mixing", difference
    mixing = np.asarray(got["mixing"], dtype=np.float64)
    by_row = mixing if per_row else mixing[..., None]  # (B, H_s, H_t, 1 or L)

    if strategy == "mean":
        extra = _pairless(got)
        if extra:
            return extra
        expected = np.full(by_row.shape, 1.0 / heads)
    else:
        runner = _Rounds(solved_on, outputs, inputs, dtype, flat)
        difference = runner.run(plan, got["alphas"])
        if difference:
            return "alphas", difference
        miscounted = runner.count(got)
        if miscounted:
            return miscounted
        composed = np.stack([row for _, _, row in runner.pool], axis=1)  # (B, H_s, H_t, 1 or L)
        expected = np.broadcast_to(composed, by_row.shape)
    difference = compare_close(expected, by_row, *agreement(dtype, "alpha"))
    if difference:
        return "mixing", difference
    # (B, H_s, L or 1, H_t) against (B, L, H_t, S)
    mixed = (by_row.transpose(0, 1, 3, 2)[..., None] * softened.transpose(0, 2, 1, 3)[:, None]).sum(3)
    difference = _compare(mixed, got["probs"], dtype, "probs")
    if difference:
        return "probs", difference
    difference = _compare(_residual(maps, outputs, by_row, groups, mask), got["residual"], dtype, "residual")
    return ("residual", difference) if difference else None


def _pairless(got: Mapping[str, Any]) -> tuple[str, Difference] | None:
    """What a strategy without pairs has of them after all (MIX-11)."""
    for name, nothing in (("alphas", []), ("num_clipped", 0), ("num_degenerate", 0)):
        answer = as_plain(got[name])
        if answer != nothing:
            return name, Difference("must be empty where no pair has a weight", str(nothing), abbreviate(answer))
    return None


class _Rounds:
    """The plan, run with the implementation's own alphas on a pool of maps, value outputs and rows of C."""

    def __init__(self, maps: Array, outputs: Array, inputs: Mapping[str, Any], dtype: str, flat: bool) -> None:
        batch, heads, rows = maps.shape[:3]
        self.inputs, self.dtype, self.flat = inputs, dtype, flat
        self.per_row = inputs.get("alpha_per", "map") == "row"
        self.weights = (batch, rows if self.per_row else 1)
        units = (np.broadcast_to(unit[None, :, None], (batch, heads, self.weights[1])) for unit in np.eye(heads))
        self.pool = [(maps[:, t], outputs[:, t], unit) for t, unit in enumerate(units)]
        self.strategy = inputs.get("strategy", "shd")
        self.pairs: list[Pair] = []

    def run(self, plan: Any, alphas: Any) -> Difference | None:
        if not isinstance(alphas, list | tuple) or len(alphas) != len(plan):
            return Difference(f"must hold one array a round, {len(plan)} in all", str(len(plan)), abbreviate(alphas))
        for number, (one_round, answer) in enumerate(zip(plan, alphas, strict=True)):
            shape = (self.weights[0], len(one_round), *(self.weights[1:] if self.per_row else ()))
            difference = _check_shape(answer, shape, f"round {number} ")
            if difference:
                return difference
            merged = []
            for position, (p, q) in enumerate(one_round):
                alpha = np.asarray(answer, dtype=np.float64)[:, position].reshape(self.weights)
                difference = self._check_pair(p, q, alpha)
                if difference:
                    where = f"round {number}, pair {position} (heads {p} and {q} of the pool)"
                    return Difference(f"{where}: {difference.problem}", difference.expected, difference.got)
                (map_p, output_p, row_p), (map_q, output_q, row_q) = self.pool[p], self.pool[q]
                a, c = alpha[:, :, None], alpha[:, None, :]
                merged.append((a * map_p + (1 - a) * map_q, output_p + output_q, c * row_p + (1 - c) * row_q))
            self.pool = next_pool(self.pool, one_round, merged)
        return None

    def count(self, got: Mapping[str, Any]) -> tuple[str, Difference] | None:
        """``num_clipped`` and ``num_degenerate``, where no alpha or pair is too close to call (NUM-7)."""
        atol, _ = agreement(self.dtype, "alpha")
        threshold = degenerate_threshold()
        clipped = degenerate = 0
        for pair in self.pairs if self.strategy != "constant" else []:
            margin = np.minimum(np.abs(pair.best), np.abs(pair.best - 1.0))
            near = (pair.flatness > threshold / 100) & (pair.flatness < threshold * 100)
            if bool(near.any()) or bool((margin <= atol).any()):
                return None
            clipped += int(((pair.best < 0.0) | (pair.best > 1.0)).sum()) if self.strategy == "shd" else 0
            degenerate += int(pair.degenerate.sum())
        for name, expected in (("num_clipped", clipped), ("num_degenerate", degenerate)):
            if as_plain(got[name]) != expected:
                return name, Difference("is not the count of MIX-9", str(expected), abbreviate(as_plain(got[name])))
        return None

    def _check_pair(self, p: int, q: int, alpha: Array) -> Difference | None:
        (map_p, output_p, _), (map_q, output_q, _) = self.pool[p], self.pool[q]
        printed = self.inputs.get("alpha_rule", "least_squares") == "as_printed"
        mask = self.inputs.get("query_mask")
        pair = Pair.of(map_p, map_q, output_p, output_q, mask, per_row=self.per_row, printed=printed)
        self.pairs.append(pair)
        if self.strategy == "shd":
            return check_alpha(pair, alpha, self.dtype, flat=self.flat)
        if self.strategy == "constant":
            return compare_close(np.full_like(alpha, 0.5), alpha, 0.0, 0.0)
        # Where the better of the two is too close to call, either is right.
        close = np.abs(pair.best - 0.5) <= agreement(self.dtype, "alpha")[0]
        sure = close & ~(pair.degenerate | ~pair.counted) & ((alpha == 0.0) | (alpha == 1.0))
        return compare_close(np.where(sure, alpha, np.where(pair.best >= 0.5, 1.0, 0.0)), alpha, 0.0, 0.0)


def _residual(
    maps: Array, outputs: Array, mixing: Array, groups: Sequence[Sequence[int]], mask: NDArray[np.bool_] | None
) -> Array:
    """MIX-8 of this mixing, at temperature 1."""
    counts = np.ones((maps.shape[0], maps.shape[2])) if mask is None else mask.astype(np.float64)
    target = (maps @ outputs).sum(1)
    sums = np.stack([outputs[:, list(group)].sum(1) for group in groups], axis=1)
    mixed = (mixing.transpose(0, 1, 3, 2)[..., None] * maps.transpose(0, 2, 1, 3)[:, None]).sum(3)
    error, size = ((t**2 * counts[..., None]).sum((1, 2)) for t in ((mixed @ sums).sum(1) - target, target))
    return _relative(error, size)


def _relative(error: Array, size: Array) -> Array:
    """The root of a quotient of squares; 0 where both vanish, infinite where only the size does (MIX-8)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(size > 0, np.sqrt(error / size), np.where(error > 0, np.inf, 0.0))


def _sum_rows(terms: Array, per_row: bool) -> Array:
    """``(B, L, D)`` to ``(B, L)``, or over rows too to ``(B, 1)``."""
    total: Array = terms.sum(-1) if per_row else terms.sum((1, 2))[:, None]
    return total


def _compare(right: Array, answer: Any, dtype: str, quantity: str) -> Difference | None:
    difference = _check_shape(answer, right.shape)
    return difference or compare_close(right, np.asarray(answer, dtype=np.float64), *agreement(dtype, quantity))


def _check_shape(answer: Any, shape: tuple[int, ...], what: str = "") -> Difference | None:
    numbers = as_numbers(answer)
    if numbers is not None and numbers.shape == shape:
        return None
    actual = abbreviate(answer) if numbers is None else f"shape {list(numbers.shape)}"
    return Difference(f"{what}must be numbers of the shape {list(shape)}", f"shape {list(shape)}", actual)
