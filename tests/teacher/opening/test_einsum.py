"""Einsum written as MatMul: the same numbers for every order of the letters, and nothing else touched."""

from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from support.attention_graphs import GraphBuilder, saved

from shd_ref.teacher import load_teacher, open_session

SIZES = dict(zip("bhlsdmkgijn", (2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 6), strict=True))


def model_of(equation: str, shapes: list[list[Any]] | None = None) -> onnx.ModelProto:
    """An Einsum on inputs x_0, x_1, ...; every letter is a named size."""
    build = GraphBuilder()
    terms = equation.split("->")[0].split(",")
    shapes = shapes or [list(term) for term in terms]
    names = [f"x_{number}" for number in range(len(terms))]
    output = build.op("Einsum", *names, equation=equation)
    return build.model(dict(zip(names, ((TensorProto.FLOAT, shape) for shape in shapes), strict=True)), [output])


def rewrite_einsum(model: onnx.ModelProto) -> onnx.ModelProto:
    """As a teacher's file is read."""
    with TemporaryDirectory() as folder:
        return load_teacher(saved(model, Path(folder)))


def run(model: onnx.ModelProto, feeds: dict[str, NDArray[np.float32]]) -> NDArray[Any]:
    (output,) = open_session(model, num_threads=1).run(None, feeds)
    return np.asarray(output)


def check(equation: str, *, is_rewritten: bool = True, **sizes: int) -> None:
    model = model_of(equation)
    rewritten = rewrite_einsum(model)
    assert any(node.op_type == "Einsum" for node in rewritten.graph.node) is not is_rewritten
    rng = np.random.default_rng(0)
    all_sizes = SIZES | sizes
    feeds = {
        f"x_{number}": rng.normal(size=[all_sizes[letter] for letter in term]).astype(np.float32)
        for number, term in enumerate(equation.split("->")[0].split(","))
    }
    expected = run(model, feeds)
    np.testing.assert_allclose(run(rewritten, feeds), expected, rtol=1e-5, atol=1e-5)
    numpy = np.einsum(equation, *feeds.values())
    np.testing.assert_allclose(expected, numpy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("queries", ["".join(order) for order in permutations("bhld")][::3])
def test_every_order_of_letters(queries: str) -> None:
    """Of an operand, with the same order turned around for the output; and both operands exchanged."""
    output = queries[::-1].replace("d", "s")
    check(f"{queries},bshd->{output}")
    check(f"bshd,{queries}->{output}", b=1, l=1)


@pytest.mark.parametrize(
    "equation",
    [
        "bhls,bhsd->bhld",
        "bhls,bshd->blhd",
        "bhij,bjd->bhid",  # one head of values
        "bhld,hdm->blm",  # W_o by head
        "bld,md->blm",
        "bhls,gh->bgls",  # talking heads
        "bkgld,bksd->bkgls",  # grouped queries
        "bkgls,bksd->blkgd",
        "bij,bjk->ik",
        "bijn,bkgn->bijkg",
        "bhijn,bhkgn->bijhkg",
        "bld,d->bl",
        "d,bld->lb",
        "i,i->",
    ],
)
def test_products(equation: str) -> None:
    check(equation)
    check(equation, b=1, h=1, s=1)


@pytest.mark.parametrize(
    "equation",
    [
        "b,d->bd",
        "bh,bh->bh",
        "bhls,h->bhls",
        "bii,bij->bij",
        "bhls->bslh",
        "bhls->bh",
        "bijn,bnm->bm",
        "bl,ls,sd->bd",
    ],
)
def test_what_is_no_product_stays(equation: str) -> None:
    check(equation, is_rewritten=False)


def test_axes_that_an_ellipsis_stands_for() -> None:
    rng = np.random.default_rng(0)
    shapes = [["b", "h", "l", "s"], ["b", "h", "s", 6]]
    model = model_of("...ij,...jk->...ik", shapes)
    rewritten = rewrite_einsum(model)
    assert [node.op_type for node in rewritten.graph.node] == ["MatMul", "Identity"]
    feeds = {"x_0": rng.normal(size=(2, 3, 4, 5)), "x_1": rng.normal(size=(2, 3, 5, 6))}
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    np.testing.assert_allclose(run(rewritten, feeds), run(model, feeds), rtol=1e-5, atol=1e-5)


def test_sizes_that_are_broadcast_stay() -> None:
    model = model_of("bhd,bhd->bd", [["b", 1, 4], ["b", 3, 4]])
    assert rewrite_einsum(model).graph.node[0].op_type == "Einsum"
