"""Sessions: a drawn call and what may follow it, each with the reference's answer.

A session is a call; the same with one thing spoiled; another operation in between; the same arrays written over; the
first call again; or several calls at once. Whatever the reference does (a value or a code) is right.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

import shd_ref
from shd_ref.attention import Array, soften_rows
from shd_ref.conformance.comparison import arrays_of, last_bits, nudged, outputs_of
from shd_ref.conformance.generator import FACTORS, Draw, Inputs, covering_rows, draw_call
from shd_ref.conformance.specification import OUTPUTS, error_codes
from shd_ref.merging.mixing import check_teacher, make_pool, merge_round, output_residual
from shd_ref.tolerances import row_sum_tolerance

_PLACES = re.compile(r"\b(layer|sample|head|row|key) (\d+)")
_COUNTS = "num_teacher_heads num_student_heads num_teacher_layers num_student_layers groups block_size top_k"
_NUMBERED = {
    "temperature": (0, -1.0, np.nan, np.inf, True),
    "beta": (-1.0, -1e-9, np.nan, np.inf, True),
    **dict.fromkeys(("scale", "teacher_scale"), (np.nan, np.inf, True)),
    **dict.fromkeys(_COUNTS.split(), (0, -1, True, 2.5)),
    **dict.fromkeys(("p", "q"), (-1, 99, True, 0.5)),
    "relu": (1, 0, 0.5),
}
"""What numbers must not be, mostly; the reference decides."""
_WORDS = (
    "rule row_sums strategy alpha_rule alpha_from reduction divergence support by restriction kind plan".split()  # noqa: SIM905
)


@dataclass
class Call:
    """One call, and what the reference says of it."""

    operation: str
    inputs: Inputs
    dtype: str
    title: str
    levels: Mapping[str, str] = field(default_factory=dict)
    codes: frozenset[str] = frozenset()  # of ERR-4: other codes that are right too
    places: tuple[str, ...] = ()  # kinds of positions that a message must name
    seed: int = 0

    @cached_property
    def answer(self) -> tuple[str, Any, str]:
        """``("value", outputs, "")``, ``("error", code, message)`` or ``("skip", why, "")`` where all is right."""
        if any(array.size == 0 for array in arrays_of(self.inputs)):
            return "skip", "MAP-12", ""
        try:
            with np.errstate(all="ignore"):
                got = getattr(shd_ref, self.operation)(**copy.deepcopy(self.inputs))
        except shd_ref.ShdError as error:
            return ("error", error.code, str(error)) if error.code in error_codes() else ("skip", error.code, "")
        except Exception as error:  # what ERR-8 leaves to the language
            return "skip", type(error).__name__, ""
        gram = np.asarray(self.inputs.get("gram", 0.0), np.float64)
        turned = gram.transpose(0, 3, 4, 1, 2) if gram.ndim == 5 else gram
        if not np.allclose(gram, turned, atol=1e-6 * np.abs(turned).max(initial=0.0)):
            return "skip", "no gram tensor, which is symmetric by GRAM-1", ""
        return "value", outputs_of(self.operation, got), ""

    @cached_property
    def near(self) -> list[dict[str, Any]]:
        """The reference's outputs for nudged inputs, where it answers them."""
        rng, found = np.random.default_rng(self.seed), []
        frozen = frozenset({"queries", "keys", "weights"}) if self.levels.get("scores") == "tied" else frozenset()
        for size in (1.0, 1.0, 30.0, 30.0, 30.0, 30.0):
            try:
                with np.errstate(all="ignore"):
                    inputs = nudged(self.inputs, self.dtype, rng, size, frozen=frozen)
                    found.append(outputs_of(self.operation, getattr(shd_ref, self.operation)(**inputs)))
                    if self.operation == "squeeze_heads" and size == 1:
                        found.insert(0, self._squeezed_with_noise(rng))
            except Exception:
                return []
        return found

    def _squeezed_with_noise(self, rng: np.random.Generator) -> dict[str, Any]:
        """``squeeze_heads`` with last bits lost in every pool, as by arithmetic in the dtype (NUM-6)."""
        inputs, right = self.inputs, self.answer[1]
        sums, temperature = inputs.get("row_sums", "one"), float(inputs.get("temperature", 1))
        maps, outputs, mask = check_teacher(
            inputs["teacher_probs"], inputs["value_outputs"], inputs.get("query_mask"), row_sums=sums
        )
        softened = soften_rows(maps, temperature, row_sums=sums)
        bits = last_bits(self.dtype, inputs)

        def noisy(array: Array) -> Array:
            return np.asarray(array * (1 + bits * rng.uniform(-1, 1, size=array.shape)))

        pool = make_pool(noisy(softened if inputs.get("alpha_from") == "softened" else maps), noisy(outputs))
        alphas, mixing = [], right["mixing"]
        for one in right["plan"] if inputs.get("strategy", "shd") in ("shd", "hard") else ():
            rule = inputs.get("alpha_rule", "least_squares")
            pool, solved = merge_round(pool, one, strategy=inputs.get("strategy", "shd"), query_mask=mask, rule=rule)
            pool = [(noisy(probs), noisy(values)) for probs, values in pool]
            alphas.append(np.stack([solution.clipped for solution in solved], axis=1))
        mixing = shd_ref.compose_mixing(alphas, right["plan"], maps.shape[1]) if alphas else mixing
        groups = shd_ref.plan_groups(right["plan"], maps.shape[1])
        residual = output_residual(maps, outputs, mixing, groups, mask)
        probs = np.einsum("bht,btls->bhls", mixing, softened)
        return {"alphas": alphas or right["alphas"], "mixing": mixing, "probs": probs, "residual": residual} | {
            name: right[name] for name in ("plan", "num_clipped", "num_degenerate")
        }

    @property
    def exact(self) -> bool:
        """Whether the content is such that no rounding decides anything."""
        if self.operation not in ("solve_alpha", "solve_alpha_from_gram", "merge_gram"):
            return False
        if "gram" in self.levels:
            return bool((self.inputs["gram"] == np.round(self.inputs["gram"])).all())
        return self.levels.get("maps") == "exact"

    @property
    def accepted(self) -> frozenset[str]:
        """The codes of which any is right."""
        return self.codes | {self.answer[1]}

    @property
    def told(self) -> set[tuple[str, str]]:
        """The positions that the message of a refusal must name (MAP-5, LOSS-6)."""
        return {place for place in _PLACES.findall(self.answer[2]) if place[0] in self.places}


@dataclass
class Step:
    """A call of a session; ``over`` writes it into the arrays of the step before, ``beside`` runs calls at once."""

    call: Call
    over: bool = False
    beside: tuple[Call, ...] = ()


@dataclass
class Session:
    """Calls in a row, the first of them the one that was drawn."""

    id: str
    operation: str
    steps: list[Step]


def option_tokens(operation: str, levels: Mapping[str, str]) -> tuple[str, ...]:
    """The options that a call of these levels gives, words with their value: what an implementation may lack."""
    tokens = []
    for name, level in levels.items():
        if level and name in options_of(operation):
            tokens.append(
                f"{name}={level}"
                if name in _WORDS and level in _NOT_DEFAULT
                else "lists of layers"
                if name == "layers"
                else name
            )
    return tuple(tokens)


_OPTIONS = {
    *("attn_mask query_mask loss_mask temperature rule row_sums plan strategy alpha_rule alpha_from beta".split()),  # noqa: SIM905
    *("reduction divergence support kind pairs rows columns by strategies groups block_size segments".split()),  # noqa: SIM905
    *("outside weights relu top_k restriction layers".split()),  # noqa: SIM905
}
_REQUIRED = {("soften", "temperature"), ("plan_groups", "plan"), ("compose_mixing", "plan")}
_NOT_DEFAULT = {
    *("at_most_one as_printed constant hard mean softened rows samples reverse_kl js mse intersect".split()),  # noqa: SIM905
    *("balanced similarity mask_first unnormalised student_all".split()),  # noqa: SIM905
}
_MASKS = ("attn_mask", "query_mask", "loss_mask")
_MASK_KINDS = ("int64", "uint8", "int8", "float64", "float32", "object")


def options_of(operation: str) -> list[str]:
    """The factors of an operation that are options of its call."""
    return [name for name in FACTORS[operation] if name in _OPTIONS and (operation, name) not in _REQUIRED]


def core_factors(operation: str) -> dict[str, tuple[str, ...]]:
    """The factors of the profile ``core``: sizes, contents and masks, with arrays as they usually come."""
    left_out = {name for name in options_of(operation) if name not in _MASKS} | {"dtype", "layout", "counts"}
    return {name: levels for name, levels in FACTORS[operation].items() if name not in left_out}


def sessions_of(
    operation: str, dtype: str, seed: int, factors: Mapping[str, Sequence[str]], part: str, least: int = 1
) -> Iterator[Session]:
    """A session for every row of a covering array, or several, so that there are at least so many."""
    number = list(OUTPUTS).index(operation)
    base = [seed, number, sum(map(ord, part))]
    made = 0
    while made < least:
        for levels in covering_rows(factors, np.random.default_rng([*base, made])):
            name, draws = f"{operation}/{part}-{made}", [*base, made]
            yield make_session(name, operation, draws, dtype, levels, made, share_shapes=part == "core")
            made += 1
    # A mask of each other kind, which no crossing of options is sure to reach.
    masks = [name for name in _MASKS if factors.get(name)] if part == "core" else []
    for number, (name, kind) in enumerate(product(masks, _MASK_KINDS)):
        levels = {each: first for each, (first, *_) in FACTORS[operation].items() if first}
        levels[name] = next(level for level in factors[name] if level)
        inputs = draw_call(operation, [*base, made], dtype, levels, (seed, number))
        if name not in inputs:
            continue  # inside a list of items
        inputs[name] = inputs[name].astype(kind)
        call = Call(operation, inputs, dtype, f"with {name} of {kind}", levels, seed=number)
        yield Session(f"{operation}/{part}-{made + number}", operation, [Step(call)])


def make_session(
    name: str,
    operation: str,
    key: Sequence[int],
    dtype: str,
    levels: Mapping[str, str],
    number: int,
    *,
    share_shapes: bool = False,
) -> Session:
    """A drawn call and its company; which company, its number says."""
    d = Draw([*key, 1], dtype, levels)
    shapes = (key[0], key[1], number % 2) if share_shapes else ()
    inputs = draw_call(operation, key, dtype, levels, shapes)
    call = Call(operation, inputs, dtype, "", levels, seed=number)
    steps = [Step(call)]
    if number % 3 == 0:
        steps += [Step(spoiled(d, call)), Step(call)]
    elif number % 3 == 1:
        steps.append(
            Step(
                Call(operation, varied(d, inputs), dtype, "with one argument changed", levels, _BESIDE, seed=number),
                over=d.chance(0.6),
            )
        )
        if d.chance(0.4):
            other = d.pick([name for name in OUTPUTS if name not in ("matched_plan", "diagnose")])
            plain = draw_call(other, [*key, 2], dtype, {"temperature": "one", "plan": "progressive"})
            steps.append(Step(Call(other, plain, dtype, f"{other} in between", seed=number)))
        steps.append(Step(call))
    elif number % 24 == 2:
        others = [Call(operation, varied(d, inputs), dtype, "", levels, _BESIDE, seed=number) for _ in range(3)]
        steps.append(Step(call, beside=(call, *others)))
    else:
        steps.append(Step(spoiled(d, call)))
    return Session(name, operation, steps)


_BESIDE = frozenset({"support-mismatch", "not-a-distribution"})


# --- changes ------------------------------------------------------------------------------------------------------


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every argument and item of an argument, with the way to it."""
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
    return len(value) == 2 and all(isinstance(item, int | np.integer) for item in value)


def _is_pairs(value: Any) -> bool:
    """Whether this is a round of a plan, a list of pairs."""
    pairs = isinstance(value, list) and bool(value) and all(isinstance(pair, list) for pair in value)
    return pairs and all(len(pair) == 2 and type(pair[0]) is int for pair in value)


def varied(d: Draw, inputs: Inputs) -> Inputs:
    """The same call with the numbers of one array, or of all, in another order or its last entry another."""
    lists = [(path, value) for path, value in _leaves(inputs) if _is_pairs(value)]
    found = [(path, value) for path, value in _leaves(inputs) if isinstance(value, np.ndarray) and value.ndim]
    if isinstance(inputs.get("strategies"), list) and d.chance(0.5):
        others = [name for name in ("mean", "constant", "shd", "hard") if name not in inputs["strategies"]]
        return {**inputs, "strategies": [*others, *inputs["strategies"]][: len(inputs["strategies"])]}
    if lists and (not found or d.chance(0.4)):
        path, value = d.pick(lists)
        return {**inputs, path[0]: _put(inputs, path, [[q, p] for p, q in value][:: d.pick((1, -1))])[path[0]]}
    if not found:
        return inputs
    for path, value in found if d.chance(0.2) else [d.pick(found)]:
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
    return inputs


def spoiled(d: Draw, call: Call) -> Call:
    """One thing changed; whether that is wrong, and how, the reference says."""
    inputs, operation = call.inputs, call.operation
    paths = list(_leaves(inputs))
    idle = [name for name in options_of(operation) if name not in inputs and (name in _NUMBERED or name in _WORDS)]
    if idle and d.chance(0.2):
        paths = [((name,), None) for name in idle]
    path, old = d.pick(paths)
    name = str(path[0])
    codes: set[str] = set()
    places: tuple[str, ...] = ()
    is_map = "probs" in name or name in ("supervision", "calibration")
    if isinstance(old, np.ndarray) and old.dtype == bool:
        new, codes = _spoil_mask(d, old)
    elif isinstance(old, np.ndarray) and old.ndim:
        new, codes, places = _spoil_array(d, old, is_map, len(path) > 1 and not name.startswith("teacher"))
        if operation in ("softmax", "soften") or old.ndim < 3 or name in ("gram", "outside"):
            places = ()
        elif old.ndim == 3:
            places = tuple(place for place in places if place != "head")
        if is_map:
            codes |= {"heads-exceed", "plan-invalid"} if "argument-shape" in codes else set()
        if name in ("mixing", "alphas", "alpha") and codes:
            codes |= {"mixing-invalid"}
        codes |= {"support-mismatch"} if name in ("supervision", "student_logits") and codes else set()
    elif name in _NUMBERED and not isinstance(old, list | tuple | np.ndarray):
        new = d.pick(
            (
                *_NUMBERED[name],
                *((old + 1, old - 1) if name.startswith(("num_", "groups", "top_k")) and old is not None else ()),
            )
        )
        if name.startswith("num_"):
            codes = {"argument-value", "heads-exceed", "plan-invalid", "argument-shape"} & (
                {"argument-value", "heads-exceed"}
                if "plan" not in inputs and "kind" not in inputs
                else {"argument-value", "heads-exceed", "plan-invalid", "argument-shape"}
            )
            codes = codes if new in (0, -1, True, 2.5) or "plan" in inputs or "kind" in inputs else set()
    elif isinstance(old, str) or (old is None and name in _WORDS):
        new = d.pick(("another", "", "ONE", "shd2"))
    elif isinstance(old, list | tuple) and (len(path) == 1 or not _is_pair(old)):
        items = list(old)
        new = d.pick(([], items[:-1], [*items, *items[-1:]], items[::-1], [*items[1:], *items[:1]]))
        codes = {"argument-shape", "argument-value", "plan-invalid"}
    elif isinstance(old, int | np.integer) and not isinstance(old, bool):  # a position
        new = d.pick((-1, 97, True, 0.5, old + 1, 0))
        codes = {"argument-value", "plan-invalid", "layers-invalid", "argument-shape"}
        codes = codes if len(path) > 1 else set()
    else:
        return Call(
            operation,
            varied(d, inputs),
            call.dtype,
            "with one argument changed",
            call.levels,
            _BESIDE,
            seed=call.seed,
        )
    where = name + "".join(f"[{step}]" for step in path[1:])
    return Call(
        operation,
        _put(inputs, path, new),
        call.dtype,
        f"with {where} changed",
        call.levels,
        frozenset(codes),
        places,
        call.seed,
    )


def _spoil_mask(d: Draw, old: Array) -> tuple[Any, set[str]]:
    kind = d.pick(("dtype", "dtype", "objects", "shape", "other"))
    if kind == "dtype":
        return old.astype(d.pick(_MASK_KINDS[:-1])), set()
    if kind == "objects":
        return old.astype(object), set()
    if kind == "shape":
        ways = [
            old.T,
            old[..., :-1],
            old[None],
            old[:1],
            old[0],
            old[..., :1],
            np.concatenate([old, old[:1]]),
            np.ones((7, 7), bool),
        ]
        return np.asarray(d.pick(ways)), {"support-mismatch", "not-a-distribution"}
    return d.pick((np.logical_not(old), np.zeros_like(old), np.ones_like(old))), {
        "support-mismatch",
        "not-a-distribution",
    }


def _spoil_array(d: Draw, old: Array, is_map: bool, in_list: bool) -> tuple[Any, set[str], tuple[str, ...]]:
    """Another array, other codes that are right too, and what a message must name."""
    index = tuple(int(d.rng.integers(n)) if d.chance(0.7) else n - 1 for n in old.shape)
    kind = d.pick(
        ("entry", "entry", "entry", "sum", "shape", "shape", "dtype")
        if is_map
        else ("entry", "entry", "shape", "shape", "dtype", "other")
    )
    if kind == "dtype" or (kind in ("entry", "sum") and old.dtype.kind != "f"):
        return d.pick((old.astype(complex), old > 0, old.astype(object))), {"argument-dtype"}, ()
    values = np.array(old)
    if kind == "entry":
        value = d.pick((np.nan, np.nan, np.inf, -np.inf, -0.25, -(2.0**-20), 1.5))
        values[index] = value
        places = ("sample", "head", "layer") if in_list else ("sample", "head")
        codes = (
            {"not-a-distribution"} if is_map and value == -np.inf else {"not-finite"} if value == -np.inf else set()
        )
        return (
            values.view(type(old)),
            codes | ({"not-a-distribution"} if is_map and np.isfinite(value) else set()),
            places if not np.isfinite(value) else (),
        )
    if kind == "sum":
        off = row_sum_tolerance(d.dtype if d.dtype in ("float16", "bfloat16") else old.dtype.newbyteorder("=").name)
        away = d.pick((1.4, -1.4, 0.6, -0.6, 5, 30)) if d.dtype in ("float64", "float32") else d.pick((1.4, -1.4, 30))
        row = values[index[:-1]]
        if d.chance(0.2):
            row[:] = np.where(np.arange(len(row)) == 0, 2.0**-24, 0.0)  # next to nothing is not a masked row
        else:
            row[:] = row / (row.sum() or 1.0) * (1 + away * off)
        return values.view(type(old)), {"not-a-distribution"}, ()
    if kind == "shape":
        ways = [
            old[0],
            old[None],
            old[..., :-1],
            np.concatenate([old, old], -1),
            old[:1],
            np.concatenate([old, old[-1:]]),
            old[(0,) * (old.ndim - 1)],
        ]
        if old.ndim > 1:
            ways += [
                old[:, :1],
                old.swapaxes(-1, -2),
                old.swapaxes(0, 1),
                np.concatenate([old, old], 1),
                old[:, :-1],
                old[..., :-1, :],
            ]
        codes = {"argument-shape", "argument-value"} | ({"not-a-distribution"} if is_map else set())
        return np.asarray(d.pick(ways)).view(type(old)), codes, ()
    return (
        (values * float(d.pick((-1, 2, 0) if old.dtype.kind == "f" else (0, 1)))).astype(old.dtype).view(type(old)),
        {"argument-value"},
        (),
    )
