"""What a teacher gives besides attention: logits of its head, hidden states between blocks, pooled embeddings.

Forward from a site's map, the first sum with a tensor that the map was made from is the residual connection, and this
tensor enters the block: ``hidden_states[k]`` of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from shd_ref.cache.forms.exact import TeacherHead
from shd_ref.errors import argument_value, graph_unsupported, need
from shd_ref.teacher.graph.factors import Logits, read_logits
from shd_ref.teacher.graph.find import AttentionSite, SiteKinds
from shd_ref.teacher.graph.projection import product_weight
from shd_ref.teacher.graph.walk import FLOATS, ancestors
from shd_ref.teacher.opening.model import PRODUCTS, SIZE_OPS, fixed_input, ir, is_computed, onnx, read_graph
from shd_ref.teacher.options import PrecomputeOptions

LAST_STATES: Final = ("last_hidden_state", "encoder_last_hidden_state")
"""Names that exporters give the output of the last block; an encoder-decoder has only the first."""

_RESIDUAL: Final = frozenset({"Add", "Sum", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})


@dataclass(frozen=True, eq=False)
class GraphHead:
    """The tensor that a head reads, the tensor of its logits, and the head."""

    states: str
    logits: str
    head: TeacherHead


LOGITS: Final = "logits"
POOLED: Final = "pooled"
LAST_ROLE: Final = "last"
"""Roles of targets: logits, the states that embeddings are pooled from, those that the head reads."""


def hidden_role(layer: int) -> str:
    """The role of the state that enters block k, or leaves the last."""
    return f"hidden-{layer}"


@dataclass(frozen=True)
class TargetTensors:
    """Names of tensors that become outputs next to attention, by role, and the head that reads the last states."""

    names: Mapping[str, str] = field(default_factory=dict)
    head: GraphHead | None = None


def find_targets(
    model: onnx.ModelProto, sites: Sequence[AttentionSite], options: PrecomputeOptions, kinds: SiteKinds | None = None
) -> TargetTensors:
    """The tensors of a graph that hold the logits, hidden states and embeddings of the options.

    ``sites`` are all its attention sites, from ``find_sites``; ``kinds`` tell a decoder's apart, from ``find_kinds``.
    """
    kinds = kinds or SiteKinds({})
    of_decoder = bool(kinds.kinds)
    blocks = [site for site in sites if kinds.kind(site) in (None, "decoder")]
    layers = sorted(set(options.hidden_layers))
    unknown = [site for site in blocks if of_decoder and kinds.kind(site) is None]
    if layers and unknown:
        rule = "hidden states are counted by the blocks of the decoder"
        raise graph_unsupported(f"{rule}, and {unknown[0].label} may be one of the decoder's: {unknown[0].reason}")
    if layers and of_decoder and not (blocks and kinds.decoder_inputs):
        rule = "hidden states with cross attention are a decoder's, with its own self-attention and inputs"
        raise graph_unsupported(f"{rule}; this graph lacks them: run the teacher live (OnlineTeacher)", "CACHE-175")
    if options.embeddings is not None and of_decoder:
        rule = "embeddings are made of a single sequence, and this graph has a decoder's too"
        raise graph_unsupported(f"{rule}: export the encoder alone", "CACHE-181")
    graph = read_graph(model)
    names = {LOGITS: _find_logits(graph, options.logits_output)} if options.logits != "none" else {}
    if layers:
        states = _find_hidden(graph, blocks, layers, LAST_STATES[: 1 if of_decoder else 2])
        names |= {hidden_role(layer): state for layer, state in zip(layers, states, strict=True)}
    if options.embeddings is not None:
        last = _last_state(graph, LAST_STATES)
        rule = f"be pooled from an output named {' or '.join(LAST_STATES)}"
        got = f"{', '.join(str(value.name) for value in graph.outputs)}: export the encoder so"
        need(last is not None, "graph-unsupported", "embeddings", rule, got, spec_id="CACHE-181")
        names[POOLED] = str(last)
    if not options.exact:
        return TargetTensors(names)
    head = _find_head(graph, _find_logits(graph, options.logits_output, _LAST_NEEDS))
    return TargetTensors(names | {LAST_ROLE: head.states}, head)


def dtype_of(model: onnx.ModelProto, sites: Sequence[AttentionSite], targets: TargetTensors) -> str:
    """The type that a teacher computes in: of its attention, else of its targets, else float32."""
    if sites:
        return sites[0].dtype or "float32"
    values = (*model.graph.output, *model.graph.value_info)
    kinds = {value.type.tensor_type.elem_type for value in values if value.name in targets.names.values()} & {*FLOATS}
    return str(ir.DataType(min(kinds)).numpy().name) if len(kinds) == 1 else "float32"


_LAST_NEEDS: Final = "hidden must leave out last, which needs a head: logits"


def _find_logits(graph: ir.Graph, output: str | None, argument: str = "logits") -> str:
    """The graph output with the logits: the named one, ``logits``, or the only one that can be."""
    outputs = {str(value.name): value for value in graph.outputs if value.dtype in FLOATS}
    if output is not None:
        rule = f"name an output of real numbers of the graph, one of {', '.join(outputs)}"
        need(output in outputs, "argument-value", "logits_output", rule, repr(output))
        return output
    if LOGITS in outputs:
        return LOGITS
    # Queries, keys and maps have four axes; a hidden state that was exported has its own name.
    ranks = {name: None if value.shape is None else len(value.shape) for name, value in outputs.items()}
    fitting = [name for name, rank in ranks.items() if rank in (None, 2, 3) and "hidden" not in name]
    if len(fitting) != 1:
        raise argument_value(
            f"{argument} must come from an output named logits, or the only one of two or three axes; it has "
            f"{', '.join(outputs) or 'none of real numbers'}: name it (--logits-output), or export the model's head"
        )
    return fitting[0]


def _find_hidden(
    graph: ir.Graph, sites: Sequence[AttentionSite], layers: Sequence[int], last_states: Sequence[str]
) -> list[str]:
    count = len(sites)
    if not count:
        raise graph_unsupported(
            "hidden states are found by the attention of their blocks, and the graph has none: store only its logits"
        )
    wrong = [layer for layer in layers if not 0 <= layer <= count]
    if wrong:
        rule = f"hold layers from 0 (what enters the first block) to {count} (what leaves the last)"
        need(False, "argument-value", "hidden", rule, wrong[0])
    states = []
    for layer in layers:
        state = _last_state(graph, last_states) if layer == count else _entering_state(sites[layer])
        if state is None:
            raise graph_unsupported(_advice(layer, count, sites))
        states.append(state)
    if len(set(states)) != len(states):
        raise graph_unsupported(
            f"hidden states of layers {', '.join(map(str, layers))} must be different tensors, but their attention "
            "sites share a block: ask for fewer layers"
        )
    return states


def _advice(layer: int, count: int, sites: Sequence[AttentionSite]) -> str:
    if layer == count:
        return (
            f"hidden state {layer}, what leaves the last block, must be an output named {' or '.join(LAST_STATES)}, "
            f"or what the head of logits reads: export it so, or ask for layers below {layer}"
        )
    site = sites[layer]
    return (
        f"hidden state {layer} must be what is added to the output of {site.label}, but "
        "no such residual connection was found: export a graph that keeps it, or ask for other layers"
    )


def _last_state(graph: ir.Graph, last_states: Sequence[str]) -> str | None:
    """The output of such a name, or else the input of the head, before a scale that is one number (as of T5)."""
    outputs = {value.name: value for value in graph.outputs if value.name}
    named = next((name for name in last_states if name in outputs), None)
    read = None if named is not None or LOGITS not in outputs else _read_head(graph, LOGITS)
    if read is None or read.product is None or read.product.op_type not in PRODUCTS:
        return named
    states = (value for value in (read.queries, read.keys) if is_computed(value))
    return str(_before_scale(next(states)).name)


def _read_head(graph: ir.Graph, name: str) -> Logits | None:
    """The operators behind the product of a state and a constant matrix; None unless all others are constants."""

    def is_head(node: ir.Node) -> bool:
        factors = [is_computed(value) for value in node.inputs[:2]]
        return node.op_type in (*PRODUCTS, "Gemm") and sum(factors) == 1

    value = next((output for output in graph.outputs if output.name == name), None)
    read = read_logits(value, is_head, frozenset({"Cast", "Identity"}))
    is_fixed = all(factor.const_value is not None for _, factor in (*read.addends, *read.multipliers))
    return read if is_fixed and not (read.reason or read.fills or read.conditions or read.sinks) else None


def _before_scale(value: ir.Value) -> ir.Value:
    """A tensor before it was multiplied by one constant number: Hugging Face counts a hidden state without it."""
    node = value.producer()
    if node is None or node.op_type not in ("Div", "Mul"):
        return value
    for slot in (0, 1):
        scale, source = fixed_input(node, 1 - slot), node.inputs[slot]
        if (node.op_type == "Mul" or slot == 0) and scale is not None and scale.size == 1 and source is not None:
            return source
    return value


def _entering_state(site: AttentionSite) -> str | None:
    """The other operand of the first sum behind a map that the map itself was made from."""
    probs, graph = site.walk.probs, site.walk.node.graph
    if probs is None or graph is None:
        return None
    before = ancestors(probs) - {probs}
    behind = {probs}
    for node in graph:  # in order, so that the first sum is the nearest
        inputs = [value for value in node.inputs if value is not None]
        if node.op_type in SIZE_OPS or behind.isdisjoint(inputs):
            continue
        if node.op_type in _RESIDUAL:
            for value in inputs:
                if value in before and value not in behind and value.const_value is None:
                    return str(value.name)
        behind.update(node.outputs)
    return None


_ROUNDING: Final = 2.0**-22  # of two constants in binary32 that are meant to be one another's inverse


def _find_head(graph: ir.Graph, logits: str) -> GraphHead:
    """Follow the output ``logits`` back to the product with the head's matrix; ``graph-unsupported`` of others."""
    refusal = graph_unsupported(
        "exact targets need logits that a head makes of a state: one product with a constant matrix, then at most a "
        f"bias, a scale and a soft cap; {logits!r} is made in another way: store --logits, or export the plain head",
        "CACHE-190",
    )
    read = _read_head(graph, logits)
    if read is None or read.product is None or read.queries is None or read.multipliers or not read.scale:
        raise refusal
    # A soft cap bounds all that is scaled and added before it; nothing is added behind it.
    if read.softcap is not None and (read.softcap <= 0 or read.capped != (0, 0)):
        raise refusal
    node, addends = read.product, list(read.addends)
    weight = product_weight(node, 0)
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        addends.append((read.scale * node.attributes.get_float("beta", 1.0), node.inputs[2]))
    added = [(scale, value.const_value.numpy()) for scale, value in addends if value.const_value is not None]
    by_class = len(added) == len(addends) and all(bias.size in (1, *bias.shape[-1:]) for _, bias in added)
    if weight is None or weight.matrix.ndim != 2 or not by_class:
        raise refusal
    matrix = np.ascontiguousarray(weight.matrix.T)
    bias = np.zeros(len(matrix)) + sum(scale * part.astype(np.float64).reshape(-1) for scale, part in added)
    scale = 1.0 if read.softcap is not None and abs(read.scale - 1) < _ROUNDING else read.scale
    with np.errstate(over="ignore"):
        half = matrix.astype(np.float16)  # where that loses nothing, as of a teacher that was exported in it
    weights = half if np.array_equal(half, matrix) else matrix.astype(np.float32)
    head = TeacherHead(weights, bias.astype(np.float32) if bias.any() else None, scale, read.softcap)
    return GraphHead(str(read.queries.name), logits, head)
