"""An encoder-decoder with a head, written node by node (not a test itself)."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from support.attention_graphs import GraphBuilder, _mask_logits, random_projection

NUM_HEADS, WIDTH = 4, 12


def encoder_decoder(*, seed: int = 0, vocabulary: int = 30, masked: bool = True) -> onnx.ModelProto:
    """Tokens of two sequences: self attention in each, cross attention, and logits of the decoder's positions.

    Args:
        seed: of the weights.
        vocabulary: tokens that are read, and classes.
        masked: whether the decoder has its own mask.
    """
    build = GraphBuilder()
    table = build.const(random_projection(vocabulary, WIDTH, 900 + seed))
    encoded = _block(build, build.op("Gather", table, "input_ids"), None, "attention_mask", 100 + seed)
    state = build.op("Gather", table, "decoder_input_ids")
    state = _block(build, state, None, "decoder_attention_mask" if masked else None, 200 + seed)
    state = _block(build, state, encoded, "attention_mask", 300 + seed)
    head = build.const(4 * random_projection(WIDTH, vocabulary, 400 + seed))
    build.op("MatMul", state, head, name="logits")
    axes = {"input_ids": "length", "attention_mask": "length", "decoder_input_ids": "decoder_length"}
    axes |= {"decoder_attention_mask": "decoder_length"} if masked else {}
    inputs = {name: (TensorProto.INT64, ["batch", axis]) for name, axis in axes.items()}
    return build.model(inputs, ["logits"])


def _block(build: GraphBuilder, state: str, other: str | None, mask: str | None, seed: int) -> str:
    """Attention of a sequence to itself, or to another one, with a residual connection."""
    split = build.const(np.array([0, 0, NUM_HEADS, 3]))
    query, key, values = (
        build.op(
            "Transpose",
            build.op("Reshape", build.op("MatMul", source, weight), split),
            perm=[0, 2, 3, 1] if place == 1 else [0, 2, 1, 3],
        )
        for place, (source, weight) in enumerate(
            zip(
                (state, other or state, other or state),
                (2 * random_projection(WIDTH, WIDTH, 10 * seed + n) for n in (1, 2, 3)),
                strict=True,
            )
        )
    )
    logits = build.op("MatMul", query, key)
    if mask is not None:
        logits = _mask_logits(build, logits, "where", -3e4, source=mask)
    context = build.op("MatMul", build.op("Softmax", logits, axis=-1), values)
    flat = build.op("Reshape", build.op("Transpose", context, perm=[0, 2, 1, 3]), [0, 0, WIDTH])
    return build.op("Add", state, build.op("MatMul", flat, random_projection(WIDTH, WIDTH, 10 * seed)))
