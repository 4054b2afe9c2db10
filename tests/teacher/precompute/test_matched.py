"""Matched plans in a precompute run: layer by layer, written down, and taken from there on resume."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import xxhash
from numpy.typing import NDArray
from support.attention_graphs import bare_attention, read_site, saved
from support.refusals import refusal

pytest.importorskip("networkx", reason="matched plans need networkx")

from support.calls import calls_of

from shd_ref import compose_mixing, matched_plan, squeeze_heads
from shd_ref.cache import CacheReader, Matching, verify_cache
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.precompute.engine import precompute

HEADS, SAMPLES, LENGTH = 6, 8, 5
MATCHED = PrecomputeOptions(2, plan="matched", calibration_samples=3, codec="float32")
RUN = RunOptions(mask="mask", samples_per_shard=3, seed=7)


def make_inputs() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {"mask": np.ones((SAMPLES, LENGTH), dtype=np.int64)}
    for layer in range(2):
        # Heads that resemble one another, others in every layer.
        kinds = rng.permutation(HEADS) % 3
        logits = rng.normal(size=(SAMPLES, 3, LENGTH, LENGTH))[:, kinds] * 2
        logits += rng.normal(size=(SAMPLES, HEADS, LENGTH, LENGTH)) * 0.3
        arrays[f"logits_{layer}"] = logits.astype(np.float32)
        arrays[f"values_{layer}"] = rng.normal(size=(SAMPLES, HEADS, LENGTH, 4)).astype(np.float32)
    return arrays


DRAWN = sorted(range(SAMPLES), key=lambda index: xxhash.xxh3_64_intdigest(struct.pack("<Q", index), 7))
"""The samples in the order of CACHE-26."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(bare_attention(HEADS, num_layers=2), tmp_path_factory.mktemp("matched"))


def read_layer(teacher: Path, layer: int, indices: list[int]) -> tuple[Any, Any]:
    return read_site(onnx.load(teacher), {name: array[indices] for name, array in make_inputs().items()}, layer)


@pytest.mark.parametrize("by", ["residual", "similarity"])
def test_every_layer_has_the_plan_that_the_reference_finds(teacher: Path, tmp_path: Path, by: str) -> None:
    options = PrecomputeOptions(2, plan="matched", matched_by=by, calibration_samples=3, codec="float32")
    precompute(teacher, make_inputs(), tmp_path / "cache", options, RUN)
    reader = CacheReader(tmp_path / "cache")
    manifest = reader.manifest
    assert manifest.attention.matching == Matching(by, 3, 7)
    chosen = DRAWN[:3]
    for number, plan in enumerate(manifest.attention.layer_plans):
        maps, outputs = read_layer(teacher, number, chosen)
        assert plan == matched_plan([(maps, outputs)], 2, by)
    assert manifest.attention.plans is not None  # the layers were made to differ
    for key in reader:
        record = reader.read(key)
        for number, plan in enumerate(manifest.attention.layer_plans):
            maps, outputs = read_layer(teacher, number, [record.index])
            reference = squeeze_heads(maps, outputs, 2, plan=plan)
            np.testing.assert_allclose(reader.decode(record, number), reference.probs[0], atol=2e-5)
            alphas = np.concatenate(reference.alphas, axis=1)[0]
            np.testing.assert_allclose(np.clip(record.parts["alphas"][number], 0, 1), alphas, atol=1e-3)
            np.testing.assert_allclose(record.parts["mixing"][number], reference.mixing[0], atol=1e-3)
            ends = np.cumsum([len(one_round) for one_round in plan])[:-1]
            rounds = np.split(np.clip(record.parts["alphas"][None, number], 0, 1), ends, axis=1)
            composed = compose_mixing(rounds, plan, HEADS)[0]
            np.testing.assert_allclose(composed, record.parts["mixing"][number], atol=1e-6)
    assert verify_cache(tmp_path / "cache").ok
    assert recheck_records(tmp_path / "cache", teacher, make_inputs()).records == SAMPLES


def test_resuming_takes_the_plans_from_the_manifest(teacher: Path, tmp_path: Path) -> None:
    whole, cache = tmp_path / "whole", tmp_path / "cache"
    precompute(teacher, make_inputs(), whole, MATCHED, RUN)
    precompute(teacher, make_inputs(), cache, MATCHED, RUN)
    assert (whole / "manifest.json").read_bytes() == (cache / "manifest.json").read_bytes()  # matched twice, alike
    (cache / "SEALED.json").unlink()
    (cache / "receipts" / "000001.json").unlink()
    with calls_of("match_plans") as calls:
        summary = precompute(teacher, make_inputs(), cache, MATCHED, RUN)
    assert calls == []
    assert summary.resumed == SAMPLES - 3
    for path in whole.rglob("*.safetensors"):
        assert path.read_bytes() == (cache / path.relative_to(whole)).read_bytes()
    with refusal("cache-mismatch", "matching.by: 'residual' -> 'similarity'"):
        precompute(teacher, make_inputs(), cache, replace(MATCHED, matched_by="similarity"), RUN)
