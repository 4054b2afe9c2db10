"""Put the merge into the teacher's own graph: calls of its ONNX function, new outputs, nothing that is not needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from shd_ref.attention import check_temperature
from shd_ref.errors import ShdError, graph_invalid, graph_unsupported, inputs_invalid
from shd_ref.merging.plans import MergePlan, merge_plan
from shd_ref.teacher.graph.factors import MASKED, SiteFactors, check_sinks
from shd_ref.teacher.graph.find import AttentionSite, projection_of
from shd_ref.teacher.graph.targets import TargetTensors
from shd_ref.teacher.opening.body import FLOAT, FUNCTION_DOMAIN, Body
from shd_ref.teacher.opening.model import (
    MIN_OPSET,
    OLD_OPSET,
    copy_skeleton,
    ir,
    onnx,
    opset_version,
    restore_weights,
)
from shd_ref.teacher.options import PrecomputeOptions, check_merge
from shd_ref.teacher.rewrite.function import (
    MergeRule,
    add_factors,
    alphas_function,
    batch_heads,
    constant_alphas,
    every_row,
    gram_matrices,
    site_tensors,
    spans_of,
    squeeze_function,
    values_of,
)
from shd_ref.teacher.rewrite.tiles import Forward, SiteTiles, TiledRows, Tiling, add_codes, run_in_tiles

_MIN_IR_VERSION: Final = 8  # the first with model-local functions
_RANKS: Final = {"alphas": 2, "degenerate": 2, "groups": 3}  # everything else is (B, H, L, S)
GROUPS_INPUT: Final = f"{FUNCTION_DOMAIN}/groups"
"""Of a squeezed graph whose maps are pooled: the weight ``(B, l, L)`` of each teacher token in each student token."""
_MASK_TYPES: Final = (onnx.TensorProto.BOOL, onnx.TensorProto.INT32, onnx.TensorProto.INT64)


@dataclass(frozen=True)
class SqueezedLayer:
    """One student layer in the squeezed graph.

    Attributes:
        names: of its outputs, by role. ``codes`` ``(B, H_s, L, S)``: of ``sqrt8-row``, else float32 maps; ``alphas``
            ``(B, num_pairs)`` or ``(B, num_pairs, L)``: all rounds in order, before clipping, 1/2 where degenerate
            or not counted; ``degenerate``, bool, where they are solved for; ``queries`` ``(B, H_t, L, d)``, ``keys``
            ``(B, H_kv, S, d)`` and int32 ``spans`` ``(B, H_t, L, 3)`` with factors. With ``check_outputs`` only:
            maps ``probs`` ``(B, H_t, L, S)``, V ``values`` ``(B, H_t, S, d_v)``, ``merged`` maps before coding, and
            ``groups`` where these are pooled.
        rows: with ``check_outputs``, of a layer in tiles: how these maps are made, some rows at a time, from more
            outputs; ``sums`` are products of maps and values.
    """

    student_layer: int
    site: AttentionSite
    rule: MergeRule
    names: Mapping[str, str]
    rows: TiledRows | None = None


@dataclass(frozen=True)
class SqueezedGraph:
    """A teacher that outputs squeezed supervision and the ``targets`` in float32, and nothing else."""

    model: onnx.ModelProto
    layers: tuple[SqueezedLayer, ...]
    targets: TargetTensors


def squeeze_graph(
    model: onnx.ModelProto,
    layers: Sequence[tuple[int, AttentionSite]],
    options: PrecomputeOptions | None = None,
    *,
    row_mask_input: str | Mapping[int, str | None] | None = None,
    check_outputs: bool = False,
    factors: Mapping[int, SiteFactors] | None = None,
    targets: TargetTensors | None = None,
    tiling: Tiling | None = None,
) -> SqueezedGraph:
    """Rewrite a teacher graph to output what ``squeeze_heads`` and the codec would make of its maps.

    The original outputs, and nodes and inputs that no new output needs, are dropped: also the head, unless its logits
    are asked for.

    Args:
        model: the teacher, from ``load_teacher``; not changed.
        layers: pairs of student layer and the site (from ``find_sites`` on this model) it learns from; none for a
            graph of targets alone.
        options: heads, plan (or plans, one for each of ``layers``), strategy, alphas, temperature and codec count:
            ``sqrt8-row`` codes in the graph, the other codecs output float32 maps. With ``groups`` the graph has one
            more input, ``GROUPS_INPUT``.
        row_mask_input: a model input ``(B, L)``, integer or boolean, non-zero = the row counts; default all. Or one
            by student layer, where rows are not of one sequence.
        check_outputs: also output each layer's teacher map, V and merged maps, see ``compare_with_reference``.
        factors: by student layer: output the teacher's queries and keys in place of codes.
        targets: logits and hidden states, from ``find_targets`` on this model, to output in float32 too.
        tiling: sites whose maps never exist as a whole; their check outputs are what ``rows_graph`` needs.

    Raises:
        ShdError: ``graph-unsupported`` (a site, or an operator set that is too old), ``argument-value``,
            ``heads-exceed``, ``plan-invalid``, ``inputs-invalid`` (the row mask), ``layers-invalid``.
    """
    options = options or PrecomputeOptions()
    check_merge(options)
    codec = "float32" if factors else options.codec
    temperature = check_temperature(options.temperature)
    opset = opset_version(model)
    if opset < MIN_OPSET:
        raise graph_unsupported(OLD_OPSET.format(opset))
    body = Body(f"{FUNCTION_DOMAIN}/", opset)
    named = row_mask_input if isinstance(row_mask_input, Mapping) else dict.fromkeys(dict(layers), row_mask_input)
    masks = {name: row_mask_of(body, model, name) for name in dict.fromkeys(named.values())}
    forward = {} if tiling is None else run_in_tiles(body, tiling)
    squeezed: list[SqueezedLayer] = []
    pooled = options.groups is not None
    if pooled:
        body.inputs.append(onnx.helper.make_tensor_value_info(GROUPS_INPUT, FLOAT, [None] * 3))
    for (student_layer, site), plan in zip(layers, list_plans(options, len(layers)), strict=True):
        if not site.supported:
            raise graph_unsupported(f"site {site.name} cannot be squeezed: {site.reason}")
        check_sinks(site, codec, temperature)
        body.prefix = f"{FUNCTION_DOMAIN}/{student_layer}/"
        heads, d_v = site.num_heads or 0, site.d_v or 0  # known for supported sites
        rounds = merge_plan(heads, options.num_student_heads, plan)
        rule = MergeRule(heads, d_v, rounds, options.strategy, temperature, codec, pooled)
        row_mask, tiles = masks[named[student_layer]], None if tiling is None else tiling.of(site)
        if tiling is not None and tiles is not None:
            tiled = forward[site.layer]
            layer = _squeeze_tiles(
                body, rule, student_layer, tiles, tiling, tiled, row_mask, factors is None, check_outputs
            )
        else:
            hidden = (
                () if check_outputs else ("probs", "values", "merged", "groups", *(("codes",) if factors else ()))
            )
            layer = _squeeze_layer(body, rule, student_layer, site, row_mask, hidden)
        if factors is not None:
            names = {role: f"{body.prefix}{role}" for role in ("queries", "keys", "spans")}
            for source, name in zip(add_factors(body, factors[student_layer]), names.values(), strict=False):
                body.output(source, name, FLOAT, rank=4)
            spans = None if tiles is None else _tiled_spans(body, tiles, forward[site.layer], names["queries"])
            spans = spans or add_spans(body, factors[student_layer])
            body.output(spans, names["spans"], onnx.TensorProto.INT32, rank=4)
            layer = replace(layer, names={**layer.names, **names})
        squeezed.append(layer)
    outputs = _output_targets(body, targets or TargetTensors())
    replaced = set() if tiling is None else {tiling.sites[layer].site.context for layer in forward}
    return SqueezedGraph(assemble_graph(model, body, replaced), tuple(squeezed), outputs)


def _squeeze_tiles(
    body: Body,
    rule: MergeRule,
    student_layer: int,
    tiles: SiteTiles,
    tiling: Tiling,
    forward: Forward,
    row_mask: str | None,
    has_codes: bool,
    check_outputs: bool,
) -> SqueezedLayer:
    """The results of ``_squeeze_layer`` without a map of all heads, and for a check all that tiles are made of."""
    site = tiles.site
    rule = replace(rule, value_heads=tiles.value_heads)
    results: dict[str, str] = {}
    weights, slots = None, tiling.slots.get(site.layer, ())
    if rule.solves:
        grams = [body.weight(gram) for gram in gram_matrices(rule, projection_of(site))]
        sums = forward.sums or ""
        inputs = [sums, row_mask or every_row(body, sums), *grams]
        results = body.call((rule, slots), lambda: alphas_function(rule, slots, body.opset), inputs)
        weights = results.pop("weights")
    else:
        results["alphas"] = constant_alphas(body, rule, batch_heads(body, site.context, site.layout, rule.num_heads))
    if has_codes:
        results["codes"] = add_codes(body, tiles, rule, tiling.rows, forward.spans, weights)
    names = _output_results(body, rule, results)
    if not check_outputs:
        return SqueezedLayer(student_layer, site, rule, names)
    needed = tiles.needed_for(tiles.probs)
    sources = dict.fromkeys(key[0] for key in tiles.sources() if key in needed)
    roles = {f"source{number}": name for number, name in enumerate(sources)}
    extra = {"values": body.op("Cast", values_of(body, site), to=FLOAT), "sums": forward.sums, "weights": weights}
    for role, tensor in {**roles, **extra}.items():
        if tensor is not None:
            names[role] = f"{body.prefix}{role}"
            body.rename(tensor, names[role])
            body.outputs.append(onnx.ValueInfoProto(name=names[role]))
    rows = TiledRows(tiles, rule, slots, roles | ({"weights": "weights"} if weights else {}), body.opset)
    return SqueezedLayer(student_layer, site, rule, names, rows)


def _tiled_spans(body: Body, tiles: SiteTiles, forward: Forward, queries: str) -> str | None:
    """The result of ``add_spans``, from masks; None where they are not known apart from logits."""
    if tiles.masks is None:
        return None
    spans = forward.spans
    shape = body.concat([body.sizes(queries, 0, 1, 2), body.const([3])], 0)
    if spans is None:  # every row sees every key
        keys = body.sizes(*tiles.shape_source(1))
        spans = body.concat([body.const([0]), body.op("Sub", keys, body.const([1])), keys], 0)
    return body.op("Cast", body.op("Expand", spans, shape), to=onnx.TensorProto.INT32)


def list_plans(options: PrecomputeOptions, count: int) -> tuple[str | MergePlan, ...]:
    """The plan of each of so many layers."""
    plans = (options.plan,) * count if options.plans is None else options.plans
    if len(plans) != count:
        raise ShdError("plan-invalid", f"plans must be one for each of {count} layers; got {len(plans)}")
    return plans


def _output_targets(body: Body, targets: TargetTensors) -> TargetTensors:
    """Make targets graph outputs in float32; their new names by role."""
    body.prefix = f"{FUNCTION_DOMAIN}/targets/"
    for role, source in targets.names.items():
        body.output(body.op("Cast", source, to=FLOAT), body.prefix + role, FLOAT, rank=None)
    return TargetTensors({role: body.prefix + role for role in targets.names})


def _squeeze_layer(
    body: Body,
    rule: MergeRule,
    student_layer: int,
    site: AttentionSite,
    row_mask: str | None,
    hidden: Collection[str],
) -> SqueezedLayer:
    """Call the merge function on one site and make its results graph outputs, but for the hidden ones."""
    probs, values = site_tensors(body, site)
    results = call_squeeze(body, rule, site, probs, values, row_mask)
    results |= {name: body.op("Cast", source, to=FLOAT) for name, source in (("probs", probs), ("values", values))}
    results |= {"groups": GROUPS_INPUT} if rule.pooled else {}
    if not rule.solves:
        results["alphas"] = constant_alphas(body, rule, probs)
    return SqueezedLayer(student_layer, site, rule, _output_results(body, rule, results, hidden))


def _output_results(
    body: Body, rule: MergeRule, results: Mapping[str, str], hidden: Collection[str] = ()
) -> dict[str, str]:
    """Make results graph outputs, but for the hidden ones; the names of all, by role."""
    codes = onnx.TensorProto.UINT8 if rule.codec == "sqrt8-row" else FLOAT
    kinds = {"codes": codes, "degenerate": onnx.TensorProto.BOOL}
    names = {role: f"{body.prefix}{role}" for role in results}
    for role, source in results.items():
        if role not in hidden:
            body.output(source, names[role], kinds.get(role, FLOAT), rank=_RANKS.get(role, 4))
    return names


# A mask puts its keys further below a row's largest logit, as it adds MASKED, and no teacher's logits reach so far.
_FAR_BELOW: Final = -MASKED / 2


def add_spans(body: Body, factors: SiteFactors) -> str:
    """First, last and number of the keys that the mask leaves each row, as nodes: ``(B, H, L, 3)`` int32."""
    site = factors.site
    logits = batch_heads(body, body.op("Cast", factors.logits, to=FLOAT), factors.logits_layout, site.num_heads or 1)
    least = body.op("Sub", body.reduce_max(logits), body.const(_FAR_BELOW))
    return body.op("Cast", spans_of(body, body.op("Greater", logits, least)), to=onnx.TensorProto.INT32)


def call_squeeze(
    body: Body, rule: MergeRule, site: AttentionSite, probs: str, values: str, row_mask: str | None
) -> dict[str, str]:
    """Call the merge function on the tensors of a site; equal rules share one, made at its first use."""
    inputs = [probs]
    if rule.solves:
        grams = [body.weight(gram) for gram in gram_matrices(rule, projection_of(site))]
        inputs += [values, row_mask or every_row(body, probs), *grams]
    elif rule.pooled:
        inputs.append(row_mask or every_row(body, probs))
    inputs += [GROUPS_INPUT] * rule.pooled
    shared = rule if rule.solves else replace(rule, d_v=0)  # which then reads no values
    return body.call(shared, lambda: squeeze_function(shared, body.opset), inputs)


def row_mask_of(body: Body, model: onnx.ModelProto, name: str | None) -> str | None:
    """The row mask as 0 or 1 in float32 ``(B, L)``."""
    if name is None:
        return None
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    tensor = inputs.get(name)
    if tensor is None or tensor.elem_type not in _MASK_TYPES or len(tensor.shape.dim) != 2:
        raise inputs_invalid(
            f"row_mask_input must name an integer or boolean (B, L) input of the graph, one of "
            f"{', '.join(inputs)}; got {name!r}"
        )
    return body.op("Cast", body.op("Cast", name, to=onnx.TensorProto.BOOL), to=FLOAT)


def assemble_graph(model: onnx.ModelProto, body: Body, replaced: Set[str] = frozenset()) -> onnx.ModelProto:
    """The model with new outputs and functions, without nodes and inputs that no output needs, or were replaced."""
    grown = copy_skeleton(model)
    for number in reversed(range(len(grown.graph.node)) if replaced else ()):
        if not replaced.isdisjoint(grown.graph.node[number].output):
            del grown.graph.node[number]
    grown.ir_version = max(grown.ir_version, _MIN_IR_VERSION)
    grown.graph.node.extend(body.nodes)
    grown.graph.input.extend(body.inputs)
    grown.graph.initializer.extend(body.initializers)
    del grown.graph.output[:]
    grown.graph.output.extend(body.outputs)
    if all(opset.domain != FUNCTION_DOMAIN for opset in grown.opset_import):
        grown.opset_import.append(onnx.helper.make_opsetid(FUNCTION_DOMAIN, 1))
    grown.functions.extend(body.functions.values())
    pruned = ir.from_proto(grown)
    pruned.graph.sort()
    remove_unused(pruned.graph)
    for value in list(pruned.graph.inputs):
        if not value.uses():
            pruned.graph.inputs.remove(value)
            pruned.graph.initializers.pop(value.name or "", None)
    try:
        assembled = ir.to_proto(pruned)
    except ir.serde.SerdeError as error:
        raise graph_invalid(f"the teacher graph cannot be written again: {error}: export it again") from error
    restore_weights(assembled, model)
    return assembled


def remove_unused(graph: ir.Graph) -> None:
    """Nodes and initialisers that no output needs; onnx-ir's pass before 1.1 also changes batch normalisation."""
    outputs = set(graph.outputs)
    for node in reversed(graph):
        if not any(value in outputs or value.uses() for value in node.outputs):
            for body in (a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH):
                for inner in body.all_nodes():  # which read what lies outside
                    for number in range(len(inner.inputs)):
                        inner.replace_input_with(number, None)
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not (value in outputs or value.uses()):
            del graph.initializers[name]
