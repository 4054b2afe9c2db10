"""Logits and hidden states of an encoder-decoder: a row for each position of the second sequence (CACHE-160)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from support.attention_graphs import saved
from support.plain_kd import topk_targets
from support.two_sequences import encoder_decoder

from shd_ref import ShdError
from shd_ref.cache import CacheReader, SampleRecord, sample_key, verify_cache
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.precompute.engine import precompute

NUM_SAMPLES = 8
RUN = RunOptions(batch_size=2, samples_per_shard=2, num_threads=1)
OPTIONS = PrecomputeOptions(num_student_heads=2, logits="topk", logits_top=5, logits_bits=16, hidden=(0, 1))
ALONE = replace(OPTIONS, num_student_heads=0, form="none", hidden=())


def make_inputs(masked: bool = True) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(3)
    first = (np.arange(6) < rng.integers(3, 7, NUM_SAMPLES)[:, None]).astype(np.int64)
    second = (np.arange(9) < rng.integers(2, 10, NUM_SAMPLES)[:, None]).astype(np.int64)
    second[1, 1] = 0  # a position between others that does not count
    inputs = {
        "input_ids": rng.integers(0, 30, first.shape),
        "attention_mask": first,
        "decoder_input_ids": rng.integers(0, 30, second.shape),
    }
    return inputs | ({"decoder_attention_mask": second} if masked else {})


def cut(inputs: dict[str, NDArray[Any]], index: int) -> dict[str, NDArray[Any]]:
    """A sample without padding."""
    one = {name: array[index] for name, array in inputs.items()}
    end = int(one["attention_mask"].sum())
    mask = one.get("decoder_attention_mask", np.ones(9))
    last = int(np.flatnonzero(mask)[-1]) + 1
    return {name: array[: last if name.startswith("decoder") else end] for name, array in one.items()}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(encoder_decoder(), tmp_path_factory.mktemp("teacher"))


@pytest.mark.parametrize("options", [OPTIONS, ALONE], ids=["beside attention", "alone"])
def test_rows_are_the_decoders_positions(teacher: Path, tmp_path: Path, options: PrecomputeOptions) -> None:
    inputs, session = make_inputs(), onnxruntime.InferenceSession(teacher)
    precompute(teacher, inputs, tmp_path / "cache", options, RUN)
    assert verify_cache(tmp_path / "cache").ok
    assert recheck_records(tmp_path / "cache", teacher, inputs, num_records=NUM_SAMPLES).target_rows > NUM_SAMPLES
    reader = CacheReader(tmp_path / "cache")
    form = reader.manifest.logits
    assert form is not None
    assert form.rows == "decoder"
    for index in range(NUM_SAMPLES):
        sample = cut(inputs, index)
        record = reader.read(sample_key(sample))
        assert (record.length, record.decoder) == (len(sample["input_ids"]), len(sample["decoder_input_ids"]))
        (logits,) = session.run(["logits"], {name: array[None] for name, array in sample.items()})
        found: Any = form.decode(record)
        wanted = topk_targets(logits[0], 5)
        counted = sample["decoder_attention_mask"].astype(bool)
        np.testing.assert_array_equal(found.ids[counted], wanted.ids[counted])
        np.testing.assert_allclose(np.exp(found.log_probs)[counted], np.exp(wanted.log_probs)[counted], atol=1e-4)
        np.testing.assert_allclose(np.exp(found.log_probs)[~counted], 1 / 30, rtol=1e-2)
        if reader.manifest.hidden is not None:
            check_hidden(teacher, reader, record, sample, logits[0])


def check_hidden(
    teacher: Path, reader: CacheReader, record: SampleRecord, sample: dict[str, NDArray[Any]], logits: NDArray[Any]
) -> None:
    """State 0 is the embeddings of what the decoder reads, and the last is what its head makes the logits of."""
    weights = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(teacher).graph.initializer}
    table = next(array for array in weights.values() if array.shape == (30, 12))
    head = next(array for array in weights.values() if array.shape == (12, 30))
    counted = sample["decoder_attention_mask"].astype(bool)
    first, last = (reader.decode_hidden(record, layer) for layer in (0, 1))
    np.testing.assert_allclose(first[counted], table[sample["decoder_input_ids"]][counted], rtol=1e-3)
    np.testing.assert_allclose((last @ head)[counted], logits[counted], rtol=2e-2, atol=2e-2)
    assert not first[~counted].any()
    assert not last[~counted].any()


def test_a_decoder_without_a_mask_keeps_all_its_positions(tmp_path: Path) -> None:
    onnx.save(encoder_decoder(masked=False), tmp_path / "teacher.onnx")
    inputs = make_inputs(masked=False)
    precompute(tmp_path / "teacher.onnx", inputs, tmp_path / "cache", ALONE, RUN)
    reader = CacheReader(tmp_path / "cache")
    assert {reader.read(key).decoder for key in reader} == {9}
    assert recheck_records(tmp_path / "cache", tmp_path / "teacher.onnx", inputs).records == NUM_SAMPLES


def test_the_mean_of_two_encoder_decoders(teacher: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.onnx"
    onnx.save(encoder_decoder(seed=1), second)
    options, inputs = replace(ALONE, with_teachers=(second,), logits="float16"), make_inputs()
    precompute(teacher, inputs, tmp_path / "cache", options, RUN)
    sample = cut(inputs, 0)
    fed = {name: array[None] for name, array in sample.items()}
    logits = [onnxruntime.InferenceSession(path).run(["logits"], fed)[0][0] for path in (teacher, second)]
    reader = CacheReader(tmp_path / "cache")
    assert reader.manifest.logits is not None
    found: Any = reader.manifest.logits.decode(reader.read(sample_key(sample)))
    np.testing.assert_allclose(found, np.mean(logits, axis=0), rtol=2e-3, atol=2e-3)
    assert recheck_records(tmp_path / "cache", teacher, inputs, with_teachers=[second]).records == NUM_SAMPLES
    onnx.save(encoder_decoder(seed=1, masked=False), second)
    with pytest.raises(ShdError, match="must take decoder_attention_mask, as the first teacher does"):
        precompute(teacher, inputs, tmp_path / "other", options, RUN)
