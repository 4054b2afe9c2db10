"""Einsum of two operands as Transpose, Unsqueeze and MatMul, which say which axis is which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from shd_ref.teacher.opening.body import Body
from shd_ref.teacher.opening.model import MAP_CARRIERS, STANDARD_DOMAINS, infer_shapes, onnx, opset_version

_MOST_STEPS: Final = 16
"""Back from an operand to the softmax that it is the map of."""
_SPARE_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NONE: Final = "-"
"""An axis of size 1, where an operand has no letter for a row or a column."""


def rewrite_einsum(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its products by equation as MatMul; the model itself where it has none."""
    if not any(_is_einsum(node) for node in model.graph.node):
        return model
    rewritten = onnx.ModelProto()
    rewritten.CopyFrom(model)
    sizes = _known_sizes(model)
    producers = {name: node for node in model.graph.node for name in node.output}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        body = Body(f"{node.output[0]}/product/", opset_version(model))
        is_product = _is_einsum(node) and _rewrite(body, node, sizes, producers)
        nodes += body.nodes if is_product else [node]
    del rewritten.graph.node[:]
    rewritten.graph.node.extend(nodes)
    return rewritten


def _is_einsum(node: onnx.NodeProto) -> bool:
    return bool(node.op_type == "Einsum" and node.domain in STANDARD_DOMAINS)


def _known_sizes(model: onnx.ModelProto) -> dict[str, list[int | None]]:
    """The size of each axis where it is a number, by tensor; tensors of unknown rank are missing."""
    inferred = infer_shapes(model, data_prop=False)
    sizes: dict[str, list[int | None]] = {
        value.name: [d.dim_value or None for d in value.type.tensor_type.shape.dim]
        for value in (*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output)
        if value.type.tensor_type.HasField("shape")
    }
    return sizes | {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}


def _rewrite(
    body: Body, node: onnx.NodeProto, sizes: Mapping[str, list[int | None]], producers: Mapping[str, onnx.NodeProto]
) -> bool:
    """Append the nodes that give the output of an Einsum; False where it stays as it is."""
    terms, output = _parse(node, sizes)
    if len(terms) != 2:
        return False
    summed = [letter for letter in terms[0] if letter in terms[1] and letter not in output]
    numbers: dict[str, int] = {}
    for name, term in zip(node.input, terms, strict=True):
        for letter, size in zip(term, sizes.get(name, ()), strict=False):
            if size is not None and numbers.setdefault(letter, size) != size:
                return False  # one of them is broadcast
    if not summed or not {*terms[0]} ^ {*terms[1]} <= {*output}:  # no product, or summed alone
        return False
    operands = list(zip(node.input, terms, strict=True))
    # The map is left, else queries before keys: the operand whose own letter comes first.
    first_own = next((letter for letter in output if not (letter in terms[0] and letter in terms[1])), "")
    is_map = [_comes_from_softmax(name, producers) for name in node.input]
    if is_map[1] or (not is_map[0] and first_own and first_own in terms[1]):
        operands.reverse()
    (_, left), (_, right) = operands
    batch = [letter for letter in output if letter in left and letter in right]
    rows, columns = (
        [letter for letter in output if letter in term and letter not in batch] for term in (left, right)
    )
    # Of several rows or columns all but one are axes along which the other operand is broadcast.
    more = [*rows[:-1], *columns[:-1]]
    row, column = rows[-1:] or [_NONE], columns[-1:] or [_NONE]
    is_one = len(summed) == 1
    first = _arrange(body, *operands[0], [*batch, *more], [*row, *summed])
    second = _arrange(body, *operands[1], [*batch, *more], [*summed, *column] if is_one else [*column, *summed])
    if not is_one:  # side by side, as their sizes need not be known
        count = len(_kept([*batch, *more], right)) + 1
        first = body.reshape(first, *[0] * (len(_kept([*batch, *more], left)) + 1), -1)
        second = body.reshape(second, *[0] * count, -1)
        second = body.op("Transpose", second, perm=[*range(count - 1), count, count - 1])
    letters = [*batch, *more, *row, *column]
    product = body.op("MatMul", first, second)
    if _NONE in letters:
        product = body.op("Squeeze", product, body.const([n for n, one in enumerate(letters) if one == _NONE]))
    body.rename(_transpose(body, product, [one for one in letters if one != _NONE], list(output)), node.output[0])
    return True


def _kept(leading: Sequence[str], term: str) -> Sequence[str]:
    """Without the first axes that the operand lacks: a product broadcasts it along them by itself."""
    return leading[next((number for number, letter in enumerate(leading) if letter in term), len(leading)) :]


def _arrange(body: Body, name: str, term: str, leading: Sequence[str], last: Sequence[str]) -> str:
    """An operand with these axes, of size 1 for letters that it lacks."""
    axes = [*_kept(leading, term), *last]
    name = _transpose(body, name, list(term), [letter for letter in axes if letter in term])
    lacking = [number for number, letter in enumerate(axes) if letter not in term]
    return body.op("Unsqueeze", name, body.const(lacking)) if lacking else name


def _transpose(body: Body, name: str, letters: Sequence[str], order: Sequence[str]) -> str:
    if letters == order:
        return name
    return body.op("Transpose", name, perm=[letters.index(letter) for letter in order])


def _parse(node: onnx.NodeProto, sizes: Mapping[str, list[int | None]]) -> tuple[list[str], str]:
    """The letters of every operand and of the output, with unused letters for the axes of an ellipsis; or none."""
    equation = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "equation"), "")
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != len(node.input):
        return [], ""
    spare = "".join(letter for letter in _SPARE_LETTERS if letter not in equation)
    most = 0
    for number, (name, term) in enumerate(zip(node.input, terms, strict=True)):
        if "..." in term:
            more = len(sizes[name]) - len(term) + 3 if name in sizes else -1
            if not 0 <= more <= len(spare):
                return [], ""
            most = max(most, more)
            terms[number] = term.replace("...", spare[len(spare) - more :])
    output = output.replace("...", spare[len(spare) - most :])
    words = [*terms, output]
    is_plain = all((word or "a").isalpha() and word.isascii() and len({*word}) == len(word) for word in words)
    return (terms, output) if is_plain and {*output} <= {*"".join(terms)} else ([], "")


def _comes_from_softmax(name: str, producers: Mapping[str, onnx.NodeProto]) -> bool:
    for _ in range(_MOST_STEPS):
        node = producers.get(name)
        if node is None or node.op_type == "Softmax":
            return node is not None
        if node.op_type not in MAP_CARRIERS | {"Transpose"}:
            return False
        name = node.input[1 if node.op_type == "Where" else 0]
    return False
