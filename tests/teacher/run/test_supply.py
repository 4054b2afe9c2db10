"""What decoders with past are fed beside the data (CACHE-36): an empty past, positions, the flag of a body."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from support.attention_graphs import GraphBuilder, random_projection
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import CacheReader, sample_key
from shd_ref.teacher import InputSpec, ModelInputs, PrecomputeOptions, RunOptions, find_sites, load_teacher
from shd_ref.teacher.precompute.engine import precompute

IDS = InputSpec("input_ids", "int64", ("batch_size", "sequence_length"))
MASK = InputSpec("attention_mask", "int64", ("batch_size", "past_sequence_length + 1"))
POSITIONS = InputSpec("position_ids", "int64", ("batch_size", "sequence_length"))
PAST = InputSpec("past_key_values.0.key", "float32", ("batch_size", 2, "past_sequence_length", 4))
FLAG = InputSpec("use_cache_branch", "bool", (1,))
SPECS = (IDS, MASK, POSITIONS, PAST, FLAG)

MASKS = np.array([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]])
DATA: dict[str, Any] = {"input_ids": np.arange(12).reshape(3, 4), "attention_mask": MASKS}


def test_the_key_is_of_what_the_data_hold() -> None:
    inputs = ModelInputs(DATA, SPECS)
    assert inputs.names == ("attention_mask", "input_ids")
    assert inputs.supplied == ("past_key_values.0.key", "position_ids", "use_cache_branch")
    assert inputs.fixed_batch is None, "the flag's one entry is no batch"
    assert inputs.key(0) == sample_key({name: array[0] for name, array in DATA.items()})


def test_positions_are_counted_from_the_mask_as_generation_does() -> None:
    """Without a mask, and where every position counts, they are those of the sequence."""
    inputs = ModelInputs(DATA, SPECS)
    (batch,) = inputs.batches([0, 1, 2], 3)
    by_index = dict(zip(batch.indices, batch.arrays["position_ids"].tolist(), strict=True))
    assert by_index == {0: [0, 0, 0, 1], 1: [0, 1, 0, 0], 2: [0, 0, 1, 2]}
    assert batch.arrays["position_ids"].dtype == np.int64
    assert batch.arrays["past_key_values.0.key"].shape == (3, 2, 0, 4)
    assert batch.arrays["use_cache_branch"].tolist() == [False]
    (bare,) = ModelInputs({"input_ids": DATA["input_ids"]}, (IDS, POSITIONS)).batches([0, 1, 2], 3)
    for whole in (bare, inputs.unmasked(batch)):
        assert whole.arrays["position_ids"].tolist() == [[0, 1, 2, 3]] * 3


def test_positions_in_the_data_are_fed_and_make_the_key() -> None:
    data = DATA | {"position_ids": np.arange(10, 22).reshape(3, 4)}
    inputs = ModelInputs(data, SPECS)
    assert inputs.names == ("attention_mask", "input_ids", "position_ids")
    (batch,) = inputs.batches([0], 1)
    assert batch.arrays["position_ids"].tolist() == [[10, 11, 12, 13]]
    assert inputs.key(0) != ModelInputs(DATA, SPECS).key(0)
    # A manifest's names decide where the data hold more, or less.
    assert ModelInputs(data, SPECS, names=("attention_mask", "input_ids")).key(0) == ModelInputs(DATA, SPECS).key(0)
    with pytest.raises(ShdError, match="missing position_ids"):
        ModelInputs(DATA, SPECS, names=inputs.names)


def decoder_with_past(stack: str) -> onnx.ModelProto:
    """Two layers of four query and two key heads whose past is in one input a layer and kind, a layer, or in all."""
    build = GraphBuilder()
    inputs: dict[str, Any] = {"x": (TensorProto.FLOAT, ["batch", "length", 8])}
    outputs, state = [], "x"
    for layer in range(2):
        pasts = {kind: f"past_key_values.{layer}.{kind}" for kind in ("key", "value")}
        shape: list[int | str] = ["batch", 2, "past_length", 2]
        if stack == "kinds":
            shape, pasts = [2, *shape], dict.fromkeys(pasts, f"past_{layer}")
        elif stack == "layers":
            shape, pasts = [2, 2, *shape], dict.fromkeys(pasts, "past")
        for place, (kind, name) in enumerate(pasts.items()):
            inputs[name] = (TensorProto.FLOAT, shape)
            for index in {"none": (), "kinds": (place,), "layers": (layer, place)}[stack]:
                pasts[kind] = build.op("Gather", pasts[kind], index, axis=0)
        heads = []
        for seed, (kind, count) in enumerate({"query": 4, "key": 2, "value": 2}.items()):
            weight = build.const(3 * random_projection(8, 2 * count, 10 * layer + seed))
            split = build.op("Reshape", build.op("MatMul", state, weight), [0, 0, count, 2])
            split = build.op("Transpose", split, perm=[0, 2, 1, 3])
            if kind in pasts:
                split = build.op("Concat", pasts[kind], split, axis=2)
                split = build.op("Gather", split, [0, 0, 1, 1], axis=1)
            heads.append(split)
        logits = build.op("MatMul", heads[0], build.op("Transpose", heads[1], perm=[0, 1, 3, 2]))
        joined = build.op("MatMul", build.op("Softmax", logits, axis=-1), heads[2])
        state = build.project(joined, 8, 8, 10 * layer + 5)
        outputs.append(state)
    return build.model(inputs, outputs)


def test_a_stacked_past_is_fed_empty_like_any_other(tmp_path: Path) -> None:
    data = {"x": np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)}
    maps = []
    for stack in ("none", "kinds", "layers"):
        file, cache = tmp_path / f"{stack}.onnx", tmp_path / stack
        onnx.save(decoder_with_past(stack), file)
        sites = find_sites(load_teacher(file))
        assert [(site.supported, site.num_heads, site.num_kv_heads) for site in sites] == [(True, 4, 2)] * 2
        precompute(file, data, cache, PrecomputeOptions(num_student_heads=2), RunOptions(batch_size=2))
        reader = CacheReader(cache)
        records = [reader.read(sample_key({"x": sample})) for sample in data["x"]]
        maps.append([reader.decode(record, layer) for record in records for layer in (0, 1)])
    np.testing.assert_array_equal(maps[1:], [maps[0]] * 2)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (InputSpec("past_key_values.0.key", "float32", ("batch", 2, 16, 4)), "decoder_model.onnx"),
        (
            InputSpec("past_key_values.0.encoder.key", "float32", ("batch", 2, "encoder_sequence_length", 4)),
            "decoder_model.onnx",
        ),
        (
            InputSpec("past_key_values.0.key", "float32", ("batch", "heads", "past_length", "width")),
            "heads and width",
        ),
        (InputSpec("past_0", "float32", (2, "batch", "heads", "past_length", 4)), "heads and width"),
        (InputSpec("position_ids", "int64", (3, "batch", "length")), "3 axes"),
    ],
    ids=["static cache", "encoder", "open heads", "open heads, stacked", "three positions"],
)
def test_what_cannot_be_supplied_is_refused_with_the_remedy(spec: InputSpec, reason: str) -> None:
    with refusal("inputs-invalid", reason):
        ModelInputs(DATA, (IDS, MASK, spec))
