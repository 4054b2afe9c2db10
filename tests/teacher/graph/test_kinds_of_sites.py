"""Encoder, decoder and cross attention of one graph, in graphs written by hand."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from support.attention_graphs import GraphBuilder, random_projection, saved, token_samples
from support.refusals import refusal
from support.two_sequences import encoder_decoder

pytest.importorskip("onnxruntime")

from shd_ref.cache import CacheReader
from shd_ref.teacher import PrecomputeOptions, RunOptions, find_kinds, find_sites, input_specs
from shd_ref.teacher.precompute.engine import precompute


def attend(build: GraphBuilder, rows: str, keys: str, seed: int, *, mask: str | None = None) -> str:
    """One head of width 6, with its projection."""

    def times(value: str, number: int) -> str:
        return build.op("MatMul", value, random_projection(6, 6, 10 * seed + number))

    query, key, value = times(rows, 1), times(keys, 2), times(keys, 3)
    logits = build.op("MatMul", query, build.op("Transpose", key, perm=[0, 2, 1]))
    if mask is not None:
        column = build.op("Cast", build.op("Unsqueeze", mask, [1]), to=9)
        logits = build.op("Where", column, logits, np.float32(-1e9))
    return times(build.op("MatMul", build.op("Softmax", logits, axis=-1), value), 4)


def beside(*, learned: bool) -> onnx.ModelProto:
    """Self-attention on ``x`` or on learned queries, and, beside it, learned queries that read ``x``."""
    build = GraphBuilder()
    batch = build.op("Slice", build.op("Shape", "x"), [0], [1])
    shape = build.op("Concat", batch, [2, 6], axis=0)
    queries = build.op("Expand", random_projection(2, 6, 90)[None], shape)
    own = attend(build, queries, queries, 1) if learned else attend(build, "x", "x", 1, mask="attention_mask")
    read = attend(build, own if learned else queries, "x", 2, mask="attention_mask")
    inputs = {
        "x": (TensorProto.FLOAT, ["batch", "length", 6]),
        "attention_mask": (TensorProto.INT64, ["batch", "length"]),
    }
    return build.model(inputs, [own, read])


@pytest.mark.parametrize(("learned", "kinds"), [(False, ["encoder", "cross"]), (True, ["decoder", "cross"])])
def test_what_reads_the_encoders_inputs_alone_has_its_positions(learned: bool, kinds: list[str]) -> None:
    model = beside(learned=learned)
    sites = find_sites(model)
    assert [site.supported for site in sites] == [True, True], sites
    found = find_kinds(sites, input_specs(model))
    assert [found.kind(site) for site in sites] == kinds


def test_a_mask_of_a_fixed_length_is_that_of_the_inputs_as_long() -> None:
    model = beside(learned=False)
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = 6
    found = find_kinds(find_sites(model), input_specs(model))
    assert found.decoder_inputs == ()


def test_its_records_do_not_depend_on_the_padding_of_a_batch(tmp_path: Path) -> None:
    onnx.save(beside(learned=False), tmp_path / "teacher.onnx")
    lengths = np.array([6, 3, 5, 4])
    data = {
        "x": np.random.default_rng(0).normal(size=(4, 6, 6)).astype(np.float32),
        "attention_mask": (np.arange(6) < lengths[:, None]).astype(np.int64),
    }
    shapes = []
    for size in (1, 4):
        folder = tmp_path / str(size)
        options = PrecomputeOptions(1, layer_pairs=((0, 0),), codec="float32")
        precompute(tmp_path / "teacher.onnx", data, folder, options, RunOptions(batch_size=size))
        reader = CacheReader(folder)
        shapes.append(sorted(reader.decode(reader.read(key), 0).shape for key in reader))
    assert shapes[0] == shapes[1] == [(1, n, n) for n in sorted(lengths)]


def joined(*, keys_alone: bool, masked: bool = True) -> onnx.ModelProto:
    """Attention with one token more than ``x`` has, joined inside the graph, in the rows and keys or in the keys."""
    build = GraphBuilder()
    batch = build.op("Slice", build.op("Shape", "x"), [0], [1])
    shape = build.op("Concat", batch, [1, 6], axis=0)
    tokens = build.op("Concat", build.op("Expand", random_projection(1, 6, 90)[None], shape), "x", axis=1)
    mask = None
    inputs: dict[str, tuple[int, list[str | int]]] = {"x": (TensorProto.FLOAT, ["batch", "length", 6])}
    if masked:
        inputs["attention_mask"] = (TensorProto.INT64, ["batch", "length"])
        one = build.op("Expand", [[1]], build.op("Concat", batch, [1], axis=0))
        mask = build.op("Concat", one, "attention_mask", axis=1)
    output = attend(build, "x" if keys_alone else tokens, tokens, 1, mask=mask)
    return build.model(inputs, [output])


@pytest.mark.parametrize("keys_alone", [False, True])
def test_tokens_that_are_joined_in_the_graph_are_no_part_of_the_mask(keys_alone: bool, tmp_path: Path) -> None:
    data = {
        "x": np.random.default_rng(0).normal(size=(3, 5, 6)).astype(np.float32),
        "attention_mask": (np.arange(5) < np.array([[5], [3], [4]])).astype(np.int64),
    }
    for masked in (True, False):
        onnx.save(joined(keys_alone=keys_alone, masked=masked), tmp_path / "teacher.onnx")
        arguments = (tmp_path / "teacher.onnx", data, tmp_path / "cache", PrecomputeOptions(1, codec="float32"))
        if masked:
            wanted = f"as many {'keys' if keys_alone else 'rows'} as attention_mask has positions"
            with refusal("graph-unsupported", wanted):
                precompute(*arguments)
            continue
        precompute(*arguments)
        reader = CacheReader(tmp_path / "cache")
        assert {reader.decode(reader.read(key), 0).shape for key in reader} == {(1, 5 if keys_alone else 6, 6)}


def test_keys_that_are_another_input_as_it_is_are_cross_attention(tmp_path: Path) -> None:
    """Without a projection that tells, the inputs do: the mask is that of the keys and says nothing of rows."""
    build = GraphBuilder()
    query = build.op("MatMul", "x", random_projection(6, 6, 1))
    logits = build.op("MatMul", query, build.op("Transpose", "memory", perm=[0, 2, 1]))
    column = build.op("Cast", build.op("Unsqueeze", "attention_mask", [1]), to=TensorProto.BOOL)
    probs = build.op("Softmax", build.op("Where", column, logits, np.float32(-1e9)), axis=-1)
    output = build.op("MatMul", build.op("MatMul", probs, "memory"), random_projection(6, 6, 2))
    inputs = {
        "x": (TensorProto.FLOAT, ["batch", "rows", 6]),
        "memory": (TensorProto.FLOAT, ["batch", "keys", 6]),
        "attention_mask": (TensorProto.INT64, ["batch", "keys"]),
    }
    onnx.save(build.model(inputs, [output]), tmp_path / "teacher.onnx")
    rng, lengths = np.random.default_rng(0), np.array([7, 3, 4])
    data = {name: rng.normal(size=(3, size, 6)).astype(np.float32) for name, size in (("x", 5), ("memory", 7))}
    data["attention_mask"] = (np.arange(7) < lengths[:, None]).astype(np.int64)
    options = PrecomputeOptions(1, codec="float32")
    precompute(tmp_path / "teacher.onnx", data, tmp_path / "cache", options, RunOptions(batch_size=3))
    reader = CacheReader(tmp_path / "cache")
    assert sorted(reader.decode(reader.read(key), 0).shape for key in reader) == [(1, 5, n) for n in sorted(lengths)]


NOT_LAST = "not over the last axis"


@pytest.mark.parametrize(
    ("number", "options", "message"),
    [
        (0, PrecomputeOptions(2), f"attention site 0 .* cannot be squeezed: .* {NOT_LAST}"),
        (0, PrecomputeOptions(2, sites="0"), f"attention site 0 .* cannot be squeezed: .* {NOT_LAST}"),
        (0, PrecomputeOptions(form="none", hidden=(1,)), "attention site 0 .* may be one of the decoder's"),
        (2, PrecomputeOptions(2, sites="1"), f"attention site 2 .* may be cross attention: .* {NOT_LAST}"),
        (2, PrecomputeOptions(form="none", logits="topk"), "attention site 2 .* may be cross attention"),
    ],
    ids=["all sites", "that site", "hidden states", "the decoder's", "logits"],
)
def test_a_site_that_is_not_read_is_not_left_out_without_a_word(
    number: int, options: PrecomputeOptions, message: str, tmp_path: Path
) -> None:
    model, data = encoder_decoder(), {}
    [node for node in model.graph.node if node.op_type == "Softmax"][number].attribute[0].i = 2
    for seed, prefix in enumerate(("", "decoder_")):
        data |= {prefix + name: array % 30 for name, array in token_samples(3, 5, seed=seed).items()}
    with refusal("graph-unsupported", message):
        precompute(saved(model, tmp_path), data, tmp_path / "cache", options)
