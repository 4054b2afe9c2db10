"""Einsum as Transpose, Reshape and MatMul, which say which axis is which, where it is a product of known axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from shd_ref.teacher.opening.body import Body
from shd_ref.teacher.opening.model import MAP_CARRIERS, STANDARD_DOMAINS, infer_shapes, onnx

_MOST_STEPS: Final = 16
"""Back from an operand to the softmax that it is the map of."""

_SPARE_LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class _Operand:
    name: str
    letters: str
    is_map: bool = False


def rewrite_einsum(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its products by equation as MatMul; the model itself where it has none."""
    equations = [node for node in model.graph.node if node.op_type == "Einsum" and node.domain in STANDARD_DOMAINS]
    if not equations:
        return model
    rewritten = onnx.ModelProto()
    rewritten.CopyFrom(model)
    graph, opset = rewritten.graph, max(e.version for e in model.opset_import if e.domain in STANDARD_DOMAINS)
    sizes = _known_sizes(model)
    producers = {name: node for node in model.graph.node for name in node.output}
    nodes = []
    for node in model.graph.node:
        body = Body(f"{node.output[0]}/product/", opset)
        is_product = node.op_type == "Einsum" and node.domain in STANDARD_DOMAINS
        if is_product and _rewrite(body, node, sizes, producers):
            nodes += body.nodes
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return rewritten


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
    parsed = _parse(node, sizes)
    if parsed is None:
        return False
    terms, output = parsed
    operands = [
        _Operand(name, letters, _comes_from_softmax(name, producers))
        for name, letters in zip(node.input, terms, strict=True)
    ]
    numbers: dict[str, int] = {}
    for operand in operands:
        for letter, size in zip(operand.letters, sizes.get(operand.name, ()), strict=False):
            if size is not None and numbers.setdefault(letter, size) != size:
                return False  # one of them is broadcast
    while len(operands) > 1:
        first, second, *rest = operands
        needed = set(output).union(*(operand.letters for operand in rest))
        kept = output if not rest else "".join(sorted(needed & set(first.letters + second.letters)))
        product = _multiply(body, first, second, kept, numbers)
        if product is None:
            return False
        operands = [product, *rest]
    body.rename(operands[0].name, node.output[0])
    return True


def _parse(node: onnx.NodeProto, sizes: Mapping[str, list[int | None]]) -> tuple[list[str], str] | None:
    """The letters of every operand and of the output, with unused letters for the axes of an ellipsis."""
    equation = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "equation"), "")
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != len(node.input) or len(terms) < 2:
        return None
    spare = "".join(letter for letter in _SPARE_LETTERS if letter not in equation)
    most, spelled = 0, []
    for name, term in zip(node.input, terms, strict=True):
        named = term.replace("...", "")
        more = 0
        if named != term:
            more = len(sizes[name]) - len(named) if name in sizes else -1
        elif name in sizes and len(sizes[name]) != len(term):
            return None
        if not 0 <= more <= len(spare):
            return None
        most = max(most, more)
        spelled.append(term.replace("...", spare[len(spare) - more :]))
    output = right.replace("...", spare[len(spare) - most :])
    letters = [*spelled, output]
    if not all((word or "a").isalpha() and word.isascii() and len(set(word)) == len(word) for word in letters):
        return None
    return (spelled, output) if set(output) <= set("".join(spelled)) else None


def _comes_from_softmax(name: str, producers: Mapping[str, onnx.NodeProto]) -> bool:
    for _ in range(_MOST_STEPS):
        node = producers.get(name)
        if node is None or node.op_type == "Softmax":
            return node is not None
        if node.op_type not in MAP_CARRIERS | {"Transpose"}:
            return False
        name = node.input[1 if node.op_type == "Where" else 0]
    return False


def _multiply(
    body: Body, first: _Operand, second: _Operand, output: str, numbers: Mapping[str, int]
) -> _Operand | None:
    """The product of two operands as ``output``; the map is left, else the order that moves fewer axes."""
    first, second = (_sum_out(body, first, second.letters + output), _sum_out(body, second, first.letters + output))
    shared = [letter for letter in first.letters if letter in second.letters and letter not in output]
    if not shared:
        return None
    orders = (first, second), (second, first)
    left, right = min(orders, key=lambda order: (not order[0].is_map, _num_moves(order[0], order[1], output)))
    batch, rows, columns = _split(left, right, output)
    summed = "".join(letter for letter in left.letters if letter in shared)
    # The right factor is broadcast along all rows but the last; MatMul broadcasts a plain matrix by itself.
    gaps = [""] * (len(rows) - 1) if batch else []
    before, after = [*batch, *rows] if rows or not batch else [*batch, ""], [columns] if columns or batch else []
    groups, result = ([*before, summed], [*batch, *gaps, summed, *after]), [*before, *after]
    factors = []
    for operand, wanted in zip((left, right), groups, strict=True):
        letters = "".join(wanted)
        moved = _transpose(body, operand.name, operand.letters, letters)
        factors.append(_regroup(body, moved, list(letters), wanted, (left, right), numbers))
    letters = "".join(result)
    product = _regroup(body, body.op("MatMul", *factors), result, list(letters), (left, right), numbers)
    return _Operand(_transpose(body, product, letters, output), output)


def _split(left: _Operand, right: _Operand, output: str) -> tuple[str, str, str]:
    """Letters of both, of the left and of the right operand, in the order of the output."""
    both = set(left.letters) & set(right.letters)
    batch = "".join(letter for letter in output if letter in both)
    rows = "".join(letter for letter in output if letter in left.letters and letter not in both)
    columns = "".join(letter for letter in output if letter in right.letters and letter not in both)
    return batch, rows, columns


def _num_moves(left: _Operand, right: _Operand, output: str) -> int:
    batch, rows, columns = _split(left, right, output)
    summed = "".join(letter for letter in left.letters if letter in right.letters and letter not in output)
    moved = (batch + rows + summed, left.letters), (batch + summed + columns, right.letters)
    return sum(order != got for order, got in (*moved, (batch + rows + columns, output)))


def _sum_out(body: Body, operand: _Operand, needed: str) -> _Operand:
    alone = [axis for axis, letter in enumerate(operand.letters) if letter not in needed]
    if not alone:
        return operand
    name = body.op("ReduceSum", operand.name, body.const(alone), keepdims=0)
    return _Operand(name, "".join(letter for letter in operand.letters if letter in needed), operand.is_map)


def _transpose(body: Body, name: str, letters: str, order: str) -> str:
    if letters == order:
        return name
    return body.op("Transpose", name, perm=[letters.index(letter) for letter in order])


def _regroup(
    body: Body,
    name: str,
    groups: Sequence[str],
    wanted: Sequence[str],
    factors: tuple[_Operand, _Operand],
    numbers: Mapping[str, int],
) -> str:
    """A tensor with an axis for each of some groups of letters, as one with other groups; one of size 1 for none."""
    if list(groups) == list(wanted):
        return name
    sizes: list[int | tuple[str, list[int]]] = []
    for number, group in enumerate(wanted):
        if group and list(groups[: number + 1]) == list(wanted[: number + 1]):
            sizes.append(0)  # as it is
        elif all(letter in numbers for letter in group):
            sizes.append(prod(numbers[letter] for letter in group))
        else:
            operand = next(operand for operand in factors if set(group) <= set(operand.letters))
            sizes.append((operand.name, [operand.letters.index(letter) for letter in group]))
    if sum(not isinstance(size, int) for size in sizes) < 2:
        return body.reshape(name, *(size if isinstance(size, int) else -1 for size in sizes))
    parts = []
    for size in sizes:
        if isinstance(size, int):
            parts.append(body.const([size]))
        else:
            parts.append(body.op("ReduceProd", body.sizes(size[0], *size[1]), keepdims=1))
    return body.op("Reshape", name, body.concat(parts, 0))
