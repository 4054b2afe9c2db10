"""The tensors of an attention site with the axes ``(batch, heads, positions, width)``, as nodes of a graph."""

from __future__ import annotations

from shd_ref.errors import graph_unsupported
from shd_ref.teacher.graph.factors import SiteFactors
from shd_ref.teacher.graph.find import AttentionSite
from shd_ref.teacher.graph.shapes import Layout
from shd_ref.teacher.opening.body import FLOAT, Body
from shd_ref.teacher.opening.model import onnx


def batch_heads(body: Body, tensor: str, layout: Layout | None, num_heads: int) -> str:
    """A map, V, queries or keys with the leading axes ``(B, H)``, from any layout."""
    if layout in ("batch-folded", "heads-folded"):
        sizes = [-1, num_heads] if layout == "batch-folded" else [num_heads, -1]
        inner = body.op("Slice", body.op("Shape", tensor), body.const([1]), body.const([3]))
        tensor = body.op("Reshape", tensor, body.op("Concat", body.const(sizes), inner, axis=0))
    if layout in ("heads-batch", "heads-folded"):
        return body.op("Transpose", tensor, perm=[1, 0, 2, 3])
    return tensor


def site_tensors(body: Body, site: AttentionSite) -> tuple[str, str]:
    """The map ``(B, H, L, S)`` and V ``(B, H, S, d_v)`` of a supported site."""
    return batch_heads(body, site.probs, site.layout, site.num_heads or 1), values_of(body, site)


def values_of(body: Body, site: AttentionSite) -> str:
    """V ``(B, H, S, d_v)`` of a supported site."""
    heads = site.num_heads or 1
    values = batch_heads(body, site.values, site.layout, heads)
    if site.shared_values:
        values = body.op("Expand", values, body.const([1, heads, 1, 1]))
    if site.joined_values:
        by_key = body.reshape(body.op("Transpose", values, perm=[0, 2, 1, 3]), 0, 1, -1, site.d_v or 0)
        values = body.op("Expand", by_key, body.const([1, heads, 1, 1]))
    return values


def spans_of(body: Body, seen: str) -> str:
    """First, last and number of the keys that rows see ``(..., S)``, int64 ``(..., 3)``; 0, S - 1 and 0 of none."""
    marks = body.op("Cast", seen, to=onnx.TensorProto.UINT8)
    ends = [body.op("ArgMax", marks, axis=-1, keepdims=1, select_last_index=last) for last in (0, 1)]
    count = body.reduce_sum(body.op("Cast", seen, to=FLOAT), -1, keepdims=1)
    return body.concat([*ends, body.op("Cast", count, to=onnx.TensorProto.INT64)], -1)


def add_factors(body: Body, factors: SiteFactors) -> tuple[str, str]:
    """Append nodes that give queries ``(B, H, L, d)`` and keys ``(B, H_kv, S, d)`` in float32."""
    site = factors.site
    if not factors.supported:
        raise graph_unsupported(f"site {site.name} cannot be stored as queries and keys: {factors.reason}")
    queries = body.op("Cast", factors.queries, to=FLOAT)
    for op_type, multiplier in factors.multipliers:
        queries = body.op(op_type, queries, body.op("Cast", multiplier, to=FLOAT))
    keys = body.op("Cast", factors.keys, to=FLOAT)
    heads = site.num_heads or 1
    shared = factors.layout in ("batch-heads", "heads-batch") and factors.num_kv_heads == 1 and not factors.key_heads
    queries = batch_heads(body, queries, factors.layout, heads)
    keys = batch_heads(body, keys, factors.layout, 1 if shared else heads)
    if factors.keys_transposed:
        keys = body.op("Transpose", keys, perm=[0, 1, 3, 2])
    if factors.key_heads:
        keys = body.op("Gather", keys, body.const(list(factors.key_heads)), axis=1)
    return queries, keys
