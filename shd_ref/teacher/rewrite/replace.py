"""The teacher with merged maps in place of its own: ``sum_h A~_h X'_h = sum_t A~_h(t) V_t W_t``, all else stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shd_ref.errors import argument_value
from shd_ref.teacher.graph.find import AttentionSite
from shd_ref.teacher.opening.body import FLOAT, FUNCTION_DOMAIN, Body
from shd_ref.teacher.opening.model import onnx
from shd_ref.teacher.rewrite.function import MergeRule
from shd_ref.teacher.rewrite.squeeze import assemble_graph, call_squeeze, check_opset, row_mask_of
from shd_ref.teacher.rewrite.tensors import site_tensors

_CAST_LIKE_OPSET = 15


@dataclass(frozen=True)
class ReplacedSite:
    """A site's maps times values, float32 ``(B, H, L, d_v)``: with the maps in use, and with those before merging."""

    site: AttentionSite
    context: str
    unmerged: str


@dataclass(frozen=True)
class ReplacedGraph:
    """A teacher with its maps replaced, and the output that is looked at."""

    model: onnx.ModelProto
    sites: tuple[ReplacedSite, ...]
    output: str


def replace_attention(
    model: onnx.ModelProto,
    sites: Sequence[AttentionSite],
    rules: Sequence[MergeRule] | None,
    *,
    output: str,
    row_mask_input: str | Sequence[str | None] | None = None,
) -> ReplacedGraph:
    """Rewrite a teacher so that its own layers go on with squeezed attention, by one of ``rules`` a site, or None.

    ``output`` is kept beside those of the sites; ``row_mask_input`` is as in ``squeeze_graph``, or one a site.
    """
    named = {value.name: value for value in model.graph.output}
    if output not in named:
        raise argument_value(f"output must be one of the graph's {', '.join(named)}; got {output!r}")
    replaced = onnx.ModelProto()
    replaced.CopyFrom(model)
    body = Body(f"{FUNCTION_DOMAIN}/", check_opset(model))
    of_sites: Sequence[str | None] = (
        [row_mask_input] * len(sites) if row_mask_input is None or isinstance(row_mask_input, str) else row_mask_input
    )
    masks = {name: row_mask_of(body, model, name) for name in dict.fromkeys(of_sites)}
    squeezed = []
    for number, site in enumerate(sites):
        body.prefix = f"{FUNCTION_DOMAIN}/{number}/"
        maps, values = site_tensors(body, site)
        unmerged = _context(body, maps, values)
        context = unmerged
        if rules is not None:
            rule = rules[number]
            merged = call_squeeze(body, rule, site, maps, values, masks[of_sites[number]])["merged"]
            group_of = {head: number for number, group in enumerate(rule.groups) for head in group}
            per_head = body.op("Gather", merged, body.const([group_of[head] for head in sorted(group_of)]), axis=1)
            context = _context(body, per_head, values)
            substitute = _as_in_site(body, site, per_head)
            for node in replaced.graph.node:  # those of the squeeze, which read the old map, are not among them yet
                for slot in (slot for slot, name in enumerate(node.input) if name == site.probs):
                    node.input[slot] = substitute
        names = (f"{body.prefix}context", f"{body.prefix}unmerged")
        for value, name in zip((context, unmerged), names, strict=True):
            body.output(value, name, FLOAT, rank=4)
        squeezed.append(ReplacedSite(site, *names))
    body.outputs.append(named[output])
    return ReplacedGraph(assemble_graph(replaced, body), tuple(squeezed), output)


def _context(body: Body, maps: str, values: str) -> str:
    return body.op("MatMul", body.op("Cast", maps, to=FLOAT), body.op("Cast", values, to=FLOAT))


def _as_in_site(body: Body, site: AttentionSite, maps: str) -> str:
    if site.layout in ("heads-batch", "heads-folded"):
        maps = body.op("Transpose", maps, perm=[1, 0, 2, 3])
    if site.folded:
        maps = body.op("Reshape", maps, body.op("Shape", site.probs))
    if body.opset >= _CAST_LIKE_OPSET:
        return body.op("CastLike", maps, site.probs)
    return body.op("Cast", maps, to=onnx.helper.np_dtype_to_tensor_dtype(np.dtype(site.dtype or "float32")))
