"""Laws on what an argument is written as (MAP-15, ERR-6): the same numbers, in memory or of a kind, give one answer.

Every operation meets every layout and every kind of number: all its arrays at once, and each alone with the
operation's other options. A layout is in the array itself, so it lives as long as the call does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.adapter import OUTPUTS, BrokenError, Missing, arrays_of
from shd_ref.conformance.laws.calls import CALLS, numbers_of, same
from shd_ref.conformance.laws.law import DTYPE, WIDE, Array, Asked, Law, Trial, ask, ask_all, law

_Change = Callable[[Array], Array]


def _reversed(array: Array) -> Array:
    back = (slice(None, None, -1),) * array.ndim
    return array[back].copy()[back]


def _turned(array: Array) -> Array:
    """With the first axis closest in memory, whatever the order of the others."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 0, -1)), -1, 0)


def _spread(array: Array) -> Array:
    """Every second entry of a larger array, whose others are not its own."""
    wide = np.repeat(array, 2, axis=-1)
    wide[..., 1::2] = ~array if array.dtype == np.bool_ else 7
    return wide[..., ::2]


def _packed(array: Array) -> Array:
    """A field of packed records: entries that are not aligned."""
    records = np.zeros(array.shape, dtype=[("other", np.uint8), ("field", array.dtype)])
    records["field"] = array
    return records["field"]


def _read_only(array: Array) -> Array:
    kept = array.copy()
    kept.flags.writeable = False
    return kept


def _repeated(array: Array, axis: int) -> Array:
    one = (slice(1),) if axis == 0 else (..., slice(1), slice(None))
    return np.broadcast_to(array[one], array.shape) if array.ndim > 1 else array


_ONE_SAMPLE, _ONE_ROW = "one sample for all", "one row for all"
LAYOUTS: Mapping[str, _Change] = {
    "negative strides": _reversed,
    "the order of Fortran": np.asfortranarray,
    "its axes turned in memory": _turned,
    "other numbers between its own": _spread,
    "entries that are not aligned": _packed,
    "no right to write": _read_only,
    "the other byte order": lambda array: array.astype(array.dtype.newbyteorder()),
    _ONE_SAMPLE: partial(_repeated, axis=0),
    _ONE_ROW: partial(_repeated, axis=-2),
}
"""Arrays of the same numbers; of those that are broadcast, some of them."""

KINDS = (np.int64, np.int8, np.uint8)
"""Of whole numbers; float16 is one of others."""

_CHOOSING = ("matched_plan", "diagnose")  # equal heads leave them a choice


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """The change of every array and number of an argument."""
    if isinstance(value, list | tuple):
        return type(value)(_changed(item, change) for item in value)
    return value if isinstance(value, str | bool) or value is None else change(value)


_Spelled = tuple[
    Mapping[str, Any], Sequence[tuple[str, Mapping[str, Any]]]
]  # plain arguments, and others that mean the same


def _agree(operation: str, spelled: Callable[[str, Trial], Iterator[_Spelled]], trial: Trial) -> None:
    """All spellings give the answer of the plain ones; missing where none can be asked for."""
    missing, answered = None, False
    for plain, others in spelled(operation, trial):
        right: dict[str, Array] = {}
        for what, inputs in others:
            try:
                right = right or numbers_of(trial, operation, plain)
                got = numbers_of(trial, operation, inputs)
            except Missing as reason:
                missing = reason
                continue
            same(right, got, f"{operation} with {what}", exact=False)
            answered = True
    if missing and not answered:
        raise missing


def _laid(operation: str, trial: Trial) -> Iterator[_Spelled]:
    make, options = CALLS[operation]
    inputs = {**make(trial, 9700), **options}
    names = [name for name, value in inputs.items() if arrays_of(value)]
    for words, lay in LAYOUTS.items():
        if words == _ONE_ROW and operation in _CHOOSING:
            continue
        laid = {name: _changed(inputs[name], partial(_on_arrays, lay)) for name in names}
        alone = [(f"{words} in {name}", name) for name in names]
        if words in (_ONE_SAMPLE, _ONE_ROW):
            for what, name in alone:
                plain = _changed(laid[name], partial(_on_arrays, np.array))
                yield {**inputs, name: plain}, [(what, {**inputs, name: laid[name]})]
        else:
            yield inputs, [(what, {**inputs, name: laid[name]}) for what, name in alone]
    bare = make(trial, 9703)
    yield (
        bare,
        [
            (f"{words} everywhere", {name: _changed(value, partial(_on_arrays, lay)) for name, value in bare.items()})
            for words, lay in LAYOUTS.items()
            if words not in (_ONE_SAMPLE, _ONE_ROW)
        ],
    )


def _on_arrays(change: _Change, value: Any) -> Any:
    return change(value) if isinstance(value, np.ndarray) else value


def _kinds(operation: str, trial: Trial) -> Iterator[_Spelled]:
    make, options = CALLS[operation]
    for seed, more in ((9711, {}), (9715, options))[: 1 + bool(options)]:
        plain = {**make(trial, seed), **more}
        for half, kinds in ((False, KINDS), (True, (np.float16,))):
            change = partial(_whole, trial, operation in _CHOOSING, half)
            whole = {name: _changed(value, partial(change, name)) for name, value in plain.items()}
            copies = {
                kind: {name: _changed(value, partial(_as_kind, kind)) for name, value in whole.items()}
                for kind in kinds
            }
            yield whole, [(f"{kind.__name__} everywhere", copies[kind]) for kind in kinds]
            for name, value in whole.items():
                fitting = [kind for kind in kinds if any(_fits(item, kind) for item in _items(value))]
                others = [(f"{kind.__name__} in {name}", {**plain, name: copies[kind][name]}) for kind in fitting]
                yield {**plain, name: value}, others


def _items(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _items(item)]
    return [] if isinstance(value, str | bool) or value is None else [value]


def _whole(trial: Trial, choosing: bool, half: bool, name: str, value: Any) -> Any:
    """Whole numbers, where the argument may have them: maps and weights with all of a row on one key."""
    if not isinstance(value, np.ndarray) or value.dtype == np.bool_ or name == "calibration":
        return value
    wide = value.astype(np.float64)
    if "probs" in name or name in ("supervision", "mixing"):
        return value if half or choosing else trial.rounded(np.eye(wide.shape[-1])[wide.argmax(-1)])
    if "alpha" in name:
        return value if half else trial.rounded(np.round(wide))
    # The squares of the larger ones are beyond float16, and the maps and weights that come of them are not.
    return trial.rounded(wide * (64 if half and "value_outputs" in name else 8))


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype != np.bool_ and bool((value == value.astype(kind)).all())
    if isinstance(value, int):
        return np.dtype(kind).kind in "iu"
    return bool(value == kind(value))


def _as_kind(kind: Any, value: Any) -> Any:
    if not _fits(value, kind):
        return value
    return value.astype(kind) if isinstance(value, np.ndarray) else kind(value)


def _cast(kind: Any, array: Array) -> Array:
    return array.astype(kind)


def _of_kinds(operation: str, trial: Trial, masks: Sequence[Any], others: Sequence[Any]) -> Iterator[Asked]:
    make, options = CALLS[operation]
    inputs = {**make(trial, 9721), **options}
    for name, value in inputs.items():
        for kind in (masks if name.endswith("mask") else others) if arrays_of(value) else ():
            arguments = {**inputs, name: _changed(value, partial(_on_arrays, partial(_cast, kind)))}
            yield Asked(f"{name} of {np.dtype(kind).name}", DTYPE, operation, arguments)


def _not_numbers(operation: str, trial: Trial) -> None:
    ask_all(trial, _of_kinds(operation, trial, (np.uint8, np.int8, np.int32, np.float16), (np.bool_, np.complex64)))
    # An array of objects is refused too, if need be in the language's own words (ERR-8).
    for asked in _of_kinds(operation, trial, (object,), (object,)):
        with contextlib.suppress(BrokenError, Missing):
            ask(trial, asked)


def _laws(operation: str) -> Iterator[Law]:
    name = operation.replace("_", "-")
    arrays = operation not in ("merge_plan", "plan_groups", "layer_map")
    if arrays:
        comment = f"What an array of {operation} is in memory changes nothing."
        yield law(f"layouts-{name}", operation, "MAP-15 MAP-8", comment, partial(_agree, operation, _laid))
        comment = f"What is no real number, and a mask that is not boolean, is refused by {operation}."
        yield law(f"kinds-refused-{name}", operation, "MAP-5 MAP-7 ERR-1", comment,
                  partial(_not_numbers, operation))  # fmt: skip
    comment = f"The same numbers of another kind give the same answer of {operation}."
    spec = "MAP-5 MAP-15 NUM-1 ERR-6" if arrays else "ERR-6"
    statement = partial(_agree, operation, _kinds)
    # In half precision an integer is not rounded to what the float of the same law is.
    yield law(f"number-kinds-{name}", operation, spec, comment, statement, WIDE)


LAWS = tuple(law for operation in OUTPUTS for law in _laws(operation))
