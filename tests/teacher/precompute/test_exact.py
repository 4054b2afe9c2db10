"""Last states and the head: of a decoder, padded, averaged, in parts, and of heads that are none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from support.attention_graphs import language_model, saved, token_samples
from support.commands import shd
from support.makers import contents
from support.refusals import refusal
from support.two_sequences import encoder_decoder

from shd_ref.cache import CacheReader, merge_caches, verify_cache
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.options import LAST
from shd_ref.teacher.precompute.engine import precompute

RUN = RunOptions(batch_size=4, samples_per_shard=3, num_threads=1, tile=4)
ALONE = PrecomputeOptions(form="none", hidden=(LAST,), hidden_codec="float32")


def inputs_of(two: bool = False) -> dict[str, Any]:
    inputs = token_samples(9, 8, least=3)
    if not two:
        return inputs
    names = {name: f"decoder_{name}" for name in inputs}
    return {name: array % 30 for name, array in inputs.items()} | {
        names[name]: array % 30 for name, array in token_samples(9, 5, least=2, seed=1).items()
    }


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher whose last 6 classes pad the vocabulary."""
    return saved(language_model(padding=6), tmp_path_factory.mktemp("padded"))


def test_rows_are_a_decoders(tmp_path: Path) -> None:
    teacher, inputs = saved(encoder_decoder(), tmp_path), inputs_of(two=True)
    options = replace(ALONE, form="maps", num_student_heads=2)
    precompute(teacher, inputs, tmp_path / "cache", options, RUN)
    assert recheck_records(tmp_path / "cache", teacher, inputs).target_rows > 8
    reader = CacheReader(tmp_path / "cache")
    assert reader.manifest.exact is not None
    assert reader.manifest.exact.rows == "decoder"
    (logits,) = onnxruntime.InferenceSession(teacher).run(["logits"], inputs)
    for record in (reader.read(key) for key in reader):
        made = reader.read_head().logits(reader.decode_last(record))
        np.testing.assert_allclose(made, logits[record.index, : record.decoder], atol=1e-4)


def test_padded_classes_are_cut_and_parts_are_merged(padded: Path, tmp_path: Path) -> None:
    """Beside the mean logits of two teachers, of which the states are the first's."""
    second = saved(language_model(), tmp_path)
    options = replace(ALONE, vocab_size=50, logits="topk", logits_top=8, with_teachers=(second,))
    precompute(padded, inputs_of(), tmp_path / "whole", options, RUN)
    head = CacheReader(tmp_path / "whole").read_head()
    assert head.weight.shape == (50, 12)
    parts = [tmp_path / f"part-{number}" for number in range(2)]
    for number, part in enumerate(parts):
        precompute(padded, inputs_of(), part, options, replace(RUN, shards=(number, 2)))
    (parts[0] / "teacher_head.safetensors").unlink()  # the other part has it
    assert merge_caches(parts, tmp_path / "merged").sealed
    assert contents(tmp_path / "merged") == contents(tmp_path / "whole")
    assert verify_cache(tmp_path / "merged").ok
    again = recheck_records(tmp_path / "merged", padded, inputs_of(), with_teachers=[second])
    assert again.target_rows > 0
    assert "bias" in shd("ls", tmp_path / "merged")
    (parts[1] / "teacher_head.safetensors").unlink()
    with refusal("cache-incomplete", "teacher_head.safetensors"):
        merge_caches(parts, tmp_path / "again")


def test_a_head_of_another_kind_is_refused(padded: Path, tmp_path: Path) -> None:
    model = onnx.load(padded)
    (last,) = [node for node in model.graph.node if "logits" in node.output]
    last.output[0] = "before"
    model.graph.node.append(onnx.helper.make_node("Softplus", ["before"], ["logits"]))
    with refusal("graph-unsupported", "made in another way"):
        precompute(saved(model, tmp_path), inputs_of(), tmp_path / "cache", ALONE, RUN)
    classifier = saved(language_model(head="sample"), tmp_path, "classifier.onnx")
    with refusal("graph-unsupported"):
        precompute(classifier, inputs_of(), tmp_path / "cache", ALONE, RUN)
    assert not (tmp_path / "cache").exists()
