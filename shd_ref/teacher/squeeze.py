"""The merge inside the teacher's own graph: one ONNX function per merge plan, the quantiser at its end.

The function uses standard operators only, so onnxruntime inlines it and ``onnx.reference`` runs it too. No value
output X is ever formed D wide: with ``P_i = A_i [V_p | V_q]`` and the constant Gram matrix ``G`` of the pair's rows
of W_o, ``|| A_i (X_p + X_q) ||^2`` is the sum of ``(P_i G) * P_i``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.alpha import ALPHA_PER, ALPHA_RULES, check_option
from shd_ref.attention import check_temperature, value_outputs
from shd_ref.cache.codecs import CODECS, SMALLEST_PROB, SQRT8_LEVELS, encode
from shd_ref.errors import ShdError
from shd_ref.mixing import STRATEGIES, SqueezeResult, squeeze_heads
from shd_ref.plans import MergePlan, merge_plan, merge_pool, plan_groups
from shd_ref.teacher.find import MIN_OPSET, AttentionSite, opset_version
from shd_ref.tolerances import degenerate_threshold, load_tolerances

try:
    import onnx
    import onnx_ir as ir
    from onnx import TensorProto, helper, numpy_helper
    from onnx_ir.passes.common import RemoveUnusedNodesPass
except ImportError as error:
    raise ShdError(
        "dependency-missing",
        f"shd_ref.teacher needs the package {error.name}: pip install 'squeezing-heads[teacher]'",
    ) from error

FUNCTION_DOMAIN: Final = "squeezing_heads"
_MIN_IR_VERSION: Final = 8  # the first with model-local functions
_FLOAT: Final = TensorProto.FLOAT
_RANKS: Final = {"alphas": 3, "degenerate": 3}  # per row; everything else is (B, H, L, S)
_MASK_TYPES: Final = (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64)

Array32 = NDArray[np.float32]


@dataclass(frozen=True)
class SqueezeOptions:
    """What is computed for every layer; the arguments of ``squeeze_graph`` after checking."""

    num_student_heads: int
    plan: str | MergePlan
    strategy: str
    alpha_rule: str
    alpha_per: str
    temperature: float
    codec: str


@dataclass(frozen=True)
class SqueezedLayer:
    """Names of one student layer's outputs in the squeezed graph.

    Attributes:
        student_layer: the student's layer, from 0.
        site: the teacher's attention it learns from.
        plan: the rounds that are run.
        codes: ``(B, H_s, L, S)``: uint8 codes of ``sqrt8-row``, float32 maps for the other codecs.
        alphas: float32 ``(B, num_pairs)`` or ``(B, num_pairs, L)``, all rounds in plan order, before clipping;
            1/2 where degenerate or not counted; ``num_pairs`` is 0 for the strategy ``mean``.
        degenerate: bool, same shape: every alpha was optimal; None for strategies that solve for no alpha.
        probs: the teacher's map ``(B, H_t, L, S)`` in float32; output with ``check_outputs`` only.
        values: V ``(B, H_t, S, d_v)`` in float32; likewise.
        merged: the student's maps ``(B, H_s, L, S)`` in float32 before coding; likewise.
    """

    student_layer: int
    site: AttentionSite
    plan: MergePlan
    codes: str
    alphas: str
    degenerate: str | None
    probs: str
    values: str
    merged: str


@dataclass(frozen=True)
class SqueezedGraph:
    """A teacher that outputs squeezed supervision and nothing else."""

    model: onnx.ModelProto
    layers: tuple[SqueezedLayer, ...]
    options: SqueezeOptions
    row_mask_input: str | None
    check_outputs: bool


@dataclass(frozen=True)
class Comparison:
    """A squeezed graph beside the reference, on the graph's own maps and values; worst or mean over layers.

    Attributes:
        map_difference: largest absolute difference of a merged map.
        code_mismatch: largest fraction of codes of a layer that differ; 0 for the codec float32.
        residual: mean relative error of the merged attention output, see ``SqueezeResult``.
        constant_residual: the same for the strategy ``constant``.
    """

    map_difference: float
    code_mismatch: float
    residual: float
    constant_residual: float


def squeeze_graph(
    model: onnx.ModelProto,
    layers: Sequence[tuple[int, AttentionSite]],
    *,
    num_student_heads: int,
    plan: str | Iterable[Iterable[Sequence[int]]] = "progressive",
    strategy: str = "shd",
    alpha_rule: str = "least_squares",
    alpha_per: str = "map",
    temperature: float = 1.0,
    codec: str = "sqrt8-row",
    row_mask_input: str | None = None,
    check_outputs: bool = False,
) -> SqueezedGraph:
    """Rewrite a teacher graph to output what ``squeeze_heads`` and the codec would make of its maps.

    The original outputs, and every node and input that nobody reads any more, are dropped.

    Args:
        model: the teacher, from ``load_teacher``; not changed.
        layers: pairs of student layer and the site (from ``find_sites`` on this model) it learns from.
        num_student_heads: H_s, at most every site's H.
        plan: see ``merge_plan``.
        strategy: ``shd``, ``constant``, ``hard`` or ``mean``; ``simplex`` only where it equals ``shd``, that is
            for groups of at most two heads.
        alpha_rule: see ``solve_alpha``.
        alpha_per: ``"map"`` or ``"row"``.
        temperature: T_a; alphas come from the maps as they are, and mix the softened ones.
        codec: ``sqrt8-row`` codes in the graph; ``float32`` and ``bf16`` output float32 maps.
        row_mask_input: a model input ``(B, L)``, integer or boolean, non-zero = the row counts; default all.
        check_outputs: also output each layer's teacher map, V and merged maps, see ``compare_with_reference``.

    Raises:
        ShdError: ``graph-unsupported`` (a site, or an operator set that is too old), ``argument-value``,
            ``heads-exceed``, ``plan-invalid``, ``inputs-invalid`` (the row mask), ``layers-invalid``.
    """
    check_option("strategy", strategy, STRATEGIES, "MIX-2")
    check_option("alpha_rule", alpha_rule, ALPHA_RULES, "ALPHA-4")
    check_option("alpha_per", alpha_per, ALPHA_PER, "ALPHA-9")
    check_option("codec", codec, CODECS, "CACHE-30")
    _check_layers(model, layers)
    if not isinstance(plan, str):
        plan = merge_plan(layers[0][1].num_heads or 0, num_student_heads, plan)
    options = SqueezeOptions(
        num_student_heads, plan, strategy, alpha_rule, alpha_per, check_temperature(temperature), codec
    )
    body = _Body(f"{FUNCTION_DOMAIN}/", _check_opset(model))
    functions: dict[str, onnx.FunctionProto] = {}
    squeezed = []
    mask = _row_mask(body, model, row_mask_input)
    for student_layer, site in layers:
        body.prefix = f"{FUNCTION_DOMAIN}/{student_layer}/"
        squeezed.append(_squeeze_layer(body, functions, options, student_layer, site, mask, check_outputs))
    return SqueezedGraph(
        _assemble(model, body, functions.values()), tuple(squeezed), options, row_mask_input, check_outputs
    )


def compare_with_reference(
    squeezed: SqueezedGraph, outputs: Mapping[str, NDArray[Any]], *, query_mask: NDArray[np.bool_] | None = None
) -> Comparison:
    """Judge a run of a graph made with ``check_outputs=True`` by the float64 reference.

    Args:
        squeezed: the graph that was run.
        outputs: its outputs by name, from one run.
        query_mask: boolean ``(B, L)``, what was fed to ``row_mask_input``.

    Raises:
        ShdError: ``graph-mismatch`` above the thresholds of ``specs/tolerances.json``; ``argument-value`` for a
            graph without check outputs; whatever the reference finds wrong with the maps
            (``not-finite``, ``not-a-distribution``).
    """
    if not squeezed.check_outputs:
        raise ShdError("argument-value", "squeezed must be made with check_outputs=True to be compared")
    # Layer by layer: value outputs in float64 are many times larger than the maps.
    layers = [_compare_layer(layer, squeezed.options, outputs, query_mask) for layer in squeezed.layers]
    return Comparison(
        map_difference=max(layer.map_difference for layer in layers),
        code_mismatch=max(layer.code_mismatch for layer in layers),
        residual=float(np.mean([layer.residual for layer in layers])),
        constant_residual=float(np.mean([layer.constant_residual for layer in layers])),
    )


def _compare_layer(
    layer: SqueezedLayer,
    options: SqueezeOptions,
    outputs: Mapping[str, NDArray[Any]],
    query_mask: NDArray[np.bool_] | None,
) -> Comparison:
    limits = load_tolerances()["graph"]
    dtype = layer.site.dtype if layer.site.dtype in limits["probs"] else "float32"
    # In the teacher's own precision, which decides how exactly rows must sum to one.
    probs = outputs[layer.probs].astype(dtype)
    x = value_outputs(outputs[layer.values], _projection(layer.site))

    def reference(strategy: str) -> SqueezeResult:
        return squeeze_heads(
            probs,
            x,
            options.num_student_heads,
            plan=layer.plan,
            strategy=strategy,
            query_mask=query_mask,
            temperature=options.temperature,
            alpha_rule=options.alpha_rule,
            alpha_per=options.alpha_per,
        )

    expected, merged = reference(options.strategy), outputs[layer.merged]
    difference = float(np.abs(merged - expected.probs).max(initial=0.0))
    mismatch = 0.0
    if options.codec != "float32":
        # bf16 is coded on the host, from the graph's float32 maps.
        codes = outputs[layer.codes] if options.codec == "sqrt8-row" else encode(options.codec, merged)
        mismatch = float(np.mean(codes != encode(options.codec, expected.probs)))
    for name, got in (("probs", difference), ("code_mismatch", mismatch)):
        limit = limits[name][dtype]
        if not got <= limit:  # also where it is NaN
            raise ShdError(
                "graph-mismatch",
                f"student layer {layer.student_layer} (site {layer.site.name}) must agree with the reference: {name} "
                f"within {limit:g} in {dtype}; got {got:.3g}: run the teacher in float32, or squeeze its maps on the "
                "host with shd_ref.squeeze_heads",
            )
    return Comparison(
        difference, mismatch, float(expected.residual.mean()), float(reference("constant").residual.mean())
    )


# --- one layer in the main graph --------------------------------------------------------------------------------


class _Body:
    """Nodes and constants of a graph or a function in the making; every method returns a tensor's name."""

    def __init__(self, prefix: str, opset: int) -> None:
        self.prefix = prefix
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def op(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        """Append a node with one output."""
        name = self._fresh(op_type)
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def const(self, array: NDArray[Any] | Sequence[int] | float) -> str:
        """Append a constant: sequences of integers are int64 (shapes, indices), numbers float32."""
        dtype = {float: np.float32, list: np.int64, tuple: np.int64}.get(type(array))
        name = self._fresh("Constant")
        tensor = numpy_helper.from_array(np.asarray(array, dtype=dtype), name)
        self.nodes.append(helper.make_node("Constant", [], [name], name=name, value=tensor))
        return name

    def weight(self, array: Array32) -> str:
        """Append an initialiser, which graphs may hold and functions may not."""
        name = self._fresh("Weight")
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def reshape(self, value: str, *shape: int) -> str:
        """Reshape; 0 keeps an axis, -1 takes the rest."""
        return self.op("Reshape", value, self.const(shape))

    def reduce_max(self, value: str) -> str:
        """Maximum over the last axis, kept."""
        if self.opset < 18:
            return self.op("ReduceMax", value, axes=[-1], keepdims=1)
        return self.op("ReduceMax", value, self.const([-1]), keepdims=1)

    def or_one(self, value: str) -> str:
        """A denominator at least 0, with 1 in place of 0."""
        return self.op("Where", self.op("Greater", value, self.const(0.0)), value, self.const(1.0))

    def reduce_sum(self, value: str, axis: int, keepdims: int = 0) -> str:
        """Sum over one axis."""
        return self.op("ReduceSum", value, self.const([axis]), keepdims=keepdims)

    def concat(self, values: Sequence[str], axis: int) -> str:
        """Concatenation along an axis."""
        return self.op("Concat", *values, axis=axis)

    def rename(self, value: str, name: str) -> None:
        """Give a value a second name."""
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"{name}_name"))

    def call(self, function: onnx.FunctionProto, inputs: Sequence[str]) -> dict[str, str]:
        """Call a function; its results by the names it gives them."""
        results = {output: f"{self.prefix}{function.name}/{output}" for output in function.output}
        self.nodes.append(
            helper.make_node(
                function.name,
                inputs,
                list(results.values()),
                name=f"{self.prefix}{function.name}",
                domain=FUNCTION_DOMAIN,
            )
        )
        return results

    def output(self, value: str, name: str, elem_type: int, rank: int) -> None:
        """Make a value a graph output of that name."""
        self.rename(value, name)
        self.outputs.append(helper.make_tensor_value_info(name, elem_type, [None] * rank))

    def _fresh(self, op_type: str) -> str:
        return f"{self.prefix}{op_type}_{len(self.nodes) + len(self.initializers)}"


@dataclass(frozen=True)
class _Rule:
    """All that the function of a merge depends on; within one graph, equal names mean equal functions."""

    num_heads: int
    d_v: int
    rounds: MergePlan
    strategy: str  # pairwise: never simplex
    alpha_rule: str
    alpha_per: str
    temperature: float
    codec: str

    @property
    def name(self) -> str:
        """The function's name: head counts, and d_v where alphas depend on it."""
        return f"squeeze_{self.num_heads}_to_{len(self.groups)}" + (f"_dv{self.d_v}" if self.solves else "")

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The teacher heads behind each student head."""
        return plan_groups(self.rounds, self.num_heads)

    @property
    def solves(self) -> bool:
        """Whether alphas are computed from the values."""
        return self.strategy in ("shd", "hard") and bool(self.rounds)


@dataclass(frozen=True)
class _Round:
    """One round of pairs over the pool of that round."""

    pairs: tuple[tuple[int, int], ...]
    pool: tuple[tuple[int, ...], ...]  # teacher heads behind each position

    @property
    def order(self) -> list[int]:
        """Pool positions, pair after pair."""
        return [position for pair in self.pairs for position in pair]

    @property
    def width(self) -> int:
        """Teacher heads in the largest pool position used; smaller ones are padded to it."""
        return max(len(self.pool[position]) for position in self.order)

    def members(self) -> list[list[int]]:
        """The teacher heads behind every position of ``order``, padded by repetition of the first."""
        groups = [self.pool[position] for position in self.order]
        return [[*group, *[group[0]] * (self.width - len(group))] for group in groups]


def _rounds(rule: _Rule) -> list[_Round]:
    pool: list[tuple[int, ...]] = [(head,) for head in range(rule.num_heads)]
    rounds = []
    for pairs in rule.rounds:
        rounds.append(_Round(pairs, tuple(pool)))
        pool = merge_pool(pool, pairs)
    return rounds


def _make_rule(options: SqueezeOptions, site: AttentionSite) -> _Rule:
    num_heads, d_v = site.num_heads or 0, site.d_v or 0  # both known for supported sites
    rounds = merge_plan(num_heads, options.num_student_heads, options.plan)
    strategy, alpha_rule = options.strategy, options.alpha_rule
    if strategy == "simplex":
        if any(len(group) > 2 for group in plan_groups(rounds, num_heads)):
            raise ShdError(
                "argument-value",
                "strategy must be shd, constant, hard or mean in a graph where groups have more than two heads; got "
                "'simplex': use shd, or squeeze on the host with shd_ref.squeeze_heads",
                "MIX-7",
            )
        # For two heads the simplex is the segment that the clipped least-squares alpha minimises over.
        strategy, alpha_rule = "shd", "least_squares"
    return _Rule(num_heads, d_v, rounds, strategy, alpha_rule, options.alpha_per, options.temperature, options.codec)


def _gram_matrices(rule: _Rule, output_projection: NDArray[Any]) -> list[Array32]:
    """Per round ``(num_pairs, 2 k d_v, 2 k d_v)``: products of the pairs' rows of W_o, zero where padded."""
    by_head = output_projection.astype(np.float64).reshape(rule.num_heads, rule.d_v, -1)
    grams = []
    for one_round in _rounds(rule):
        rows = by_head[np.array(one_round.members())]  # (2 m, k, d_v, D)
        for place, position in enumerate(one_round.order):
            rows[place, len(one_round.pool[position]) :] = 0.0
        stacked = rows.reshape(len(one_round.pairs), 2 * one_round.width * rule.d_v, -1)
        grams.append((stacked @ stacked.swapaxes(1, 2)).astype(np.float32))
    return grams


def _squeeze_layer(
    body: _Body,
    functions: dict[str, onnx.FunctionProto],
    options: SqueezeOptions,
    student_layer: int,
    site: AttentionSite,
    row_mask: str | None,
    check_outputs: bool,
) -> SqueezedLayer:
    """Call the merge function on one site and make its results graph outputs."""
    rule = _make_rule(options, site)
    probs = _to_batch_heads(body, site, site.probs)
    values = _to_batch_heads(body, site, site.values)
    if site.shared_values:
        values = body.op("Expand", values, body.const([1, rule.num_heads, 1, 1]))
    inputs = [probs]
    if rule.solves:
        grams = [body.weight(gram) for gram in _gram_matrices(rule, _projection(site))]
        inputs += [values, row_mask or _every_row(body, probs), *grams]
    if rule.name not in functions:
        functions[rule.name] = _squeeze_function(rule, body.opset)
    results = body.call(functions[rule.name], inputs)
    results |= {name: body.op("Cast", source, to=_FLOAT) for name, source in (("probs", probs), ("values", values))}
    if not rule.solves:
        results["alphas"] = _constant_alphas(body, rule, probs)
    kinds = {"codes": TensorProto.UINT8 if rule.codec == "sqrt8-row" else _FLOAT, "degenerate": TensorProto.BOOL}
    names = {name: f"{body.prefix}{name}" for name in results}
    hidden = () if check_outputs else ("probs", "values", "merged")
    for name, source in results.items():
        if name not in hidden:
            by_pair = name in ("alphas", "degenerate") and rule.alpha_per == "map"
            body.output(source, names[name], kinds.get(name, _FLOAT), rank=2 if by_pair else _RANKS.get(name, 4))
    return SqueezedLayer(student_layer, site, rule.rounds, degenerate=names.pop("degenerate", None), **names)


def _to_batch_heads(body: _Body, site: AttentionSite, tensor: str) -> str:
    """A map or V as ``(B, H, L or S, S or d_v)``, whatever the site's layout."""
    if site.folded:
        heads = site.num_heads or -1
        sizes = [-1, heads] if site.layout == "batch-folded" else [heads, -1]
        inner = body.op("Slice", body.op("Shape", tensor), body.const([1]), body.const([3]))
        tensor = body.op("Reshape", tensor, body.op("Concat", body.const(sizes), inner, axis=0))
    if site.layout in ("heads-batch", "heads-folded"):
        return body.op("Transpose", tensor, perm=[1, 0, 2, 3])
    return tensor


def _constant_alphas(body: _Body, rule: _Rule, probs: str) -> str:
    """Alphas that need no solving: 1/2 for every pair, or none at all."""
    num_pairs = 0 if rule.strategy == "mean" else sum(len(one_round) for one_round in rule.rounds)
    shape = body.op("Shape", probs)
    sizes = [body.op("Gather", shape, body.const([0])), body.const([num_pairs])]
    if rule.alpha_per == "row":
        sizes.append(body.op("Gather", shape, body.const([2])))
    half = numpy_helper.from_array(np.full(1, 0.5, dtype=np.float32))
    return body.op("ConstantOfShape", body.concat(sizes, 0), value=half)


def _every_row(body: _Body, probs: str) -> str:
    """A row mask ``(B, L)`` of ones."""
    shape = body.op("Gather", body.op("Shape", probs), body.const([0, 2]))
    return body.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.ones(1, np.float32)))


def _row_mask(body: _Body, model: onnx.ModelProto, name: str | None) -> str | None:
    """The row mask as 0 or 1 in float32 ``(B, L)``."""
    if name is None:
        return None
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    tensor = inputs.get(name)
    if tensor is None or tensor.elem_type not in _MASK_TYPES or len(tensor.shape.dim) != 2:
        raise ShdError(
            "inputs-invalid",
            f"row_mask_input must name an integer or boolean (B, L) input of the graph, one of "
            f"{', '.join(inputs)}; got {name!r}",
        )
    return body.op("Cast", body.op("Cast", name, to=TensorProto.BOOL), to=_FLOAT)


# --- the function -----------------------------------------------------------------------------------------------


def _squeeze_function(rule: _Rule, opset: int) -> onnx.FunctionProto:
    """``(probs[, values, row_mask, gram of each round]) -> (codes, merged[, alphas, degenerate])``."""
    body = _Body("", opset)
    inputs, outputs = ["probs"], ["codes", "merged"]
    maps = body.op("Cast", "probs", to=_FLOAT)
    weights = None
    if rule.solves:
        inputs += ["values", "row_mask", *(f"gram_{number}" for number in range(len(rule.rounds)))]
        outputs += ["alphas", "degenerate"]
        weights = _solve(body, rule, maps)
    merged = _mix(body, _soften(body, maps, rule.temperature), _final_mixing(rule), weights, rule.alpha_per)
    body.rename(merged, "merged")
    body.rename(_sqrt8_codes(body, merged) if rule.codec == "sqrt8-row" else merged, "codes")
    return helper.make_function(
        FUNCTION_DOMAIN, rule.name, inputs, outputs, body.nodes, [helper.make_opsetid("", opset)]
    )


def _final_mixing(rule: _Rule) -> Array32 | None:
    """The constant part of C ``(H_s, H_t)``: membership, times the weights where they are constant too."""
    if rule.strategy == "mean":
        return np.full((len(rule.groups), rule.num_heads), 1.0 / rule.num_heads, dtype=np.float32)
    if not rule.rounds:
        return None
    mixing = _membership(rule.groups, rule.num_heads)
    if rule.strategy == "constant":
        for one_round in _rounds(rule):
            halved = [head for position in one_round.order for head in one_round.pool[position]]
            mixing[:, halved] /= 2
    return mixing


def _membership(groups: Sequence[Sequence[int]], num_heads: int) -> Array32:
    member = np.zeros((len(groups), num_heads), dtype=np.float32)
    for row, group in enumerate(groups):
        member[row, list(group)] = 1.0
    return member


def _mix(body: _Body, maps: str, mixing: Array32 | None, weights: str | None, alpha_per: str) -> str:
    """``sum_t mixing[n, t] weights[t] A_t``: maps ``(B, n, L, S)``.

    Args:
        body: what the nodes are appended to.
        maps: A ``(B, H_t, L, S)``.
        mixing: ``(n, H_t)``, or None for the maps as they are.
        weights: ``(B, H_t, 1)``, or ``(B, H_t, L)`` per row; None for ones.
        alpha_per: which of the two.
    """
    if mixing is None:
        return maps
    num_maps = len(mixing)
    blocks = _diagonal_blocks(mixing)
    num_blocks, _, block_heads = blocks.shape
    left = body.const(blocks)
    if weights is not None and alpha_per == "map":
        left = body.op("Mul", left, body.reshape(weights, 0, num_blocks, 1, block_heads))
    elif weights is not None:
        maps = body.op("Mul", maps, body.reshape(weights, 0, 0, -1, 1))
    # Matrix products over flattened maps read every map once, whatever heads are mixed.
    mixed = body.op("MatMul", left, body.reshape(maps, 0, num_blocks, block_heads, -1))
    rows = body.op("Gather", body.op("Shape", maps), body.const([2]))
    shape = body.op("Concat", body.const([0, num_maps]), rows, body.const([-1]), axis=0)
    return body.op("Reshape", mixed, shape)


def _diagonal_blocks(mixing: Array32) -> Array32:
    """A mixing matrix ``(n, H_t)`` as ``(n, 1, H_t / n)`` where neighbours of equal number mix, else ``(1, n, H_t)``.

    Vectors times blocks are about a third faster than one product with a mostly empty matrix.
    """
    num_maps, num_heads = mixing.shape
    if num_heads % num_maps == 0:
        by_block = mixing.reshape(num_maps, num_maps, -1)
        diagonal = by_block[range(num_maps), range(num_maps)][:, None]  # (n, 1, H_t / n)
        if np.count_nonzero(diagonal) == np.count_nonzero(mixing):
            return diagonal
    return mixing[None]


def _solve(body: _Body, rule: _Rule, maps: str) -> str:
    """Run the rounds: name ``alphas`` and ``degenerate``, and return every teacher head's weight in its group."""
    values = body.op("Cast", "values", to=_FLOAT)
    weights = ""
    alphas, degenerate = [], []
    for number, one_round in enumerate(_rounds(rule)):
        if not weights:
            paired = _take_heads(body, maps, one_round.order, rule.num_heads)
        else:
            selected = [one_round.pool[position] for position in one_round.order]
            paired = _mix(body, maps, _membership(selected, rule.num_heads), weights, rule.alpha_per)
        products = _products(body, rule, one_round, paired, values)
        raw, is_degenerate = _alphas(body, rule, _moments(body, rule, one_round, products, f"gram_{number}"))
        factors = _factors(body, rule, one_round, body.op("Clip", raw, body.const(0.0), body.const(1.0)))
        weights = body.op("Mul", weights, factors) if weights else factors
        alphas.append(raw)
        degenerate.append(is_degenerate)
    per_pair = (0, -1) if rule.alpha_per == "map" else (0, 0, -1)
    body.rename(body.reshape(body.concat(alphas, 1), *per_pair), "alphas")
    body.rename(body.reshape(body.concat(degenerate, 1), *per_pair), "degenerate")
    return weights


def _take_heads(body: _Body, tensor: str, heads: Sequence[int], num_heads: int) -> str:
    """Heads along axis 1; free where they are all heads in order."""
    if list(heads) == list(range(num_heads)):
        return tensor
    if list(heads) == list(range(heads[0], heads[0] + len(heads))):
        return body.op("Slice", tensor, body.const([heads[0]]), body.const([heads[-1] + 1]), body.const([1]))
    return body.op("Gather", tensor, body.const(list(heads)), axis=1)


def _products(body: _Body, rule: _Rule, one_round: _Round, paired: str, values: str) -> str:
    """``A_p [V_p | V_q]`` above ``A_q [V_p | V_q]`` for every pair: ``(B, m, 2 L, E)`` with ``E = 2 k d_v``."""
    num_pairs, num_members = len(one_round.pairs), 2 * one_round.width
    members = [head for group in one_round.members() for head in group]
    by_pair = body.reshape(
        _take_heads(body, values, members, rule.num_heads), 0, num_pairs, num_members, -1, rule.d_v
    )
    by_key = body.op("Transpose", by_pair, perm=[0, 1, 3, 2, 4])  # (B, m, S, 2 k, d_v)
    pair_values = body.reshape(by_key, 0, num_pairs, -1, num_members * rule.d_v)  # (B, m, S, E)
    return body.op("MatMul", body.reshape(paired, 0, num_pairs, -1, 0), pair_values)


def _moments(body: _Body, rule: _Rule, one_round: _Round, products: str, gram: str) -> str:
    """Numerator, denominator and scale of every pair's alpha, over the rows that count: ``(B, m, 1 or L, 3)``.

    The scale ``||P_p||^2 + ||P_q||^2`` is half of ``||P_p + P_q||^2 + ||P_p - P_q||^2``, and the second term is
    needed anyway, so one pass over sums and differences gives all three (norms in the metric of the Gram matrix).
    """
    num_pairs, width = len(one_round.pairs), 2 * one_round.width * rule.d_v
    both = body.const(np.array([[1.0, 1.0], [1.0, -1.0]], dtype=np.float32))
    turned = body.op("MatMul", both, body.reshape(products, 0, num_pairs, 2, -1))  # sums, differences
    by_row = body.reshape(turned, 0, num_pairs, -1, width)  # (B, m, 2 L, E)
    in_metric = body.op("MatMul", by_row, gram)
    terms, pick = body.op("Mul", in_metric, by_row), _pick_moments(width)
    if rule.alpha_rule == "as_printed":
        # Its numerator also needs differences times sums.
        swapped = body.reshape(body.op("Gather", turned, body.const([1, 0]), axis=2), 0, num_pairs, -1, width)
        terms = body.concat([terms, body.op("Mul", in_metric, swapped)], -1)
        width, pick = 2 * width, _pick_printed_moments(width)
    terms = body.reshape(terms, 0, num_pairs, 2, -1, width)  # (B, m, 2, L, E)
    if rule.alpha_per == "map":
        totals = body.op("MatMul", body.reshape("row_mask", 0, 1, 1, 1, -1), terms)  # (B, m, 2, 1, E)
        picked = body.const(pick.reshape(-1, 3))
        return body.op("MatMul", body.reshape(totals, 0, num_pairs, 1, 2 * width), picked)
    parts = body.reduce_sum(body.op("MatMul", terms, body.const(pick)), 2)  # (B, m, L, 3)
    return body.op("Mul", parts, body.reshape("row_mask", 0, 1, -1, 1))


def _pick_moments(width: int) -> Array32:
    """Which columns of (sums, differences) make the numerator, the denominator and the scale: ``(2, E, 3)``."""
    pick = np.zeros((2, width, 3), dtype=np.float32)
    # u = (A_p - A_q) V_p is the first half of a difference.
    pick[1, : width // 2, 0] = 1.0
    pick[1, :, 1] = 1.0
    pick[:, :, 2] = 0.5
    return pick


def _pick_printed_moments(width: int) -> Array32:
    """The same for the printed N: ``A_p X_q - A_q X_p`` is half of (difference -+ sum), minus on p's columns."""
    pick = np.concatenate([_pick_moments(width), np.zeros((2, width, 3), dtype=np.float32)], axis=1)
    pick[1, :width, 0] = 0.5
    pick[1, width:, 0] = np.repeat([-0.5, 0.5], width // 2)
    return pick


def _alphas(body: _Body, rule: _Rule, moments: str) -> tuple[str, str]:
    """Raw alphas and whether they are degenerate, ``(B, m, 1 or L)``."""
    numerator, denominator, scale = (
        body.op("Gather", moments, body.const(np.array(moment)), axis=3) for moment in range(3)
    )
    least = body.op("Mul", scale, body.const(degenerate_threshold()))
    # NaN is not degenerate, so a broken teacher shows in its alphas.
    degenerate = body.op("LessOrEqual", denominator, least)
    quotient = body.op("Div", numerator, body.op("Where", degenerate, body.const(1.0), denominator))
    raw = body.op("Where", degenerate, body.const(0.5), quotient)
    if rule.alpha_per == "row":
        counted = body.op("Greater", body.reshape("row_mask", 0, 1, -1), body.const(0.0))
        degenerate = body.op("And", degenerate, counted)
    if rule.strategy == "hard":
        nearer_p = body.op("GreaterOrEqual", raw, body.const(0.5))
        # Times zero, not zero: NaN stays NaN.
        raw = body.op("Where", nearer_p, body.const(1.0), body.op("Mul", raw, body.const(0.0)))
    return raw, degenerate


def _factors(body: _Body, rule: _Rule, one_round: _Round, alphas: str) -> str:
    """What this round multiplies every teacher head's weight by: alpha, 1 - alpha or 1; ``(B, H_t, 1 or L)``."""
    slope = np.zeros((rule.num_heads, len(one_round.pairs)), dtype=np.float32)
    offset = np.ones((rule.num_heads, 1), dtype=np.float32)
    for number, (p, q) in enumerate(one_round.pairs):
        slope[list(one_round.pool[p]), number] = 1.0
        slope[list(one_round.pool[q]), number] = -1.0
        offset[list(one_round.pool[p])] = 0.0
    return body.op("Add", body.op("MatMul", body.const(slope), alphas), body.const(offset))


def _soften(body: _Body, maps: str, temperature: float) -> str:
    """``A^(1/T)`` over its row sums, relative to the row's maximum as in the reference."""
    if temperature == 1.0:
        return maps
    relative = body.op("Div", maps, body.or_one(body.reduce_max(maps)))
    powers = body.op("Pow", relative, body.const(1.0 / temperature))
    return body.op("Div", powers, body.or_one(body.reduce_sum(powers, -1, keepdims=1)))


def _sqrt8_codes(body: _Body, maps: str) -> str:
    """The quantiser of the codec ``sqrt8-row``, operation by operation as ``shd_ref.cache.codecs`` does it."""
    relative = body.op("Div", maps, body.or_one(body.reduce_max(maps)))
    levels = body.op("Mul", body.op("Sqrt", relative), body.const(float(SQRT8_LEVELS)))
    # A scale of one: rounds half to even and saturates in a single pass.
    codes = body.op("QuantizeLinear", levels, body.const(1.0), body.const(np.array(0, dtype=np.uint8)))
    at_least_one = body.op("Clip", codes, body.const(np.array(1, dtype=np.uint8)))
    positive = body.op("GreaterOrEqual", maps, body.const(SMALLEST_PROB))
    return body.op("Where", positive, at_least_one, body.const(np.array(0, dtype=np.uint8)))


# --- the whole graph --------------------------------------------------------------------------------------------


def _assemble(model: onnx.ModelProto, body: _Body, functions: Iterable[onnx.FunctionProto]) -> onnx.ModelProto:
    """The model with new outputs and functions, without what nobody reads any more."""
    grown = onnx.ModelProto()
    grown.CopyFrom(model)
    grown.ir_version = max(grown.ir_version, _MIN_IR_VERSION)
    grown.graph.node.extend(body.nodes)
    grown.graph.initializer.extend(body.initializers)
    del grown.graph.output[:]
    grown.graph.output.extend(body.outputs)
    grown.opset_import.append(helper.make_opsetid(FUNCTION_DOMAIN, 1))
    grown.functions.extend(functions)
    pruned = ir.from_proto(grown)
    pruned.graph.sort()
    RemoveUnusedNodesPass()(pruned)
    for value in list(pruned.graph.inputs):
        if not value.uses():
            pruned.graph.inputs.remove(value)
            pruned.graph.initializers.pop(value.name or "", None)
    return ir.to_proto(pruned)


def _check_opset(model: onnx.ModelProto) -> int:
    opset = opset_version(model)
    if opset < MIN_OPSET:
        raise ShdError(
            "graph-unsupported",
            f"model must use ONNX operator set {MIN_OPSET} or later; got {opset}: re-export it with opset 18 "
            "(load_teacher converts older graphs by itself where all their operators are standard)",
        )
    return opset


def _check_layers(model: onnx.ModelProto, layers: Sequence[tuple[int, AttentionSite]]) -> None:
    students = [student for student, _ in layers]
    if not students or len(set(students)) != len(students):
        raise ShdError(
            "layers-invalid", f"layers must hold each student layer once, and at least one; got {students}"
        )
    tensors = {name for node in model.graph.node for name in node.output} | {v.name for v in model.graph.input}
    for _, site in layers:
        if not site.supported:
            raise ShdError("graph-unsupported", f"site {site.name} cannot be squeezed: {site.reason}")
        if not tensors >= {site.probs, site.values}:
            raise ShdError(
                "graph-unsupported",
                f"site {site.name} must be one of this model's, but it has no tensors {site.probs!r} and "
                f"{site.values!r}: call find_sites on the same model",
            )


def _projection(site: AttentionSite) -> NDArray[Any]:
    if site.output_projection is None:
        raise ShdError("graph-unsupported", f"site {site.name} cannot be squeezed: it has no output projection")
    return site.output_projection
