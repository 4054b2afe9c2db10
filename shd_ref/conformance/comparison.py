"""Is an answer right? The reference's answer, the published tolerance, and what last bits do to the reference's own.

An ill-conditioned case needs no rule of its own: the reference answers it again with its inputs nudged in their last
bits, and what that moves its answer by is added to the tolerance. Near a threshold, where a nudge turns a decision,
nothing is compared; away from it everything is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shd_ref.attention import Array
from shd_ref.conformance.generator import OwnDtype, round_to
from shd_ref.conformance.specification import OUTPUTS, agreement

EXACT = frozenset({"plan", "groups", "pairs", "num_clipped", "num_degenerate"})
QUANTITIES = {
    **dict.fromkeys(("alpha", "alphas", "mixing"), "alpha"),
    **dict.fromkeys(("dz", "dq", "dk", "dw"), "gradient"),
    **dict.fromkeys(("residual", "head_residual", "unconstrained", "stochastic"), "residual"),
    **dict.fromkeys(("over_unconstrained", "over_stochastic"), "residual"),
    "loss": "loss",
}
_STORED = frozenset(
    {"attn_probs", "probs", "supervision"}
)  # maps in the dtype of the maps they were made from (MAP-14)
_LAST_BITS = {"float64": 4e-16, "float32": 1.2e-7, "float16": 1.2e-7, "bfloat16": 1.2e-7}
_NAN_IS_WRONG = "is NaN"


@dataclass(frozen=True)
class Difference:
    """One output that is wrong."""

    output: str
    problem: str
    expected: str
    got: str


@dataclass(frozen=True)
class _Rule:
    """How near an output must be: in these dtypes, where roundings are multiplied by ``reach``."""

    dtypes: frozenset[str]
    exact: bool  # no rounding decides anything, so that nudges say nothing
    reach: float = 1.0


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
    *,
    exact: bool,
) -> Difference | None:
    """The first output that is wrong; those that are missing come last.

    Args:
        right: the reference's outputs.
        near: gives its outputs for nudged inputs, asked only where something differs; the last four were nudged
            30 times as far.
        got: the implementation's.
        dtype: what it computes in.
        inputs: the arguments, whose dtypes widen the tolerance.
        exact: whether the inputs are such that no rounding decides anything, so that nudges say nothing.
    """
    narrowest = _narrowest(inputs)
    for name, value in right.items():
        if name not in got or (name.startswith("num_") and dtype in ("float16", "bfloat16")):
            continue  # in half precision rounding decides what lies within [0, 1] (NUM-7)
        wide = frozenset({dtype, "float32" if narrowest == "float16" and name not in _STORED else narrowest or dtype})
        rule = _Rule(wide, exact, _reach(inputs) if QUANTITIES.get(name) == "gradient" else 1.0)
        zeros = _zeros(name, inputs) if name in ("dz", "dq", "dw") else None
        difference = _compare(name, name, value, [], got[name], rule, zeros)
        if difference and (others := [one.get(name) for one in near()]):
            difference = _compare(name, name, value, others, got[name], rule, zeros)
        if difference:
            return difference
    missing = [name for name in right if name not in got]
    if missing:
        return Difference(
            missing[0], f"the answer lacks {', '.join(missing)}", ", ".join(right), ", ".join(got) or "nothing"
        )
    return None


def _narrowest(inputs: Mapping[str, Any]) -> str:
    """The narrowest dtype of the arrays; integers may be computed with in float32."""
    arrays = [array for name, value in inputs.items() if name != "segments" for array in arrays_of(value)]
    kinds = {array.dtype.name for array in arrays if isinstance(array, OwnDtype)}
    if "float16" in kinds:
        return "float16"
    return "float32" if "float32" in kinds or any(array.dtype.kind in "iu" for array in arrays) else ""


def _compare(
    name: str, path: str, right: Any, near: Sequence[Any], got: Any, rule: _Rule, zeros: Any = None
) -> Difference | None:
    """One output, records and lists item by item."""
    if name in EXACT:
        return _compare_exactly(path, right, near, got, rule.exact)
    fields = fields_of(right)
    if fields or isinstance(right, Mapping):  # a record may be empty: no strategies were asked for
        theirs = fields_of(got)
        for field, value in fields.items():
            if field not in theirs:
                names = [", ".join(map(str, each)) for each in (fields, theirs)]
                return Difference(path, f"{path} lacks {field}", *names)
            others = [fields_of(one).get(field) for one in near if one is not None]
            rest = _Rule(rule.dtypes, rule.exact)
            if found := _compare(str(field), f"{path}.{field}", value, others, theirs[field], rest):
                return found
        return None
    if isinstance(right, list | tuple):
        if not isinstance(got, list | tuple | np.ndarray) or len(got) != len(right):
            wanted = f"{len(right)} arrays"
            return Difference(path, f"{path} must be a list of {wanted}", wanted, abbreviate(got))
        for number, (value, item) in enumerate(zip(right, got, strict=True)):
            others = [one[number] for one in near if one is not None and len(one) == len(right)]
            zero = zeros[number] if isinstance(zeros, list) else zeros
            if found := _compare(name, f"{path}[{number}]", value, others, item, rule, zero):
                return found
        return None
    zeros = zeros[0] if isinstance(zeros, list) else zeros
    return _compare_numbers(name, path, np.asarray(right, np.float64), near, got, rule, zeros)


def _compare_exactly(path: str, right: Any, near: Sequence[Any], got: Any, exact: bool) -> Difference | None:
    expected, actual = as_plain(right), as_plain(got)
    if not exact and any(as_plain(one) != expected for one in near):
        return None  # last bits decide
    if actual == expected and _kinds(actual) == _kinds(expected):
        return None
    return Difference(path, f"{path} is wrong", abbreviate(expected), abbreviate(actual))


def _compare_numbers(
    name: str, path: str, right: Array, near: Sequence[Any], got: Any, rule: _Rule, zeros: Any
) -> Difference | None:
    numbers = as_numbers(got)
    if numbers is None:
        return Difference(path, f"{path} must be numbers", abbreviate(right), abbreviate(got))
    if numbers.shape != right.shape:
        problem = f"{path} must have the shape {list(right.shape)}; got {list(numbers.shape)}"
        return Difference(path, problem, abbreviate(right), abbreviate(numbers))
    pairs = [agreement(dtype, QUANTITIES.get(name, "probs")) for dtype in rule.dtypes]
    atol, rtol = rule.reach * max(pair[0] for pair in pairs), max(pair[1] for pair in pairs)
    others = [np.asarray(one, np.float64) for one in near if np.shape(one) == right.shape]
    with np.errstate(all="ignore"):
        slack = np.zeros(right.shape)
        for number, other in enumerate(others if not rule.exact else []):
            moved = np.where(other == right, 0.0, np.abs(other - right))
            slack = np.maximum(
                slack, (1.5 if number >= len(others) - 4 else 20.0) * np.where(np.isnan(moved), np.inf, moved)
            )
        away = np.where(numbers == right, 0.0, np.abs(numbers - right))
        allowed = np.where(np.isfinite(right), atol + rtol * np.abs(right) + slack, slack)
        wrong = ~(away <= allowed) | (np.isnan(numbers) & np.isfinite(slack))
        if name in _STORED or name == "target":
            # A zero of the text stays one however the inputs are nudged; the last numbers of a dtype are as good.
            always = np.logical_and.reduce([one == 0 for one in (right, *others)])
            wrong |= always & (np.abs(numbers) > (1e-300 if rule.dtypes == {"float64"} else 1e-37))
        if zeros is not None:
            wrong |= np.broadcast_to(zeros, right.shape) & (numbers != 0)
    if not wrong.any():
        return None
    index = tuple(
        int(i)
        for i in np.argwhere(wrong)[int(np.nanargmax(np.where(wrong, np.nan_to_num(away, nan=np.inf), -1.0)[wrong]))]
    )
    where = f" at {list(index)}" if index else ""
    if np.isnan(numbers[index]):
        problem = f"{path} {_NAN_IS_WRONG}{where}; expected {right[index]:.9g}"
    elif right[index] == 0 and away[index] <= allowed[index]:
        problem = f"{path} must be exactly 0{where}; got {numbers[index]:.3g}"
    else:
        problem = f"{path} differs by {away[index]:.3g}{where}: expected {right[index]:.9g}, got {numbers[index]:.9g}"
        problem += f", allowed {allowed[index]:.2g}"
    return Difference(path, problem, abbreviate(right), abbreviate(numbers))


def _reach(inputs: Mapping[str, Any]) -> float:
    """What a rounding of a probability is multiplied by in a gradient, where that is more than one."""
    reach = max(1.0, float(inputs.get("beta", 1))) / min(1.0, float(inputs.get("temperature", 1)))
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


def compare_matched(inputs: Mapping[str, Any], got: Any, dtype: str) -> Difference | None:
    """A matched plan by the sum of scores of each round (PLAN-9, NUM-8): several sets of pairs may be right.

    Each round is scored on the pools that the answer's own earlier rounds made.
    """
    from shd_ref.merging.matching import match_pairs, read_calibration, score_pair
    from shd_ref.merging.mixing import merge_round

    pools, masks = read_calibration(inputs["calibration"], inputs.get("row_sums", "one"))
    by, heads, students = inputs.get("by", "residual"), len(pools[0]), int(inputs["num_student_heads"])
    plan, number = as_plain(got), 0
    if not isinstance(plan, list):
        return Difference("plan", "plan must be rounds of pairs", "rounds of pairs", abbreviate(plan))
    while heads > students:
        count = min(heads // 2, heads - students)
        pairs: Any = plan[number] if number < len(plan) else None
        positions = [i for pair in pairs for i in pair] if _is_round(pairs) else []
        fits = _is_round(pairs) and len(pairs) == count and len(set(positions)) == 2 * count
        if not fits or max(positions) >= heads or min(positions) < 0:
            problem = f"round {number} must be {count} pairs of positions of {heads} heads, each at most once"
            return Difference("plan", problem, f"{count} pairs", abbreviate(pairs))
        if pairs != sorted(pairs) or any(p > q for p, q in pairs):
            return Difference(
                "plan", f"round {number} must list its pairs in order (PLAN-10)", "sorted pairs", abbreviate(pairs)
            )
        scores = np.zeros((heads, heads))
        for p in range(heads):
            for q in range(p + 1, heads):
                scores[p, q] = sum(
                    _score(score_pair, pool[p], pool[q], mask, by) for pool, mask in zip(pools, masks, strict=True)
                )
        best = sum(scores[pair] for pair in match_pairs(scores, count))
        _, rtol = agreement(dtype, "residual")
        short = best - sum(scores[p, q] for p, q in pairs)
        if short > (rtol + 1e-12) * float(np.abs(scores).max(initial=0.0)) * count:
            problem = f"the scores of round {number} sum to {short:.3g} less than the largest sum, {best:.6g}"
            return Difference("plan", problem, abbreviate(match_pairs(scores, count)), abbreviate(pairs))
        pools = [_merge(merge_round, pool, pairs, mask) for pool, mask in zip(pools, masks, strict=True)]
        heads, number = heads - count, number + 1
    if len(plan) != number:
        return Difference(
            "plan", f"plan must have {number} rounds; got {len(plan)}", f"{number} rounds", abbreviate(plan)
        )
    return None


def _score(score_pair: Any, p: Any, q: Any, mask: Any, by: str) -> float:
    return float(score_pair(p, q, mask, by, *(("map",) if score_pair.__code__.co_argcount == 5 else ())))


def _merge(merge_round: Any, pool: Any, pairs: Any, mask: Any) -> Any:
    return merge_round(pool, [tuple(pair) for pair in pairs], query_mask=mask)[0]


def _is_round(pairs: Any) -> bool:
    return isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(i) is int for i in pair) for pair in pairs
    )


def last_bits(dtype: str, inputs: Mapping[str, Any]) -> float:
    """What is lost of a number in the narrowest of the dtype and the arrays."""
    return _LAST_BITS["float32" if dtype == "float64" and _narrowest(inputs) else dtype]


def nudged(
    value: Any,
    dtype: str,
    rng: np.random.Generator,
    size: float,
    name: str = "",
    frozen: frozenset[str] = frozenset(),
) -> Any:
    """The arguments with every real number moved by up to so many last bits of the narrowest of dtype and arrays."""
    if isinstance(value, Mapping):
        if dtype == "float64" and _narrowest(value):
            dtype = "float32"
        return {
            key: item if key in frozen else nudged(item, dtype, rng, size, key, frozen) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(nudged(item, dtype, rng, size, name, frozen) for item in value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or name == "segments":
        return value
    is_map = "probs" in name or name in ("supervision", "calibration", "mixing")
    with np.errstate(all="ignore"):
        moved = np.asarray(value, np.float64) * (
            1 + _LAST_BITS[dtype] * size * rng.uniform(-1.0, 1.0, size=value.shape)
        )
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
