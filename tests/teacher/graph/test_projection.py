"""What becomes of the heads' outputs: one matrix in every spelling that is linear in them, else a refusal."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from support.attention_graphs import GraphBuilder, only_site, random_projection, reason_of, saved
from support.refusals import refusal

from shd_ref.teacher import AttentionSite, find_sites, load_teacher, open_session

HEADS, D_V, D_MODEL = 3, 2, 5
ROWS = HEADS * D_V

Spelling = Callable[[GraphBuilder, str], str]


def weight(rows: int = ROWS, columns: int = D_MODEL, seed: int = 0) -> NDArray[np.float32]:
    return random_projection(rows, columns, seed)


def join(build: GraphBuilder, context: str) -> str:
    """``(B, H, L, d_v) -> (B, L, H d_v)``."""
    return build.op("Reshape", build.op("Transpose", context, perm=[0, 2, 1, 3]), [0, 0, ROWS])


def times(build: GraphBuilder, value: str, *sizes: int, seed: int = 0) -> str:
    return build.op("MatMul", value, weight(*sizes, seed=seed))


def low_rank(build: GraphBuilder, flat: str) -> str:
    return times(build, times(build, flat, ROWS, 2, seed=1), 2, D_MODEL, seed=2)


def adapter(op_type: str, **swapped: bool) -> Spelling:
    def spell(build: GraphBuilder, context: str) -> str:
        flat = join(build, context)
        parts = [times(build, flat), build.op("Mul", low_rank(build, flat), np.float32(2))]
        return build.op(op_type, *(reversed(parts) if swapped else parts))

    return spell


def adapter_behind_the_residual(build: GraphBuilder, context: str) -> str:
    flat = join(build, context)
    return build.op("Add", build.op("Add", "residual", times(build, flat)), low_rank(build, flat))


def adapter_by_gemm(build: GraphBuilder, context: str) -> str:
    rows = build.op("Reshape", join(build, context), [-1, ROWS])
    down = build.op("Gemm", rows, weight(ROWS, 2, 1))
    return build.op("Gemm", down, weight(D_MODEL, 2, 2), times(build, rows), transB=1, alpha=0.5, beta=3.0)


def adapter_with_a_scale_a_column(build: GraphBuilder, context: str) -> str:
    flat = join(build, context)
    scaled = build.op("Div", low_rank(build, flat), np.float32([1, 2, 4, 5, 8]))
    return build.op("Add", times(build, flat), scaled)


def by_head(pick: str) -> Spelling:
    def spell(build: GraphBuilder, context: str) -> str:
        parts = [f"part_{head}" for head in range(HEADS)]
        if pick == "Gather":
            parts = [build.op("Gather", context, head, axis=1) for head in range(HEADS)]
        else:
            build.nodes.append(onnx.helper.make_node("Split", [context], parts, axis=1, num_outputs=HEADS))
            parts = [build.op("Squeeze", part, [1]) for part in parts]
        products = [times(build, part, D_V, D_MODEL, seed=head) for head, part in enumerate(parts)]
        return build.op("Sum", *products)

    return spell


def heads_joined_by_concat(build: GraphBuilder, context: str) -> str:
    """In another order than they have, by columns."""
    parts = [build.op("Gather", context, head, axis=1) for head in (2, 0, 1)]
    return times(build, build.op("Concat", *parts, axis=-1))


def matrices_by_head(build: GraphBuilder, context: str) -> str:
    stacked = build.const(weight().reshape(HEADS, D_V, D_MODEL))
    biased = build.op("Add", build.op("MatMul", context, stacked), np.ones(D_MODEL, np.float32))
    return build.op("ReduceSum", biased, [1], keepdims=0)


def convolution(rank: int) -> Spelling:
    def spell(build: GraphBuilder, context: str) -> str:
        columns = build.op("Transpose", join(build, context), perm=[0, 2, 1])  # (B, H d_v, L)
        columns = build.op("Unsqueeze", columns, [3]) if rank == 4 else columns
        kernel = build.const(weight().T.reshape(D_MODEL, ROWS, *[1] * (rank - 2)))
        output = build.op("Conv", columns, kernel, np.ones(D_MODEL, np.float32))
        output = build.op("Squeeze", output, [3]) if rank == 4 else output
        return build.op("Transpose", output, perm=[0, 2, 1])

    return spell


def product_on_the_left(build: GraphBuilder, context: str) -> str:
    columns = build.op("Transpose", join(build, context), perm=[0, 2, 1])
    product = build.op("MatMul", weight().T.copy(), columns)
    return build.op("Transpose", product, perm=[0, 2, 1])


def equation(text: str, operand: NDArray[np.float32]) -> Spelling:
    return lambda build, context: build.op("Einsum", context, operand, equation=text)


def adapted_as_it_runs(build: GraphBuilder, context: str) -> str:
    """``W + B A``, transposed by the graph, as adapters are merged."""
    down, up = build.const(weight(2, ROWS, 1)), build.const(weight(D_MODEL, 2, 2))
    low = build.op("Mul", build.op("MatMul", up, down), np.float32(0.5))
    merged = build.op("Add", weight(D_MODEL, ROWS), low)
    return build.op("MatMul", join(build, context), build.op("Transpose", merged, perm=[1, 0]))


def normed_weight(build: GraphBuilder, context: str) -> str:
    """Weight normalisation: a length for every column."""
    direction = build.const(weight(D_MODEL, ROWS))
    length = build.op("ReduceL2", direction, [1], keepdims=1)
    lengths = build.const(np.arange(1, D_MODEL + 1, dtype=np.float32)[:, None])
    normed = build.op("Mul", direction, build.op("Div", lengths, length))
    return build.op("Gemm", build.op("Reshape", join(build, context), [-1, ROWS]), normed, transB=1)


def learned_divisor(build: GraphBuilder, context: str) -> str:
    """A number a head, through a function that was not folded."""
    divisors = build.op("Exp", np.float32([0.5, -1, 2]).reshape(1, HEADS, 1, 1))
    return times(build, join(build, build.op("Div", context, divisors)))


def part_of_a_weight(build: GraphBuilder, context: str) -> str:
    """The second part of a split constant, by ``(out, in)``."""
    parts = ["first_part", "second_part"]
    stacked = build.const(weight(2 * D_MODEL, ROWS))
    build.nodes.append(onnx.helper.make_node("Split", [stacked], parts, axis=0, num_outputs=2))
    return build.op("MatMul", join(build, context), build.op("Transpose", parts[1], perm=[1, 0]))


LINEAR: dict[str, Spelling] = {
    "adapter merged as it runs": adapted_as_it_runs,
    "weight normalisation": normed_weight,
    "learned divisor": learned_divisor,
    "part of a weight": part_of_a_weight,
    "one product": lambda build, context: times(build, join(build, context)),
    "adapter": adapter("Add"),
    "adapter taken off": adapter("Sub"),
    "adapter less the product": adapter("Sub", swapped=True),
    "adapter behind the residual": adapter_behind_the_residual,
    "adapter by Gemm": adapter_by_gemm,
    "adapter with a scale a column": adapter_with_a_scale_a_column,
    "by head, gathered": by_head("Gather"),
    "by head, split": by_head("Split"),
    "heads joined by Concat": heads_joined_by_concat,
    "heads picked": lambda build, context: times(build, join(build, build.op("Gather", context, [2, 0, 1], axis=1))),
    # (B, L, d_v, H)
    "interleaved": lambda b, c: times(b, b.op("Reshape", b.op("Transpose", c, perm=[0, 2, 3, 1]), [0, 0, ROWS])),
    "matrices by head": matrices_by_head,
    "convolution": convolution(3),
    "convolution of images": convolution(4),
    "product on the left": product_on_the_left,
    "scaled heads": lambda b, c: times(b, join(b, b.op("Mul", np.float32([[[1]], [[2]], [[-3]]]), c))),
    "tensor added before": lambda b, c: times(b, join(b, b.op("Add", c, "other"))),
    "equation by head": equation("bhld,hdm->blm", weight().reshape(HEADS, D_V, D_MODEL)),
    "equation, output first": equation("bhld,mhd->blm", weight().T.reshape(D_MODEL, HEADS, D_V).copy()),
}


def teacher(spelling: Spelling, *outputs: str) -> onnx.ModelProto:
    """Attention on logits and values that are inputs, with its heads' outputs spelled to the end."""
    build = GraphBuilder()
    context = build.op("MatMul", build.op("Softmax", "logits", axis=-1), "values")
    result = spelling(build, context)
    shapes = {
        "logits": ["batch", HEADS, "rows", "keys"],
        "values": ["batch", HEADS, "keys", D_V],
        "other": ["batch", HEADS, "rows", D_V],
        "residual": ["batch", "rows", D_MODEL],
        "weight": [ROWS, D_MODEL],
    }
    read = {name for node in build.nodes for name in node.input}
    inputs = {name: (TensorProto.FLOAT, shape) for name, shape in shapes.items() if name in read}
    return build.model(inputs, [result, *outputs])


def loaded_site(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, AttentionSite]:
    model = load_teacher(saved(model, folder))
    return model, only_site(model)


@pytest.mark.parametrize("name", LINEAR)
def test_the_output_is_the_sum_of_what_the_heads_give(name: str, tmp_path: Path) -> None:
    """With other values the output changes by ``sum_h A_h dV_h W_h``, also where something else is added to it."""
    model, site = loaded_site(teacher(LINEAR[name]), tmp_path)
    assert site.supported, site.reason
    assert (site.num_heads, site.d_v, site.d_model) == (HEADS, D_V, D_MODEL)
    assert site.output_projection is not None
    session = open_session(model, num_threads=1)
    rng = np.random.default_rng(0)
    sizes: dict[str, Any] = {"batch": 2, "rows": 4, "keys": 3}
    feeds = {
        node.name: rng.normal(size=[sizes.get(size, size) for size in node.shape]).astype(np.float32)
        for node in session.get_inputs()
    }
    change = rng.normal(size=feeds["values"].shape).astype(np.float32)
    (before,), (after,) = session.run(None, feeds), session.run(None, {**feeds, "values": feeds["values"] + change})
    powers = np.exp(feeds["logits"])
    heads = powers / powers.sum(axis=-1, keepdims=True) @ change @ site.output_projection.reshape(HEADS, D_V, -1)
    np.testing.assert_allclose((after - before).reshape(2, 4, D_MODEL), heads.sum(axis=1), atol=1e-5)


def root_mean_square(build: GraphBuilder, context: str) -> str:
    flat = join(build, context)
    squares = build.op("ReduceMean", build.op("Mul", flat, flat), [-1])
    return times(build, build.op("Div", flat, build.op("Sqrt", squares)))


def bent_adapter(build: GraphBuilder, context: str) -> str:
    flat = join(build, context)
    down = build.op("Relu", times(build, flat, ROWS, 2, seed=1))
    return build.op("Add", times(build, flat), times(build, down, 2, D_MODEL, seed=2))


def bent_bypass(build: GraphBuilder, context: str) -> str:
    flat = join(build, context)
    return build.op("Add", times(build, flat), times(build, build.op("Tanh", flat), seed=1))


def two_weights(build: GraphBuilder, context: str) -> str:
    flat = join(build, context)
    build.op("Relu", times(build, flat, seed=1), name="aside")
    return build.op("Tanh", times(build, flat))


BENT: dict[str, tuple[onnx.ModelProto, str]] = {
    "gate": (
        teacher(lambda b, c: times(b, join(b, b.op("Mul", c, b.op("Sigmoid", "other"))))),
        "reach no constant weight before",
    ),
    "norm, written out": (teacher(root_mean_square), "reach no constant weight before"),
    "adapter that bends": (teacher(bent_adapter), "several weights whose products are used apart"),
    "bypass that bends": (teacher(bent_bypass), "they go to Tanh"),
    "two weights": (teacher(two_weights, "aside"), "several weights whose products are used apart"),
    "a weight from outside": (teacher(lambda b, c: b.op("MatMul", join(b, c), "weight")), "weights inside"),
    "no weight": (teacher(join), "results of the graph and reach no weight"),
    "a part of the rows": (
        teacher(lambda b, c: times(b, b.op("Gather", join(b, c), 0, axis=1))),
        "reads only a part of",
    ),
}


@pytest.mark.parametrize("name", BENT)
def test_what_is_no_sum_over_heads_is_refused(name: str, tmp_path: Path) -> None:
    model, reason = BENT[name]
    assert reason in reason_of(load_teacher(saved(model, tmp_path)))


@pytest.mark.parametrize("outputs", [("context",), ("context", "shape")])
def test_reading_the_heads_outputs_aside_changes_nothing(outputs: tuple[str, ...], tmp_path: Path) -> None:
    """The heads' outputs as an output, or a statistic of them that goes nowhere near the attention output."""

    def spell(build: GraphBuilder, context: str) -> str:
        build.op("Identity", context, name="context")
        build.op("ReduceMax", context, [-1], name="shape")
        return build.op("LayerNormalization", times(build, join(build, context)), np.ones(5, np.float32))

    _, site = loaded_site(teacher(spell, *outputs), tmp_path)
    assert site.supported, site.reason
    np.testing.assert_array_equal(site.output_projection, weight())


@pytest.mark.parametrize(
    ("op_type", "sizes"),
    [("Mul", ((2**14, 1), (1, 2**14))), ("MatMul", ((2**14, 1), (1, 2**14))), ("MatMul", ((1, 2**18), (2**18, 1)))],
)
def test_constants_that_grow_beyond_reason_are_refused_before_they_are_computed(
    op_type: str, sizes: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two hold too many numbers, and the last takes too long."""
    monkeypatch.setattr("shd_ref.teacher.opening.model._MOST_PRODUCTS", 2**17)

    def spell(build: GraphBuilder, context: str) -> str:
        factors = [build.const(np.zeros(size, np.float32)) for size in sizes]
        return build.op("MatMul", join(build, context), build.op(op_type, *factors))

    model = teacher(spell)
    tracemalloc.start()
    with refusal("graph-invalid", r"within .* entries .*constants folded"):
        find_sites(model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26
