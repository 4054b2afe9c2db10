"""Maps and values of any layout as ``(B, H, ...)``, by nodes of the graph."""

from __future__ import annotations

from shd_ref.teacher.body import Body
from shd_ref.teacher.graph.measure import Layout


def batch_heads(body: Body, tensor: str, layout: Layout | None, num_heads: int) -> str:
    """A map, V, queries or keys with the leading axes ``(B, H)``, from any layout."""
    if layout in ("batch-folded", "heads-folded"):
        sizes = [-1, num_heads] if layout == "batch-folded" else [num_heads, -1]
        inner = body.op("Slice", body.op("Shape", tensor), body.const([1]), body.const([3]))
        tensor = body.op("Reshape", tensor, body.op("Concat", body.const(sizes), inner, axis=0))
    if layout in ("heads-batch", "heads-folded"):
        return body.op("Transpose", tensor, perm=[1, 0, 2, 3])
    return tensor
