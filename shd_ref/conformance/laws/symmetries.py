"""Laws of symmetry: the order of samples, heads, rows, keys and features means nothing, and neither do batches.

Each operation is a table of axes: a letter an axis, the same in arguments and answers. Where an argument is turned
around along a letter, so must be the answer; whether an answer is right by itself is checked by other laws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.compare import as_numbers, as_plain
from shd_ref.conformance.laws.law import WIDE, Array, Law, Trial, as_array, broken, exactly, law, require

_Inputs = dict[str, Any]


@dataclass(frozen=True)
class Turned:
    """An operation, and how its arrays read."""

    operation: str
    make: Callable[[Trial, Sequence[int]], _Inputs]  # from (B, L, S, D)
    axes: Mapping[str, str]  # by argument, a letter an axis
    answers: Mapping[str, tuple[str, str]]  # by name, letters and the tolerance's quantity; without letters it stays
    letters: str  # along which the arguments are turned; B is also taken apart
    spec: str
    sizes: tuple[tuple[int, int, int, int], ...] = ((5, 3, 6, 4), (2, 37, 21, 35))


def _mask(sizes: Sequence[int]) -> Array:
    mask: Array = (np.arange(sizes[0])[:, None] * 2 + np.arange(sizes[1])[None, :] ** 2) % 5 > 0
    return mask


def _pair(trial: Trial, sizes: Sequence[int], **options: Any) -> _Inputs:
    b, rows, keys, width = sizes
    return {
        "probs_p": trial.shares(13_001, b, rows, keys), "probs_q": trial.shares(13_002, b, rows, keys),
        "value_outputs_p": trial.quotients(13_003, b, keys, width),
        "value_outputs_q": trial.quotients(13_004, b, keys, width),
        "query_mask": _mask(sizes), **options,
    }  # fmt: skip


def _teacher(trial: Trial, sizes: Sequence[int], *, heads: int = 6, **options: Any) -> _Inputs:
    b, rows, keys, width = sizes
    return {
        "teacher_probs": trial.shares(13_011, b, heads, rows, keys),
        "value_outputs": trial.quotients(13_012, b, heads, keys, width),
        "num_student_heads": 2, "query_mask": _mask(sizes), **options,
    }  # fmt: skip


def _gram(trial: Trial, sizes: Sequence[int], **options: Any) -> _Inputs:
    b, rows, keys, width = sizes
    return {
        "teacher_probs": trial.shares(13_021, b, 4, rows, keys), "values": trial.quotients(13_022, b, 2, keys, 3),
        "output_projection": trial.quotients(13_023, 12, width), "query_mask": _mask(sizes), **options,
    }  # fmt: skip


def _mixed(trial: Trial, sizes: Sequence[int], *, by_row: bool) -> _Inputs:
    b, rows, keys, _ = sizes
    weights = np.swapaxes(trial.shares(13_032, b, 3, rows, 5), 2, 3)
    mixing = np.ascontiguousarray(weights if by_row else weights[..., 0])
    return {"teacher_probs": trial.shares(13_031, b, 5, rows, keys), "mixing": mixing}


def _maps(trial: Trial, sizes: Sequence[int], **options: Any) -> _Inputs:
    b, rows, keys, _ = sizes
    return {"attn_probs": trial.shares(13_041, b, 5, rows, keys), "temperature": 1.7, **options}


def _logits(trial: Trial, sizes: Sequence[int]) -> _Inputs:
    b, rows, keys, _ = sizes
    shape = b, 5, rows, keys
    mask = trial.numbers(13_052, *shape, low=0, high=4, shift=0) > 0
    return {"attn_logits": 3 * trial.quotients(13_051, *shape), "attn_mask": mask, "temperature": 1.3}


def _values(trial: Trial, sizes: Sequence[int]) -> _Inputs:
    b, _, keys, width = sizes
    return {"values": trial.quotients(13_061, b, 2, keys, 3), "output_projection": trial.quotients(13_062, 12, width)}


def _composed(trial: Trial, sizes: Sequence[int], *, by_row: bool) -> _Inputs:
    shapes = [(sizes[0], pairs, *sizes[1 : 1 + by_row]) for pairs in (2, 1)]
    alphas = [trial.rounded(np.abs(trial.quotients(13_071 + n, *shape)) / 3.5) for n, shape in enumerate(shapes)]
    return {"alphas": alphas, "plan": [[[3, 0], [1, 4]], [[2, 0]]], "num_teacher_heads": 5}


_PAIR = {"probs_p": "BLS", "probs_q": "BLS", "value_outputs_p": "BSD", "value_outputs_q": "BSD", "query_mask": "BL"}
_TEACHER = {"teacher_probs": "BHLS", "value_outputs": "BHSD", "query_mask": "BL"}
_PROJECTED = {"teacher_probs": "BHLS", "values": "BKSV", "output_projection": "ND", "query_mask": "BL"}
_SMALL = ((5, 3, 6, 4), (2, 17, 5, 9))


def _squeezed(name: str, by_row: bool, **options: Any) -> Turned:
    mixing = "BCHL" if by_row else "BCH"
    if by_row:
        options["alpha_per"] = "row"
    return Turned(
        "squeeze_heads", partial(_teacher, strategy=name, **options), _TEACHER,
        {"probs": ("BCLS", "probs"), "mixing": (mixing, "alpha"), "residual": ("B", "residual"), "plan": ("", "")},
        "BLSD", "NUM-3 MIX-4 MIX-10",
    )  # fmt: skip


_TURNED = (
    Turned("softmax", _logits, {"attn_logits": "BHLS", "attn_mask": "BHLS"}, {"attn_probs": ("BHLS", "probs")},
        "BHLS", "MAP-1 MAP-2 NUM-3", ((5, 3, 6, 1), (2, 37, 67, 1), (1, 2, 131, 1))),
    *(Turned("soften", partial(_maps, row_sums=sums), {"attn_probs": "BHLS"}, {"attn_probs": ("BHLS", "probs")},
        "BHLS", "TEMP-2 NUM-3", ((5, 3, 6, 1), (2, 37, 67, 1), (1, 2, 131, 1))) for sums in ("one", "at_most_one")),
    Turned("value_outputs", _values, {"values": "BKSV", "output_projection": "ND"},
        {"value_outputs": ("BHSD", "probs")}, "BSD", "MAP-11 NUM-3",
        ((5, 1, 6, 4), (2, 1, 67, 35), (1, 1, 2, 131))),
    Turned("solve_alpha", _pair, _PAIR, {"alpha": ("B", "alpha")}, "BLSD", "ALPHA-2 ALPHA-8 NUM-3"),
    Turned("solve_alpha", partial(_pair, alpha_per="row"), _PAIR, {"alpha": ("BL", "alpha")}, "BLSD",
        "ALPHA-9 NUM-3", ((5, 3, 6, 4), (2, 9, 21, 35))),
    *(Turned("mix_heads", partial(_mixed, by_row=by_row), {"teacher_probs": "BHLS", "mixing": "BCHL"[: 3 + by_row]},
        {"probs": ("BCLS", "probs")}, "BHCLS", "MIX-3 NUM-3") for by_row in (False, True)),
    *(Turned("compose_mixing", partial(_composed, by_row=by_row), {"alphas": "BPL"[: 2 + by_row]},
        {"mixing": ("BCHL"[: 3 + by_row], "alpha")}, "BL"[: 1 + by_row], "MIX-13 NUM-3") for by_row in (False,
        True)),
    _squeezed("shd", by_row=False),
    _squeezed("shd", by_row=True, plan="balanced"),
    _squeezed("hard", by_row=False, temperature=1.5),
    *(Turned("gram_tensor", partial(_gram, alpha_per=per), _PROJECTED, {"gram": (letters, "probs")}, "BLSD",
        "GRAM-1 NUM-3") for per, letters in (("map", "BIJKM"), ("row", "BIJKML"))),
    *(Turned("diagnose", partial(_teacher, heads=4, strategies=["shd"], alpha_per=per), _TEACHER,
        {"unconstrained": ("B", "residual"), "stochastic": ("B", "residual"), "plan": ("", "")}, "BLSD",
        "ORACLE-1 NUM-3", _SMALL) for per in ("map", "row")),
)  # fmt: skip


def _flip(value: Any, letters: str, letter: str, part: slice) -> Any:
    """An argument turned around, or cut, along a letter; a list has arrays of one reading."""
    if isinstance(value, list):
        return [_flip(item, letters, letter, part) for item in value]
    if letter not in letters:
        return value
    return value[(slice(None),) * letters.index(letter) + (part,)].copy(order="C")


def _check(trial: Trial, one: Turned, sizes: Sequence[int]) -> None:
    inputs = one.make(trial, sizes)
    whole = trial.call(one.operation, **inputs)
    parts = {letter: [slice(None, None, -1)] for letter in one.letters}
    parts["B"] += [slice(0, 1), slice(sizes[0] // 2, None)] if sizes[0] > 1 else []
    for letter, slices in parts.items():
        for piece in slices:
            arguments = {name: _flip(value, one.axes.get(name, ""), letter, piece) for name, value in inputs.items()}
            got = trial.call(one.operation, **arguments)
            how = "turned around" if piece.step else f"samples {piece.start} to {piece.stop or sizes[0]}"
            what = f"of {one.operation} with axis {letter} {how}, (B, L, S, D) = {tuple(sizes)},"
            for name, (letters, quantity) in one.answers.items():
                if not letters:
                    exactly(got[name], as_plain(whole[name]), f"{name} {what}")
                    continue
                before, after = as_numbers(whole[name]), as_numbers(got[name])
                if before is None or after is None or before.ndim != len(letters):
                    raise broken(f"{name} {what}", "must be numbers with its axes", letters, whole[name])
                right = _flip(before, letters, letter, piece)
                size = max(1.0, float(np.abs(right).max()))
                trial.agree(after / size, right / size, quantity, f"{name} {what}", times=2)


def _statement(trial: Trial, chosen: Sequence[Turned]) -> None:
    for one in chosen:
        for sizes in one.sizes:
            _check(trial, one, sizes)


# --- heads under other numbers ----------------------------------------------------------------------------------

_ORDER = [3, 0, 4, 2, 1]  # the head that takes each place
_PLAN = [[[3, 0], [1, 4]], [[2, 0]]]


def _renamed(plan: Sequence[Sequence[Sequence[int]]]) -> tuple[list[list[list[int]]], list[int]]:
    """The same merges where heads stand in ``_ORDER``, and the student head that takes each place (PLAN-4)."""
    old: list[Any] = [(head,) for head in range(len(_ORDER))]
    new, rounds = [(head,) for head in _ORDER], []
    for one_round in plan:
        pairs = [(old[p], old[q]) for p, q in one_round]
        rounds.append([[new.index(p), new.index(q)] for p, q in pairs])
        used = {head for pair in pairs for head in pair}
        old, new = ([p + q for p, q in pairs] + [head for head in pool if head not in used] for pool in (old, new))
    return rounds, [old.index(group) for group in new]


def _squeezed_renamed(trial: Trial) -> None:
    plan, students = _renamed(_PLAN)
    for options in ({"strategy": "shd"}, {"strategy": "hard", "alpha_per": "row"}):
        inputs = {**_teacher(trial, (3, 4, 5, 4), heads=5), **options}
        before = trial.call("squeeze_heads", **inputs, plan=_PLAN)
        renamed = {**inputs, **{name: inputs[name][:, _ORDER].copy() for name in ("teacher_probs", "value_outputs")}}
        after = trial.call("squeeze_heads", **renamed, plan=plan)
        say = f"of {options['strategy']} with heads and plan renumbered,"
        expected = {name: as_array(before[name], name) for name in ("probs", "mixing", "residual")}
        trial.agree(after["probs"], expected["probs"][:, students], "probs", f"the maps {say}", times=2)
        mixing = expected["mixing"][:, students][:, :, _ORDER]
        trial.agree(after["mixing"], mixing, "alpha", f"the mixing {say}", times=2)
        trial.agree(after["residual"], expected["residual"], "residual", f"the residual {say}", times=2)
        for one, other in zip(before["alphas"], after["alphas"], strict=True):
            trial.agree(other, as_array(one, "alphas"), "alpha", f"the alphas {say}", times=2)
        for name in ("num_clipped", "num_degenerate"):
            exactly(after[name], as_plain(before[name]), f"{name} {say}")


def _diagnosed_renamed(trial: Trial) -> None:
    inputs = {**_teacher(trial, (2, 3, 4, 5), heads=5), "strategies": ["shd", "mean"]}
    before = trial.call("diagnose", **inputs, plan=_PLAN)
    renamed = {**inputs, **{name: inputs[name][:, _ORDER].copy() for name in ("teacher_probs", "value_outputs")}}
    after = trial.call("diagnose", **renamed, plan=_renamed(_PLAN)[0])
    for name in ("unconstrained", "stochastic"):
        what = f"the {name} optimum with heads and plan renumbered"
        trial.agree(after[name], as_array(before[name], name), "residual", what, times=2)


def _matched_renamed(trial: Trial) -> None:
    for by in ("residual", "similarity"):
        inputs = _teacher(trial, (2, 4, 5, 3), heads=5)
        item = inputs["teacher_probs"], inputs["value_outputs"], inputs["query_mask"]
        moved = *(array[:, _ORDER].copy() for array in item[:2]), item[2]
        before, after = (
            as_plain(trial.call("matched_plan", calibration=[one], num_student_heads=2, by=by)["plan"])
            for one in (item, moved)
        )
        expected, actual = _merged(before, range(5)), _merged(after, _ORDER)
        require(expected == actual, f"the plan matched by {by} with heads renumbered", str(expected), str(actual))


def _merged(plan: Sequence[Sequence[Sequence[int]]], heads: Iterable[int]) -> list[set[frozenset[int]]]:
    """For each round the groups of heads that it makes."""
    pool, rounds = [frozenset({head}) for head in heads], []
    for one_round in plan:
        made = [pool[p] | pool[q] for p, q in one_round]
        pool = made + [head for head in pool if not any(head <= group for group in made)]
        rounds.append(set(made))
    return rounds


def _gram_renamed(trial: Trial) -> None:
    maps, values = trial.shares(13_081, 2, 5, 3, 4), trial.quotients(13_082, 2, 5, 4, 2)
    projection = trial.quotients(13_083, 10, 3)
    blocks = projection.reshape(5, 2, 3)[_ORDER].reshape(10, 3).copy()
    moved = {"values": values[:, _ORDER].copy(), "output_projection": blocks}
    arguments = {"values": values, "output_projection": projection}
    outputs, other = (trial.numbers_of("value_outputs", **inputs) for inputs in (arguments, moved))
    trial.agree(other, outputs[:, _ORDER], "probs", "value outputs of renumbered heads", times=2)
    gram = trial.numbers_of("gram_tensor", teacher_probs=maps, **arguments)
    renamed = trial.numbers_of("gram_tensor", teacher_probs=maps[:, _ORDER].copy(), **moved)
    expected = gram[np.ix_(range(2), _ORDER, _ORDER, _ORDER, _ORDER)]
    size = float(np.abs(gram).max())
    trial.agree(renamed / size, expected / size, "probs", "the gram tensor of renumbered heads", times=2)


def _renamed_laws() -> Iterator[Law]:
    comment = "Heads under other numbers, with a plan to match, are merged as before."
    for name, operations, spec, statement in (
        ("squeeze", "squeeze_heads", "PLAN-4 MIX-4", _squeezed_renamed),
        ("diagnose", "diagnose", "PLAN-4 ORACLE-1", _diagnosed_renamed),
        ("matched", "matched_plan", "PLAN-9 PLAN-12", _matched_renamed),
        ("gram", "gram_tensor value_outputs", "GRAM-1 MAP-6", _gram_renamed),
    ):
        yield law(f"renumbered-{name}", operations, spec, comment, statement, WIDE)


def _laws() -> Iterator[Law]:
    for operation in dict.fromkeys(one.operation for one in _TURNED):
        chosen = [one for one in _TURNED if one.operation == operation]
        spec = " ".join(dict.fromkeys(spec for one in chosen for spec in one.spec.split()))
        yield law(f"turned-{operation.replace('_', '-')}", operation, spec,
                  "The order of samples, rows, keys and features means nothing, nor does a sample's batch.",
                  partial(_statement, chosen=chosen), WIDE)  # fmt: skip


LAWS = (*_laws(), *_renamed_laws())
