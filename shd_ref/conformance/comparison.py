"""Is an answer right? The reference's answer, the published tolerance, and what last bits do to the reference's own.

An ill-conditioned case needs no rule of its own: the reference answers it again with its inputs nudged in their last
bits, and what that moves its answer by is added to the tolerance. Near a threshold, where a nudge turns a decision,
nothing is compared; away from it everything is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shd_ref.attention import Array, soften_rows
from shd_ref.conformance.generator import OUTPUTS, Inputs, OwnDtype, round_to
from shd_ref.conformance.specification import agreement
from shd_ref.merging.mixing import check_teacher, merge_round, solve_mixing
from shd_ref.merging.plans import merge_plan

EXACT = frozenset({"plan", "groups", "pairs", "num_clipped", "num_degenerate"})
_RESIDUALS = ("residual", "head_residual", "unconstrained", "stochastic", "over_unconstrained", "over_stochastic")
QUANTITIES = {
    **dict.fromkeys(("alpha", "alphas", "mixing"), "alpha"),
    **dict.fromkeys(("dz", "dq", "dk", "dw"), "gradient"),
    **dict.fromkeys(_RESIDUALS, "residual"),
    "loss": "loss",
}
_STORED = frozenset({"attn_probs", "probs", "supervision"})  # in the dtype of the maps they were made from (MAP-14)
_PLAIN = (np.ndarray, np.generic, int, float, str)
_TINY = {"float64": 1e-290, "float32": 1e-30}
_LAST_BITS = {"float64": 4e-16, "float32": 1.2e-7, "float16": 1.2e-7, "bfloat16": 1.2e-7}


class Difference(NamedTuple):
    """One output that is wrong."""

    output: str
    problem: str
    expected: str
    got: str


def compare(
    right: Mapping[str, Any],
    near: Callable[[], Sequence[Mapping[str, Any]]],
    got: Mapping[str, Any],
    dtype: str,
    inputs: Inputs,
) -> Difference | None:
    """The first of ``right``'s outputs that is wrong; those that are missing come last.

    ``near`` gives the reference's outputs for nudged inputs, asked only where something differs; ``dtype`` is what
    the implementation computes in, and the dtypes of ``inputs`` widen the tolerance.
    """
    for keys, value in _leaves({name: value for name, value in right.items() if name in got}):
        answer = _pick(got, keys)
        check = _compare_exactly if keys[0] in EXACT or keys[-1] == "length" else _compare_numbers
        difference = check(keys, value, [], answer, dtype, inputs)
        if difference and (others := [_pick(answers, keys) for answers in near()]):
            difference = check(keys, value, others, answer, dtype, inputs)
        clipped = keys[0] == "num_clipped" and "plan" in right
        if difference and not (clipped and _may_be_clipped(inputs, right["plan"], answer, dtype)):
            return difference
    if missing := [name for name in right if name not in got]:
        problem = f"the answer lacks {', '.join(missing)}"
        return Difference(missing[0], problem, ", ".join(right), ", ".join(got) or "nothing")
    return None


def _leaves(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every array of an answer with the way to it, and the length of every list."""
    listed = isinstance(value, list | tuple) and not hasattr(value, "_asdict")
    if (keys and keys[0] in EXACT) or not (listed or isinstance(value, Mapping) or fields_of(value)):
        yield keys, value
        return
    if listed:
        yield (*keys, "length"), len(value)
    for key, item in enumerate(value) if listed else fields_of(value).items():
        yield from _leaves(item, (*keys, key))


def _pick(value: Any, keys: Sequence[Any]) -> Any:
    """The value there in an answer; None where there is none."""
    for key in keys:
        items = value if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim) else ()
        if key == "length":
            value = len(items)
        elif isinstance(key, int):
            value = items[key] if key < len(items) else None
        else:
            value = fields_of(value).get(key)
    return value


def _path(keys: Sequence[Any]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")


def _compare_exactly(keys: Sequence[Any], right: Any, near: Sequence[Any], got: Any, *_: Any) -> Difference | None:
    expected, actual = as_plain(right), as_plain(got)
    is_undecided = any(as_plain(other) != expected for other in near)  # the last bits of the inputs decide
    if is_undecided or (actual == expected and _kinds(actual) == _kinds(expected)):
        return None
    return Difference(_path(keys), f"{_path(keys)} is wrong", abbreviate(expected), abbreviate(actual))


def _compare_numbers(
    keys: Sequence[Any], expected: Any, near: Sequence[Any], got: Any, dtype: str, inputs: Inputs
) -> Difference | None:
    name, path = [key for key in keys if isinstance(key, str)][-1], _path(keys)
    numbers, right = as_numbers(got), np.asarray(expected, np.float64)
    if numbers is None or numbers.shape != right.shape:
        rule = f"numbers of the shape {list(right.shape)}; got {got if numbers is None else list(numbers.shape)}"
        return Difference(path, f"{path} must be {rule}", abbreviate(right), abbreviate(got))
    dtypes = _dtypes(name, dtype, inputs)
    pairs = [agreement(by, QUANTITIES.get(name, "probs")) for by in dtypes]
    others = [np.asarray(a, np.float64) for a in near if a is not None and np.shape(a) == right.shape]
    with np.errstate(all="ignore"):
        slack = np.zeros(right.shape)
        for number, other in enumerate(others):
            moved = np.where(other == right, 0.0, np.abs(other - right))
            moved = np.where(np.isnan(moved), np.inf, moved) * (1.5 if number >= len(others) - 4 else 20.0)
            slack = np.maximum(slack, moved)
        alike = (numbers == right) | (np.isnan(numbers) & np.isnan(right))
        away = np.where(alike, 0.0, np.abs(numbers - right))
        published = _reach(name, inputs) * max(atol for atol, _ in pairs) + max(r for _, r in pairs) * np.abs(right)
        allowed = np.where(np.isfinite(right), published, 0.0) + slack
        wrong = ~(away <= allowed)
        if name in _STORED or name == "target":
            # A zero of the text stays one however the inputs are nudged; the last numbers of a dtype are as good.
            always = np.logical_and.reduce([answer == 0 for answer in (right, *others)])
            wrong |= always & (np.abs(numbers) > (1e-300 if dtypes == {"float64"} else 1e-37))
        if name in _STORED and (lost := _TINY.get(dtype)) and right.ndim:
            # No temperature and no small weight turns a row with mass into zeros (TEMP-6).
            wrong |= (right > lost) & ~numbers.any(axis=-1, keepdims=True)
        if name.endswith("stochastic"):
            wrong &= ~(_silent(inputs) & np.isin(numbers, (0.0, 1.0, np.inf)))
        if name in ("dz", "dq", "dw"):
            wrong |= np.broadcast_to(_zeros(name, inputs, keys), right.shape) & (numbers != 0)
    if not wrong.any():
        return None
    worst = np.argmax(np.where(wrong, np.nan_to_num(away, nan=np.inf), -1.0))
    index = tuple(int(i) for i in np.unravel_index(worst, right.shape))
    where = f" at {list(index)}" if index else ""
    if right[index] == 0 and away[index] <= allowed[index]:
        problem = f"{path} must be exactly 0{where}; got {numbers[index]:.3g}"
    else:
        problem = f"{path} differs by {away[index]:.3g}{where}: expected {right[index]:.9g}, got {numbers[index]:.9g}"
        problem += f", allowed {allowed[index]:.2g}"
    return Difference(path, problem, abbreviate(right), abbreviate(numbers))


def narrowest(inputs: Inputs) -> str:
    """The narrowest dtype of the arrays; integers may be computed with in float32."""
    arrays = [array for name, value in inputs.items() if name != "segments" for array in arrays_of(value)]
    kinds = {array.dtype.name for array in arrays if isinstance(array, OwnDtype)}
    if "float16" in kinds:
        return "float16"
    return "float32" if "float32" in kinds or any(array.dtype.kind in "iu" for array in arrays) else ""


def _dtypes(name: str, dtype: str, inputs: Inputs) -> set[str]:
    """The dtypes by which an output may be rounded; sums of half precision are float32's (NUM-1)."""
    least = narrowest(inputs)
    return {dtype, "float32" if least == "float16" and name not in _STORED else least or dtype}


def _reach(name: str, inputs: Inputs) -> float:
    """The factor of a rounding, where that is more than one: of a probability, or of one of many terms."""
    if name == "loss" and "teacher_scale" in inputs and inputs.get("reduction", "sum") == "sum":
        terms = inputs["queries"][:, 0, :, 0].size * int(inputs.get("groups", 1))
        return max(1.0, 0.1 * float(terms))
    if QUANTITIES.get(name) != "gradient":
        return 1.0
    reach = max(1.0, float(inputs.get("beta", 1))) / min(1.0, float(inputs.get("temperature", 1)))
    reach *= 8 if inputs.get("divergence") == "reverse_kl" else 1  # where log P is subtracted from log Q
    factors = [array for name in ("queries", "keys", "weights") for array in arrays_of(inputs.get(name))]
    for array in factors:
        reach *= max(1.0, float(np.abs(np.asarray(array, np.float64)).max(initial=0.0)))
    return reach * max(1.0, abs(float(inputs.get("scale", 1)))) if factors else reach


def _zeros(name: str, inputs: Inputs, keys: Sequence[Any]) -> Any:
    """Where a gradient is exactly 0 (GRAD-3, GRAD-6, IDX-14), of its layer: rows that do not count, masked keys."""
    rows, may = inputs.get("loss_mask"), inputs.get("attn_mask")
    zeros: Any = False if rows is None else ~rows[:, None] if name == "dw" else ~rows[:, None, :, None]
    if name == "dz":
        logits = np.asarray(_pick(inputs["student_logits"], keys[1:]), np.float64)
        zeros = zeros | np.isneginf(logits) | (False if may is None else ~np.broadcast_to(may, logits.shape))
    return zeros


# --- where several answers are right ------------------------------------------------------------------------------


def _may_be_clipped(inputs: Inputs, plan: Any, got: Any, dtype: str) -> bool:
    """Whether a count of clipped alphas is right: an optimum within the tolerance of 0 or 1 counts or not (NUM-7)."""
    if inputs.get("strategy", "shd") != "shd" or type(as_plain(got)) is not int:
        return False
    atol = max(agreement(by, "alpha")[0] for by in _dtypes("num_clipped", dtype, inputs))
    maps, outputs, mask = _teacher(inputs)
    if inputs.get("alpha_from") == "softened":
        temperature = float(inputs.get("temperature", 1.0))
        maps = soften_rows(maps, temperature, row_sums=inputs.get("row_sums", "one"))
    rule = inputs.get("alpha_rule", "least_squares")
    _, solutions = solve_mixing(maps, outputs, plan, strategy="shd", query_mask=mask, alpha_rule=rule)
    beyond = np.array([abs(s.raw - 0.5) - 0.5 for one_round in solutions for s in one_round])
    return bool((beyond > atol).sum() <= as_plain(got) <= (beyond >= -atol).sum())


def _silent(inputs: Inputs) -> Any:
    """Samples in which no head gives anything: a solver's rounding says whether an optimum is 0 (ORACLE-1)."""
    maps, outputs, mask = _teacher(inputs)
    counted = True if mask is None else mask[:, None, :, None]
    return ~((maps @ outputs != 0) & counted).any(axis=(1, 2, 3))


def _teacher(inputs: Inputs) -> Any:
    teacher = (inputs["teacher_probs"], inputs["value_outputs"], inputs.get("query_mask"))
    return check_teacher(*teacher, row_sums=inputs.get("row_sums", "one"))


def compare_matched(inputs: Inputs, got: Any, dtype: str) -> Difference | None:
    """A matched plan by the sum of scores of each round (PLAN-9, NUM-8): several sets of pairs may be right.

    Each round is scored on the pools that the answer's own earlier rounds made.
    """
    from shd_ref.merging.matching import match_pairs, read_calibration, score_pair  # a solver's, not of the core

    pools, masks = read_calibration(inputs["calibration"], inputs.get("row_sums", "one"))
    by, plan = inputs.get("by", "residual"), as_plain(got)
    rounds = merge_plan(len(pools[0]), int(inputs["num_student_heads"]))  # of the same sizes
    if not isinstance(plan, list) or len(plan) != len(rounds):
        return Difference("plan", f"plan must have {len(rounds)} rounds", f"{len(rounds)} rounds", abbreviate(plan))
    for number, (pairs, count) in enumerate(zip(plan, map(len, rounds), strict=True)):
        heads = len(pools[0])
        flat = [place for pair in pairs for place in pair] if _kinds(pairs) == [[int, int]] * count else []
        if len({*flat} & {*range(heads)}) != 2 * count or pairs != sorted(map(sorted, pairs)):
            rule = f"{count} pairs of positions of {heads} heads, each at most once, in order (PLAN-10)"
            return Difference("plan", f"round {number} must be {rule}", f"{count} pairs", abbreviate(pairs))
        scores = np.zeros((heads, heads))
        for p, q in zip(*np.triu_indices(heads, 1), strict=True):
            scores[p, q] = sum(
                float(score_pair(pool[p], pool[q], mask, by)) for pool, mask in zip(pools, masks, strict=True)
            )
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


def outputs_of(operation: str, answer: Any) -> dict[str, Any]:
    """The outputs by name that an answer holds: of a mapping, an object, a tuple in order, or the value itself."""
    names, fields = OUTPUTS[operation], fields_of(answer)
    if any(name in fields for name in names):
        return {name: fields[name] for name in names if name in fields}
    answers = [answer] if len(names) == 1 else answer
    fits = isinstance(answers, tuple | list) and len(answers) == len(names)
    return dict(zip(names, answers, strict=True)) if fits else {}


def fields_of(value: Any) -> Mapping[Any, Any]:
    """The named fields of a mapping, a named tuple, a dataclass or a plain object; of anything else none."""
    if value is None or isinstance(value, _PLAIN):
        return {}
    if isinstance(value, Mapping):
        return value
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if callable(value) or not hasattr(value, "__dict__"):
        return {}
    return {name: item for name, item in vars(value).items() if not name.startswith("_")}


def arrays_of(value: Any) -> list[Array]:
    """All arrays of an argument or an answer."""
    if isinstance(value, np.ndarray):
        return [value]
    items = value if isinstance(value, list | tuple) else fields_of(value).values()
    return [array for item in items for array in arrays_of(item)]


def as_plain(value: Any) -> Any:
    """Tuples and arrays as lists, NumPy numbers as Python's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [as_plain(item) for item in value] if isinstance(value, list | tuple) else value


def as_numbers(value: Any) -> Array | None:
    """The value as a float64 array, or None where it is not numbers."""
    try:
        array = np.asarray(value)
        numeric = array.dtype.kind in "fiu" or "float" in array.dtype.name
        return np.asarray(array, dtype=np.float64) if numeric else None
    except (TypeError, ValueError, RuntimeError):
        return None


def abbreviate(value: Any) -> str:
    """A value on one line: of arrays their shape and first entries."""
    if isinstance(value, np.ndarray):
        first = [f"{x:.7g}" if isinstance(x, float) else str(x) for x in value.reshape(-1)[:8].tolist()]
        return f"{value.dtype.name}{list(value.shape)} [{', '.join(first + ['...'] * (value.size > 8))}]"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={abbreviate(item)}" for name, item in value.items())
    if isinstance(value, list | tuple) and arrays_of(value):
        return "[" + "; ".join(map(abbreviate, value)) + "]"
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _kinds(value: Any) -> Any:
    return [_kinds(item) for item in value] if isinstance(value, list) else type(value)
