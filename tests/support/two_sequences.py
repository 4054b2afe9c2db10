"""An encoder-decoder with a head, written node by node (not a test itself)."""

import onnx
from onnx import TensorProto

from support.attention_graphs import GraphBuilder, attend, random_projection

NUM_HEADS, WIDTH = 4, 12


def encoder_decoder(*, seed: int = 0, vocabulary: int = 30, masked: bool = True) -> onnx.ModelProto:
    """Tokens of two sequences: self attention in each, cross attention, and logits of the decoder's positions."""
    build = GraphBuilder()
    table = build.const(random_projection(vocabulary, WIDTH, 900 + seed))

    def block(state: str, other: str, mask: str | None, number: int) -> str:
        return build.op("Add", state, attend(build, state, other, mask, NUM_HEADS, 100 * number + seed))

    encoded, state = (build.op("Gather", table, name) for name in ("input_ids", "decoder_input_ids"))
    encoded = block(encoded, encoded, "attention_mask", 1)
    state = block(state, state, "decoder_attention_mask" if masked else None, 2)
    state = block(state, encoded, "attention_mask", 3)
    head = build.const(4 * random_projection(WIDTH, vocabulary, 400 + seed))
    build.op("MatMul", state, head, name="logits")
    axes = {"input_ids": "length", "attention_mask": "length", "decoder_input_ids": "decoder_length"}
    axes |= {"decoder_attention_mask": "decoder_length"} if masked else {}
    inputs = {name: (TensorProto.INT64, ["batch", axis]) for name, axis in axes.items()}
    return build.model(inputs, ["logits"])
