"""Kinds of ONNX operators, by what they do to a map, to values or to logits that pass through them."""

from __future__ import annotations

from typing import Final


def kinds(names: str) -> frozenset[str]:
    """Kinds of operators, written with spaces between."""
    return frozenset(names.split())


STANDARD_DOMAINS: Final = ("", "ai.onnx")
CONTRIB_DOMAIN: Final = "com.microsoft"

MAP_CARRIERS: Final = kinds(
    "Cast DequantizeLinear Dropout DynamicQuantizeLinear Identity Mul QuantizeLinear Reshape Slice Trilu Where"
)
"""What the map may pass through between the softmax and its product with V."""

LAYOUT_OPS: Final = kinds(
    "Cast DequantizeLinear Dropout DynamicQuantizeLinear Flatten Identity QuantizeLinear Reshape Squeeze "
    "Transpose Unsqueeze"
)
"""What only moves numbers, between the heads' outputs and W_o, or around V."""

MOVING_OPS: Final = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Of these, what gives a number another place."""

NORMS: Final = kinds(
    "GroupNormalization InstanceNormalization LayerNormalization LpNormalization Pow RMSNormalization "
    "ReduceL2 ReduceMean ReduceSumSquare SimplifiedLayerNormalization"
)
"""Norms, and what exporters write out norms with."""

REPEAT_OPS: Final = frozenset({"Concat", "Expand", "Gather", "Tile"})

ADDING_OPS: Final = frozenset({"Add", "Sub", "Sum"})
SCALING_OPS: Final = frozenset({"Div", "Mul"})

LOGIT_OPS: Final = kinds(
    "Add Cast Clip Concat DequantizeLinear Div Identity Max Mul QuantizeLinear Reshape Sub Tanh Transpose Where"
)
"""Backward from the softmax: scale, mask, softcap and sink on the way to ``Q K^T``."""

PRODUCTS: Final = frozenset({"MatMul", "FusedMatMul"})
INTEGER_PRODUCTS: Final = frozenset({"MatMulInteger", "QLinearMatMul", "MatMulIntegerToFloat"})
OPAQUE_PRODUCTS: Final = frozenset({"Einsum"})
"""Products whose axes only their equation tells."""

FUSED_OPS: Final = kinds(
    "Attention DecoderAttention DecoderMaskedMultiHeadAttention DecoderMaskedSelfAttention "
    "GroupQueryAttention LongformerAttention MultiHeadAttention PackedAttention PackedMultiHeadAttention "
    "PagedAttention QAttention QOrderedAttention SparseAttention"
)
