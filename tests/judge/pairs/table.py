"""The pairs of option values that the judge checks together, and those that it does not: ``specs/pairs.md``.

Written by ``cd tests && python -m judge.pairs.table``, which reads every valid vector and every call of every law;
``tests/meta/test_pairs.py`` reads it. A call counts where an item compares its answer with what is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from implementations import ReferenceWithOracles
from judge.pairs.options import OPTIONS, read_call

from shd_ref.conformance import Missing, cases
from shd_ref.conformance.adapter import Subject, as_adapter
from shd_ref.conformance.laws import Law, Trial, calls, refusals

PAGE = Path(__file__).resolve().parents[3] / "specs" / "pairs.md"
Value = tuple[str, str]  # an option and one of its values
Pair = frozenset[Value]

# Laws that compare answers with each other alone: what is wrong in all of them passes.
NOTHING_RIGHT = {"law/inputs-unchanged", "law/equal-calls-agree"} | {law.id for law in calls.LAWS}

_EMPTY = "the empty plan has no pair, and leaves all heads"
_WITHOUT = [(("rounds", "0"), ("heads left", left)) for left in ("one", "several, evenly", "several, unevenly")]
_WITHOUT += [(("heads left", "all"), ("rounds", rounds)) for rounds in ("1", "2", "3", "4 or more")]
_PLANLESS = [
    (operation, *values, _EMPTY)
    for operation in ("merge_plan", "plan_groups", "squeeze_heads", "matched_plan", "diagnose")
    for values in _WITHOUT
]
_ORDERLESS = [
    ("plan_groups", ("order", order), none, _EMPTY)
    for order in ("pairs swapped", "rounds shuffled")
    for none in (("rounds", "0"), ("heads left", "all"))
]
_FEWER_AXES = "a mask has no more axes than the logits (MAP-10)"
_RANKS = [
    ("softmax", ("axes", "2"), ("attn_mask", "(B, 1, 1, S)"), _FEWER_AXES),
    ("softmax", ("axes", "3"), ("attn_mask", "(B, 1, 1, S)"), _FEWER_AXES),
    ("softmax", ("axes", "2"), ("attn_mask", "(L, S)"), "with two axes that is the full mask"),
]
_NO_THIRD = "a pool of two has no third head"
_POOLS = [
    (operation, ("heads of the pool", "2"), ("positions", f"{order}, not the last"), _NO_THIRD)
    for operation in ("solve_alpha_from_gram", "merge_gram")
    for order in ("p < q", "p > q")
]
_TOO_MANY = "of 17 heads there are too many sets of pairs to compare; four rounds are checked down to one head"
_DEEP = [
    ("matched_plan", ("rounds", "4 or more"), ("heads left", left), _TOO_MANY)
    for left in ("several, evenly", "several, unevenly")
]
NEVER: dict[tuple[str, Pair], str] = {
    (operation, frozenset((one, other))): reason
    for operation, one, other, reason in (
        *_PLANLESS,
        *_ORDERLESS,
        *_RANKS,
        *_POOLS,
        *_DEEP,
        *(
            (
                operation,
                ("samples", "1"),
                ("loss_mask", "an empty sample"),
                "a single empty sample has no row that counts",
            )
            for operation in ("indexer_loss", "indexer_loss_gradient")
        ),
        ("layer_map", ("pairs", "not given"), ("layers", "deeper student"), "refused (LAYER-2)"),
    )
}
"""Pairs that no call can have or that no item is to check, and why."""


def all_pairs(operation: str) -> list[Pair]:
    """Every two values of two options of an operation, in the order of its options."""
    options = OPTIONS[operation]
    return [
        frozenset(((one.name, a), (other.name, b)))
        for one, other in combinations(options, 2)
        for a in one.values
        for b in other.values
    ]


@cache
def checked() -> Mapping[str, frozenset[Pair]]:
    """The pairs that some item checks, by operation."""
    found: dict[str, set[Pair]] = {operation: set() for operation in OPTIONS}
    for operation, inputs in _calls():
        read = read_call(operation, inputs)
        for (one, values), (other, others) in combinations(read.items(), 2):
            found[operation] |= {frozenset(((one, a), (other, b))) for a in values for b in others}
    return {operation: frozenset(pairs) for operation, pairs in found.items()}


def unchecked(operation: str) -> list[Pair]:
    """The pairs that no item checks and that some call could have."""
    return [
        pair for pair in all_pairs(operation) if pair not in checked()[operation] and (operation, pair) not in NEVER
    ]


def _calls() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for item in cases():
        if isinstance(item, Law):
            if item.id not in NOTHING_RIGHT | {law.id for law in refusals.LAWS}:
                yield from _calls_of_law(item)
        elif not item.codes:
            yield item.operation, item.make_inputs("float64")


def _calls_of_law(law: Law) -> Iterator[tuple[str, Mapping[str, Any]]]:
    dtype = "float64" if "float64" in law.dtypes else law.dtypes[0]
    subject = Subject(as_adapter(ReferenceWithOracles()), dtype)
    with np.errstate(all="ignore"):
        try:
            law.statement(Trial(subject))
        except Missing as reason:
            raise RuntimeError(f"{law.id} needs the extra 'oracles'") from reason
    # What was refused has no answer to be right.
    yield from ((call.operation, call.inputs) for call in subject.calls if call.answer is not None)


_INTRODUCTION = """# Pairs of options

Mistakes like to sit where two options meet. For each operation this page lists its options with their values, how
many pairs of values of two options the vectors and laws check together, and each pair that they do not. An option is
an argument, or something about the arrays that an implementation may go another way for. *short* numbers are held by
bfloat16, *full* ones are not; a temperature *above* one is not an integer; a *large* axis is longer than 16, a
*small mass* is an entry below 1/512.

Written by `cd tests && python -m judge.pairs.table`; not by hand.
"""


def render() -> str:
    """The page."""
    parts = [_INTRODUCTION]
    for operation, options in OPTIONS.items():
        pairs, missing = all_pairs(operation), unchecked(operation)
        never = [pair for pair in pairs if (operation, pair) in NEVER]
        lines = [f"## {operation}", "", "| option | values |", "|---|---|"]
        lines += [f"| {option.name} | {', '.join(option.values)} |" for option in options]
        lines += ["", f"{len(pairs) - len(never) - len(missing)} of {len(pairs) - len(never)} pairs are checked."]
        if missing:
            lines += ["", "Not checked:", "", *_lists(operation, missing)]
        if never:
            lines += ["", "Left out:", ""]
            reasons = dict.fromkeys(NEVER[operation, pair] for pair in never)
            for reason in reasons:
                of_reason = [pair for pair in never if NEVER[operation, pair] == reason]
                lines += [f"- {reason}: " + "; ".join(_words(operation, pair) for pair in of_reason)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _lists(operation: str, pairs: Iterable[Pair]) -> list[str]:
    """One line a first value and second option, with the second values."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for pair in pairs:
        (one, a), (other, b) = _ordered(operation, pair)
        lines.setdefault((one, a, other), []).append(b)
    return [f"- {one} = {a} with {other} = {', '.join(values)}" for (one, a, other), values in lines.items()]


def _words(operation: str, pair: Pair) -> str:
    return " with ".join(f"{name} = {value}" for name, value in _ordered(operation, pair))


def _ordered(operation: str, pair: Pair) -> list[Value]:
    names = [option.name for option in OPTIONS[operation]]
    return sorted(pair, key=lambda value: names.index(value[0]))


def main() -> None:
    """Write the page, and say how many pairs are not checked."""
    PAGE.write_text(render(), encoding="utf-8")
    for operation in OPTIONS:
        missing = unchecked(operation)
        if missing:
            print(f"{operation}: {len(missing)} pairs are not checked")


if __name__ == "__main__":
    main()
