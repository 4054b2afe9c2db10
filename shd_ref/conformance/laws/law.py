"""What a law is, what its text is written with, and how it asks for what must be refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shd_ref.conformance.adapter import OUTPUTS, Missing, RefusedError, Subject, take_output
from shd_ref.conformance.compare import Difference, abbreviate, as_numbers, as_plain, compare_close
from shd_ref.conformance.specification import DTYPES, agreement
from shd_ref.conformance.vectors import make_array, round_to

Array: TypeAlias = NDArray[Any]

WIDE = ("float64", "float32")
_STRIDE = 0x9E3779B1  # odd, so that no two trials of 32 bits draw alike; far from the steps between a law's seeds


class LawBrokenError(Exception):
    """An implementation breaks a law; ``spec`` are the sentences about this very difference, if not the law's own."""

    def __init__(self, difference: Difference, spec: tuple[str, ...] = ()) -> None:
        super().__init__(difference.problem)
        self.difference = difference
        self.spec = spec


@dataclass(frozen=True)
class Law:
    """A fact about an implementation's own answers that needs no expected numbers."""

    id: str
    operations: tuple[str, ...]  # what it calls; an implementation that lacks one cannot be judged by it
    spec: tuple[str, ...]  # the sentences that it follows from
    comment: str  # the law in one sentence
    statement: Callable[[Trial], None] = field(repr=False)  # raises LawBrokenError
    dtypes: tuple[str, ...] = DTYPES  # where it holds closely enough to be tested

    @property
    def flags(self) -> Mapping[str, str]:
        """None: a law hunts every mistake that breaks it."""
        return {}


def law(
    name: str,
    operations: str,
    spec: str,
    comment: str,
    statement: Callable[[Trial], None],
    dtypes: tuple[str, ...] = DTYPES,
) -> Law:
    """A law by its name, with operations and sentences as words."""
    return Law(f"law/{name}", tuple(operations.split()), tuple(spec.split()), comment, statement, dtypes)


class Laws(list[Law]):
    """The laws of one chapter, in the order of its file."""

    def add(
        self, name: str, operations: str, spec: str, dtypes: tuple[str, ...] = DTYPES
    ) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
        """Take a function as the law that its docstring states."""

        def take(statement: Callable[[Trial], None]) -> Callable[[Trial], None]:
            self.append(law(name, operations, spec, " ".join(str(statement.__doc__).split()), statement, dtypes))
            return statement

        return take


@dataclass(frozen=True)
class Trial:
    """One implementation at one dtype, with the words in which laws are written.

    Inputs come from the integer generator of the vector files, on a grid that every dtype holds exactly.
    """

    subject: Subject
    seed: int = 0  # shifts every seed of a law, so that it draws other numbers; 0 leaves them

    def shifted(self, seed: int) -> int:
        """The seed that a law's own stands for in this trial."""
        return seed + self.seed * _STRIDE

    def call(self, operation: str, **inputs: Any) -> dict[str, Any]:
        """The operation's outputs by name, as they came."""
        names = OUTPUTS[operation]
        answer = self.subject.run(operation, inputs)
        return {name: take_output(answer, name, names) for name in names}

    def numbers_of(self, operation: str, **inputs: Any) -> NDArray[np.float64]:
        """The operation's only output as float64."""
        (value,) = self.call(operation, **inputs).values()
        return as_array(value, operation)

    def probs(
        self, seed: int, *shape: int, causal: bool = False, zero_rows: Sequence[int] = (), bits: int = 8
    ) -> Array:
        """Attention maps: rows of multiples of ``2^-bits`` that sum to exactly one."""
        recipe = {"kind": "probs", "seed": self.shifted(seed), "levels": 16, "power": 2, "bits": bits}
        return self.rounded(make_array(shape, {**recipe, "causal": causal, "zero_rows": zero_rows}))

    def numbers(self, seed: int, *shape: int, low: int = -24, high: int = 24, shift: int = 3) -> Array:
        """Multiples of ``2^-shift`` from ``low / 2^shift`` to ``high / 2^shift``."""
        return self.rounded(self._drawn(seed, shape, low, high, shift))

    def shares(self, seed: int, *shape: int, zero_rows: Sequence[int] = ()) -> Array:
        """Attention maps of numbers that need all bits of the dtype; rows sum to one up to rounding."""
        weights = self._drawn(seed, shape, 1, 997) ** 2
        maps = weights / weights.sum(-1, keepdims=True)
        maps[..., list(zero_rows), :] = 0.0
        return self.rounded(maps)

    def quotients(self, seed: int, *shape: int) -> Array:
        """Numbers between -3.1 and 3.1 that need all bits of the dtype."""
        return self.rounded(self._drawn(seed, shape, -307, 307) / 99.0)

    def _drawn(self, seed: int, shape: tuple[int, ...], low: int, high: int, shift: int = 0) -> Array:
        recipe = {"kind": "numbers", "seed": self.shifted(seed), "low": low, "high": high, "shift": shift}
        return make_array(shape, recipe)

    def with_small_mass(self, maps: Array) -> Array:
        """The maps with all but 2^-10 of the first key's mass moved to the last key, where the row has any."""
        moved = maps.astype(np.float64)
        small = np.minimum(moved[..., 0], 2.0**-10)
        moved[..., -1] += moved[..., 0] - small
        moved[..., 0] = small
        return self.rounded(moved)

    def rounded(self, array: ArrayLike) -> Array:
        """The array in the dtype under judgement."""
        return round_to(np.asarray(array), self.subject.dtype)

    def agree(self, got: Any, wanted: ArrayLike, quantity: str, what: str, *, times: float = 1.0) -> None:
        """``got`` is ``wanted`` within the quantity's tolerance, or ``times`` it where several errors add up."""
        numbers, right = as_array(got, what), np.asarray(wanted, dtype=np.float64)
        if numbers.shape != right.shape:
            raise broken(what, f"must have the shape {list(right.shape)}", right, numbers)
        atol, rtol = agreement(self.subject.dtype, quantity)
        difference = compare_close(right, numbers, times * atol, times * rtol)
        if difference:
            raise LawBrokenError(Difference(f"{what}: {difference.problem}", difference.expected, difference.got))

    def at_most(self, got: Any, bound: ArrayLike, quantity: str, what: str) -> None:
        """``got`` does not exceed ``bound`` by more than the quantity's tolerance."""
        numbers = as_array(got, what)
        atol, rtol = agreement(self.subject.dtype, quantity)
        limit = np.broadcast_to(np.asarray(bound, dtype=np.float64), numbers.shape)
        # An infinite bound holds for everything but NaN; 0 times infinity would not.
        slack = atol + rtol * np.abs(np.where(np.isfinite(limit), limit, 0.0))
        if not bool((numbers <= limit + slack).all()):
            raise broken(what, f"exceeds its bound by {float((numbers - limit).max()):.6g}", limit, numbers)


def as_array(value: Any, what: str) -> NDArray[np.float64]:
    """An answer as float64, or the law is broken."""
    numbers = as_numbers(value)
    if numbers is None:
        raise broken(what, "must be numbers", "numbers", value)
    return numbers


def exactly(got: Any, wanted: Any, what: str) -> None:
    """``got`` is ``wanted``, with no tolerance."""
    if isinstance(wanted, np.ndarray | float):
        numbers = as_array(got, what)
        right = np.broadcast_to(np.asarray(wanted, dtype=np.float64), numbers.shape)
        difference = compare_close(right, numbers, 0.0, 0.0)
        if difference:
            raise LawBrokenError(Difference(f"{what}: {difference.problem}", difference.expected, difference.got))
    elif as_plain(got) != as_plain(wanted):
        raise broken(what, "must be equal", wanted, as_plain(got))


def require(holds: bool | np.bool_, what: str, wanted: Any, got: Any) -> None:
    """A condition on an answer, with the words of the report."""
    if not holds:
        raise broken(what, "does not hold", wanted, got)


def broken(what: str, problem: str, wanted: Any, got: Any) -> LawBrokenError:
    """The error for one failed statement."""
    return LawBrokenError(Difference(f"{what} {problem}", _text(wanted), _text(got)))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else abbreviate(value)


def in_words(inputs: Mapping[str, Any]) -> str:
    """The options of a call for a report: numbers and words as they are, arrays by their shapes."""

    def word(value: Any) -> str:
        if isinstance(value, np.ndarray):
            return str(list(value.shape))
        if isinstance(value, Sequence) and value and isinstance(value[0], np.ndarray):
            return f"{len(value)} layers"
        return repr(value) if not isinstance(value, list) else f"a list of {len(value)}"

    return ", ".join(f"{name}={word(value)}" for name, value in inputs.items())


VALUE, SHAPE, DTYPE = ("argument-value",), ("argument-shape",), ("argument-dtype",)
FINITE, SUMS, MISMATCH = ("not-finite",), ("not-a-distribution",), ("support-mismatch",)


@dataclass(frozen=True)
class Asked:
    """A call, and the codes of which any is right; without one it must be answered."""

    what: str
    codes: tuple[str, ...]
    operation: str
    inputs: Mapping[str, Any]


def ask(trial: Trial, asked: Asked) -> str:
    """The message of the refusal; empty where an answer was right."""
    code, message = "", ""
    try:
        trial.subject.run(asked.operation, asked.inputs)
    except RefusedError as refusal:
        code, message = refusal.code, str(refusal)
    if (code in asked.codes) if asked.codes else not code:
        return message
    problem = "must be refused" if not code else "has another code" if asked.codes else "must not be refused"
    what = f"{asked.operation} with {asked.what} ({in_words(asked.inputs)})"
    raise broken(what, problem, " or ".join(asked.codes) or "an answer", message or "an answer")


def ask_all(trial: Trial, calls: Iterable[Asked]) -> None:
    """Every call that the implementation has the options for."""
    each(calls, partial(ask, trial))


_PATIENCE = 32  # calls that one may lack the options for before the operation is taken as missing
_T = TypeVar("_T")


def each(calls: Iterable[_T], check: Callable[[_T], Any]) -> None:
    """Check every call that the implementation has the options for; Missing where it has them for none."""
    missing: list[Missing] = []
    answered = False
    for call in calls:
        try:
            check(call)
            answered = True
        except Missing as reason:
            missing.append(reason)
            if len(missing) == _PATIENCE and not answered:
                break
    if missing and not answered:
        raise missing[0]
