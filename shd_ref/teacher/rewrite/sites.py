"""A site's tensors as nodes of the graph: maps, values, queries, keys and what the mask leaves."""

from __future__ import annotations

from typing import Final

from shd_ref.errors import ShdError
from shd_ref.teacher.body import FLOAT, Body
from shd_ref.teacher.graph.factors import SiteFactors
from shd_ref.teacher.graph.measure import Layout
from shd_ref.teacher.packages import onnx


def batch_heads(body: Body, tensor: str, layout: Layout | None, num_heads: int) -> str:
    """A map, V, queries or keys with the leading axes ``(B, H)``, from any layout."""
    if layout in ("batch-folded", "heads-folded"):
        sizes = [-1, num_heads] if layout == "batch-folded" else [num_heads, -1]
        inner = body.op("Slice", body.op("Shape", tensor), body.const([1]), body.const([3]))
        tensor = body.op("Reshape", tensor, body.op("Concat", body.const(sizes), inner, axis=0))
    if layout in ("heads-batch", "heads-folded"):
        return body.op("Transpose", tensor, perm=[1, 0, 2, 3])
    return tensor


# Half of it: what a mask leaves below a row's largest logit, and no teacher's own logits reach.
_FAR_BELOW: Final = 500.0


def add_factors(body: Body, factors: SiteFactors) -> tuple[str, str]:
    """Append nodes that give queries ``(B, H, L, d)`` and keys ``(B, H_kv, S, d)`` in float32."""
    site = factors.site
    if not factors.supported:
        raise ShdError(
            "graph-unsupported", f"site {site.name} cannot be stored as queries and keys: {factors.reason}"
        )
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


def add_spans(body: Body, factors: SiteFactors) -> str:
    """Append nodes that say which keys the graph's own mask leaves each row: ``(B, H, L, 3)`` int32.

    First, last and number of these keys: a run of keys is told from any other mask. Masked is what lies far below the
    row's largest logit.
    """
    site = factors.site
    logits = batch_heads(body, body.op("Cast", site.logits, to=FLOAT), factors.logits_layout, site.num_heads or 1)
    least = body.op("Sub", body.reduce_max(logits), body.const(_FAR_BELOW))
    seen = body.op("Cast", body.op("Greater", logits, least), to=FLOAT)
    first = body.op("ArgMax", seen, axis=-1, keepdims=1)
    last = body.op("ArgMax", seen, axis=-1, keepdims=1, select_last_index=1)
    count = body.op("Cast", body.reduce_sum(seen, -1, keepdims=1), to=onnx.TensorProto.INT64)
    return body.op("Cast", body.concat([first, last, count], axis=-1), to=onnx.TensorProto.INT32)
