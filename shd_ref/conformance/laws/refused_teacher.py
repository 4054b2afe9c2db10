"""Laws of chapter ERR: what must be refused is refused wherever it stands, not in the first sample alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.laws.law import DTYPE, FINITE, SHAPE, SUMS, WIDE, Array, Asked, Law, Trial, ask_all, law
from shd_ref.conformance.laws.refused_calls import Sizes, arrays_of, right_call, roles_of
from shd_ref.tolerances import row_sum_tolerance

_TINY = 2.0**-24  # the least that float16 holds
_SIZES: Sizes = (3, 4, 4, 5)
_Calls = Iterator[Asked]


def _put(value: Any, path: Sequence[Any], array: Array) -> Any:
    """The inputs with another array at the path; nothing is shared with the old ones."""
    if not path:
        return array
    step, *rest = path
    if isinstance(value, Mapping):
        return {**value, step: _put(value[step], rest, array)}
    return type(value)(_put(item, rest, array) if index == step else item for index, item in enumerate(value))


def _positions(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """The last of all, the last of each axis, and the middle."""
    first = (0,) * len(shape)
    ends = [(*first[:axis], size - 1, *first[axis + 1 :]) for axis, size in enumerate(shape) if size > 1]
    return list(dict.fromkeys([tuple(s - 1 for s in shape), *ends, tuple(s // 2 for s in shape)]))


def _wrong(
    role: str, array: Array, index: tuple[int, ...], tolerance: float
) -> Iterator[tuple[str, Array, tuple[str, ...]]]:
    """What must not stand at a place of such an array: in words, the array, the codes."""
    axis = 2 if role == "mixing" else -1
    neighbour = list(index)
    neighbour[axis] = (index[axis] + 1) % array.shape[axis]

    def changed(value: float, *, added: float = 0.0) -> Array:
        copy = array.copy()
        copy[tuple(neighbour)] += added
        copy[index] = value
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
        # What was there goes to a neighbour, so that the sum stays.
        yield "a little less than zero", changed(-_TINY, added=array[index]), sums
        yield "a sixteenth too much", changed(array[index] + 0.0625), sums
        if tolerance:
            yield "a little more than ROW_SUM too much", changed(array[index] + 1.5 * tolerance), sums
        if role != "mixed":
            moved = array[index] + array[tuple(neighbour)]
            yield "a sixteenth off", changed(0.0, added=array[index] + (-0.0625 if moved >= 0.0625 else 0.0625)), sums


def _faulty(operation: str, sizes: Sizes, last: bool, trial: Trial) -> _Calls:
    """Every fault at every place of every array, or at the last places alone."""
    inputs, dtype = right_call(trial, operation, sizes), trial.subject.dtype
    tolerance = row_sum_tolerance(dtype) if dtype in WIDE else 0.0
    for path, role, _, array in arrays_of(operation, inputs):
        name = ".".join(map(str, path))
        for index in _positions(array.shape)[: 1 if last else None]:
            for words, changed, codes in _wrong(role, array, index, tolerance):
                changed_inputs = _put(inputs, path, trial.rounded(changed))
                yield Asked(f"{words} at {list(index)} of {name}", codes, operation, changed_inputs)
            if tolerance and not last and role in ("maps", "mixed", "mixing"):
                inside = array.copy()
                inside[index] += 0.7 * tolerance
                words = f"a sum off by less than ROW_SUM at {list(index)} of {name}"
                yield Asked(words, (), operation, _put(inputs, path, inside))


def _far(operation: str, trial: Trial) -> _Calls:
    """The last entry of axes longer than what is looked at in one go."""
    for sizes in ((1, 2, 131, 3), (1, 2, 3, 131), (1, 19, 2, 3), (9, 2, 2, 3)):
        yield from _faulty(operation, sizes, True, trial)


def _spread(operation: str, trial: Trial) -> _Calls:
    inputs = right_call(trial, operation, _SIZES)
    codes = (*SHAPE, *SUMS, "mixing-invalid", "heads-exceed")
    for path, _, axes, array in arrays_of(operation, inputs):
        others = [np.take(array, [0], axis=axis) for axis in axes]
        for other in [*others, array[None], array[0]] if axes else []:
            what = f"{'.'.join(map(str, path))} of the shape {list(other.shape)}"
            yield Asked(what, codes, operation, _put(inputs, path, np.array(other)))


def _masks(operation: str, trial: Trial) -> _Calls:
    batch, _, rows, _ = _SIZES
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
    for samples, counted, shape in (*((batch, rows, shape) for shape in shapes), *looking_right):
        inputs = right_call(trial, operation, (samples, 4, counted, 5))
        arguments = {**inputs, "query_mask": np.ones(shape, dtype=np.bool_)}
        yield Asked(f"a query_mask {list(shape)}, B = {samples}, L = {counted}", SHAPE, operation, arguments)
    for dtype in (np.int64, np.float32):
        mask = np.ones((batch, rows), dtype=dtype)
        arguments = {**right_call(trial, operation, _SIZES), "query_mask": mask}
        yield Asked(f"a query_mask of {np.dtype(dtype).name}", DTYPE, operation, arguments)


def _uncounted(operation: str, trial: Trial) -> _Calls:
    inputs = right_call(trial, operation, _SIZES)
    for (name,), role, _, maps in arrays_of(operation, inputs):
        if role != "maps":
            continue
        for sample, row, others in ((0, 1, True), (1, 0, True), (2, 3, True), (1, 2, False)):  # the last: none counts
            mask = np.full((maps.shape[0], maps.shape[-2]), others)
            mask[sample, row] = False
            for index in [(sample, head, row) for head in range(4)] if maps.ndim == 4 else [(sample, row)]:
                short, negative, not_finite, elsewhere = maps.copy(), maps.copy(), maps.copy(), maps.copy()
                short[index] *= 0.25
                negative[index] = np.roll(negative[index], 1)
                negative[(*index, int(np.argmin(negative[index])))] = -_TINY
                not_finite[(*index, -1)] = np.nan
                elsewhere[(*index[:-1], (row + 1) % maps.shape[-2])] *= 0.25
                for words, codes, changed in (
                    ("a sum of 1/4 at", (), short),
                    ("an entry below zero at", SUMS, negative),
                    ("NaN at", FINITE, not_finite),
                    ("a sum of 1/4 beside", SUMS if others else (), elsewhere),
                ):
                    what = f"{words} {list(index)} of {name}, a row that does not count"
                    yield Asked(what, codes, operation, {**inputs, name: changed, "query_mask": mask})


def _attn_masks(trial: Trial) -> _Calls:
    logits = trial.numbers(8095, 2, 3, 4, 5)
    for shape in (
        (2, 5), (3, 5), (2, 4, 5), (2, 3, 4), (4, 1, 5), (2, 1, 5, 4), (1, 1, 1, 4), (4,), (3, 1, 1, 5), (2, 2, 4, 5),
    ):  # fmt: skip
        inputs = {"attn_logits": logits, "attn_mask": np.ones(shape, dtype=np.bool_)}
        yield Asked(f"an attn_mask {list(shape)}", SHAPE, "softmax", inputs)


def _gram_axes(trial: Trial) -> _Calls:
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


def _law(name: str, operation: str, spec: str, comment: str, calls: Callable[[Trial], _Calls]) -> Law:
    return law(name, operation, spec, comment, lambda trial: ask_all(trial, calls(trial)))


_MASKED = ("solve_alpha", "squeeze_heads", "gram_tensor", "diagnose")  # those with a query_mask
_FAR = {
    "softmax": "",
    "soften": "MAP-3",
    "value_outputs": "",
    "solve_alpha": "MAP-3",
    "mix_heads": "MIX-3 MIX-18",
    "squeeze_heads": "MAP-3",
    "compose_mixing": "MIX-13",
}
# The sentence about the shapes of an operation's arrays; none where any will do.
_SHAPES = {
    "softmax": "",
    "soften": "",
    "value_outputs": "MAP-11",
    "solve_alpha": "ALPHA-1",
    "compose_mixing": "MIX-13",
    "mix_heads": "MIX-3",
    "squeeze_heads": "MIX-1",
    "gram_tensor": "GRAM-6",
    "solve_alpha_from_gram": "GRAM-6",
    "merge_gram": "GRAM-6",
    "matched_plan": "MIX-1",
    "diagnose": "MIX-1",
}


def _laws() -> Iterator[Law]:
    comment = "An alpha is (B), or (B, L) per row, and nothing that broadcasts to it."
    yield _law("gram-weights-refused", "merge_gram", "GRAM-6 ERR-1", comment, _gram_axes)
    sums = {"maps": "MAP-3 MAP-9", "mixed": "MIX-18", "mixing": "MIX-3", "logits": "", "numbers": ""}
    alphas = {"compose_mixing": "MIX-13", "merge_gram": "GRAM-6"}
    for operation, shapes in _SHAPES.items():
        name = operation.replace("_", "-")
        roles = dict.fromkeys(roles_of(operation).values())
        spec = " ".join(("MAP-5 ERR-1", *(sums.get(role, alphas.get(operation, "")) for role in roles)))
        comment = f"What {operation} must refuse it refuses in every sample, head, row and item."
        everywhere = partial(_faulty, operation, _SIZES, False)
        yield _law(f"refused-everywhere-{name}", operation, spec, comment, everywhere)
        if shapes:
            comment = "An axis of size one, or one more or less, is another shape."
            spec = f"{shapes} MAP-4 ERR-1"
            yield _law(f"no-axis-stands-for-all-{name}", operation, spec, comment, partial(_spread, operation))
        if operation in _MASKED:
            comment = "A query_mask that is not boolean (B, L) is refused, also where it would broadcast."
            yield _law(f"masks-refused-{name}", operation, "MAP-7 ERR-1", comment, partial(_masks, operation))
            comment = "A row that does not count may have any sum, wherever it stands, and nothing else."
            exempt = partial(_uncounted, operation)
            yield _law(f"uncounted-rows-exempt-{name}", operation, "MAP-3 MAP-5 MAP-7", comment, exempt)
    for operation, spec in _FAR.items():
        comment = f"What {operation} must refuse it refuses at the end of long axes."
        name = f"refused-far-{operation.replace('_', '-')}"
        yield _law(name, operation, f"MAP-5 ERR-1 {spec}", comment, partial(_far, operation))
    comment = "A mask that does not broadcast to the logits is refused."
    yield _law("masks-refused-softmax", "softmax", "MAP-10 ERR-1", comment, _attn_masks)


LAWS = tuple(_laws())
