"""Sessions: a drawn call and what may follow it, each with the reference's answer.

A session is a call, and after it the same with one thing spoiled, another operation, the same arrays written over,
or the first call again; or it is several calls at once. Whatever the reference does (a value or a code) is right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import shd_ref
from shd_ref.attention import Array, soften_rows
from shd_ref.conformance.comparison import arrays_of, narrowest, nudged, outputs_of
from shd_ref.conformance.generator import ARGUMENTS, FACTORS, OUTPUTS, WORDS, Draw, Inputs, covering_rows, draw_call
from shd_ref.conformance.specification import error_codes
from shd_ref.merging.mixing import check_teacher, output_residual
from shd_ref.merging.plans import plan_groups
from shd_ref.tolerances import row_sum_tolerance

_PLACES = re.compile(r"\b(layer|sample|head|row|key) (\d+)")
_MASKS = ("attn_mask", "query_mask", "loss_mask")
_MASK_KINDS = ("int64", "uint8", "int8", "float64", "float32", "object")
_COUNTS = (0, -1, True, 2.5)
# What else is tried for a number; the reference decides whether it may be.
_TRIALS = {
    "temperature": (0, -1.0, np.nan, np.inf, True),
    "beta": (-1.0, -1e-9, np.nan, np.inf, True),
    **dict.fromkeys(("scale", "teacher_scale"), (np.nan, np.inf, True)),
    **dict.fromkeys(("num_teacher_heads", "num_student_heads", "groups", "block_size", "top_k"), _COUNTS),
    **dict.fromkeys(("num_teacher_layers", "num_student_layers"), _COUNTS),
    **dict.fromkeys("pq", (-1, 99, True, 0.5)),
    "relu": (1, 0, 0.5),
}
_FEW_HEADS = 32  # heads of all samples
_VALUE_CODES = {"support-mismatch", "not-a-distribution"}  # refusals that depend on numbers


@dataclass
class Call:
    """One call, and what the reference says of it."""

    operation: str
    inputs: Inputs
    dtype: str
    title: str = ""
    levels: Mapping[str, str] = field(default_factory=dict)
    codes: frozenset[str] = frozenset()  # of ERR-4, other codes that are right too
    places: tuple[str, ...] = ()  # kinds of positions that the message of a refusal must name (MAP-5, LOSS-6)
    seed: int = 0

    @cached_property
    def answer(self) -> tuple[str, Any, str]:
        """``("value", outputs, "")``, ``("error", code, message)`` or ``("skip", why, "")`` where all is right."""
        if any(array.size == 0 for array in arrays_of(self.inputs)):
            return "skip", "MAP-12", ""
        try:
            with np.errstate(all="ignore"):
                got = getattr(shd_ref, self.operation)(**self.inputs)
        except shd_ref.ShdError as error:
            return ("error", error.code, str(error)) if error.code in error_codes() else ("skip", error.code, "")
        except Exception as error:  # what ERR-8 leaves to the language
            return "skip", type(error).__name__, ""
        gram = np.asarray(self.inputs.get("gram", np.zeros((1,) * 5)), np.float64)
        if not np.allclose(gram, gram.transpose(0, 3, 4, 1, 2), atol=1e-6 * np.abs(gram).max()):
            return "skip", "no gram tensor, which is symmetric by GRAM-1", ""
        return "value", outputs_of(self.operation, got), ""

    @cached_property
    def near(self) -> list[dict[str, Any]]:
        """The reference's outputs for nudged inputs, the last four 30 times as far; none where it refuses some."""
        rng, answers = np.random.default_rng(self.seed), []
        scores = self.inputs.get("queries", 0.5) if "scores" in FACTORS[self.operation] else 0.5
        may_tie = bool(np.all(scores == np.round(scores)))  # whole numbers, of which equal scores stay equal
        frozen = ("queries", "keys", "weights") if may_tie else ()
        # Of a hundred heads that tie, some would turn the same way in each of a few.
        heads = max((math.prod(array.shape[:2]) for array in arrays_of(self.inputs) if array.ndim > 2), default=1)
        dtype = "float32" if self.dtype == "float64" and narrowest(self.inputs) else self.dtype
        for size in (*[1.0] * (3 if heads <= _FEW_HEADS else 24), 30.0, 30.0, 30.0, 30.0):
            try:
                with np.errstate(all="ignore"):
                    inputs = nudged(self.inputs, dtype, rng, size, frozen=frozen)
                    if self.operation == "squeeze_heads":
                        answers.append(_squeeze_nudged(inputs, dtype, rng, size))
                    else:
                        answers.append(outputs_of(self.operation, getattr(shd_ref, self.operation)(**inputs)))
            except Exception:
                return []
        return answers

    @property
    def accepted(self) -> frozenset[str]:
        return self.codes | {self.answer[1]}

    @property
    def patterns(self) -> list[str]:
        """Patterns that the message of the refusal must match: positions, of any mass of LOSS-6."""
        if self.answer[1] == "support-mismatch":
            return [f"{place} [0-9]+" for place in ("layer", "sample", "head", "row", "key")]
        return [" ".join(place) for place in _PLACES.findall(self.answer[2]) if place[0] in self.places]


def _squeeze_nudged(inputs: Inputs, dtype: str, rng: np.random.Generator, size: float) -> dict[str, Any]:
    """``squeeze_heads`` of nudged inputs, with softened maps and C nudged too: an implementation rounds both."""
    row_sums, mask = inputs.get("row_sums", "one"), inputs.get("query_mask")
    maps, outputs, mask = check_teacher(inputs["teacher_probs"], inputs["value_outputs"], mask, row_sums=row_sums)
    if inputs.get("alpha_from") == "softened":
        softened = soften_rows(maps, float(inputs.get("temperature", 1.0)), row_sums=row_sums)
        softened = softened if dtype == "float64" else softened.astype(np.float32)
        probs = nudged(softened, dtype, rng, size, "teacher_probs")
        inputs = {**inputs, "teacher_probs": probs, "temperature": 1.0, "alpha_from": "teacher"}
    answer = shd_ref.squeeze_heads(**inputs)
    # An alpha near 1 is rounded as 1 is, and 1 - alpha with it.
    mixing = nudged(answer.mixing, dtype, rng, size, "mixing")
    residual = output_residual(maps, outputs, mixing, plan_groups(answer.plan, maps.shape[1]), mask)
    return {**outputs_of("squeeze_heads", answer), "residual": residual}


class Step(NamedTuple):
    """A call of a session, or several at once; ``over`` writes it into the arrays of the first."""

    calls: tuple[Call, ...]
    over: bool = False


def options_of(operation: str) -> list[str]:
    """The factors of an operation that are options of its call."""
    names = {*ARGUMENTS[operation], "layers", "query_mask"}
    return [name for name, levels in FACTORS[operation].items() if name in names and "" in levels]


def option_tokens(operation: str, levels: Mapping[str, str]) -> tuple[str, ...]:
    """The options that a call of these levels gives, words with their value: what an implementation may lack."""
    options = {name: level for name, level in levels.items() if level and name in options_of(operation)}
    usual = {name: FACTORS[operation][name][1] for name in options}  # the first level that is given
    named = {name: f"{name}={level}" for name, level in options.items() if name in WORDS and level != usual[name]}
    return tuple(named.get(name, name if name != "layers" else "lists of layers") for name in options)


def core_factors(operation: str) -> dict[str, tuple[str, ...]]:
    """The factors of the profile ``core``: sizes, contents and masks, with arrays as they usually come."""
    left_out = {name for name in options_of(operation) if name not in _MASKS} | {"dtype", "layout", "counts"}
    return {name: levels for name, levels in FACTORS[operation].items() if name not in left_out}


def sessions_of(
    operation: str, dtype: str, seed: int, factors: Mapping[str, Sequence[str]], part: str, least: int = 1
) -> Iterator[list[Step]]:
    """A session for every row of a covering array, and more, so that there are at least so many."""
    base = [seed, list(OUTPUTS).index(operation), sum(map(ord, part))]
    rng = np.random.default_rng(base)
    rows = covering_rows(factors, rng, options_of(operation) if part == "options" else ())
    for _ in range(max(least - len(rows), least // 4)):  # and some with few options
        few = {name: levels if rng.random() < 0.5 else levels[:1] for name, levels in factors.items()}
        rows.append({name: levels[int(rng.integers(len(levels)))] for name, levels in few.items()})
    for number, levels in enumerate(rows):
        shapes = (seed, base[1], number % 2) if part == "core" else ()
        yield make_session(operation, [*base, number], dtype, levels, shapes)
    # A mask of each other kind, which no crossing of options is sure to reach.
    masks = [name for name in _MASKS if factors.get(name)] if part == "core" else []
    for number, (name, kind) in enumerate(product(masks, _MASK_KINDS)):
        levels = {other: first for other, (first, *_) in FACTORS[operation].items() if first}
        levels[name] = next(level for level in factors[name] if level)
        inputs = draw_call(operation, [*base, len(rows)], dtype, levels, (seed, number))
        if name in inputs:  # and not inside a list of items
            wrong_before = Call(operation, inputs, dtype).answer[0] == "error"  # ERR-4
            codes = error_codes() if wrong_before else frozenset()
            inputs = {**inputs, name: inputs[name].astype(kind)}
            yield [Step((Call(operation, inputs, dtype, f"with {name} of {kind}", levels, codes, seed=number),))]


def make_session(
    operation: str, key: Sequence[int], dtype: str, levels: Mapping[str, str], shapes: Sequence[int] = ()
) -> list[Step]:
    """A drawn call and what follows it, by the last number of the key."""
    d, number = Draw(operation, [*key, 1], dtype, levels), key[-1]
    call = Call(operation, draw_call(operation, key, dtype, levels, shapes), dtype, "", levels, seed=number)
    if number % 48 == 2 and number < 100:  # three sessions in threads, which take the longest
        return [Step((call,)), Step((call, *(change_numbers(d, call) for _ in range(3))))]
    if number % 3 != 1:
        calls = [call, spoil_argument(d, call), spoil_argument(d, call), *([call] if number % 3 == 0 else [])]
        return [Step((one_call,)) for one_call in calls]
    steps = [Step((call,)), Step((change_numbers(d, call),), over=d.chance(0.6))]
    if d.chance(0.4):
        other = d.pick([name for name in OUTPUTS if name not in ("matched_plan", "diagnose")])
        usual = {name: levels[0] for name, levels in FACTORS[other].items() if levels[0]}
        inputs = draw_call(other, [*key, 2], dtype, usual)
        steps.append(Step((Call(other, inputs, dtype, f"{other} in between", seed=number),)))
    return [*steps, Step((call,))]


# --- changes ------------------------------------------------------------------------------------------------------


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every argument and item of an argument, with its path."""
    if path:
        yield path, value
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, (*path, key))


def _put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    if isinstance(value, dict):
        return {**value, path[0]: _put(value.get(path[0]), path[1:], new)}
    items = [_put(item, path[1:], new) if number == path[0] else item for number, item in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def _is_pair(value: Any) -> bool:
    """Whether this is one pair, in whose place another kind of thing may raise the language's own error (ERR-8)."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(i, int | np.integer) for i in value)


def change_numbers(d: Draw, call: Call) -> Call:
    """The same call with the numbers of one array, or of all, in another order or its last entry another."""
    inputs, leaves = call.inputs, list(_leaves(call.inputs))
    arrays = [(path, value) for path, value in leaves if isinstance(value, np.ndarray) and value.ndim]
    rounds = [(path, value) for path, value in leaves if isinstance(value, list) and value]
    rounds = [(path, value) for path, value in rounds if all(isinstance(p, list) and _is_pair(p) for p in value)]
    if isinstance(inputs.get("strategies"), list) and d.chance(0.5):
        names = sorted(("mean", "constant", "shd", "hard"), key=inputs["strategies"].__contains__)
        arrays, inputs = [], {**inputs, "strategies": names[: len(inputs["strategies"])]}
    elif rounds and (not arrays or d.chance(0.4)):
        path, pairs = d.pick(rounds)
        arrays, inputs = [], _put(inputs, path, [[q, p] for p, q in pairs][:: d.pick((1, -1))])
    for path, value in arrays if not arrays or d.chance(0.2) else [d.pick(arrays)]:
        if value.dtype == bool:
            new = value ^ (d.rng.random(value.shape) < 0.3)
        elif d.chance(0.6) or path == ("gram",):  # heads of a gram tensor keep their places
            new = np.roll(value, 1, axis=int(d.rng.integers(value.ndim if path != ("gram",) else 1)))
        elif value.ndim > 1 and d.chance(0.5):
            new = value.copy()
            new[..., -1, :] = np.roll(new[..., -1, :], 1, axis=-1)
        else:
            new = value[::-1].copy()
        inputs = _put(inputs, path, new.view(type(value)))
    title, codes = "with one argument changed", frozenset(_VALUE_CODES)
    return Call(call.operation, inputs, call.dtype, title, call.levels, codes, seed=call.seed)


def spoil_argument(d: Draw, call: Call) -> Call:
    """The same call with one thing changed; the reference decides whether that is wrong, and how."""
    inputs, operation = call.inputs, call.operation
    idle = [name for name in options_of(operation) if name not in inputs and (name in _TRIALS or name in WORDS)]
    name = d.pick(idle) if idle and d.chance(0.2) else d.pick(list(inputs))
    path, old = d.pick(list(_leaves({name: inputs.get(name)})))
    codes: set[str] = set()
    places: tuple[str, ...] = ()
    change = ""
    is_map = "probs" in name or name in ("supervision", "calibration")
    if isinstance(old, np.ndarray) and old.dtype == bool:
        new, _, _, change = _spoil_array(d, old, is_map=False)
        codes = _VALUE_CODES
    elif isinstance(old, np.ndarray) and old.ndim:
        new, codes, places, change = _spoil_array(d, old, is_map)
        in_list = len(path) > 1 and not name.startswith("teacher") and name != "calibration"
        unnamed = operation in ("softmax", "soften") or old.ndim < 3 or name in ("gram", "outside")
        places = () if unnamed else places[: 1 if old.ndim == 3 else 2] + (("layer",) if in_list and places else ())
        if codes:
            codes |= {"heads-exceed", "plan-invalid"} if is_map and "argument-shape" in codes else set()
            codes |= {"mixing-invalid"} if name in ("mixing", "alphas", "alpha") else set()
            codes |= {"support-mismatch"} if name in ("supervision", "student_logits") else set()
    elif name in _TRIALS and not isinstance(old, list | tuple | np.ndarray):
        near = (old + 1, old - 1, old + 9) if name.startswith(("num_", "groups", "top_k")) and old is not None else ()
        new = d.pick((*_TRIALS[name], *near))
        planned = bool({"plan", "kind"} & inputs.keys())
        if name.startswith("num_") and (planned or new in _COUNTS):
            codes = {"argument-value", "heads-exceed"} | ({"plan-invalid", "argument-shape"} if planned else set())
    elif isinstance(old, str) or (old is None and name in WORDS):
        new = d.pick(("another", "", "ONE", "shd2"))
    elif isinstance(old, list | tuple) and (len(path) == 1 or not _is_pair(old)):
        items = list(old)
        new = d.pick(([], items[:-1], [*items, *items[-1:]], items[::-1], [*items[1:], *items[:1]]))
        codes = {"argument-shape", "argument-value", "plan-invalid"}
    elif isinstance(old, int | np.integer) and not isinstance(old, bool):  # a position
        new = d.pick((-1, 97, True, 0.5, old + 1, 0))
        codes = {"argument-value", "plan-invalid", "layers-invalid", "argument-shape"} if len(path) > 1 else set()
    else:
        return change_numbers(d, call)
    title = f"with {name}{''.join(f'[{step}]' for step in path[1:])} changed{change}"
    # Where the call was wrong before, two rules are broken (ERR-4).
    right = frozenset(codes) if call.answer[0] != "error" else error_codes()
    return Call(operation, _put(inputs, path, new), call.dtype, title, call.levels, right, places, call.seed)


def _spoil_array(d: Draw, old: Array, is_map: bool) -> tuple[Any, set[str], tuple[str, ...], str]:
    """Another array, other codes that are right too, what a message must name, and words for the change."""
    is_mask, last_chance = old.dtype == bool, 0.6 if d.axis else 0.3  # of an axis's end; more where one is long
    index = tuple(n - 1 if d.chance(last_chance) else int(d.rng.integers(n)) for n in old.shape)
    kinds = ["shape", "shape", "dtype", *(("dtype", "other") if is_mask else ("entry", "entry"))]
    kind = d.pick([*kinds, *(("entry", "sum", "sum") if is_map else () if is_mask else ("other",))])
    values, before = np.array(old), f" from {old.dtype.name}{list(old.shape)}"
    if kind == "dtype" or (kind in ("entry", "sum") and old.dtype.kind != "f"):
        others = [old.astype(kind) for kind in _MASK_KINDS] if is_mask else [old.astype(complex), old > 0]
        return d.pick([*others, *([old.astype(object)] if not is_mask else [])]), {"argument-dtype"}, (), before
    if kind == "entry":
        value = values[index] = d.pick((np.nan, np.nan, np.inf, -np.inf, -0.25, -(2.0**-20), 1.5))
        codes = {"not-a-distribution"} if is_map and (np.isfinite(value) or value == -np.inf) else set()
        codes |= {"not-finite"} if value == -np.inf and not is_map else set()
        places = () if np.isfinite(value) else ("sample", "head")
        return values.view(type(old)), codes, places, f": {value} instead of {old[index]} at {list(index)}"
    if kind == "sum":
        is_half = d.dtype in ("float16", "bfloat16")
        tolerance = row_sum_tolerance(d.dtype if is_half else old.dtype.newbyteorder("=").name)
        times = d.pick((1.4, -1.4, 30) if is_half else (1.4, -1.4, 0.6, -0.6, 5, 30))
        row = values[index[:-1]]
        row[:] = row / (row.sum() or 1.0) * (1 + times * tolerance)
        if d.chance(0.2):
            row[:] = np.where(np.arange(len(row)) == 0, 2.0**-24, 0.0)  # next to nothing is not a masked row
        return values.view(type(old)), {"not-a-distribution"}, (), f": the sum of the row {list(index[:-1])}"
    if kind == "shape":
        ways = [old[0], old[None], old[..., :-1], np.concatenate([old, old], -1), old[:1], np.r_[old, old[-1:]]]
        ways += [old[(0,) * (old.ndim - 1)], old.T, old[..., :1], *[old[0]] * (6 * (is_mask and len(old) == 1))]
        if old.ndim > 1:
            ways += [old[:, :1], old.swapaxes(-1, -2), old.swapaxes(0, 1), np.concatenate([old, old], 1)]
            ways += [old[:, :-1], old[..., :-1, :]]
        if is_map and d.coarse:  # whose sums may be right by one dtype and wrong by another
            ways = ways[:2]
        codes = {"argument-shape", "argument-value"} | ({"not-a-distribution"} if is_map else set())
        return np.asarray(d.pick(ways)).view(type(old)), codes, (), before
    if is_mask:
        return d.pick((np.logical_not(old), np.zeros_like(old), np.ones_like(old))), set(), (), ""
    factor = d.pick((-1, 0.5, 0) if old.dtype.kind == "f" else (0, 1))
    return (values * float(factor)).astype(old.dtype).view(type(old)), {"argument-value"}, (), f": times {factor}"
