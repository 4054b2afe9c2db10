"""Is an answer right? The reference's answer, the published tolerance, and what last bits do to the reference's own.

An ill-conditioned case needs no rule of its own: the reference answers it again with its inputs nudged in their last
bits, and what that moves its answer by is added to the tolerance. Near a threshold, where a nudge turns a decision,
nothing is compared; away from it everything is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shd_ref.attention import Array, soften_rows
from shd_ref.conformance.generator import OUTPUTS, Inputs, OwnDtype, round_to
from shd_ref.conformance.specification import agreement
from shd_ref.merging.mixing import check_teacher, solve_mixing
from shd_ref.merging.plans import MergePlan

EXACT = frozenset({"plan", "groups", "pairs", "num_clipped", "num_degenerate"})
_RESIDUALS = ("residual", "head_residual", "unconstrained", "stochastic", "over_unconstrained", "over_stochastic")
QUANTITIES = {
    **dict.fromkeys(("alpha", "alphas", "mixing"), "alpha"),
    **dict.fromkeys(("dz", "dq", "dk", "dw"), "gradient"),
    **dict.fromkeys(_RESIDUALS, "residual"),
    "loss": "loss",
}
_STORED = frozenset({"attn_probs", "probs", "supervision"})  # in the dtype of the maps they were made from (MAP-14)
_LAST_BITS = {"float64": 4e-16, "float32": 1.2e-7, "float16": 1.2e-7, "bfloat16": 1.2e-7}


@dataclass(frozen=True)
class Difference:
    """One output that is wrong."""

    output: str
    problem: str
    expected: str
    got: str


@dataclass(frozen=True)
class _Rule:
    """How near an output must be: in these dtypes, where roundings are multiplied by ``reach``; ``zeros`` are 0.

    ``solved``: samples in which the rounding of a solver decides whether an optimum is 0 or infinite (ORACLE-1).
    """

    dtypes: frozenset[str]
    reach: float = 1.0
    zeros: Any = None
    solved: Any = False


def outputs_of(operation: str, answer: Any) -> dict[str, Any]:
    """The outputs by name that an answer holds: of a mapping, an object, a tuple in order, or the value itself."""
    names = OUTPUTS[operation]
    fields = fields_of(answer)
    if any(name in fields for name in names):
        return {name: fields[name] for name in names if name in fields}
    if len(names) == 1:
        return {names[0]: answer}
    if isinstance(answer, tuple | list) and len(answer) == len(names):
        return dict(zip(names, answer, strict=True))
    return {}


def fields_of(value: Any) -> Mapping[Any, Any]:
    """The named fields of a mapping, a named tuple, a dataclass or a plain object; of anything else none."""
    if isinstance(value, Mapping):
        return value
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if isinstance(value, np.ndarray | np.generic) or callable(value) or not hasattr(value, "__dict__"):
        return {}
    return {name: item for name, item in vars(value).items() if not name.startswith("_")}


def compare(
    right: Mapping[str, Any],
    near: Callable[[], Sequence[Mapping[str, Any]]],
    got: Mapping[str, Any],
    dtype: str,
    inputs: Any,
) -> Difference | None:
    """The first output that is wrong; those that are missing come last.

    Args:
        right: the reference's outputs.
        near: gives its outputs for nudged inputs, asked only where something differs.
        got: the implementation's.
        dtype: what it computes in.
        inputs: the arguments, whose dtypes widen the tolerance.
    """
    least = narrowest(inputs)
    for name, value in right.items():
        if name not in got:
            continue
        wide = frozenset({dtype, "float32" if least == "float16" and name not in _STORED else least or dtype})
        zeros = _zeros(name, inputs) if name in ("dz", "dq", "dw") else None
        rule = _Rule(wide, _reach(name, inputs), zeros, _silent(inputs) if "stochastic" in right else False)
        difference = _compare(name, name, value, [], got[name], rule)
        if difference and (others := [one.get(name) for one in near()]):
            difference = _compare(name, name, value, others, got[name], rule)
        if difference and name == "num_clipped" and _may_be_clipped(inputs, right["plan"], got[name], wide):
            continue
        if difference:
            return difference
    if missing := [name for name in right if name not in got]:
        problem = f"the answer lacks {', '.join(missing)}"
        return Difference(missing[0], problem, ", ".join(right), ", ".join(got) or "nothing")
    return None


def _may_be_clipped(inputs: Inputs, plan: MergePlan, got: Any, dtypes: frozenset[str]) -> bool:
    """Whether a count of clipped alphas is right: an optimum within the tolerance of 0 or 1 counts or not (NUM-7)."""
    if inputs.get("strategy", "shd") != "shd" or type(as_plain(got)) is not int:
        return False
    row_sums, atol = inputs.get("row_sums", "one"), max(agreement(dtype, "alpha")[0] for dtype in dtypes)
    maps, outputs, mask = check_teacher(
        inputs["teacher_probs"], inputs["value_outputs"], inputs.get("query_mask"), row_sums=row_sums
    )
    if inputs.get("alpha_from") == "softened":
        maps = soften_rows(maps, float(inputs.get("temperature", 1.0)), row_sums=row_sums)
    rule = inputs.get("alpha_rule", "least_squares")
    _, solutions = solve_mixing(maps, outputs, plan, strategy="shd", query_mask=mask, alpha_rule=rule)
    beyond = np.array([abs(s.raw - 0.5) - 0.5 for one_round in solutions for s in one_round])
    return bool((beyond > atol).sum() <= as_plain(got) <= (beyond >= -atol).sum())


def narrowest(inputs: Mapping[str, Any]) -> str:
    """The narrowest dtype of the arrays; integers may be computed with in float32."""
    arrays = [array for name, value in inputs.items() if name != "segments" for array in arrays_of(value)]
    kinds = {array.dtype.name for array in arrays if isinstance(array, OwnDtype)}
    if "float16" in kinds:
        return "float16"
    return "float32" if "float32" in kinds or any(array.dtype.kind in "iu" for array in arrays) else ""


def _compare(name: str, path: str, right: Any, near: Sequence[Any], got: Any, rule: _Rule) -> Difference | None:
    """One output, records and lists item by item."""
    if name in EXACT:
        expected, actual = as_plain(right), as_plain(got)
        turned = any(as_plain(one) != expected for one in near)  # last bits decide
        if turned or (actual == expected and _kinds(actual) == _kinds(expected)):
            return None
        return Difference(path, f"{path} is wrong", abbreviate(expected), abbreviate(actual))
    fields = fields_of(right)
    if fields or isinstance(right, Mapping):  # a record may be empty: no strategies were asked for
        theirs = fields_of(got)
        for field, value in fields.items():
            if field not in theirs:
                names = [", ".join(map(str, each)) for each in (fields, theirs)]
                return Difference(path, f"{path} lacks {field}", *names)
            others = [fields_of(one).get(field) for one in near if one is not None]
            if found := _compare(str(field), f"{path}.{field}", value, others, theirs[field], rule):
                return found
        return None
    if isinstance(right, list | tuple):
        if not isinstance(got, list | tuple | np.ndarray) or len(got) != len(right):
            wanted = f"{len(right)} arrays"
            return Difference(path, f"{path} must be a list of {wanted}", wanted, abbreviate(got))
        for number, (value, item) in enumerate(zip(right, got, strict=True)):
            others = [one[number] for one in near if one is not None and len(one) == len(right)]
            each = rule if not isinstance(rule.zeros, list) else replace(rule, zeros=rule.zeros[number])
            if found := _compare(name, f"{path}[{number}]", value, others, item, each):
                return found
        return None
    return _compare_numbers(name, path, np.asarray(right, np.float64), near, got, rule)


def _compare_numbers(
    name: str, path: str, right: Array, near: Sequence[Any], got: Any, rule: _Rule
) -> Difference | None:
    numbers = as_numbers(got)
    if numbers is None:
        return Difference(path, f"{path} must be numbers", abbreviate(right), abbreviate(got))
    if numbers.shape != right.shape:
        problem = f"{path} must have the shape {list(right.shape)}; got {list(numbers.shape)}"
        return Difference(path, problem, abbreviate(right), abbreviate(numbers))
    pairs = [agreement(dtype, QUANTITIES.get(name, "probs")) for dtype in rule.dtypes]
    others = [np.asarray(one, np.float64) for one in near if np.shape(one) == right.shape]
    with np.errstate(all="ignore"):
        slack = np.zeros(right.shape)
        for number, other in enumerate(others):
            moved = np.where(other == right, 0.0, np.abs(other - right))
            moved = np.where(np.isnan(moved), np.inf, moved) * (1.5 if number >= len(others) - 4 else 20.0)
            slack = np.maximum(slack, moved)
        away = np.where(numbers == right, 0.0, np.abs(numbers - right))
        published = rule.reach * max(atol for atol, _ in pairs) + max(rtol for _, rtol in pairs) * np.abs(right)
        allowed = np.where(np.isfinite(right), published, 0.0) + slack
        wrong = ~(away <= allowed) | (np.isnan(numbers) & np.isfinite(slack))
        if name in _STORED or name == "target":
            # A zero of the text stays one however the inputs are nudged; the last numbers of a dtype are as good.
            always = np.logical_and.reduce([one == 0 for one in (right, *others)])
            wrong |= always & (np.abs(numbers) > (1e-300 if rule.dtypes == {"float64"} else 1e-37))
        if name.endswith("stochastic"):
            wrong &= ~(rule.solved & np.isin(numbers, (0.0, 1.0, np.inf)))
        if rule.zeros is not None:
            zeros = rule.zeros[0] if isinstance(rule.zeros, list) else rule.zeros
            wrong |= np.broadcast_to(zeros, right.shape) & (numbers != 0)
    if not wrong.any():
        return None
    worst = np.argmax(np.where(wrong, np.nan_to_num(away, nan=np.inf), -1.0))
    index = tuple(int(i) for i in np.unravel_index(worst, right.shape))
    where = f" at {list(index)}" if index else ""
    if np.isnan(numbers[index]):
        problem = f"{path} is NaN{where}; expected {right[index]:.9g}"
    elif right[index] == 0 and away[index] <= allowed[index]:
        problem = f"{path} must be exactly 0{where}; got {numbers[index]:.3g}"
    else:
        problem = f"{path} differs by {away[index]:.3g}{where}: expected {right[index]:.9g}, got {numbers[index]:.9g}"
        problem += f", allowed {allowed[index]:.2g}"
    return Difference(path, problem, abbreviate(right), abbreviate(numbers))


def _reach(name: str, inputs: Mapping[str, Any]) -> float:
    """What a rounding is multiplied by, where that is more than one: of a probability, or of one of many terms."""
    if name == "loss" and "teacher_scale" in inputs and inputs.get("reduction", "sum") == "sum":
        terms = inputs["queries"][:, 0, :, 0].size * int(inputs.get("groups", 1))
        return max(1.0, 0.1 * float(terms))
    if QUANTITIES.get(name) != "gradient":
        return 1.0
    reach = max(1.0, float(inputs.get("beta", 1))) / min(1.0, float(inputs.get("temperature", 1)))
    reach *= 8 if inputs.get("divergence") == "reverse_kl" else 1  # where log P is subtracted from log Q
    given = [array for name in ("queries", "keys", "weights") for array in arrays_of(inputs.get(name))]
    for array in given:
        reach *= max(1.0, float(np.abs(np.asarray(array, np.float64)).max(initial=0.0)))
    return reach * max(1.0, abs(float(inputs.get("scale", 1)))) if given else reach


def _zeros(name: str, inputs: Mapping[str, Any]) -> Any:
    """Where a gradient is exactly 0 (GRAD-3, GRAD-6, IDX-14), of each layer: rows that do not count, masked keys."""
    counted, may = inputs.get("loss_mask"), inputs.get("attn_mask")
    rows = None if counted is None else ~counted[:, None, :, None] if name != "dw" else ~counted[:, None]
    if name != "dz":
        return rows
    logits = inputs["student_logits"] if isinstance(inputs["student_logits"], list) else [inputs["student_logits"]]
    masked = [np.isneginf(np.asarray(z, np.float64)) | (False if rows is None else rows) for z in logits]
    return masked if may is None else [one | ~np.broadcast_to(may, one.shape) for one in masked]


def _silent(inputs: Mapping[str, Any]) -> Any:
    """The samples in which no head gives anything in a counted row."""
    given = (inputs["teacher_probs"], inputs["value_outputs"], inputs.get("query_mask"))
    maps, outputs, mask = check_teacher(*given, row_sums=inputs.get("row_sums", "one"))
    counted = True if mask is None else mask[:, None, :, None]
    return ~((maps @ outputs != 0) & counted).any(axis=(1, 2, 3))


def compare_matched(inputs: Mapping[str, Any], got: Any, dtype: str) -> Difference | None:
    """A matched plan by the sum of scores of each round (PLAN-9, NUM-8): several sets of pairs may be right.

    Each round is scored on the pools that the answer's own earlier rounds made.
    """
    from shd_ref.merging.matching import match_pairs, read_calibration, score_pair
    from shd_ref.merging.mixing import merge_round

    pools, masks = read_calibration(inputs["calibration"], inputs.get("row_sums", "one"))
    by, heads, students = inputs.get("by", "residual"), len(pools[0]), int(inputs["num_student_heads"])
    plan, sizes = as_plain(got), []
    while heads > students:
        sizes.append(min(heads // 2, heads - students))
        heads -= sizes[-1]
    if not isinstance(plan, list) or len(plan) != len(sizes):
        return Difference("plan", f"plan must have {len(sizes)} rounds", f"{len(sizes)} rounds", abbreviate(plan))
    for number, (pairs, count) in enumerate(zip(plan, sizes, strict=True)):
        heads = len(pools[0])
        fits = isinstance(pairs, list) and all(isinstance(p, list) and [*map(type, p)] == [int, int] for p in pairs)
        used = {position for pair in pairs for position in pair if 0 <= position < heads} if fits else ()
        if not fits or len(pairs) != count or len(used) != 2 * count:
            problem = f"round {number} must be {count} pairs of positions of {heads} heads, each at most once"
            return Difference("plan", problem, f"{count} pairs", abbreviate(pairs))
        if pairs != sorted(map(sorted, pairs)):
            problem = f"round {number} must list its pairs in order (PLAN-10)"
            return Difference("plan", problem, "sorted pairs", abbreviate(pairs))
        scores = np.zeros((heads, heads))
        for p, q in zip(*np.triu_indices(heads, 1), strict=True):
            of_items = [score_pair(pool[p], pool[q], mask, by) for pool, mask in zip(pools, masks, strict=True)]
            scores[p, q] = sum(map(float, of_items))
        best = match_pairs(scores, count)
        short = sum(scores[pair] for pair in best) - sum(scores[p, q] for p, q in pairs)
        if short > (agreement(dtype, "residual")[1] + 1e-12) * float(np.abs(scores).max(initial=0.0)) * count:
            problem = f"the scores of round {number} sum to {short:.3g} less than the largest sum"
            return Difference("plan", problem, abbreviate(best), abbreviate(pairs))
        merged = [tuple(pair) for pair in pairs]
        pools = [merge_round(pool, merged, query_mask=mask)[0] for pool, mask in zip(pools, masks, strict=True)]
    return None


def nudged(
    value: Any, dtype: str, rng: np.random.Generator, size: float, name: str = "", frozen: Sequence[str] = ()
) -> Any:
    """The arguments with every real number moved by up to so many last bits of a dtype."""
    if isinstance(value, Mapping):
        items = value.items()
        return {key: item if key in frozen else nudged(item, dtype, rng, size, key) for key, item in items}
    if isinstance(value, list | tuple):
        return type(value)(nudged(item, dtype, rng, size, name) for item in value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or name == "segments":
        return value
    with np.errstate(all="ignore"):
        bits = _LAST_BITS[dtype] * size * rng.uniform(-1.0, 1.0, size=value.shape)
        moved = np.asarray(value, np.float64) * (1 + bits)
    is_map = "probs" in name or name in ("supervision", "calibration", "mixing")
    if is_map and value.dtype.itemsize < 8:  # whose dtype decides what its rows may sum to
        return moved.astype(np.float32)
    if dtype in ("float16", "bfloat16") and size == 1:
        moved = round_to(moved * (1 + rng.choice([-1.0, 1.0], size=value.shape) * 2.0**-13), "float32")
    return np.clip(moved, 0.0, 1.0) if name in ("alpha", "alphas") else moved


# --- values -------------------------------------------------------------------------------------------------------


def arrays_of(value: Any) -> list[Array]:
    """All arrays of an argument or an answer."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, int | float | str) or value is None:
        return []
    items = value if isinstance(value, list | tuple) else fields_of(value).values()
    return [array for item in items for array in arrays_of(item)]


def as_plain(value: Any) -> Any:
    """Tuples and arrays as lists, NumPy numbers as Python's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    return value


def as_numbers(value: Any) -> Array | None:
    """The value as a float64 array, or None where it is not numbers."""
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "fiu" and "float" not in array.dtype.name:
            return None
        return np.asarray(array, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        return None


def abbreviate(value: Any, limit: int = 8) -> str:
    """A value on one line: its shape and first entries."""
    if isinstance(value, np.ndarray):
        numbers = ", ".join(
            f"{x:.7g}" if isinstance(x, float) else str(x) for x in value.reshape(-1)[:limit].tolist()
        )
        return f"{value.dtype.name}{list(value.shape)} [{numbers}{', ...' if value.size > limit else ''}]"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={abbreviate(item, limit)}" for name, item in value.items())
    if isinstance(value, list | tuple) and arrays_of(value):
        return "[" + "; ".join(abbreviate(item, limit) for item in value) + "]"
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _kinds(value: Any) -> Any:
    return [_kinds(item) for item in value] if isinstance(value, list) else type(value)
