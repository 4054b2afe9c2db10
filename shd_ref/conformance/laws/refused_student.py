"""Laws of what the student's operations refuse: at every place, in every layer, under every option."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.laws.answers import check_answers
from shd_ref.conformance.laws.law import (
    FINITE,
    MISMATCH,
    SHAPE,
    SUMS,
    VALUE,
    WIDE,
    Array,
    Asked,
    Laws,
    Trial,
    ask,
    ask_all,
    broken,
    law,
)
from shd_ref.conformance.laws.refused_calls import right_call, roles_of
from shd_ref.conformance.laws.student import LOSSES, SHORT
from shd_ref.conformance.specification import DTYPES
from shd_ref.tolerances import load_tolerances

# What else is asked for, which changes nothing about what is refused.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"divergence": "reverse_kl", "reduction": "mean"},
    {"divergence": "js", "temperature": 2.0},
    {"divergence": "mse", "beta": 0.0},
    {"support": "intersect", "temperature": 0.75},
    {"row_sums": "at_most_one", "beta": 3.0},
    {"row_sums": "at_most_one", "support": "intersect", "reduction": "mean"},
)


_SIZES = (3, 4, 3, 3)


def _arrays(operation: str) -> tuple[str, ...]:
    """The float arguments, maps first."""
    return tuple(roles_of(operation))


def _variants(operation: str) -> tuple[dict[str, Any], ...]:
    if operation in LOSSES:
        return _VARIANTS
    if operation == "intersect_support":
        return ({}, {"row_sums": "at_most_one"})
    # The fault lies on rows and columns that are kept, and on some that are not.
    return ({}, {"row_sums": "at_most_one"}, {"rows": [1], "columns": [0, 1]}, {"columns": [2]})


def _placed(trial: Trial, array: Array, place: tuple[Any, ...], value: float, *, add: bool = False) -> Array:
    """A copy with one entry changed."""
    changed = array.astype(np.float64)
    changed[place] = changed[place] + value if add else value
    return trial.rounded(changed)


_PLACES = ((0, 0, 0, 0), (1, 1, 1, 1), (-1, -1, -1, -1))


# --- values -----------------------------------------------------------------------------------------------------


def _tiny(trial: Trial) -> float:
    """Little, but not rounded to 0."""
    return 2.0**-24 if trial.subject.dtype == "float16" else 2.0**-100


def _faults(trial: Trial, name: str, option: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], float, bool]]:
    """Words, codes, and an entry that is put in place of another or added to it."""
    yield "NaN", FINITE, np.nan, False
    yield "infinity", FINITE, np.inf, False
    if name == "student_logits":
        return
    yield "minus infinity", (*FINITE, *SUMS) if name in ("supervision", "attn_probs") else FINITE, -np.inf, False
    if name in ("supervision", "attn_probs"):
        off = 1.25 * load_tolerances()["row_sum"][trial.subject.dtype]
        yield "a row sum just above its bound", SUMS, off, True
        if option.get("row_sums") == "at_most_one":
            yield "a negative entry in a row of any sum", SUMS, -_tiny(trial), False
        else:
            yield "a row sum just below its bound", SUMS, -off, True


def _bad_entries(trial: Trial, operation: str) -> Iterator[Asked]:
    """NaN, infinities, negative entries and wrong row sums are refused wherever they lie."""
    for option in _variants(operation):
        good = {**right_call(trial, operation, _SIZES), **option}
        for name in _arrays(operation):
            for words, codes, value, add in _faults(trial, name, option):
                for index in _PLACES:
                    bad = _placed(trial, good[name], index, value, add=add)
                    yield Asked(f"{words} at {list(index)} of {name}", codes, operation, {**good, name: bad})
    # The last place of axes longer than what is looked at in one go.
    for shape in ((9, 18, 2, 2), (1, 2, 131, 2), (1, 2, 2, 67)):
        good = right_call(trial, operation, shape)
        for name in _arrays(operation):
            for words, codes, value, add in _faults(trial, name, {}):
                bad = _placed(trial, good[name], (-1, -1, -1, -1), value, add=add)
                if not (add and (bad == good[name]).all()):
                    inputs = {**good, name: bad}
                    yield Asked(f"{words} at the last of {good[name].shape} of {name}", codes, operation, inputs)
    maps = _arrays(operation)[0]
    good = right_call(trial, operation, _SIZES)
    for index in _PLACES:
        for share in (0.75, 0.25, 2.0**-10, 2.0**-20):
            short = good[maps].copy()
            short[index[:3]] *= share
            yield Asked(f"{share} of the mass of row {list(index[:3])}", SUMS, operation, {**good, maps: short})
        # The row keeps its sum, so that the sign alone is wrong.
        bad = _placed(trial, good[maps], index, -_tiny(trial))
        other = (*index[:3], (index[3] + 1) % 3)
        bad = _placed(trial, bad, other, 1.0 - float(bad[index[:3]].sum()), add=True)
        yield Asked(f"a negative entry at {list(index)}", SUMS, operation, {**good, maps: bad})


def _uncounted_entries(trial: Trial, operation: str) -> Iterator[Asked]:
    """Entries that are not finite, or negative, are refused in rows that do not count too."""
    mask_name = "query_mask" if operation == "align_tokens" else "loss_mask"
    for option in _variants(operation):
        good = {**right_call(trial, operation, _SIZES), **option}
        for b, i, others in ((0, 0, True), (1, 1, True), (2, 2, True), (1, 2, False)):  # the last: no row counts
            mask = np.full((3, 3), others)
            mask[b, i] = False
            for name in _arrays(operation):
                row = slice(None) if name == "keys" else i
                for value, codes in ((np.nan, FINITE), (np.inf, FINITE), (-0.25, SUMS)):
                    if value == -0.25 and name not in ("supervision", "attn_probs"):
                        continue
                    bad = _placed(trial, good[name], (b, -1, row, -1), value)
                    inputs = {**good, mask_name: mask, name: bad}
                    yield Asked(f"{value} of {name} in a row that does not count", codes, operation, inputs)


def _bad_layers(trial: Trial, operation: str) -> Iterator[Asked]:
    """Every layer's values are checked."""
    for option in (_VARIANTS[0], _VARIANTS[1], _VARIANTS[-1]):
        good = right_call(trial, operation, _SIZES)
        names = _arrays(operation)
        for layer in (0, 4, 9):
            for name in names:
                for words, codes, value, add in _faults(trial, name, option):
                    lists = {other: [good[other]] * 10 for other in names}
                    lists[name] = [*lists[name]]
                    lists[name][layer] = _placed(trial, good[name], (-1, -1, -1, -1), value, add=add)
                    inputs = {**good, **lists, **option}
                    yield Asked(f"{words} in layer {layer} of {name}", codes, operation, inputs)


def _near_sums(trial: Trial, operation: str) -> None:
    """Rows whose sums are off by less than ROW_SUM are taken as they are."""
    off = 0.75 * load_tolerances()["row_sum"][trial.subject.dtype]
    name = _arrays(operation)[0]
    calls = (
        {**good, name: _placed(trial, good[name], index, sign * off, add=True)}
        for option in _variants(operation)
        for good in [{**right_call(trial, operation, _SIZES), **option}]
        for index in _PLACES
        for sign in (1, -1)
    )
    check_answers(trial, operation, calls)


# --- support ----------------------------------------------------------------------------------------------------


def _mismatches(trial: Trial, operation: str) -> Iterator[Asked]:
    """Any mass on a key that the student may not attend is refused, in every layer and place."""
    good = right_call(trial, operation, _SIZES)
    rest = {name: value for name, value in good.items() if name not in ("supervision", "student_logits")}
    for option in _VARIANTS:
        if option.get("support") == "intersect":
            continue
        for index in _PLACES:
            little = np.where(np.arange(3) == index[3] % 3, _tiny(trial), 0.5)
            maps = trial.rounded(np.broadcast_to(little, (3, 4, 3, 3)))
            allowed = np.zeros((3, 4, 3, 3), dtype=np.bool_)
            allowed[..., np.arange(3) != index[3] % 3] = True
            only = maps.copy()
            keep = np.zeros((3, 4, 3), dtype=np.bool_)
            keep[index[:3]] = True
            only[~keep] = np.where(allowed[~keep], only[~keep], 0.0)
            words = f"2^{round(np.log2(_tiny(trial)))} of mass on a masked key at {list(index)}"
            yield Asked(words, MISMATCH, operation, {**good, **option, "supervision": only, "attn_mask": allowed})
            if "student_logits" in good:
                blocked = trial.rounded(np.where(allowed, good["student_logits"], -np.inf))
                inputs = {**rest, **option, "supervision": only, "student_logits": blocked}
                yield Asked(words.replace("masked key", "key of -inf"), MISMATCH, operation, inputs)
    for option in ({}, {"support": "intersect"}, {"row_sums": "at_most_one", "temperature": 2.0}):
        for index in _PLACES:
            holed = _placed(trial, good["supervision"], index, 0.0)
            holed = holed if "row_sums" in option else _placed(
                trial, holed, (*index[:3], (index[3] + 1) % 3), 1.0 - float(holed[index[:3]].sum()), add=True
            )  # fmt: skip
            inputs = {**good, **option, "supervision": holed, "divergence": "reverse_kl"}
            yield Asked(f"a teacher's zero at {list(index)}", MISMATCH, operation, inputs)
    for layer in (0, 4, 9):
        mask = np.array([True, False, True])
        fitting = trial.rounded(np.broadcast_to([0.5, 0.0, 0.5], (3, 4, 3, 3)))
        lists = {name: [good[name]] * 10 for name in _arrays(operation)}
        lists["supervision"] = [fitting] * 10
        lists["supervision"][layer] = _placed(trial, fitting, (-1, -1, -1, 1), _tiny(trial))
        yield Asked(
            f"mass on a masked key in layer {layer}", MISMATCH, operation, {**rest, **lists, "attn_mask": mask}
        )


# --- shapes -----------------------------------------------------------------------------------------------------

_B, _H, _L, _S = 2, 6, 3, 5
_ROW_MASKS: tuple[tuple[int, ...], ...] = (
    (1, _L), (_B, 1), (_L,), (_B,), (_B, _L, 1), (_B, 1, _L), (_L, _B), (_B * _L,), (_B, _L + 1), (_B + 1, _L),
    (_B, _H, _L), (), (1, 1), (_B, _S), (1, _B, _L), (_B, _L - 1),
)  # fmt: skip
_ATTN_MASKS: tuple[tuple[int, ...], ...] = (
    (_B, _S), (_B, _L, _S), (_S, _L), (_L, _S + 1), (_L + 1, _S), (_B, 2, _L, _S), (1, _B, _H, _L, _S), (_L,),
    (_B, _H, _L), (_H,), (_B + 1, 1, 1, _S), (_B, _H, _S, _L), (_L, _B, 1, _S), (_S - 1,), (3, _L, _S), (_B, 3, 1, 1),
)  # fmt: skip


def _bad_masks(trial: Trial, operation: str) -> Iterator[Asked]:
    """Masks of another shape are refused, those that would broadcast by accident too."""
    good = right_call(trial, operation, (_B, _H, _L, _S))
    name = "query_mask" if operation == "align_tokens" else "loss_mask"
    for shape in _ROW_MASKS:
        mask = np.ones(shape, dtype=np.bool_)
        yield Asked(f"{name} of shape {shape}", SHAPE, operation, {**good, name: mask})
    if operation == "align_tokens":
        return
    for shape in _ATTN_MASKS:
        inputs = {**good, "attn_mask": np.ones(shape, dtype=np.bool_)}
        yield Asked(f"attn_mask of shape {shape}", SHAPE, operation, inputs)


def _bad_shapes(trial: Trial, operation: str) -> Iterator[Asked]:
    """Arrays and lists that do not fit are refused, never repeated or cut."""
    full = (_B, _H, _L, _S)
    good = right_call(trial, operation, full)
    names = _arrays(operation)
    if operation == "align_tokens":
        for maps in (good["attn_probs"][0], good["attn_probs"][None]):
            yield Asked(f"maps of {maps.ndim} axes", SHAPE, operation, {"attn_probs": maps})
        return
    for axis in range(4):
        shape = tuple(1 if i == axis else n for i, n in enumerate(full))
        small = right_call(trial, operation, shape)
        for name in names:
            if small[name].shape != good[name].shape and not (name == "keys" and axis == 1):
                words = f"{name} {small[name].shape} among {full}"
                yield Asked(words, SHAPE, operation, {**good, name: small[name]})
        cut = {name: np.ascontiguousarray(good[name][(slice(None),) * axis + (slice(1),)]) for name in names[1:]}
        for name, array in cut.items():
            if not (name == "keys" and axis == 1):
                yield Asked(f"{name} {array.shape} among {full}", SHAPE, operation, {**good, name: array})
    for name in names:
        yield Asked(f"{name} without samples", SHAPE, operation, {**good, name: good[name][0]})
        yield Asked(f"{name} of five axes", SHAPE, operation, {**good, name: good[name][None]})
    if operation not in LOSSES:
        return
    lists = {name: [good[name]] * 3 for name in names}
    for name in names:
        for count in (1, 2, 4):
            inputs = {**good, **lists, name: [good[name]] * count}
            yield Asked(f"{count} layers of {name} among 3", SHAPE, operation, inputs)
        yield Asked(f"one array of {name} among lists of 3", SHAPE, operation, {**good, **lists, name: good[name]})
        yield Asked(f"a list of one {name} among arrays", SHAPE, operation, {**good, name: [good[name]]})
        for layer in range(3):
            other = [*lists[name]]
            other[layer] = np.ascontiguousarray(other[layer][:1])
            yield Asked(f"layer {layer} of {name} with one sample", SHAPE, operation, {**good, **lists, name: other})


# --- numbers and lists ------------------------------------------------------------------------------------------


def _bad_options(trial: Trial, operation: str) -> Iterator[Asked]:
    """Options that are not in their list, and numbers out of their range, are refused."""
    good = right_call(trial, operation, _SIZES)
    numbers: dict[str, tuple[Any, ...]] = {
        "temperature": (0.0, -0.0, -1.0, -1e-300, np.nan, np.inf, -np.inf, True, False),
        "beta": (-1.0, -1e-300, np.nan, np.inf, -np.inf, True, False),
        "scale": (np.nan, np.inf, -np.inf, True, False),
    }
    words = {
        "reduction": ("batchmean", "none", "Sum", "", "sum "),
        "divergence": ("tv", "KL", "reverse-kl", "", "jsd"),
        "support": ("ignore", "Error", "", "intersection"),
        "row_sums": ("many", "ONE", "", "at-most-one", "at_most_two"),
    }
    taken = {"intersect_support": ("row_sums",), "align_tokens": ("row_sums",)}.get(
        operation, ("temperature", "beta", *words, *(("scale",) if operation.endswith("qk") else ()))
    )
    for name in taken:
        for value in (*numbers.get(name, ()), *words.get(name, ())):
            if isinstance(value, float):
                value = float(value)
            yield Asked(f"{name}={value!r}", VALUE, operation, {**good, name: value})


def _bad_lists(trial: Trial, operation: str) -> Iterator[Asked]:
    """Every position of a list is checked."""
    size = 7
    good = right_call(trial, "align_tokens", (1, 1, size, size))
    order = [3, 0, 6, 2, 5, 1]
    for name in ("rows", "columns"):
        for position in range(len(order)):
            for value in (size, -1, size + 1000, -size, True):
                changed = [*order[:position], value, *order[position + 1 :]]
                yield Asked(f"{value!r} at {position} of {name}", VALUE, operation, {**good, name: changed})
            for other in range(position):
                changed = [*order[:position], order[other], *order[position + 1 :]]
                yield Asked(f"{other} again at {position} of {name}", VALUE, operation, {**good, name: changed})
        yield Asked(f"no {name}", VALUE, operation, {**good, name: []})
        longer = [*range(size), 0]
        yield Asked(f"more {name} than there are", VALUE, operation, {**good, name: longer})


def _bad_pairs(_: Trial, operation: str) -> Iterator[Asked]:
    """Every explicit pair is checked."""
    codes = ("layers-invalid",)
    for teachers, students in ((6, 6), (9, 5), (4, 7), (23, 23)):
        counts = {"num_teacher_layers": teachers, "num_student_layers": students}
        order = [(s * 3 + 1) % students for s in range(students)]
        pairs = [[s, (s * 2 + 1) % teachers] for s in order]
        for position, (student, teacher) in enumerate(pairs):
            bad: list[list[Any]] = [[student, teachers], [students, teacher], [student, -1], [-1, teacher]]
            bad += [[True, teacher], [student, True], [student, teacher, 0], [student]]
            bad += [[student, teacher + 1000], [pairs[position - 1][0], teacher]]
            for pair in bad:
                changed = [*pairs[:position], pair, *pairs[position + 1 :]]
                yield Asked(f"{pair} at {position} of pairs", codes, operation, {**counts, "pairs": changed})
    for teachers, students in ((0, 1), (-1, 1), (4, 0), (4, -2), (True, 1), (4, True), (3, 4), (1, 2)):
        counts = {"num_teacher_layers": teachers, "num_student_layers": students}
        yield Asked("such counts", codes, operation, counts)
        if students != 4 and (teachers, students) != (1, 2):
            yield Asked("such counts", codes, operation, {**counts, "pairs": [[0, 0]]})


# --- the places that messages name ------------------------------------------------------------------------------


def _named(trial: Trial, operation: str) -> None:
    """A message names the place of what it refuses."""
    layers = 5
    good = right_call(trial, operation, (3, 8, 2, 4))
    index = (2, 1, 0, 3)
    wrong: list[tuple[Asked, dict[str, int]]] = []
    for name in _arrays(operation):
        bad = _placed(trial, good[name], (2, 1, 0, 0), np.nan)
        named = {"sample": 2, "head": 1}
        wrong.append((Asked(f"NaN in {name}", FINITE, operation, {**good, name: bad}), named))
        if operation in LOSSES:
            lists = {other: [good[other]] * layers for other in _arrays(operation)}
            lists[name] = [*lists[name][:4], bad]
            inputs = {**good, **lists}
            wrong.append((Asked(f"NaN in layer 4 of {name}", FINITE, operation, inputs), {"layer": 4, **named}))
    if operation in LOSSES:
        mask = np.ones((3, 8, 2, 4), dtype=np.bool_)
        mask[index] = False
        lists = {other: [good[other]] * layers for other in _arrays(operation)}
        fitting = np.where(mask, good["supervision"], 0.0)
        fitting[2, 1, 0, 0] = 1.0 - float(fitting[2, 1, 0, 1:].sum())
        lists["supervision"] = [trial.rounded(fitting)] * 4 + [good["supervision"]]
        named = {"layer": 4, "sample": 2, "head": 1, "row": 0, "key": 3}
        inputs = {**good, **lists, "attn_mask": mask}
        wrong.append((Asked("mass on a masked key", MISMATCH, operation, inputs), named))
        single = {**good, "attn_mask": mask}
        wrong.append((Asked("mass on a masked key", MISMATCH, operation, single), {**named, "layer": 0}))
    for one, named in wrong:
        message = ask(trial, one)
        for word, number in named.items():
            if not re.search(rf"\b{word}s?\W{{0,3}}{number}\b", message, re.IGNORECASE):
                what = f"the message of {operation} with {one.what}"
                raise broken(what, f"must name {word} {number}", f"{word} {number}", message)


_FAMILIES: tuple[tuple[str, str, Sequence[str], Callable[[Trial, str], Iterator[Asked] | None]], ...] = (
    ("bad-entries", "MAP-3 MAP-5 MAP-9", tuple(SHORT), _bad_entries),
    ("uncounted-entries", "MAP-3 MAP-5", tuple(SHORT), _uncounted_entries),
    ("bad-masks", "MAP-7 MAP-10", tuple(SHORT), _bad_masks),
    ("bad-shapes", "LOSS-3 TOKEN-7 MAP-4", (*LOSSES, "intersect_support"), _bad_shapes),
    ("bad-shapes", "MAP-4", ("align_tokens",), _bad_shapes),
    ("bad-options", "MAP-9 ERR-6 ERR-7", tuple(SHORT), _bad_options),
    ("near-sums", "MAP-3 MAP-9 LOSS-10", tuple(SHORT), _near_sums),
    ("places-named", "MAP-5 LOSS-6", LOSSES, _named),
    ("places-named", "MAP-5", ("intersect_support", "align_tokens"), _named),
    ("bad-layers", "MAP-3 MAP-5 LOSS-3", LOSSES, _bad_layers),
    ("mismatches", "LOSS-6 LOSS-13 LOSS-14", LOSSES, _mismatches),
    ("bad-lists", "TOKEN-4 ERR-6", ("align_tokens",), _bad_lists),
    ("bad-pairs", "LAYER-2 LAYER-4 ERR-6", ("layer_map",), _bad_pairs),
)


def _ask(check: Callable[[Trial, str], Iterator[Asked] | None], operation: str, trial: Trial) -> None:
    ask_all(trial, check(trial, operation) or ())


LAWS = Laws(
    law(
        f"{SHORT.get(operation, 'layers')}-{name}",
        operation,
        spec,
        str(check.__doc__),
        partial(_ask, check, operation),
        WIDE if name == "near-sums" else DTYPES,
    )
    for operation in (*SHORT, "layer_map")
    for name, spec, operations, check in _FAMILIES
    if operation in operations
)
