"""Laws of the student's operations over many options, sizes and magnitudes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.laws.answers import check_answer, check_answers
from shd_ref.conformance.laws.crossing import Choice, Maker, choices, loss_call, option_calls, positions
from shd_ref.conformance.laws.law import WIDE, Law, Laws, Trial, law
from shd_ref.conformance.specification import DTYPES

LOSSES = ("shd_loss", "shd_loss_gradient", "shd_loss_gradient_qk")
SHORT = {
    "shd_loss": "loss",
    "shd_loss_gradient": "gradient",
    "shd_loss_gradient_qk": "gradient-qk",
    "intersect_support": "support",
    "align_tokens": "tokens",
}
_COUNT = 104  # calls in which every two values of two options meet
_DIVERGENCES = ("kl", "reverse_kl", "js", "mse")


# --- sizes ------------------------------------------------------------------------------------------------------

# One axis beyond what is unrolled, tiled, or counted in few bits: (B, H, L, S).
_SHAPES = ((9, 1, 2, 3), (3, 13, 2, 3), (1, 9, 3, 2), (1, 1, 300, 3), (1, 1, 2, 530), (17, 1, 1, 9), (1, 1, 33, 67))
_DEPTHS = (9, 17)


def _size_calls(operation: str, trial: Trial) -> Iterator[dict[str, Any]]:
    kind = "queries and keys" if operation.endswith("qk") else "logits"
    every = choices(kind, _COUNT)
    number = 0
    for divergence in _DIVERGENCES:
        barred = {"beta": "zero", "layers": "many", "scale": "zero", "samples": "1", "numbers": "short"}
        fitting = (
            choice for choice in every if choice["divergence"] == divergence and not barred.items() & choice.items()
        )
        for shapes in (*([shape] for shape in _SHAPES), *([(2, 1, 2, 2)] * depth for depth in _DEPTHS)):
            choice = dict(next(fitting, every[number]))
            choice |= {"divergence": divergence, "layers": "alike" if len(shapes) > 1 else choice["layers"]}
            yield _sized_call(trial, number, choice, shapes)
            number += 1


def _sized_call(trial: Trial, number: int, choice: Choice, shapes: Sequence[Any]) -> dict[str, Any]:
    plain = {"layers": "alike" if len(shapes) > 1 else "one array", "attn_mask": "none", "loss_mask": "none"}
    masked = {"attn_mask": "(B, 1, L, S)", "loss_mask": choice["loss_mask"]} if number % 2 else {}
    support = {"support": "error"} if not masked and choice.get("-inf") != "some" else {}
    whole = {**choice, **plain, **masked, **support}
    if "grouped" in choice:
        heads = shapes[0][1]
        whole["grouped"] = "three" if heads % 3 == 0 else "one for all" if number % 3 else "own"
    return loss_call(trial, 3000 + number, whole, shapes)


def _wide_queries(trial: Trial) -> Iterator[dict[str, Any]]:
    """Queries and keys of many features, of numbers that no power of two divides."""
    for number, (shape, kv, width) in enumerate(
        (
            ((1, 2, 3, 4), 1, 65),
            ((1, 6, 2, 3), 2, 131),
            ((2, 1, 2, 3), 1, 257),
            ((1, 9, 3, 3), 3, 9),
            ((1, 8, 2, 3), 2, 5),
            ((2, 15, 2, 2), 3, 3),
        )
    ):
        make = Maker(trial, 4000 + number, full=True)
        batch, heads, rows, keys = shape
        weights = 1 + make.draws(*shape) % 8
        yield {
            "supervision": trial.rounded(Maker(trial, 4100 + number, full=False).distributions(weights)),
            "queries": trial.rounded(2.0 * make.fractions(batch, heads, rows, width) - 1.0),
            "keys": trial.rounded(2.0 * make.fractions(batch, kv, keys, width) - 1.0),
            "scale": width**-0.5,
        }


def _kept_sizes(operation: str, trial: Trial) -> Iterator[dict[str, Any]]:
    """Large maps for ``intersect_support`` and ``align_tokens``, with masks and lists to match."""
    for number, shape in enumerate((*_SHAPES, (1, 1, 131, 131))):
        make = Maker(trial, 5000 + number, full=False)
        maps = trial.rounded(make.distributions(make.draws(*shape) % 5 + (np.arange(shape[3]) == 0)))
        if operation == "align_tokens":
            kinds = ("some out of order", "all of them", "some in order")
            lists = {
                name: positions(make, kinds[(number + axis) % 3], shape[axis])
                for name, axis in (("rows", 2), ("columns", 3))
                if shape[axis] > 1
            }
            yield {"attn_probs": maps, **lists}
        else:
            logits = np.where(make.draws(*shape) % 3 == 0, -np.inf, 0.25)
            mask = make.draws(shape[0], 1, *shape[2:]) % 5 > 0
            yield {"supervision": maps, "student_logits": trial.rounded(logits), "attn_mask": mask}


# --- magnitudes -------------------------------------------------------------------------------------------------


# Temperature and beta.
_SCALARS = ((1e-4, 1.0), (1e4, 1e6), (1.0, 1e-6), (1.0, 1e6), (0.02, 333.3), (77.7, 0.01))


def _scale_calls(operation: str, trial: Trial) -> Iterator[dict[str, Any]]:
    """Arguments far from one that make up for each other, and rows, samples and heads of very different size."""
    shape = (3, 2, 3, 4)
    for number, (temperature, beta) in enumerate(_SCALARS):
        make = Maker(trial, 6000 + number, full=False)
        maps = trial.rounded(make.distributions(1 + make.draws(*shape) % 8))
        z = (make.draws(*shape) % 48 - 24) / 8.0 * 2.0 ** round(np.log2(temperature))
        options = {"temperature": temperature, "beta": beta, "divergence": _DIVERGENCES[number % 4]}
        if operation.endswith("qk"):
            queries = trial.rounded((make.draws(*shape[:3], 2) % 15 - 7) / 8.0)
            keys = trial.rounded((make.draws(*shape[:2], 4, 2) % 15 - 7) / 8.0)
            yield {"supervision": maps, "queries": queries, "keys": keys, "scale": 3.0 * temperature, **options}
        else:
            yield {"supervision": maps, "student_logits": trial.rounded(z), **options}
    if not operation.endswith("qk") and trial.subject.dtype != "float16":
        # A finite logit is not masked, however low it is (MAP-1), whether or not the teacher attends there.
        low = np.where(np.arange(4) == 1, -(2.0**100), np.arange(4) / 2.0)
        some = np.array([0.5, 0.25, 0.125, 0.125])
        for row, divergence in ((some, "kl"), (some, "mse"), (some[[0, 0, 0, 0]] / 2, "js")):
            maps, logits = (trial.rounded(np.broadcast_to(array, shape)) for array in (row, low))
            yield {"supervision": maps, "student_logits": logits, "divergence": divergence, "beta": 2.0**-90}
    yield from _uneven_calls(operation, trial)


def _uneven_calls(operation: str, trial: Trial) -> Iterator[dict[str, Any]]:
    """Rows with very different masses or logits: what is right for one is nothing, or overflows, for another."""
    shape = (3, 2, 3, 4)
    for number, divergence in enumerate(_DIVERGENCES):
        make = Maker(trial, 6100 + number, full=False)
        maps = make.distributions(1 + make.draws(*shape) % 8)
        # Offsets from row to row, sample to sample and head to head, which no softmax sees.
        offsets = 64.0 * (np.arange(18).reshape(3, 2, 3)[..., None] - 9) * (8 if number % 2 else 16)
        z = (make.draws(*shape) % 48 - 24) / 8.0
        exact = trial.subject.dtype in ("float64", "float32")
        shares = 2.0 ** -(np.arange(18).reshape(3, 2, 3)[::-1] * (2.0 if exact else 0.25) // 1)
        inputs = {"supervision": trial.rounded(maps), "divergence": divergence}
        sunk = {"supervision": trial.rounded(maps * shares[..., None]), "row_sums": "at_most_one"}
        thin = {**sunk, "supervision": trial.rounded(maps * 2.0**-10), "beta": 2.0**10, "divergence": divergence}
        # Keys of next to no mass: 2^-30 of the row's, where the dtype holds it.
        little = trial.rounded(np.where(np.arange(4) == number, 2.0**-30, np.array([0.5, 0.25, 0.125, 0.125])))
        few = {**inputs, "supervision": np.broadcast_to(little, shape).copy(), "row_sums": "at_most_one"}
        if operation.endswith("qk"):
            rest: dict[str, Any] = {
                "queries": trial.rounded((make.draws(*shape[:3], 2) % 15 - 7) * (512.0 if number % 2 else 2.0**-9)),
                "keys": trial.rounded((make.draws(*shape[:2], 4, 2) % 15 - 7) / (2.0**15 if number % 2 else 2.0**-3)),
                "scale": 0.7,
            }
        else:
            rest = {"student_logits": trial.rounded(z)}
            if exact:
                yield {**inputs, "student_logits": trial.rounded(z + offsets)}
        yield {**inputs, **rest}
        yield {**inputs, **sunk, **rest}
        yield {**thin, **rest}
        if exact:
            yield {**few, **rest}


def _little_left(operation: str, trial: Trial) -> Iterator[dict[str, Any]]:
    """Rows that keep, or lose, from 2^-5 to 2^-40 of their mass."""
    for number, power in enumerate((5, 8, 11, 14, 20, 27, 34, 40)):
        make = Maker(trial, 6200 + number, full=False)
        share = 2.0**-power
        base = make.distributions(1 + make.draws(2, 2, 3, 4) % 8)
        halves = np.array([share, share, 1.0, 1.0])
        # Two of four keys have nearly all; each sample, head and row has them in turns among those that stay.
        maps = base * np.where((np.arange(3) % 2 == 0)[:, None], halves, halves[::-1])
        maps = maps / maps.sum(-1, keepdims=True)
        for sinks in (1.0, 0.375, 2.0**-9):
            options = {} if sinks == 1.0 else {"row_sums": "at_most_one"}
            probs = trial.rounded(maps * sinks)
            stay = np.array([True, True, False, False])
            if operation == "align_tokens":
                yield {"attn_probs": probs, "columns": [1, 0] if number % 2 else [0, 1], **options}
                continue
            logits = trial.rounded((make.draws(2, 2, 3, 4) % 16 - 8) / 8.0)
            inputs = {"supervision": probs, "student_logits": logits, "attn_mask": stay, **options}
            if operation == "intersect_support":
                yield inputs
            else:
                yield {**inputs, "support": "intersect", "divergence": _DIVERGENCES[number % 4]}


# --- the table --------------------------------------------------------------------------------------------------

_SPEC = {
    "shd_loss": "LOSS-2 LOSS-4 LOSS-5 LOSS-10 LOSS-11 LOSS-14 LOSS-16 TEMP-4",
    "shd_loss_gradient": "GRAD-1 GRAD-2 GRAD-3 GRAD-9 LOSS-8 LOSS-14 TEMP-4",
    "shd_loss_gradient_qk": "GRAD-4 GRAD-5 GRAD-6 GRAD-8 GRAD-9",
    "intersect_support": "LOSS-15 MAP-9 MAP-10",
    "align_tokens": "TOKEN-1 TOKEN-2 TOKEN-3",
}


def _law(
    operation: str,
    name: str,
    words: str,
    calls: Callable[[str, Trial], Iterator[dict[str, Any]]],
    dtypes: tuple[str, ...] = DTYPES,
) -> Law:
    def statement(trial: Trial) -> None:
        check_answers(trial, operation, calls(operation, trial))

    comment = f"{operation} follows its formula {words}."
    return law(f"{SHORT[operation]}-{name}", operation, _SPEC[operation], comment, statement, dtypes)


def _laws_of(operation: str) -> Iterator[Law]:
    yield _law(operation, "options", "wherever two of its options meet", partial(option_calls, count=_COUNT))
    if operation in LOSSES:
        yield _law(operation, "sizes", "for many samples, heads, rows, keys and layers", _size_calls)
        words = "for large and small numbers, and for rows of very different size"
        yield _law(operation, "magnitudes", words, _scale_calls)
    else:
        yield _law(operation, "sizes", "for many samples, heads, rows and keys", _kept_sizes)
    if operation != "shd_loss_gradient_qk":
        # Half precision rounds what is left, and the sums of rows with it.
        yield _law(operation, "little-left", "where a row keeps or loses little of its mass", _little_left, WIDE)


LAWS = Laws(law for operation in SHORT for law in _laws_of(operation))


@LAWS.add("gradient-qk-wide", "shd_loss_gradient_qk", "GRAD-4 GRAD-5 NUM-1")
def _wide(trial: Trial) -> None:
    """Gradients of queries and keys follow from dz for any number of features and key heads."""
    check_answers(trial, "shd_loss_gradient_qk", _wide_queries(trial))


@LAWS.add("layers-every-count", "layer_map", "LAYER-1 LAYER-3 LAYER-6")
def _every_layer_map(trial: Trial) -> None:
    """Default layer maps are those of the rule for all counts up to 24."""
    for teachers in range(1, 25):
        for students in range(1, teachers + 1):
            check_answer(trial, "layer_map", {"num_teacher_layers": teachers, "num_student_layers": students})


@LAWS.add("layers-long-lists", "layer_map", "LAYER-4 LAYER-5")
def _long_layer_lists(trial: Trial) -> None:
    """Explicit pairs come back in student order, however many there are."""
    for number, (teachers, students, count) in enumerate(
        ((12, 12, 12), (40, 40, 40), (7, 33, 20), (300, 5, 5), (6, 6, 6))
    ):
        make = Maker(trial, 7000 + number, full=False)
        order = [int(s) for s in np.argsort(make.draws(students), kind="stable")][:count]
        pairs = [[s, int(t) % teachers] for s, t in zip(order, make.draws(count), strict=True)]
        counts = {"num_teacher_layers": teachers, "num_student_layers": students}
        check_answer(trial, "layer_map", {**counts, "pairs": pairs})
