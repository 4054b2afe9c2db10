"""What an operation can be asked for: for each operation its options, and how a call is read for their values.

An option is an argument with a list of values, or something about the arrays that an implementation may take another
way for: how many rounds a plan has, whether rows are zero, whether numbers need more bits than bfloat16 has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shd_ref.conformance.compare import as_plain
from shd_ref.conformance.variants import compute
from shd_ref.conformance.vectors import round_to

Inputs = Mapping[str, Any]
LARGE = 16  # an axis above it is large: a block of a kernel, or more than unrolled by hand
SMALL_MASS = 1 / 512


@dataclass(frozen=True)
class Option:
    """One option of an operation, with all of its values as words."""

    name: str
    values: tuple[str, ...]
    read: Callable[[Inputs], str | tuple[str, ...]]  # the values in a call, usually one


def argument(name: str, default: str, *others: str) -> Option:
    """An argument with a list of words."""
    return Option(name, (default, *others), lambda inputs: str(inputs.get(name, default)))


def arrays_of(value: Any) -> Iterator[np.ndarray]:
    """Every array in an argument."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from arrays_of(item)


def first(value: Any) -> np.ndarray:
    """An array, or that of the first layer or item."""
    return next(arrays_of(value))


# --- numbers and sizes ------------------------------------------------------------------------------------------


def _numbers(inputs: Inputs) -> str:
    floats = [a for value in inputs.values() for a in arrays_of(value) if a.dtype.kind == "f"]
    scalars = [np.array([v]) for v in inputs.values() if isinstance(v, float) and np.isfinite(v)]
    with np.errstate(over="ignore"):  # the largest number of float64 is none of bfloat16
        short = all(np.array_equal(round_to(a, "bfloat16"), a, equal_nan=True) for a in (*floats, *scalars))
    return "short" if short else "full"


NUMBERS = Option("numbers", ("short", "full"), _numbers)


def _temperature(inputs: Inputs) -> str:
    t = inputs.get("temperature", 1)
    if t == 1:
        return "one"
    if t < 1:
        return "below"
    return "whole" if t == int(t) else "above"


TEMPERATURE = Option("temperature", ("one", "whole", "above", "below"), _temperature)


def batch(name: str) -> Option:
    """How many samples."""

    def read(inputs: Inputs) -> str:
        size = first(inputs[name]).shape[0]
        return "1" if size == 1 else "2 to 4" if size <= 4 else "more"

    return Option("samples", ("1", "2 to 4", "more"), read)


def size(*names: str) -> Option:
    """Whether some axis is large."""

    def read(inputs: Inputs) -> str:
        return "large" if any(max(a.shape) > LARGE for n in names for a in arrays_of(inputs[n])) else "small"

    return Option("size", ("small", "large"), read)


def map_shape(name: str) -> Option:
    """Queries against keys."""

    def read(inputs: Inputs) -> str:
        rows, keys = first(inputs[name]).shape[-2:]
        return "L < S" if rows < keys else "L = S" if rows == keys else "L > S"

    return Option("shape", ("L < S", "L = S", "L > S"), read)


def zero_rows(name: str) -> Option:
    """Whether a map has fully masked rows."""

    def read(inputs: Inputs) -> str:
        given = [item[0] for item in inputs[name]] if name == "calibration" else inputs[name]
        return "some" if any((a.sum(-1) == 0).any() for a in arrays_of(given)) else "none"

    return Option("zero rows", ("none", "some"), read)


def some(option: str, name: str, holds: Callable[[np.ndarray], Any]) -> Option:
    """Whether something holds for an entry of an argument's arrays."""

    def read(inputs: Inputs) -> str:
        return "some" if any(holds(a).any() for a in arrays_of(inputs[name])) else "none"

    return Option(option, ("none", "some"), read)


def small_mass(name: str) -> Option:
    """Whether an entry above 0 is small."""
    return some("small mass", name, lambda array: (array > 0) & (array < SMALL_MASS))


# --- masks ------------------------------------------------------------------------------------------------------


def _row_mask(mask: Any) -> tuple[str, ...]:
    if mask is None:
        return ("none",)
    if mask.all():
        return ()  # as good as no mask, and does not show that one is read
    return ("some rows",) if mask.any(-1).all() else ("an empty sample",)


def row_mask(name: str) -> Option:
    """A mask ``(B, L)``."""
    return Option(name, ("none", "some rows", "an empty sample"), lambda inputs: _row_mask(inputs.get(name)))


def attn_mask(logits: str) -> Option:
    """A mask that broadcasts to the logits."""

    def read(inputs: Inputs) -> str | tuple[str, ...]:
        mask = inputs.get("attn_mask")
        if mask is None:
            return "none"
        shape = first(inputs[logits]).shape
        if mask.shape == shape:
            return "full"
        if mask.ndim <= 2:
            return "(L, S)" if mask.shape == shape[-2:] else "other"
        return "(B, 1, 1, S)" if mask.ndim == 4 and mask.shape[1:3] == (1, 1) else "other"

    return Option("attn_mask", ("none", "full", "(L, S)", "(B, 1, 1, S)", "other"), read)


def minus_infinity(name: str) -> Option:
    """Whether the logits themselves mask keys."""
    return some("-inf", name, np.isneginf)


# --- plans ------------------------------------------------------------------------------------------------------


def _heads(inputs: Inputs) -> tuple[int, int, Any]:
    """Teacher heads, student heads and the rounds of a call."""
    if "calibration" in inputs:
        teachers, students, kind = inputs["calibration"][0][0].shape[1], inputs["num_student_heads"], None
    elif "teacher_probs" in inputs:
        teachers, students = inputs["teacher_probs"].shape[1], inputs["num_student_heads"]
        kind = inputs.get("plan")
    else:
        teachers, students, kind = inputs["num_teacher_heads"], inputs.get("num_student_heads"), inputs.get("kind")
        if "plan" in inputs:
            kind = as_plain(inputs["plan"])
            students = teachers - sum(len(r) for r in kind)
    counts = {"num_teacher_heads": teachers, "num_student_heads": students}
    rounds = compute("merge_plan", {**counts, **({} if kind is None else {"kind": kind})})
    assert rounds is not None
    return teachers, students, rounds["plan"]


def _plan(inputs: Inputs, name: str) -> str:
    kind = inputs.get(name)
    return "progressive" if kind is None else kind if isinstance(kind, str) else "explicit"


def plan_kind(name: str) -> Option:
    """Which plan."""
    return Option(name, ("progressive", "balanced", "explicit"), lambda inputs: _plan(inputs, name))


def _rounds(inputs: Inputs) -> str:
    count = len(_heads(inputs)[2])
    return str(count) if count < 4 else "4 or more"


def rounds(*left_out: str) -> Option:
    """How many rounds the plan has."""
    values = tuple(v for v in ("0", "1", "2", "3", "4 or more") if v not in left_out)
    return Option("rounds", values, _rounds)


def _left(inputs: Inputs) -> str:
    teachers, students, _ = _heads(inputs)
    if teachers == students:
        return "all"
    return "one" if students == 1 else "several, evenly" if teachers % students == 0 else "several, unevenly"


def left(*left_out: str) -> Option:
    """What is left of the heads."""
    values = tuple(v for v in ("all", "one", "several, evenly", "several, unevenly") if v not in left_out)
    return Option("heads left", values, _left)


def _order(inputs: Inputs) -> str:
    pairs = [[tuple(pair) for pair in one_round] for one_round in as_plain(inputs["plan"])]
    if any(p > q for one_round in pairs for p, q in one_round):
        return "pairs swapped"
    return "as the pool" if all(one_round == sorted(one_round) for one_round in pairs) else "rounds shuffled"


ORDER = Option("order", ("as the pool", "pairs swapped", "rounds shuffled"), _order)
PER = argument("alpha_per", "map", "row")
ROW_SUMS = argument("row_sums", "one", "at_most_one")


def groups(heads: Callable[[Inputs], int], kv: Callable[[Inputs], int]) -> Option:
    """How many query heads read one key or value head."""

    def read(inputs: Inputs) -> str:
        count, shared = heads(inputs), kv(inputs)
        if shared == 1 and count > 1:
            return "one for all"
        return {1: "own", 2: "two"}.get(count // shared, "three or more")

    return Option("grouped", ("own", "two", "three or more", "one for all"), read)


# --- layers and losses ------------------------------------------------------------------------------------------


def _layers(inputs: Inputs) -> str:
    given = inputs["supervision"]
    if not isinstance(given, list | tuple):
        return "one array"
    alike = len({a.shape for a in given}) == 1
    return "a list of one" if len(given) == 1 else "alike" if alike else "of different shapes"


_LOSS = (
    argument("divergence", "kl", "reverse_kl", "js", "mse"),
    argument("reduction", "sum", "mean"),
    argument("support", "error", "intersect"),
    ROW_SUMS,
    TEMPERATURE,
    Option(
        "beta", ("one", "zero", "other"), lambda inputs: {1: "one", 0: "zero"}.get(inputs.get("beta", 1), "other")
    ),
    Option("layers", ("one array", "a list of one", "alike", "of different shapes"), _layers),
    row_mask("loss_mask"),
    batch("supervision"),
    zero_rows("supervision"),
    map_shape("supervision"),
    NUMBERS,
)


def _scale(inputs: Inputs) -> str:
    scale = inputs["scale"]
    return "one" if scale == 1 else "negative" if scale < 0 else "zero" if scale == 0 else "positive"


# --- lists of positions -----------------------------------------------------------------------------------------


def positions(name: str, axis: int) -> Option:
    """Which positions are kept, and in which order."""

    def read(inputs: Inputs) -> str:
        kept = inputs.get(name)
        if kept is None:
            return "not given"
        kept = list(kept)
        if len(kept) == inputs["attn_probs"].shape[axis]:
            return "all of them"
        return "some in order" if kept == sorted(kept) else "some out of order"

    return Option(name, ("not given", "all of them", "some in order", "some out of order"), read)


def _pairs_of_layers(inputs: Inputs) -> str:
    teachers, students = inputs["num_teacher_layers"], inputs["num_student_layers"]
    if students > teachers:
        return "deeper student"
    return "equal" if teachers == students else "even" if teachers % students == 0 else "uneven"


def _positions(inputs: Inputs) -> str:
    p, q, last = inputs["p"], inputs["q"], inputs["gram"].shape[1] - 1
    order = "p < q" if p < q else "p > q"
    return f"{order}, {'the last' if last in (p, q) else 'not the last'}"


_GRAM = (
    Option("alpha_per", ("map", "row"), lambda inputs: "row" if inputs["gram"].ndim == 6 else "map"),
    Option(
        "heads of the pool", ("2", "3", "more"), lambda inputs: {2: "2", 3: "3"}.get(inputs["gram"].shape[1], "more")
    ),
    Option(
        "positions", ("p < q, the last", "p > q, the last", "p < q, not the last", "p > q, not the last"), _positions
    ),
    batch("gram"),
    NUMBERS,
)


def _strategies(inputs: Inputs) -> str:
    given = inputs.get("strategies")
    if given is None:
        return "not given"
    return "one" if len(list(given)) == 1 else "several"


def _calibration_mask(inputs: Inputs) -> tuple[str, ...]:
    masks = [item[2] if len(item) == 3 else None for item in inputs["calibration"]]
    return tuple(value for mask in masks for value in _row_mask(mask))


def _widths(inputs: Inputs) -> str:
    keys, width = inputs["values"].shape[2:]
    return "S = d_v = D" if keys == width == inputs["output_projection"].shape[1] else "different"


def _ranks(inputs: Inputs) -> str:
    return str(min(first(inputs.get("attn_logits", inputs.get("attn_probs"))).ndim, 5)).replace("5", "5 or more")


def _mixing_per(inputs: Inputs) -> str:
    return (
        "row" if first(inputs.get("mixing", inputs.get("alphas"))).ndim == (4 if "mixing" in inputs else 3) else "map"
    )


def _mixing_heads(inputs: Inputs) -> str:
    students, teachers = inputs["mixing"].shape[1:3]
    return "one" if students == 1 else "fewer" if students < teachers else "as many"


RANKS = Option("axes", ("2", "3", "4", "5 or more"), _ranks)
_VALUE_GROUPS = groups(
    lambda inputs: inputs["output_projection"].shape[0] // inputs["values"].shape[3],
    lambda inputs: inputs["values"].shape[1],
)
_WIDTHS = Option("widths", ("different", "S = d_v = D"), _widths)


def _given(name: str, *ones: str) -> Option:
    """Whether an argument is given."""
    no, yes = ones or ("none", "some")
    return Option(name, (no, yes), lambda inputs: no if inputs.get(name) is None else yes)


def _count(name: str) -> Option:
    return Option(name, ("one", "several"), lambda inputs: "one" if inputs.get(name, 1) == 1 else "several")


def _indexer_mask(inputs: Inputs) -> str:
    mask = inputs.get("attn_mask")
    return "none" if mask is None else "(L, S)" if mask.ndim == 2 else "other"


def _top_k(inputs: Inputs) -> str:
    top_k, keys = inputs.get("top_k"), first(inputs["keys"] if "keys" in inputs else inputs["teacher_keys"])
    return "none" if top_k is None else "few" if top_k < keys.shape[2] else "all"


_INDEXER_TARGET = (
    _count("groups"),
    _count("block_size"),
    Option("layers", ("one array", "several"),
        lambda inputs: "several" if isinstance(inputs["teacher_keys"], list | tuple) else "one array"),
    _given("outside"),
    Option("attn_mask", ("none", "(L, S)", "other"), _indexer_mask),
    _given("segments"),
    Option("samples", ("1", "2 to 4"),
        lambda inputs: "1" if first(inputs["teacher_keys"]).shape[0] == 1 else "2 to 4"),
    NUMBERS,
)  # fmt: skip
_INDEXER = (
    *_INDEXER_TARGET,
    Option("relu", ("True", "False"), lambda inputs: str(bool(inputs.get("relu", True)))),
    _given("weights"),
    Option("top_k", ("none", "few", "all"), _top_k),
    argument("restriction", "renormalised", "mask_first", "unnormalised", "student_all"),
    argument("reduction", "sum", "rows", "samples"),
    row_mask("loss_mask"),
)

OPTIONS: Mapping[str, tuple[Option, ...]] = {
    "softmax": (RANKS, attn_mask("attn_logits"), minus_infinity("attn_logits"), TEMPERATURE, size("attn_logits"),
        NUMBERS),
    "soften": (RANKS, ROW_SUMS, TEMPERATURE, zero_rows("attn_probs"), small_mass("attn_probs"), size("attn_probs"),
        NUMBERS),
    "value_outputs": (_VALUE_GROUPS, batch("values"), _WIDTHS, size("values"), NUMBERS),
    "merge_plan": (plan_kind("kind"), rounds(), left()),
    "plan_groups": (ORDER, rounds(), left()),
    "solve_alpha": (argument("rule", "least_squares", "as_printed"), PER, ROW_SUMS, row_mask("query_mask"),
        zero_rows("probs_p"), batch("probs_p"), map_shape("probs_p"), size("probs_p", "value_outputs_p"), NUMBERS),
    "compose_mixing": (Option("alpha_per", ("map", "row"), _mixing_per), ORDER, rounds("0"), left("all"),
        batch("alphas"), NUMBERS),
    "mix_heads": (Option("alpha_per", ("map", "row"), _mixing_per),
        Option("student heads", ("one", "fewer", "as many"), _mixing_heads), zero_rows("teacher_probs"),
        batch("teacher_probs"), map_shape("teacher_probs"), size("teacher_probs"), NUMBERS),
    "squeeze_heads": (argument("strategy", "shd", "constant", "hard", "mean"), plan_kind("plan"), PER,
        argument("alpha_rule", "least_squares", "as_printed"), argument("alpha_from", "teacher", "softened"),
        ROW_SUMS, TEMPERATURE, row_mask("query_mask"), rounds(), left(), zero_rows("teacher_probs"),
        batch("teacher_probs"), map_shape("teacher_probs"), size("teacher_probs", "value_outputs"), NUMBERS),
    "shd_loss": (*_LOSS, attn_mask("student_logits"), minus_infinity("student_logits")),
    "shd_loss_gradient": (*_LOSS, attn_mask("student_logits"), minus_infinity("student_logits")),
    "shd_loss_gradient_qk": (*_LOSS, attn_mask("supervision"),
        Option("scale", ("one", "positive", "negative", "zero"), _scale),
        groups(lambda inputs: first(inputs["queries"]).shape[1], lambda inputs: first(inputs["keys"]).shape[1])),
    "indexer_target": _INDEXER_TARGET,
    "indexer_loss": _INDEXER,
    "indexer_loss_gradient": _INDEXER,
    "intersect_support": (ROW_SUMS, row_mask("loss_mask"), attn_mask("student_logits"),
        minus_infinity("student_logits"), zero_rows("supervision"), small_mass("supervision"), batch("supervision"),
        map_shape("supervision"), NUMBERS),
    "layer_map": (Option("pairs", ("not given", "given"),
        lambda inputs: "not given" if inputs.get("pairs") is None else "given"),
        Option("layers", ("equal", "even", "uneven", "deeper student"), _pairs_of_layers)),
    "align_tokens": (positions("rows", 2), positions("columns", 3), row_mask("query_mask"), ROW_SUMS,
        zero_rows("attn_probs"), small_mass("attn_probs"), batch("attn_probs"), map_shape("attn_probs"), NUMBERS),
    "gram_tensor": (_VALUE_GROUPS, PER, ROW_SUMS, row_mask("query_mask"), zero_rows("teacher_probs"),
        batch("teacher_probs"), map_shape("teacher_probs"), _WIDTHS, NUMBERS),
    "solve_alpha_from_gram": _GRAM,
    "merge_gram": _GRAM,
    "matched_plan": (argument("by", "residual", "similarity"), PER, ROW_SUMS,
        Option("query_mask", ("none", "some rows", "an empty sample"), _calibration_mask), rounds(), left(),
        Option("items", ("1", "several"), lambda inputs: "1" if len(inputs["calibration"]) == 1 else "several"),
        batch("calibration"), zero_rows("calibration"), NUMBERS),
    "diagnose": (plan_kind("plan"), Option("strategies", ("not given", "one", "several"), _strategies), PER,
        ROW_SUMS, row_mask("query_mask"), rounds(), left(), zero_rows("teacher_probs"), batch("teacher_probs"),
        map_shape("teacher_probs"), NUMBERS),
}  # fmt: skip


def read_call(operation: str, inputs: Inputs) -> dict[str, frozenset[str]]:
    """The values of every option in one call."""
    found = {}
    for option in OPTIONS[operation]:
        values = option.read(inputs)
        found[option.name] = frozenset([values] if isinstance(values, str) else values)
    return found
