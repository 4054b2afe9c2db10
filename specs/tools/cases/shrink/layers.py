"""Cases of the chapters FFN, WIDTH, ALIGN and DEPTH of ``specs/shrink.md``."""

from __future__ import annotations

from typing import Any

import oracle_shrink as oracle
from book import array, numbers, special

from cases.shrink.inputs import EXACT, FACTOR, PRODUCT, WideBook, moments

FIRST, SECOND = numbers([3, 4], 5601, -8, 8, 2), numbers([2, 3], 5602, -8, 8, 2)
FIRST_BIAS, SECOND_BIAS = array([1, -0.5, 0.25]), array([2, -1.5])


def merge_linear() -> WideBook:
    """FFN-1 to FFN-3."""
    book = WideBook("merge_linear", ("weight", "bias"), oracle.merge_linear, {"weight": PRODUCT, "bias": PRODUCT})
    good: dict[str, Any] = {"first": FIRST, "second": SECOND}
    both = {**good, "first_bias": FIRST_BIAS, "second_bias": SECOND_BIAS}
    book.valid("both", "W = W2 W1, b = W2 b1 + b2", "FFN-1", "weights-transposed bias-left-out", inputs=both)
    book.valid(
        "first", "the first bias alone", "FFN-1 FFN-2", "bias-left-out", inputs={**good, "first_bias": FIRST_BIAS}
    )
    book.valid("second", "the second bias alone", "FFN-1 FFN-2", inputs={**good, "second_bias": SECOND_BIAS})
    book.valid("bare", "no bias in, none out", "FFN-2", inputs=good, compare={"bias": EXACT})
    square = {"first": numbers([3, 3], 5603, -8, 8, 2), "second": numbers([3, 3], 5604, -8, 8, 2)}
    book.valid(
        "square",
        "square matrices, whose order shows",
        "FFN-1",
        "weights-transposed",
        inputs=square,
        compare={"bias": EXACT},
    )
    book.invalid("gate", "a gated FFN", "FFN-3", "shrink-unsupported", inputs={**good, "gate": FIRST})
    for name, comment, changes in (
        ("matrices", "matrices that do not meet", {"second": FIRST}),
        ("first-bias", "a first bias of the other length", {"first_bias": SECOND_BIAS}),
        ("second-bias", "a second bias of the other length", {"second_bias": FIRST_BIAS}),
    ):
        book.invalid(name, comment, "FFN-1", "argument-shape", inputs={**good, **changes})
    book.invalid("nan", "NaN in a bias", "FFN-1", "not-finite", inputs={**good, "second_bias": array(["nan", 0])})
    return book  # fmt: skip


def neuron_importance() -> WideBook:
    """FFN-4."""
    book = WideBook(
        "neuron_importance", ("importance",), lambda **given: {"importance": oracle.neuron_importance(**given)},
        {"importance": PRODUCT},
    )  # fmt: skip
    rows = numbers([6, 3], 5611, -8, 8, 2)
    book.valid(
        "rows",
        "root mean square times the norm of a column",
        "FFN-4",
        "importance-by-mean",
        inputs={"activations": rows, "second": SECOND},
    )
    book.valid(
        "silent",
        "a neuron that says nothing, and one that is not read",
        "FFN-4",
        inputs={"activations": array([[0, 1, 2], [0, 2, -1]]), "second": array([[1, 2, 0], [4, 2, 0]])},
    )
    for name, comment, changes in (
        ("neurons", "fewer neurons than columns", {"activations": numbers([6, 2], 1, 0, 4, 1)}),
        ("rows-none", "no row", {"activations": numbers([0, 3], 1, 0, 4, 1)}),
    ):
        book.invalid(
            name, comment, "FFN-4", "argument-shape", inputs={"activations": rows, "second": SECOND, **changes}
        )
    return book  # fmt: skip


def keep_neurons() -> WideBook:
    """FFN-5."""
    rules = {f"{side}.{part}": PRODUCT for side in ("first", "second") for part in ("weight", "bias")}
    book = WideBook("keep_neurons", ("first", "second", "kept"), oracle.keep_neurons, {**rules, "kept": EXACT})
    good: dict[str, Any] = {
        "first": {"weight": FIRST, "bias": FIRST_BIAS},
        "second": {"weight": SECOND, "bias": SECOND_BIAS},
        "importance": array([0.5, 2, 1]),
        "count": 2,
    }
    bare = {"first": {"weight": FIRST}, "second": {"weight": SECOND}}
    book.valid("two", "the two most important, in their order", "FFN-5", "neurons-by-rank", inputs=good)
    book.valid("ties", "of equal neurons the first", "FFN-5", inputs={**good, "importance": array([1, 1, 1])})
    book.valid("all", "all of them", "FFN-5", inputs={**good, "count": 3})
    book.valid(
        "bare",
        "layers without biases",
        "FFN-5",
        inputs={**good, **bare},
        compare={"first.bias": EXACT, "second.bias": EXACT},
    )
    for name, comment, code, changes in (
        ("none", "no neuron", "argument-value", {"count": 0}),
        ("more", "more than there are", "argument-value", {"count": 4}),
        ("half", "no whole number", "argument-value", {"count": 1.5}),
        ("importance", "an importance too few", "argument-shape", {"importance": array([1, 2])}),
        ("nan", "NaN as an importance", "not-finite", {"importance": array(["nan", 0, 1])}),
    ):
        book.invalid(name, comment, "FFN-5", code, inputs={**good, **changes})
    return book  # fmt: skip


def fold_norm() -> WideBook:
    """WIDTH-1."""
    book = WideBook("fold_norm", ("matrix", "bias"), oracle.fold_norm, {"matrix": PRODUCT, "bias": PRODUCT})
    matrix, scale, shift = numbers([4, 2], 5621, -8, 8, 2), array([2, -0.5, 1, 0]), array([1, 0.25, -1, 3])
    good = {"matrix": matrix, "scale": scale}
    book.valid(
        "both",
        "scale and shift, before a bias",
        "WIDTH-1",
        "bias-left-out",
        inputs={**good, "shift": shift, "bias": SECOND_BIAS},
    )
    book.valid("shift", "a shift makes a bias", "WIDTH-1", "bias-left-out", inputs={**good, "shift": shift})
    book.valid("bias", "a bias stays as it is", "WIDTH-1", inputs={**good, "bias": SECOND_BIAS})
    book.valid("bare", "a scale alone", "WIDTH-1", inputs=good, compare={"bias": EXACT})
    square = {"matrix": numbers([4, 4], 5622, -8, 8, 2), "scale": scale}
    book.valid(
        "square", "the scale is of rows", "WIDTH-1", "weights-transposed", inputs=square, compare={"bias": EXACT}
    )
    for name, comment, changes in (
        ("scale", "a scale of the other length", {"scale": SECOND_BIAS}),
        ("shift-shape", "a shift of the other length", {"shift": SECOND_BIAS}),
    ):
        book.invalid(name, comment, "WIDTH-1", "argument-shape", inputs={**good, **changes})
    return book  # fmt: skip


def principal_axes() -> WideBook:
    """WIDTH-2 to WIDTH-4."""
    book = WideBook("principal_axes", ("basis",), oracle.principal_axes, {"projector": FACTOR})
    moment = moments(5631)[1]
    for width in (1, 2, 3, 4):
        book.valid(
            f"rms-{width}",
            "the leading axes",
            "WIDTH-2 WIDTH-3",
            "rank-cut axes-smallest",
            inputs={"moment": moment, "width": width},
        )
    for width in (2, 3, 4):
        book.valid(
            f"layer-{width}",
            "axes orthogonal to the ones",
            "WIDTH-4",
            "ones-not-removed",
            inputs={"moment": moment, "width": width, "norm": "layer"},
        )
    for name, comment, code, changes in (
        ("wide", "wider than the stream", "argument-value", {"width": 5}),
        ("none", "no axis", "argument-value", {"width": 0}),
        ("layer-one", "one channel, which a LayerNorm makes 0", "argument-value", {"width": 1, "norm": "layer"}),
        ("norm", "another norm", "argument-value", {"norm": "batch"}),
        ("oblong", "a moment that is not square", "argument-shape", {"moment": FIRST}),
        ("nan", "NaN in the moment", "not-finite", {"moment": array([["nan"]]), "width": 1}),
    ):
        book.invalid(
            name,
            comment,
            "WIDTH-4" if "layer" in name or name == "norm" else "WIDTH-3",
            code,
            inputs={"moment": moment, "width": 2, **changes},
        )
    return book  # fmt: skip


def kept_scale() -> WideBook:
    """WIDTH-5."""
    book = WideBook(
        "kept_scale", ("scale",), lambda **given: {"scale": oracle.kept_scale(**given)}, {"scale": PRODUCT}
    )
    moment = moments(5641)[1]
    basis = array([[1, 0], [0, 0], [0, 0.5], [0, 0.5]])
    book.valid("two", "two of four axes", "WIDTH-5", "norm-scale-inverted", inputs={"moment": moment, "basis": basis})
    same = array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    book.valid("all", "all of them: 1", "WIDTH-5", inputs={"moment": moment, "basis": same})
    book.invalid(
        "shape", "a basis of other channels", "WIDTH-5", "argument-shape", inputs={"moment": moment, "basis": SECOND}
    )
    return book  # fmt: skip


def align_output() -> WideBook:
    """ALIGN-2."""
    book = WideBook("align_output", ("weight", "bias"), oracle.align_output, {"weight": FACTOR, "bias": FACTOR})
    good: dict[str, Any] = {
        "inputs": numbers([6, 3], 5651, -8, 8, 2),
        "targets": numbers([6, 2], 5652, -8, 8, 2),
        "weight": numbers([3, 2], 5653, -8, 8, 2),
    }
    for ridge in (0.25, 4):
        book.valid(
            f"ridge-{ridge:g}",
            "held to the matrix that it starts from",
            "ALIGN-2",
            "ridge-towards-zero",
            inputs={**good, "ridge": ridge},
            compare={"bias": EXACT},
        )
        book.valid(
            f"bias-{ridge:g}",
            "the bias is free",
            "ALIGN-2",
            "ridge-on-bias",
            inputs={**good, "ridge": ridge, "bias": SECOND_BIAS},
        )
    book.valid("usual", "the usual ridge", "ALIGN-2", inputs=good, compare={"bias": EXACT})
    book.valid("least-squares", "no ridge", "ALIGN-2", inputs={**good, "ridge": 0, "bias": SECOND_BIAS})
    for name, comment, code, changes in (
        ("rows", "targets of other rows", "argument-shape", {"targets": numbers([5, 2], 1, 0, 4, 1)}),
        ("matrix", "a matrix of other columns", "argument-shape", {"weight": numbers([3, 3], 1, 0, 4, 1)}),
        ("ridge", "a ridge below 0", "argument-value", {"ridge": -1}),
        ("ridge-nan", "a ridge that is no number", "argument-value", {"ridge": special("nan")}),
        (
            "infinite",
            "an infinite target",
            "not-finite",
            {"inputs": array([[1, 0, 1]]), "targets": array([["inf", 0]])},
        ),
    ):
        book.invalid(name, comment, "ALIGN-2", code, inputs={**good, **changes})
    return book  # fmt: skip


def kept_layers() -> WideBook:
    """DEPTH-1, DEPTH-2."""
    book = WideBook(
        "kept_layers", ("layers",), lambda **given: {"layers": oracle.kept_layers(**given)}, {"layers": EXACT}
    )
    for teacher, student in ((5, 3), (12, 4), (12, 6), (12, 12), (12, 1), (12, 2), (7, 5), (6, 4), (1, 1), (24, 7)):
        book.valid(
            f"{teacher}-{student}",
            f"{student} of {teacher}",
            "DEPTH-2",
            "layers-last-missing",
            inputs={"num_teacher_layers": teacher, "layers": student},
        )
    book.valid("list", "a list stays as it is", "DEPTH-1", inputs={"num_teacher_layers": 5, "layers": [0, 1, 4]})
    for name, comment, layers in (
        ("falling", "a list that falls", [4, 0]),
        ("twice", "a layer twice", [0, 0]),
        ("beyond", "no such layer", [0, 5]),
        ("negative", "a layer below 0", [-1, 2]),
        ("empty", "no layer", []),
        ("zero", "none", 0),
        ("more", "more than there are", 6),
        ("half", "no whole number", 2.5),
        ("truth", "no number", True),
    ):
        book.invalid(name, comment, "DEPTH-1", "layers-invalid", inputs={"num_teacher_layers": 5, "layers": layers})
    return book  # fmt: skip


BOOKS = (
    merge_linear, neuron_importance, keep_neurons, fold_norm, principal_axes, kept_scale, align_output, kept_layers,
)  # fmt: skip
