"""Cases as they are written down: inputs, the oracle's answer, the rule, and the JSON of it all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

from exact import MINUS_INFINITY, Nested, flatten, map_numbers, shape_of, unflatten

ABOUT = "Written by specs/tools/make_vectors.py; specs/conformance.md says what each field means. Never edit a case."
DTYPES = ("float64", "float32", "float16", "bfloat16")
MISTAKES: dict[str, str] = json.loads((Path(__file__).parents[1] / "mistakes.json").read_text(encoding="utf-8"))
REAL_ARGUMENTS = ("temperature", "beta", "scale", "teacher_scale", "ridge", "limit")


@dataclass(frozen=True)
class Given:
    """An input: its JSON, and what the oracle reads (None where it never does)."""

    json: Any
    value: Any = None


# --- inputs -------------------------------------------------------------------------------------------------------


def array(nested: Nested, dtype: str = "float") -> Given:
    """An array spelled out; ``"nan"``, ``"inf"`` and ``"-inf"`` are written as strings."""
    data = [_plain_number(x) for x in flatten(nested)]
    document: dict[str, Any] = {"shape": shape_of(nested), "data": data}
    if dtype != "float":
        document["dtype"] = dtype
    return Given(document, map_numbers(_exact_number, nested))


def mask(nested: Nested) -> Given:
    """A boolean array, of 0 and 1 for short."""
    flags = map_numbers(bool, nested)
    return Given({"shape": shape_of(flags), "dtype": "bool", "data": list(flatten(flags))}, flags)


def special(name: str) -> Given:
    """A scalar that JSON has no number for."""
    return Given({"number": name})


def numbers(shape: Sequence[int], seed: int, low: int, high: int, shift: int, *, causal: bool = False) -> Given:
    """The recipe of that kind."""
    recipe: dict[str, Any] = {"kind": "numbers", "seed": seed, "low": low, "high": high, "shift": shift}
    drawn: list[Any] = [Fraction(low + draw % (high - low + 1), 2**shift) for draw in _draw(seed, prod(shape))]
    if causal:
        recipe["causal"] = True
        rows, keys = shape[-2:]
        drawn = [x if n % keys <= n // keys % rows else MINUS_INFINITY for n, x in enumerate(drawn)]
    return Given({"shape": list(shape), "recipe": recipe}, unflatten(drawn, shape))


def probs(
    shape: Sequence[int],
    seed: int,
    levels: int,
    power: int,
    bits: int,
    *,
    causal: bool = False,
    zero_rows: Sequence[int] = (),
) -> Given:
    """The recipe of that kind: every row sums to exactly one, or is zero."""
    recipe: dict[str, Any] = {"kind": "probs", "seed": seed, "levels": levels, "power": power, "bits": bits}
    if causal:
        recipe["causal"] = True
    if zero_rows:
        recipe["zero_rows"] = list(zero_rows)
    rows, keys = shape[-2:]
    draws = _draw(seed, prod(shape))
    entries: list[Fraction] = []
    for number in range(prod(shape) // keys):
        i = number % rows
        weights = [(draw % levels) ** power for draw in draws[number * keys : (number + 1) * keys]]
        if causal:
            weights = [w if j <= i else 0 for j, w in enumerate(weights)]
        if not any(weights):
            weights[0] = 1
        counts = [2**bits * w // sum(weights) for w in weights]
        missing = 2**bits - sum(counts)
        for j, w in enumerate(weights):
            if w > 0 and missing > 0:
                counts[j] += 1
                missing -= 1
        entries += [Fraction(0 if i in zero_rows else c, 2**bits) for c in counts]
    return Given({"shape": list(shape), "recipe": recipe}, unflatten(entries, shape))


def random_model(batch: int, teachers: int, rows: int, keys: int, width: int, seed: int) -> dict[str, Any]:
    """Maps and value outputs of recipes, as arguments."""
    return {
        "teacher_probs": probs([batch, teachers, rows, keys], seed, 9, 2, 6),
        "value_outputs": numbers([batch, teachers, keys, width], seed + 1, -8, 16, 2),
    }


def random_mask(shape: Sequence[int], seed: int, true: int, of: int) -> Given:
    """The recipe ``mask``."""
    flags = [draw % of < true for draw in _draw(seed, prod(shape))]
    recipe = {"kind": "mask", "seed": seed, "true": true, "of": of}
    return Given({"shape": list(shape), "recipe": recipe}, unflatten(flags, shape))


def lengths(rows: int, counts: Sequence[int]) -> Given:
    """The recipe of that kind: True where the row's number is below the sample's length."""
    flags = [[i < count for i in range(rows)] for count in counts]
    return Given({"shape": [len(counts), rows], "recipe": {"kind": "lengths", "lengths": list(counts)}}, flags)


def _draw(seed: int, count: int) -> list[int]:
    state, draws = seed, []
    for _ in range(count):
        state = (1664525 * state + 1013904223) % 2**32
        draws.append(state // 65536)
    return draws


def _plain_number(value: Any) -> Any:
    if isinstance(value, str | bool):
        return value
    if value == MINUS_INFINITY:
        return "-inf"
    return int(value) if value == int(value) else float(value)


def _exact_number(value: Any) -> Any:
    if value in ("nan", "inf"):
        return value
    return MINUS_INFINITY if value in ("-inf", MINUS_INFINITY) else Fraction(value)


def _json_of(value: Any) -> Any:
    if isinstance(value, Given):
        return value.json
    if isinstance(value, dict):
        return {name: _json_of(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json_of(item) for item in value]
    return _plain_number(value) if isinstance(value, float | Fraction) else value


def _value_of(value: Any) -> Any:
    if isinstance(value, Given):
        return value.value
    if isinstance(value, dict):
        return {name: _value_of(item) for name, item in value.items()}
    # A list of layers keeps its kind, which tells it from one array.
    return type(value)(map(_value_of, value)) if isinstance(value, list) else value


def is_few_bits(value: Any) -> bool:
    """Whether bfloat16 (8 significant bits) and float16 hold the number exactly."""
    if not isinstance(value, Fraction) or value == 0:
        return True
    top, bottom = abs(value.numerator), value.denominator
    while top % 2 == 0:
        top //= 2
    return top < 256 and bottom <= 2**24 and bottom & (bottom - 1) == 0 and abs(value) <= 65504


# --- cases --------------------------------------------------------------------------------------------------------


@dataclass
class Book:
    """All cases of one operation.

    ``answer`` is the oracle, from inputs by name to outputs by name; ``check`` raises where a valid case's inputs,
    answer, flags and rules are not fair.
    """

    operation: str
    outputs: tuple[str, ...]
    answer: Callable[..., dict[str, Any]]
    rules: dict[str, dict[str, Any]]
    check: Callable[[dict[str, Any], dict[str, Any], Sequence[str], dict[str, Any]], None] | None = None
    cases: list[dict[str, Any]] = field(default_factory=list)

    def valid(
        self,
        name: str,
        comment: str,
        spec: str,
        flags: str = "",
        *,
        dtypes: Sequence[str] = (),
        compare: dict[str, dict[str, Any]] | None = None,
        leave_out: Sequence[str] = (),
        at: int = 0,
        withdrawn: str = "",
        **inputs: Any,
    ) -> None:
        """A case with the oracle's answer.

        Sentences and flags, names in ``specs/mistakes.json``, are separated by blanks. ``compare`` holds other rules
        than the operation's usual ones, ``leave_out`` the outputs that are not compared, ``at`` how many entries of a
        large array are stored, and ``withdrawn`` why the case no longer runs.
        """
        given = _value_of(inputs)
        for key in REAL_ARGUMENTS:
            if key in given and not isinstance(given[key], list):
                given[key] = Fraction(given[key])
        if not dtypes:
            for key, value in given.items():
                few = all(is_few_bits(x) for x in flatten(value)) if isinstance(value, list) else True
                assert few, f"{self.operation}/{name}: {key} has numbers that bfloat16 cannot hold"
        answer = self.answer(**given)
        rules = {key: rule for key, rule in {**self.rules, **(compare or {})}.items() if key not in leave_out}
        if self.check:
            self.check(given, answer, flags.split(), rules)
        expected = {key: expected_json(answer[key], at, rules[key]) for key in rules}
        body = {"inputs": _json_of(inputs), "expected": expected, "compare": rules}
        self._add(name, comment, spec, flags, withdrawn, dtypes, {"result": "valid", **body})

    def case(self, title: str, words: str, **rest: Any) -> None:
        """A valid case by its title and words (``head``)."""
        name, comment, spec, flags = head(title, words)
        self.valid(name, comment, spec, flags, **rest)

    def invalid(
        self,
        name: str,
        comment: str,
        spec: str,
        code: str,
        *,
        flags: str = "",
        dtypes: Sequence[str] = (),
        withdrawn: str = "",
        **inputs: Any,
    ) -> None:
        """A case that must be refused with the code, or any of several that are separated by blanks."""
        codes = code.split()
        body = {"inputs": _json_of(inputs), "code": codes[0] if len(codes) == 1 else codes}
        self._add(name, comment, spec, flags, withdrawn, dtypes, {"result": "invalid", **body})

    def _add(self, name: str, comment: str, spec: str, flags: str, withdrawn: str, dtypes: Any, body: Any) -> None:
        unknown = set(flags.split()) - set(MISTAKES)
        assert not unknown, f"{self.operation}/{name}: not in specs/mistakes.json: {unknown}"
        case: dict[str, Any] = {"id": f"{self.operation}/{name}", "comment": comment}
        case |= {"spec": spec.split(), "flags": flags.split()}
        if withdrawn:
            case["withdrawn"] = withdrawn
        if dtypes:
            case["dtypes"] = list(dtypes)
        assert case["id"] not in {other["id"] for other in self.cases}, f"{case['id']} is used twice"
        self.cases.append({**case, **body})

    def document(self) -> dict[str, Any]:
        """The file."""
        used = sorted({flag for case in self.cases for flag in case["flags"]})
        return {
            "vectors_version": "1",
            "about": ABOUT,
            "operation": self.operation,
            "outputs": list(self.outputs),
            "notes": {flag: MISTAKES[flag] for flag in used},
            "cases": self.cases,
        }


def book_of(function: Callable[..., Any], output: str, rule: dict[str, Any], check: Any = None) -> Book:
    """The book of an operation with one output, under the name of its oracle."""
    return Book(function.__name__, (output,), lambda **given: {output: function(**given)}, {output: rule}, check)


# --- expected numbers ---------------------------------------------------------------------------------------------


def head(title: str, words: str) -> tuple[str, str, str, str]:
    """Name and comment of a case from its title, sentences (in capitals) and flags from its words."""
    name, _, comment = title.partition(": ")
    labels = words.split()
    sentences, flags = (" ".join(x for x in labels if x[0].isupper() == wanted) for wanted in (True, False))
    return name, comment, sentences, flags


def expected_json(value: Any, at: int, rule: dict[str, Any]) -> Any:
    """Arrays with their shape; integers of plans, groups and counts as they are."""
    if rule["rule"] == "plan" or value is None or isinstance(value, int | str):
        return value
    if isinstance(value, Arrays):
        return [expected_json(item, at, rule) for item in value.items]
    if not isinstance(value, list):
        return expected_number(value)
    entries = list(flatten(value))
    if all(isinstance(x, int) for x in entries):
        return value
    document: dict[str, Any] = {"shape": shape_of(value)}
    if at and len(entries) > at:
        # A stride without a common factor with the axes visits every row and key sooner or later.
        stride = len(entries) // at
        positions = sorted({0, len(entries) - 1, *((k * stride + k * k % stride) % len(entries) for k in range(at))})
        document["at"] = positions
        entries = [entries[k] for k in positions]
    return {**document, "data": [expected_number(x) for x in entries]}


@dataclass(frozen=True)
class Arrays:
    """A list of arrays: one a round or layer."""

    items: list[Any]


def expected_number(value: Any) -> Any:
    """A JSON number where a float64 is exactly it, else 17 significant digits."""
    if isinstance(value, float):
        return "inf" if value > 0 else "-inf"
    if isinstance(value, Decimal) and abs(value) < Decimal(10) ** -45:
        value = Fraction(0)  # what 60 digits leave of a difference of equals
    exact = Fraction(value)
    if abs(exact) < Fraction(10) ** 300 and Fraction(float(exact)) == exact:
        return _plain_number(exact)
    return f"{Decimal(exact.numerator) / Decimal(exact.denominator):.17g}"


# --- JSON ---------------------------------------------------------------------------------------------------------


def dump(document: dict[str, Any]) -> str:
    """JSON with one line an argument, output and rule."""
    lines = ["{"]
    heads = [key for key in document if key not in ("notes", "cases")]
    lines += [f" {json.dumps(key)}: {_line(document[key])}," for key in heads]
    lines.append(' "notes": {')
    lines.append(",\n".join(f"  {json.dumps(key)}: {_line(note)}" for key, note in document["notes"].items()))
    lines.append(" },")
    lines.append(' "cases": [')
    lines.append(",\n".join(_dump_case(case) for case in document["cases"]))
    lines += [" ]", "}"]
    return "\n".join(line for line in lines if line) + "\n"


def _dump_case(case: dict[str, Any]) -> str:
    parts = []
    for key, value in case.items():
        if key in ("inputs", "expected", "compare") and value:
            inner = ",\n".join(f"    {json.dumps(name)}: {_line(item)}" for name, item in value.items())
            parts.append(f'   "{key}": {{\n{inner}\n   }}')
        else:
            parts.append(f'   "{key}": {_line(value)}')
    return "  {\n" + ",\n".join(parts) + "\n  }"


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True)


def fingerprint(case: dict[str, Any]) -> str:
    """What is frozen of a case: all that decides whether an implementation passes it."""
    parts = {key: case.get(key) for key in ("result", "dtypes", "inputs", "expected", "compare", "code")}
    parts["near-degenerate"] = "near-degenerate" in case["flags"]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
