"""Laws of chapter ERR: what must be refused is refused wherever it stands, not in the first sample alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.laws.law import DTYPE, FINITE, SHAPE, SUMS, Array, Asked, Law, Trial, ask_all, law
from shd_ref.tolerances import row_sum_tolerance

_WIDE = ("float64", "float32")
_TINY = 2.0**-24  # the least that float16 holds


@dataclass(frozen=True)
class Argument:
    """An array of an operation, by what may stand in it.

    Attributes:
        path: the argument's name, and for a list the numbers that lead to the array.
        role: ``logits``, ``maps``, ``mixing``, ``alphas`` or ``numbers``.
        axes: where an axis of size one, in place of all, must be refused.
    """

    path: tuple[Any, ...]
    role: str
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Subjected:
    """A right call of an operation, its arrays as words (path, role, axes), and the maps that a query_mask is for."""

    operation: str
    make: Callable[[Trial], dict[str, Any]]
    words: str
    masked: str = ""

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arrays of ``words``."""
        parts = (word.split(":") for word in self.words.split())
        return tuple(
            Argument(tuple(int(s) if s.isdigit() else s for s in path.split(".")), role, tuple(map(int, axes)))
            for path, role, axes in parts
        )


def _weights(trial: Trial, seed: int, *shape: int) -> Array:
    """Alphas from 0 to 1."""
    return trial.numbers(seed, *shape, low=0, high=16, shift=4)


def _pair(trial: Trial) -> dict[str, Any]:
    return {
        "probs_p": trial.probs(8001, 3, 4, 5),
        "probs_q": trial.probs(8002, 3, 4, 5),
        "value_outputs_p": trial.numbers(8003, 3, 5, 2),
        "value_outputs_q": trial.numbers(8004, 3, 5, 2),
    }


def _teacher(trial: Trial) -> dict[str, Any]:
    return {
        "teacher_probs": trial.probs(8011, 3, 4, 4, 5),
        "value_outputs": trial.numbers(8012, 3, 4, 5, 2),
        "num_student_heads": 2,
    }


def _gram(trial: Trial, *rows: int) -> Array:
    return trial.rounded(np.abs(trial.numbers(8021, 3, 3, 3, 3, 3, *rows)))


def _calibration(trial: Trial) -> dict[str, Any]:
    items = [(trial.probs(8031 + n, 2, 4, 3, 5), trial.numbers(8041 + n, 2, 4, 5, 2)) for n in range(3)]
    return {"calibration": items, "num_student_heads": 2}


_CALLS = (
    Subjected("softmax", lambda trial: {"attn_logits": trial.numbers(8051, 2, 3, 4, 5)}, "attn_logits:logits:"),
    Subjected(
        "soften", lambda trial: {"attn_probs": trial.probs(8052, 2, 3, 4, 5), "temperature": 2.0}, "attn_probs:maps:"
    ),
    Subjected(
        "value_outputs",
        lambda trial: {"values": trial.numbers(8053, 2, 2, 5, 3), "output_projection": trial.numbers(8054, 12, 4)},
        "values:numbers: output_projection:numbers:0",
    ),
    Subjected(
        "solve_alpha",
        _pair,
        "probs_p:maps:012 probs_q:maps:012 value_outputs_p:numbers:012 value_outputs_q:numbers:012",
        "probs_p",
    ),
    Subjected(
        "compose_mixing",
        lambda trial: {
            "alphas": [_weights(trial, 8061, 3, 2, 4), _weights(trial, 8062, 3, 1, 4)],
            "plan": [[[0, 1], [2, 3]], [[1, 0]]],
            "num_teacher_heads": 5,
        },
        "alphas.0:alphas:012 alphas.1:alphas:02",
    ),
    Subjected(
        "mix_heads",
        lambda trial: {
            "teacher_probs": trial.probs(8071, 3, 4, 4, 5),
            "mixing": np.ascontiguousarray(np.swapaxes(trial.probs(8072, 3, 2, 4, 4), 2, 3)),
        },
        "teacher_probs:mixed:012 mixing:mixing:023",
    ),
    Subjected("squeeze_heads", _teacher, "teacher_probs:maps:013 value_outputs:numbers:012", "teacher_probs"),
    Subjected(
        "gram_tensor",
        lambda trial: {
            "teacher_probs": trial.probs(8081, 3, 4, 4, 5),
            "values": trial.numbers(8082, 3, 2, 5, 3),
            "output_projection": trial.numbers(8083, 12, 4),
        },
        "teacher_probs:maps:03 values:numbers:02 output_projection:numbers:0",
        "teacher_probs",
    ),
    Subjected("solve_alpha_from_gram", lambda trial: {"gram": _gram(trial, 4), "p": 2, "q": 0}, "gram:numbers:1234"),
    Subjected(
        "merge_gram",
        lambda trial: {"gram": _gram(trial, 4), "p": 2, "q": 0, "alpha": _weights(trial, 8091, 3, 4)},
        "gram:numbers:1234 alpha:alphas:01",
    ),
    Subjected(
        "matched_plan",
        _calibration,
        " ".join(f"calibration.{n}.0:maps:03 calibration.{n}.1:numbers:012" for n in range(3)),
    ),
    Subjected("diagnose", _teacher, "teacher_probs:maps:013 value_outputs:numbers:012", "teacher_probs"),
)


def _take(inputs: Mapping[str, Any], path: Sequence[Any]) -> Array:
    value: Any = inputs
    for step in path:
        value = value[step]
    return np.array(value)


def _put(value: Any, path: Sequence[Any], array: Array) -> Any:
    """The inputs with another array at the path; nothing is shared with the old ones."""
    if not path:
        return array
    step, *rest = path
    if isinstance(value, Mapping):
        return {**value, step: _put(value[step], rest, array)}
    return type(value)(_put(item, rest, array) if index == step else item for index, item in enumerate(value))


def _places(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """The last of each axis, the last of all, and the middle."""
    first = (0,) * len(shape)
    ends = [(*first[:axis], size - 1, *first[axis + 1 :]) for axis, size in enumerate(shape) if size > 1]
    return list(dict.fromkeys([*ends, tuple(s - 1 for s in shape), tuple(s // 2 for s in shape)]))


def _wrong(
    role: str, array: Array, place: tuple[int, ...], tolerance: float
) -> Iterator[tuple[str, Array, tuple[str, ...]]]:
    """What must not stand at a place of such an array: in words, the array, the codes."""

    def changed(value: float, *, kept: int | None = None) -> Array:
        copy = array.copy()
        if kept is not None:  # what was there goes to a neighbour, so that the sum stays
            neighbour = list(place)
            neighbour[kept] = (place[kept] + 1) % array.shape[kept]
            copy[tuple(neighbour)] += array[place]
        copy[place] = value
        return copy

    sums = SUMS if role in ("maps", "mixed") else ("mixing-invalid",)
    yield "NaN", changed(np.nan), FINITE
    yield "infinity", changed(np.inf), (*FINITE, *sums)
    if role == "numbers":
        yield "minus infinity", changed(-np.inf), FINITE
    if role == "alphas":
        yield "a little more than one", changed(1.0 + 2.0**-7), sums
        yield "a little less than zero", changed(-_TINY), sums
    if role in ("maps", "mixed", "mixing"):
        axis = 2 if role == "mixing" else -1
        yield "a little less than zero", changed(-_TINY, kept=axis), sums
        yield "a sixteenth too much", changed(array[place] + 0.0625), sums
        if tolerance:
            yield "a little more than ROW_SUM too much", changed(array[place] + 1.5 * tolerance), sums
        if role != "mixed":
            other = changed(0.0, kept=axis)
            neighbour = list(place)
            neighbour[axis] = (place[axis] + 1) % array.shape[axis]
            other[tuple(neighbour)] -= 0.0625 if other[tuple(neighbour)] >= 0.0625 else -0.0625
            yield "a sixteenth off", other, sums


def _everywhere(call: Subjected, trial: Trial) -> Iterator[Asked]:
    inputs = call.make(trial)
    dtype = trial.subject.dtype
    tolerance = row_sum_tolerance(dtype) if dtype in _WIDE else 0.0
    for argument in call.arguments:
        array, name = _take(inputs, argument.path), ".".join(map(str, argument.path))
        for index in _places(array.shape):
            for words, changed, codes in _wrong(argument.role, array, index, tolerance):
                changed_inputs = _put(inputs, argument.path, trial.rounded(changed))
                yield Asked(f"{words} at {list(index)} of {name}", codes, call.operation, changed_inputs)
            if tolerance and argument.role in ("maps", "mixed", "mixing"):
                inside = array.copy()
                inside[index] += 0.7 * tolerance
                words = f"a sum off by less than ROW_SUM at {list(index)} of {name}"
                yield Asked(words, (), call.operation, _put(inputs, argument.path, inside))


def _spread(call: Subjected, trial: Trial) -> Iterator[Asked]:
    inputs = call.make(trial)
    codes = (*SHAPE, *SUMS, "mixing-invalid", "heads-exceed")
    for argument in call.arguments:
        array, name = _take(inputs, argument.path), ".".join(map(str, argument.path))
        others = [np.take(array, [0], axis=axis) for axis in argument.axes]
        for other in [*others, array[None], array[0]] if argument.axes else []:
            what = f"{name} of the shape {list(other.shape)}"
            yield Asked(what, codes, call.operation, _put(inputs, argument.path, np.array(other)))


def _masks(call: Subjected, trial: Trial) -> Iterator[Asked]:
    inputs = call.make(trial)
    maps = np.asarray(inputs[call.masked])
    batch, rows = maps.shape[0], maps.shape[-2]
    shapes = [
        (1, rows), (batch, 1), (rows, batch), (batch, rows + 1), (batch, rows - 1), (rows,), (1,), (1, 1),
        (batch, 1, rows), (batch, rows, 1), (batch * rows,), (batch + 1, rows), (batch - 1, rows),
    ]  # fmt: skip
    # With one sample, one row or as many samples as rows a wrong mask can look right.
    looking_right = (
        (1, rows, (rows,)), (1, rows, (rows, 1)), (1, rows, (1, 1, rows)), (1, rows, (1, 1)),
        (batch, 1, (batch,)), (batch, 1, (1, batch)), (batch, 1, (1, 1)), (1, 1, (1,)), (1, 1, ()),
        (batch, batch, (batch,)), (batch, batch, (1, batch)), (batch, batch, (batch, 1)),
    )  # fmt: skip
    for samples, kept, shape in (*((batch, rows, shape) for shape in shapes), *looking_right):
        fewer = {name: _fewer(value, name, samples, kept) for name, value in inputs.items()}
        arguments = {**fewer, "query_mask": np.ones(shape, dtype=np.bool_)}
        yield Asked(f"a query_mask {list(shape)}, B = {samples}, L = {kept}", SHAPE, call.operation, arguments)
    for dtype in (np.int64, np.float32):
        arguments = {**inputs, "query_mask": np.ones((batch, rows), dtype=dtype)}
        yield Asked(f"a query_mask of {np.dtype(dtype).name}", DTYPE, call.operation, arguments)


def _fewer(value: Any, name: str, samples: int, rows: int) -> Any:
    """An argument with the first samples, and for maps the first rows."""
    if not isinstance(value, np.ndarray) or name == "output_projection":
        return value
    cut = value[:samples]
    return np.array(cut[..., :rows, :] if "probs" in name else cut)


def _uncounted(call: Subjected, trial: Trial) -> Iterator[Asked]:
    inputs = call.make(trial)
    names = [argument.path[0] for argument in call.arguments if argument.role == "maps"]
    for name in names:
        maps = np.asarray(inputs[name])
        for sample, row, others in ((0, 1, True), (1, 0, True), (2, 3, True), (1, 2, False)):  # the last: none counts
            mask = np.full((maps.shape[0], maps.shape[-2]), others)
            mask[sample, row] = False
            for head in range(maps.shape[1]) if maps.ndim == 4 else (0,):
                index = (sample, head, row) if maps.ndim == 4 else (sample, row)
                short, negative, broken_row, elsewhere = maps.copy(), maps.copy(), maps.copy(), maps.copy()
                short[index] *= 0.25
                negative[index] = np.roll(negative[index], 1)
                negative[(*index, int(np.argmin(negative[index])))] = -_TINY
                broken_row[(*index, -1)] = np.nan
                other = (*index[:-1], (row + 1) % maps.shape[-2])
                elsewhere[other] *= 0.25
                where = f"{list(index)} of {name}, a row that does not count"
                for words, codes, changed in (
                    ("a sum of 1/4 at", (), short),
                    ("an entry below zero at", SUMS, negative),
                    ("NaN at", FINITE, broken_row),
                    ("a sum of 1/4 beside", SUMS if others else (), elsewhere),
                ):
                    changed_inputs = {**inputs, name: changed, "query_mask": mask}
                    yield Asked(f"{words} {where}", codes, call.operation, changed_inputs)


def _attn_masks(trial: Trial) -> Iterator[Asked]:
    logits = trial.numbers(8095, 2, 3, 4, 5)
    for shape in (
        (2, 5), (3, 5), (2, 4, 5), (2, 3, 4), (4, 1, 5), (2, 1, 5, 4), (1, 1, 1, 4), (4,), (3, 1, 1, 5), (2, 2, 4, 5),
    ):  # fmt: skip
        inputs = {"attn_logits": logits, "attn_mask": np.ones(shape, dtype=np.bool_)}
        yield Asked(f"an attn_mask {list(shape)}", SHAPE, "softmax", inputs)


def _gram_axes(trial: Trial) -> Iterator[Asked]:
    # Weights by sample are not weights by row, nor the other way round, also where B, L or H are equal or one.
    for batch, heads, rows in ((3, 3, 3), (3, 3, 1), (1, 3, 4), (1, 2, 1), (2, 2, 2), (4, 3, 2)):
        gram = trial.rounded(np.abs(trial.numbers(8101, batch, *(heads,) * 4, rows)))
        alpha = trial.numbers(8102, batch, rows, low=0, high=16, shift=4)
        by_row = [(batch,), (rows,), (), (batch, 1), (1, rows), (rows, batch), (batch, rows, 1), (batch, 1, rows)]
        by_map = [(batch, 1), (1, batch), (batch, batch), (1,), (), (batch, rows), (batch, heads), (batch, 1, 1)]
        for tensor, right, wrong in ((gram, (batch, rows), by_row), (gram[..., 0].copy(), (batch,), by_map)):
            inputs = {"gram": tensor, "p": 0, "q": 1}
            fitting = alpha.copy() if len(right) == 2 else alpha[:, 0].copy()
            yield Asked("an alpha that fits", (), "merge_gram", {**inputs, "alpha": fitting})
            for shape in wrong:
                if shape != right:
                    weights = np.resize(alpha, shape).astype(alpha.dtype)
                    what = f"an alpha {list(shape)} for a gram tensor {list(tensor.shape)}"
                    yield Asked(what, SHAPE, "merge_gram", {**inputs, "alpha": weights})


_LONG = ((1, 2, 131, 3), (1, 2, 3, 131), (1, 19, 2, 3), (9, 2, 2, 3))


def _sized(
    trial: Trial, operation: str, batch: int, heads: int, rows: int, keys: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """A call with axes of these sizes, and the roles of its arrays."""
    maps, outputs = trial.probs(8111, batch, heads, rows, keys), trial.numbers(8112, batch, heads, keys, 2)
    projection = trial.numbers(8113, 2 * heads, 3)
    calls: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        "softmax": ({"attn_logits": trial.numbers(8114, *maps.shape)}, {"attn_logits": "logits"}),
        "soften": ({"attn_probs": maps, "temperature": 2.0}, {"attn_probs": "maps"}),
        "value_outputs": (
            {"values": outputs, "output_projection": projection},
            {"values": "numbers", "output_projection": "numbers"},
        ),
        "solve_alpha": (
            {
                **{f"probs_{name}": maps[:, head].copy() for head, name in enumerate("pq")},
                **{f"value_outputs_{name}": outputs[:, head].copy() for head, name in enumerate("pq")},
            },
            {"probs_p": "maps", "probs_q": "maps", "value_outputs_p": "numbers", "value_outputs_q": "numbers"},
        ),
        "mix_heads": (
            {"teacher_probs": maps, "mixing": trial.probs(8115, batch, 2, heads)},
            {"teacher_probs": "mixed", "mixing": "sums"},
        ),
        "squeeze_heads": (
            {"teacher_probs": maps, "value_outputs": outputs, "num_student_heads": 1},
            {"teacher_probs": "maps", "value_outputs": "numbers"},
        ),
        "compose_mixing": (
            {
                "alphas": [trial.numbers(8116, batch, 1, rows, low=0, high=16, shift=4)] * (heads - 1),
                "plan": [[[0, 1]]] * (heads - 1),
                "num_teacher_heads": heads,
            },
            {},
        ),
    }  # fmt: skip
    return calls[operation]


def _far(operation: str, trial: Trial) -> Iterator[Asked]:
    """The last entry of axes longer than what is looked at in one go."""
    for sizes in _LONG:
        inputs, roles = _sized(trial, operation, *sizes)
        for name, role in roles.items():
            array = inputs[name]
            index = tuple(size - 1 for size in array.shape)
            faults = [("NaN", np.nan, FINITE)]
            if role in ("maps", "mixed", "sums"):
                codes = SUMS if role != "sums" else ("mixing-invalid",)
                faults += [("a sixteenth too much", array[index] + 0.0625, codes), ("less than zero", -_TINY, codes)]
            for words, value, codes in faults:
                changed = array.copy()
                changed[index] = value
                changed_inputs = {**inputs, name: trial.rounded(changed)}
                yield Asked(f"{words} at the last of {list(array.shape)} of {name}", codes, operation, changed_inputs)
        for number in range(len(inputs.get("alphas", ()))):
            alphas = list(inputs["alphas"])
            alphas[number] = trial.rounded(
                np.where(np.arange(alphas[number].size) == 0, 1.0 + 2.0**-7, 0.5)[::-1].reshape(alphas[number].shape)
            )
            yield Asked(
                f"an alpha above one in round {number}", ("mixing-invalid",), operation, {**inputs, "alphas": alphas}
            )


def _law(name: str, operation: str, spec: str, comment: str, calls: Callable[[Trial], Iterator[Asked]]) -> Law:
    return law(name, operation, spec, comment, lambda trial: ask_all(trial, calls(trial)))


def _laws() -> Iterator[Law]:
    yield _law(
        "gram-weights-refused",
        "merge_gram",
        "GRAM-6 ERR-1",
        "An alpha is (B), or (B, L) per row, and nothing that broadcasts to it.",
        _gram_axes,
    )
    spec: Any
    sums = {"maps": ("MAP-3", "MAP-9"), "mixed": ("MIX-18",), "mixing": ("MIX-3",), "logits": (), "numbers": ()}
    for call in _CALLS:
        name = call.operation.replace("_", "-")
        alphas = {"compose_mixing": ("MIX-13",), "merge_gram": ("GRAM-6",)}.get(call.operation, ())
        ids = [sums.get(argument.role, alphas) for argument in call.arguments]
        yield _law(
            f"refused-everywhere-{name}",
            call.operation,
            " ".join(dict.fromkeys(("MAP-5", "ERR-1", *(spec for of in ids for spec in of)))),
            f"What {call.operation} must refuse it refuses in every sample, head, row and item.",
            partial(_everywhere, call),
        )
        if any(argument.axes for argument in call.arguments):
            spec = {
                "solve_alpha": "ALPHA-1", "compose_mixing": "MIX-13", "mix_heads": "MIX-3", "gram_tensor": "GRAM-6",
                "merge_gram": "GRAM-6", "solve_alpha_from_gram": "GRAM-6", "value_outputs": "MAP-11",
            }  # fmt: skip
            yield _law(
                f"no-axis-stands-for-all-{name}",
                call.operation,
                f"{spec.get(call.operation, 'MIX-1')} MAP-4 ERR-1",
                "An axis of size one, or one more or less, is another shape.",
                partial(_spread, call),
            )
        if call.masked:
            yield _law(
                f"masks-refused-{name}",
                call.operation,
                "MAP-7 ERR-1",
                "A query_mask that is not boolean (B, L) is refused, also where it would broadcast.",
                partial(_masks, call),
            )
            yield _law(
                f"uncounted-rows-exempt-{name}",
                call.operation,
                "MAP-3 MAP-5 MAP-7",
                "A row that does not count may have any sum, wherever it stands, and nothing else.",
                partial(_uncounted, call),
            )
    for operation, spec in (
        ("softmax", ""), ("soften", "MAP-3"), ("value_outputs", ""), ("solve_alpha", "MAP-3"),
        ("mix_heads", "MIX-3 MIX-18"), ("squeeze_heads", "MAP-3"), ("compose_mixing", "MIX-13"),
    ):  # fmt: skip
        yield _law(
            f"refused-far-{operation.replace('_', '-')}",
            operation,
            f"MAP-5 ERR-1 {spec}",
            f"What {operation} must refuse it refuses at the end of long axes.",
            partial(_far, operation),
        )
    yield _law(
        "masks-refused-softmax",
        "softmax",
        "MAP-10 ERR-1",
        "A mask that does not broadcast to the logits is refused.",
        _attn_masks,
    )


LAWS = tuple(_laws())
