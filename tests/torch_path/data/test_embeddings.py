"""Embeddings of texts, from a sentence encoder's graph to the batch of a training (CACHE-181 to 185)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sentence_transformers", reason="what the cache holds is compared with it")

import onnx
import sentence_transformers
import torch
from support.attention_graphs import (
    encoder_layer,
    language_model,
    saved,
    token_samples,
    token_teacher,
    vector_samples,
)
from support.binding.sentences import TEXTS, export_encoder, samples_of, tokens_of, write_encoder
from support.commands import shd
from support.refusals import refusal
from support.two_sequences import encoder_decoder

from shd_ref.cache import CacheReader, verify_cache
from shd_ref.teacher import Pooling, PrecomputeOptions, RunOptions, read_pooling, recheck_records
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import SupervisedDataset

ALONE = PrecomputeOptions(form="none", embeddings=Pooling("mean"))
RUN = RunOptions(batch_size=5, num_threads=1)
"""The longest text and others run together, with padding."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_encoder(tmp_path_factory.mktemp("encoder") / "teacher")
    export_encoder(folder)
    return folder


def vectors_of(cache: Path, encoder: Path) -> torch.Tensor:
    joined = SupervisedDataset(samples_of(encoder), cache)
    _, batch = joined.collate_with(len)([joined[index] for index in range(len(joined))])
    taught = batch.embeddings()
    assert taught is not None
    return taught.vectors


@pytest.mark.parametrize(
    ("pooling", "others", "side", "run"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ["Normalize"], "right", RUN),
        ({"pooling_mode": "cls"}, [], "left", RUN),
        ({"pooling_mode": ["max"]}, ["Dropout", "Normalize"], "right", RUN),
        ({"pooling_mode_lasttoken": True}, [], "left", replace(RUN, batch_size=1)),  # the first has one token
    ],
    ids=["mean", "cls", "max", "last"],
)
def test_embeddings_are_those_of_sentence_transformers(
    encoder: Path, tmp_path: Path, pooling: dict[str, Any], others: list[str], side: str, run: RunOptions
) -> None:
    folder = write_encoder(tmp_path / "teacher", pooling, *others)
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    model.tokenizer.padding_side = side
    expected = model.encode(TEXTS, batch_size=len(TEXTS))  # positions are counted from the padding in front
    options = replace(ALONE, embeddings=read_pooling(folder))
    # Maps beside them leave padding in front in their records.
    options = replace(options, form="maps", num_student_heads=2) if side == "left" else options
    arrays = tokens_of(folder, side)
    precompute(encoder.with_suffix(".onnx"), arrays, tmp_path / "cache", options, run)
    assert verify_cache(tmp_path / "cache").ok
    if side == "right":
        recheck_records(tmp_path / "cache", encoder.with_suffix(".onnx"), arrays, num_records=4)
    reader = CacheReader(tmp_path / "cache")
    records = sorted((reader.read(key) for key in reader), key=lambda record: record.index)
    stored = np.stack([reader.decode_embedding(record) for record in records])
    np.testing.assert_allclose(stored, expected, atol=1e-6, rtol=0)
    if side == "right":
        np.testing.assert_array_equal(vectors_of(tmp_path / "cache", folder).numpy(), stored)


def test_the_command_reads_the_folder(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    words = ["precompute", str(encoder.with_suffix(".onnx")), "--inputs", str(tmp_path / "texts.jsonl")]
    words += ["--tokenizer", str(encoder), "--embeddings", str(encoder), "--no-attention"]
    words += ["--out", str(tmp_path / "cache")]
    output = shd(*words)
    assert "embeddings" in output
    assert "width 32, pooling mean" in shd("ls", str(tmp_path / "cache"))
    assert len(vectors_of(tmp_path / "cache", encoder)) == len(TEXTS)
    words[words.index("--embeddings") + 1] = "mean,normalize"
    assert "embeddings.normalize: False -> True" in shd(*words, code=1)
    words[words.index("--embeddings") + 1] = "median"
    assert "--embeddings must be mean, cls, max, last" in shd(*words, code=1)


@pytest.mark.parametrize(
    ("pooling", "others", "says"),
    [
        ({"pooling_mode": "weightedmean"}, [], "pool by one of mean, cls, max, lasttoken; got weightedmean"),
        ({"pooling_mode": ["mean", "cls"]}, [], "got .'mean', 'cls'."),
        ({}, ["Dense", "Normalize"], "Pooling, and then Normalize or nothing.*got Pooling, Dense, Normalize"),
    ],
)
def test_folders_that_pool_another_way(tmp_path: Path, pooling: dict[str, Any], others: list[str], says: str) -> None:
    with refusal("argument-value", says):
        read_pooling(write_encoder(tmp_path / "teacher", pooling, *others))


def test_a_pooling_that_leaves_its_folder(encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(encoder, tmp_path / "teacher")
    config = tmp_path / "teacher/1_Pooling/config.json"
    config.rename(tmp_path / "elsewhere.json")
    config.symlink_to(tmp_path / "elsewhere.json")
    with refusal("read-failed", "none of them"):
        read_pooling(tmp_path / "teacher")


def without_mask() -> onnx.ModelProto:
    model = encoder_layer(mask=None)
    model.graph.node.append(onnx.helper.make_node("Identity", [model.graph.output[0].name], ["last_hidden_state"]))
    model.graph.output[0].name = "last_hidden_state"
    return model


GRAPHS = {
    "no mask": (without_mask, "positions that the graph's padding mask counts, and it takes none"),
    "no last state": (token_teacher, "an output named last_hidden_state or encoder_last_hidden_state; got matmul"),
    "pooled already": (
        lambda: language_model(head="sample"),
        r"embeddings must be pooled from \(., ., 'width'\) states",
    ),
    "two sequences": (encoder_decoder, "export the encoder alone"),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_that_cannot_be_pooled(tmp_path: Path, graph: str) -> None:
    make, says = GRAPHS[graph]
    inputs = vector_samples(4, 6) if graph == "no mask" else token_samples(4, 6)
    if graph == "two sequences":
        inputs |= {f"decoder_{name}": array for name, array in inputs.items()}
    with refusal("graph-unsupported", says):
        precompute(saved(make(), tmp_path), inputs, tmp_path / "cache", ALONE, RUN)
    assert not (tmp_path / "cache/manifest.json").exists()
