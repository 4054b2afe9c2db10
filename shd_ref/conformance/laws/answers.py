"""What every operation must answer: by plain formulas, link by link, or against the best of all answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np

from shd_ref.conformance.chain import Pair, check_alpha, check_chain
from shd_ref.conformance.compare import Difference, as_plain
from shd_ref.conformance.laws.law import Array, LawBrokenError, Trial, as_array, each, exactly, in_words, require
from shd_ref.conformance.specification import agreement
from shd_ref.conformance.variants import as_layers, compute, next_pool
from shd_ref.tolerances import degenerate_threshold

Inputs: TypeAlias = Mapping[str, Any]


def check_answer(trial: Trial, operation: str, inputs: Inputs, words: str = "") -> dict[str, Any]:
    """One call, and every output of it against what is right; the answer, for what a law asks besides."""
    answer = trial.call(operation, **inputs)
    words = words or f"with {in_words(inputs)}"
    if operation in _CHECKS:
        _CHECKS[operation](trial, inputs, answer, words)
        return answer
    for name, right in compute(operation, inputs).items():
        what = f"{name} of {operation} {words}"
        if not isinstance(right, np.ndarray):
            exactly(answer[name], right, what)
        elif name in ("value_outputs", "gram"):
            agree_relative(trial, answer[name], right, what)
        else:
            trial.agree(answer[name], right, "alpha" if name in ("alpha", "mixing") else "probs", what)
    return answer


def check_answers(trial: Trial, operation: str, calls: Iterable[Inputs]) -> None:
    """Every call that the implementation has the options for."""
    each(calls, lambda inputs: check_answer(trial, operation, inputs))


def agree_relative(trial: Trial, answer: Any, right: Array, what: str) -> None:
    """Sample by sample, relative to its largest entry."""
    numbers = as_array(answer, what)
    exactly(list(numbers.shape), list(right.shape), f"the shape of {what}")
    size = np.abs(right).max(tuple(range(1, right.ndim)), keepdims=True)
    size = np.where(size > 0, size, 1.0)
    trial.agree(numbers / size, right / size, "probs", f"{what}, over its largest entry,")


# --- the student's side -----------------------------------------------------------------------------------------


def _check_loss(trial: Trial, inputs: Inputs, answer: Inputs, words: str) -> None:
    trial.agree(answer["loss"], compute("shd_loss", inputs)["loss"], "loss", f"the loss {words}", times=2)


def _check_gradients(operation: str, trial: Trial, inputs: Inputs, answer: Inputs, words: str) -> None:
    for name, right in compute(operation, inputs).items():
        what = f"{name} {words}"
        if isinstance(right, list):
            is_list = isinstance(answer[name], list | tuple) and len(answer[name]) == len(right)
            require(is_list, what, f"a list of {len(right)}", answer[name])
        largest = max(1.0, *(float(np.abs(layer).max()) for layer in as_layers(right)))
        layers = answer[name] if isinstance(right, list) else [answer[name]]
        for layer, right_layer in zip(layers, as_layers(right), strict=True):
            trial.agree(layer, right_layer, "gradient", what, times=8 * largest)


def _check_indexer(operation: str, trial: Trial, inputs: Inputs, answer: Inputs, words: str) -> None:
    for name, right in compute(operation, inputs).items():
        if name == "target":
            trial.agree(answer[name], right, "probs", f"the target {words}")
            exactly(as_array(answer[name], name)[right == 0.0], 0.0, f"the target's masked keys {words},")
        else:
            size = max(1.0, float(np.abs(right).max()))
            quantity = "loss" if name == "loss" else "gradient"
            trial.agree(answer[name], right, quantity, f"{name} {words}", times=8 * size)


def _check_kept(operation: str, trial: Trial, inputs: Inputs, answer: Inputs, words: str) -> None:
    (name, maps), (_, dropped) = compute(operation, inputs).items()
    trial.agree(answer[name], maps, "probs", f"{name} {words}")
    numbers = as_array(answer[name], name)
    exactly(numbers[maps == 0.0], 0.0, f"{name} where nothing is left, {words},")
    exactly(numbers[dropped == 0.0], maps[dropped == 0.0], f"{name} of rows that lose nothing, {words},")
    trial.agree(answer["dropped"], dropped, "probs", f"dropped {words}")


# --- maps and merging -------------------------------------------------------------------------------------------


def _check_softmax(trial: Trial, inputs: Inputs, answer: Inputs, words: str) -> None:
    right = compute("softmax", inputs)["attn_probs"]
    trial.agree(answer["attn_probs"], right, "probs", f"softmax {words}")
    exactly(as_array(answer["attn_probs"], "softmax")[right == 0], 0.0, f"the masked keys of softmax {words}")


def _check_softened(trial: Trial, inputs: Inputs, answer: Inputs, words: str) -> None:
    """Row by row, relative to the row's mass where a sink takes the rest."""
    mass = inputs["attn_probs"].sum(-1, keepdims=True, dtype=np.float64)
    size = np.where(mass > 0, mass, 1.0) if inputs.get("row_sums") == "at_most_one" else 1.0
    numbers, right = as_array(answer["attn_probs"], "soften"), compute("soften", inputs)["attn_probs"]
    exactly(list(numbers.shape), list(right.shape), f"the shape of soften {words}")
    trial.agree(numbers / size, right / size, "probs", f"soften {words}")


def _check_alpha(trial: Trial, inputs: Inputs, answer: Inputs, words: str) -> None:
    right = Pair.of_inputs(inputs)
    shape = right.best.shape if inputs.get("alpha_per") == "row" else right.best.shape[:1]
    alpha = as_array(answer["alpha"], "alpha")
    exactly(list(alpha.shape), list(shape), f"the shape of alpha {words}")
    agree_alpha(trial, right, alpha, words)


def agree_alpha(trial: Trial, right: Pair, alpha: Array, words: str) -> None:
    """Compare the alphas of a pair with the best ones (NUM-4)."""
    difference = check_alpha(right, alpha.reshape(right.best.shape), trial.subject.dtype, flat=False)
    if difference:
        raise LawBrokenError(Difference(f"alpha {words}: {difference.problem}", difference.expected, difference.got))


# The sentences about each output of squeeze_heads, for the report of one that is wrong.
_LINKS = {
    "plan": ("PLAN-5", "PLAN-7", "MIX-9"),
    "alphas": ("ALPHA-2", "ALPHA-3", "MIX-4", "MIX-5", "MIX-11"),
    "mixing": ("MIX-6", "MIX-12", "MIX-13"),
    "probs": ("MIX-3", "TEMP-2", "TEMP-3", "TEMP-5"),
    "residual": ("MIX-8",),
    "num_clipped": ("MIX-9", "ALPHA-5"),
    "num_degenerate": ("MIX-9", "ALPHA-6"),
}


def _check_squeezed(trial: Trial, inputs: Inputs, answer: Inputs, words: str) -> None:
    counts = {"num_teacher_heads": inputs["teacher_probs"].shape[1], "num_student_heads": inputs["num_student_heads"]}
    rounds = compute("merge_plan", {**counts, "kind": inputs.get("plan", "progressive")})["plan"]
    exactly(answer["plan"], rounds, f"the plan {words}")
    failure = check_chain(inputs, answer, trial.subject.dtype)
    if failure:
        name, difference = failure
        problem = f"{name}: {difference.problem}; {words}"
        raise LawBrokenError(Difference(problem, difference.expected, difference.got), _LINKS[name])


# --- plans by matching ------------------------------------------------------------------------------------------


def check_rounds(plan: Any, heads: int, students: int) -> list[list[int]]:
    """The groups of a plan, after checking that it is one (PLAN-4, PLAN-6, PLAN-7)."""
    pool = [[head] for head in range(heads)]
    for one_round in plan:
        used = [head for pair in one_round for head in pair]
        fits = used and len(set(used)) == len(used) and all(0 <= head < len(pool) for head in used)
        require(bool(fits), f"a round on a pool of {len(pool)}", "distinct positions in the pool", one_round)
        pool = next_pool(pool, one_round, [pool[p] + pool[q] for p, q in one_round])
    require(len(pool) == students, f"the plan {heads} -> {students}", f"{students} heads", f"{len(pool)} heads")
    return pool


def _check_matched(trial: Trial, inputs: Inputs, answer: Inputs, words: str) -> None:
    """Each round is as good as the best of all sets of pairs, on the pool that the earlier rounds made."""
    plan, calibration, students = as_plain(answer["plan"]), inputs["calibration"], inputs["num_student_heads"]
    by, per = inputs.get("by", "residual"), inputs.get("alpha_per", "map")
    what = f"the matched plan by {by}, alpha per {per}, {words}:"
    heads = calibration[0][0].shape[1]
    check_rounds(plan, heads, students)
    pools = [
        [tuple(array[:, t].astype(np.float64) for array in item[:2]) for t in range(heads)] for item in calibration
    ]
    masks = [item[2] if len(item) == 3 else None for item in calibration]
    for number, one_round in enumerate(plan):
        count = min(heads // 2, heads - students)
        exactly(len(one_round), count, f"{what} the pairs of round {number}")
        exactly(one_round, sorted(sorted(pair) for pair in one_round), f"{what} the order of round {number}")
        scores: dict[tuple[int, int], float] = {}
        merges: dict[tuple[int, int], list[Any]] = {}
        for p, q in combinations(range(heads), 2):
            scores[p, q], merges[p, q] = 0.0, []
            for pool, mask in zip(pools, masks, strict=True):
                (map_p, output_p), (map_q, output_q) = pool[p], pool[q]
                pair = Pair.of(map_p, map_q, output_p, output_q, mask, per_row=per == "row")
                a = pair.clipped
                distance = ((map_p - map_q) ** 2 * (1.0 if mask is None else mask[:, :, None])).sum()
                scores[p, q] -= float(pair.squared_error(a).sum() if by == "residual" else distance)
                merges[p, q].append((a[:, :, None] * map_p + (1 - a[:, :, None]) * map_q, output_p + output_q))
        best = _largest_sum(scores, heads, count)
        reached = sum(scores[p, q] for p, q in one_round)
        missed = np.array([(best - reached) / max(abs(best), 1.0)])
        trial.at_most(missed, np.zeros(1), "residual", f"{what} the share of the score missed in round {number}")
        pools = [
            next_pool(pool, one_round, [merges[p, q][item] for p, q in one_round]) for item, pool in enumerate(pools)
        ]
        heads -= count


def _largest_sum(scores: dict[tuple[int, int], float], heads: int, count: int) -> float:
    """The largest sum of exactly ``count`` pairs that share no head: the first head left stays alone or is paired."""

    @cache
    def best(left: frozenset[int], alone: int) -> float:
        if not left:
            return 0.0
        first = min(left)
        rest = left - {first}
        sums = [best(rest, alone - 1)] if alone else []
        return max([*sums, *(scores[first, other] + best(rest - {other}, alone) for other in rest)], default=-np.inf)

    return best(frozenset(range(heads)), heads - 2 * count)


# --- optima -----------------------------------------------------------------------------------------------------

_ALL = ("shd", "constant", "hard", "mean")


def _check_diagnosis(trial: Trial, inputs: Inputs, got: Inputs, say: str) -> None:
    """Against optima found here, and against the implementation's own ``squeeze_heads``."""
    maps, outputs = (inputs[name].astype(np.float64) for name in ("teacher_probs", "value_outputs"))
    mask = inputs.get("query_mask")
    weight = np.ones(maps.shape[::2]) if mask is None else mask.astype(np.float64)
    options = {name: value for name, value in inputs.items() if name != "strategies"}
    names = inputs.get("strategies") or _ALL
    exactly(sorted(got["strategies"]), sorted(names), f"the strategies {say}")
    squeezed = {name: trial.call("squeeze_heads", **options, strategy=name) for name in names}
    plan = as_plain(next(iter(squeezed.values()))["plan"])
    exactly(got["plan"], plan, f"the plan {say}")
    groups = compute("plan_groups", {"plan": plan, "num_teacher_heads": maps.shape[1]})["groups"]
    merged = np.stack([outputs[:, group].sum(1) for group in groups], axis=1)  # (B, H_s, S, D)
    target = np.stack([(maps[:, group] @ outputs[:, group]).sum(1) for group in groups], axis=1)  # (B, H_s, L, D)
    size = (target**2 * weight[:, None, :, None]).sum((1, 2, 3))
    atol, _ = agreement(trial.subject.dtype, "residual")
    rounding = atol**2 * (outputs**2).sum((1, 2, 3))

    def relative(errors: Array, answer: Array) -> Array:
        """The squared head residual; the answer's own where 0 and infinite are both right (ORACLE-1)."""
        total = (errors * weight[:, None]).sum((1, 2))
        square = np.where(size > 0, total / np.where(size > 0, size, 1.0), np.where(total > 0, np.inf, 0.0))
        either = (size == 0) & (total <= rounding) & ((answer == 0) | np.isposinf(answer))
        return np.where(either, answer**2, square)

    allowed = np.broadcast_to((maps > 0).any(1, keepdims=True), (len(maps), len(groups), *maps.shape[2:]))
    errors = {
        "unconstrained": _to_span(merged, target),
        "stochastic": _to_hull(merged, target, allowed, sink=inputs.get("row_sums") == "at_most_one"),
    }
    squares = {name: relative(error, as_array(got[name], name)) for name, error in errors.items()}
    for name, square in squares.items():
        trial.agree(got[name], np.sqrt(square), "residual", f"the {name} optimum {say}", times=2)
    for name in names:
        report = got["strategies"][name]
        field = field_of(report)
        probs = as_array(squeezed[name]["probs"], "probs")
        head = as_array(field("head_residual"), "head_residual")
        square = relative(((probs @ merged - target) ** 2).sum(-1), head)
        trial.agree(head, np.sqrt(square), "residual", f"the head residual of {name} {say}", times=2)
        expected = as_array(squeezed[name]["residual"], "residual")
        trial.agree(field("residual"), expected, "residual", f"the residual of {name} {say}")
        for bound, least in squares.items():
            what = f"the ratio over_{bound} of {name} {say}"
            trial.agree(field(f"over_{bound}"), ratio_of(square, least), "residual", what, times=8)


def field_of(report: Any) -> Callable[[str], Any]:
    """The reader of a strategy's report, a mapping or an object."""
    return report.get if isinstance(report, Mapping) else partial(getattr, report)


def ratio_of(square: Array, least: Array) -> Array:
    """ORACLE-6."""
    over, under = (np.where(x <= degenerate_threshold(), 0.0, x) for x in (square, least))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.sqrt(over / under)
    return np.where(over == under, 1.0, ratio)


def _to_span(points: Array, target: Array) -> Array:
    """Squared distance of every row from the span of its head's value outputs ``(B, H_s, S, D)``."""
    basis, values, _ = np.linalg.svd(np.swapaxes(points, -1, -2), full_matrices=False)  # (B, H_s, D, k)
    basis = basis * (values > 1e-9 * values[..., :1])[..., None, :]
    rest = target - (target @ basis) @ np.swapaxes(basis, -1, -2)
    distance: Array = (rest**2).sum(-1)
    return distance


def _to_hull(points: Array, target: Array, allowed: Any, *, sink: bool) -> Array:
    """Squared distance of every row from the hull of its allowed keys."""
    moved = points[:, :, None] - target[:, :, :, None]  # (B, H_s, L, S, D)
    if sink:
        moved = np.concatenate([moved, -target[:, :, :, None]], axis=3)
        allowed = np.concatenate(
            [allowed, np.ones((*allowed.shape[:-1], 1), dtype=bool) & allowed.any(-1)[..., None]], -1
        )
    gram = moved @ np.swapaxes(moved, -1, -2)
    weights = np.zeros(allowed.shape)
    for row in np.argwhere(allowed.any(-1)):
        index = tuple(row)
        kept = np.flatnonzero(allowed[index])
        weights[index][kept] = _best_simplex(gram[index][np.ix_(kept, kept)])
    reached = ((weights[..., None] * moved).sum(-2) ** 2).sum(-1)
    best: Array = np.where(allowed.any(-1), reached, (target**2).sum(-1))  # a row without a key stays zero
    return best


def _best_simplex(gram: Array) -> Array:
    """The weights of the smallest ``c^T gram c`` on the simplex, whose slopes prove that there are none smaller.

    Corners are taken in while one has a smaller slope than the weights have (Karush-Kuhn-Tucker), and left where the
    minimum of those in use has a weight below 0.

    Raises:
        ArithmeticError: rounding kept it from a proof.
    """
    weights: Array = np.zeros(len(gram))
    used = [int(np.diag(gram).argmin())]
    weights[used] = 1.0
    gap = np.inf
    for _ in range(8 * len(gram) + 8):
        slopes = gram @ weights
        corner = int(slopes.argmin())
        gap = float(weights @ slopes - slopes[corner]) / max(float(np.trace(gram)), 1e-300)
        if gap <= 1e-15 or (corner in used and gap <= 1e-12):
            break
        used = [*used, corner] if corner not in used else used
        while True:
            # On a face the minimum has equal slopes: inner c = t 1 with sum(c) = 1.
            system = np.ones((len(used) + 1, len(used) + 1))
            system[-1, -1] = 0.0
            size = max(float(np.diag(gram)[used].max()), 1e-300)
            system[:-1, :-1] = gram[np.ix_(used, used)] / size
            solution = np.linalg.lstsq(system, np.append(np.zeros(len(used)), 1.0), rcond=1e-15)[0][:-1]
            if solution.min() >= 0:
                break
            now = weights[used]
            falling = solution < 0
            steps = now[falling] / (now[falling] - solution[falling])
            solution = now + steps.min() * (solution - now)
            solution[np.flatnonzero(falling)[steps.argmin()]] = 0.0
            weights[:] = 0.0
            weights[used] = np.maximum(solution, 0.0)
            used = [i for i in used if weights[i] > 0]
        weights[:] = 0.0
        weights[used] = solution
    if gap > 1e-12:
        raise ArithmeticError("the judge found no proof that these weights are the best")
    best: Array = weights / weights.sum()
    return best


_Check: TypeAlias = Callable[[Trial, Inputs, Inputs, str], None]
_CHECKS: dict[str, _Check] = {
    "softmax": _check_softmax,
    "soften": _check_softened,
    "solve_alpha": _check_alpha,
    "squeeze_heads": _check_squeezed,
    "matched_plan": _check_matched,
    "diagnose": _check_diagnosis,
    "shd_loss": _check_loss,
    "shd_loss_gradient": partial(_check_gradients, "shd_loss_gradient"),
    "shd_loss_gradient_qk": partial(_check_gradients, "shd_loss_gradient_qk"),
    **{name: partial(_check_indexer, name) for name in ("indexer_target", "indexer_loss", "indexer_loss_gradient")},
    "intersect_support": partial(_check_kept, "intersect_support"),
    "align_tokens": partial(_check_kept, "align_tokens"),
}
"""Where a formula and a tolerance are not all."""
