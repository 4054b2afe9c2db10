"""Caches for a student with fewer tokens: maps pooled in the graph, identified by their groups."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.attention_graphs import encoder_layer, language_model, saved, token_samples, vector_samples
from support.pooled import draw_groups, pool_by_loops
from support.refusals import refusal

from shd_ref import id_groups, patch_groups
from shd_ref.cache import CacheReader, sample_key, trim_inputs, verify_cache
from shd_ref.conformance import load_tolerances
from shd_ref.teacher import PrecomputeOptions, RunOptions, recheck_records
from shd_ref.teacher.precompute.engine import precompute

COUNT, LENGTH = 12, 9
LIMIT = load_tolerances()["graph"]["probs"]["float32"]
OPTIONS = partial(PrecomputeOptions, num_student_heads=2, codec="float32", temperature=1.5)
RUN = RunOptions(mask="mask", batch_size=4, samples_per_shard=5)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(encoder_layer(num_heads=4, mask="where"), tmp_path_factory.mktemp("teacher"))


def read_maps(folder: Path, inputs: dict[str, NDArray[Any]]) -> list[NDArray[np.float64]]:
    reader = CacheReader(folder)
    assert verify_cache(folder).ok
    maps = []
    for index in range(COUNT):
        names = reader.manifest.inputs.names
        sample = {name: inputs[name][index] for name in names}
        record = reader.read(sample_key(trim_inputs(sample, "mask")[0]))
        maps.append(reader.decode(record, 0).astype(np.float64))
    return maps


def draw_columns(rng: np.random.Generator, kind: str, lengths: Any) -> Any:
    """Groups of the tokens of each sample, by column, padded as their inputs are, and as weights ``(l, L)``."""
    weights = [id_groups(rng.integers(0, 4, size=n)) if kind == "ids" else draw_groups(rng, n) for n in lengths]
    weights = [np.ceil(4 * one) for one in weights]
    if kind == "ids":
        weights = [np.minimum(one, 1) for one in weights]
        columns = [np.where(one.any(0), one.argmax(0), -1) for one in weights]
        return np.stack([np.r_[ids, np.full(LENGTH - len(ids), 3)] for ids in columns]), weights
    width = max(len(one) for one in weights)
    column = np.zeros((len(weights), LENGTH, width), np.int64)
    for number, one in enumerate(weights):
        column[number, : one.shape[1], : len(one)] = one.T
    return column, [np.pad(one, ((0, width - len(one)), (0, 0))) for one in weights]


@pytest.mark.parametrize(("kind", "strategy"), [("ids", "shd"), ("weights", "mean")])
def test_records_are_what_plain_loops_make_of_the_merged_maps(
    teacher: Path, tmp_path: Path, kind: str, strategy: str
) -> None:
    """A grouping for each sample; padded samples beside longer ones."""
    inputs, rng = vector_samples(COUNT, LENGTH), np.random.default_rng(1)
    options = partial(OPTIONS, strategy=strategy)
    precompute(teacher, inputs, tmp_path / "whole", options(), RUN)
    merged, lengths = read_maps(tmp_path / "whole", inputs), inputs["mask"].sum(1)
    for number in range(3):
        column, weights = draw_columns(rng, kind, lengths)
        data = inputs | {"parts": column}
        folder = tmp_path / f"pooled{number}"
        precompute(teacher, data, folder, options(groups=f"{kind}:parts"), RUN)
        for maps, groups, pooled in zip(merged, weights, read_maps(folder, data), strict=True):
            expected, _ = pool_by_loops(maps[None], groups, groups, np.ones((1, len(maps[0]))))
            np.testing.assert_allclose(pooled, expected[0], rtol=0, atol=2 * LIMIT)
            sums = pooled.sum(-1)
            np.testing.assert_allclose(sums[sums > 0], 1.0, rtol=0, atol=LIMIT)
    assert recheck_records(folder, teacher, data).records == 8


def test_patches_are_pooled_and_told_apart(teacher: Path, tmp_path: Path) -> None:
    """Records get smaller by the square; of other groups a cache is another job, and its samples have other keys."""
    inputs = vector_samples(COUNT, 17, least=17)
    precompute(teacher, inputs, tmp_path / "whole", OPTIONS(), RUN)
    pooled = OPTIONS(groups="patches:4x4:2x2:1")
    precompute(teacher, inputs, tmp_path / "pooled", pooled, RUN)
    groups = patch_groups((4, 4), (2, 2), extra=1)
    for maps, small in zip(
        read_maps(tmp_path / "whole", inputs), read_maps(tmp_path / "pooled", inputs), strict=True
    ):
        expected, _ = pool_by_loops(maps[None], groups, groups, np.ones((1, 17)))
        np.testing.assert_allclose(small, expected[0], rtol=0, atol=2 * LIMIT)
    assert recheck_records(tmp_path / "pooled", teacher, inputs).records == 8
    shards = [(tmp_path / name).rglob("*.safetensors") for name in ("whole", "pooled")]
    whole, small_size = (sum(path.stat().st_size for path in paths) for paths in shards)
    assert whole > 3 * small_size
    assert precompute(teacher, inputs, tmp_path / "pooled", pooled, RUN).resumed == COUNT
    for other in (OPTIONS(), OPTIONS(groups="patches:4x4:4x1:1")):
        with refusal("cache-mismatch", "groups"):
            precompute(teacher, inputs, tmp_path / "pooled", other, RUN)
    keys = []
    for number, ids in enumerate(([0, 0, 1] * 5 + [2, 2], [0, 1, 1] * 5 + [2, 2])):
        data = inputs | {"parts": np.tile(ids, (COUNT, 1))}
        precompute(teacher, data, tmp_path / f"ids{number}", OPTIONS(groups="ids:parts"), RUN)
        keys.append(set(CacheReader(tmp_path / f"ids{number}")))
    assert not keys[0] & keys[1]


@pytest.mark.parametrize(
    ("code", "message", "options", "column"),
    [
        ("argument-value", "groups must be patches:14x14:7x7", {"groups": "patches:4x4"}, None),
        ("argument-value", "as many axes", {"groups": "patches:4x4:2"}, None),
        ("argument-value", "form must be left out", {"groups": "ids:parts", "form": "factored"}, None),
        ("argument-value", "hidden must be left out", {"groups": "ids:parts", "hidden": (0,)}, None),
        (
            "argument-shape",
            "a place for each token .* got 16 tokens: count those",
            {"groups": "patches:4x4:2x2"},
            None,
        ),
        ("inputs-invalid", "missing other", {"groups": "ids:other"}, None),
        ("inputs-invalid", "parts must be int64", {"groups": "ids:parts"}, np.ones((2, 9))),
        ("inputs-invalid", "a group for each of 9 tokens", {"groups": "ids:parts"}, np.ones((2, 8), int)),
        ("inputs-invalid", "1000001 groups", {"groups": "ids:parts"}, np.full((2, 9), 10**6)),
        ("inputs-invalid", "weights of at least 0", {"groups": "weights:parts"}, -np.ones((2, 9, 2), int)),
    ],
)
def test_refusals(teacher: Path, tmp_path: Path, code: str, message: str, options: Any, column: Any) -> None:
    data = vector_samples(2, LENGTH, least=LENGTH)
    data["parts"] = np.zeros((2, LENGTH), int) if column is None else column
    with refusal(code, message):
        precompute(teacher, data, tmp_path / "cache", PrecomputeOptions(num_student_heads=2, **options), RUN)


def test_maps_of_tiles_are_not_pooled(teacher: Path, tmp_path: Path) -> None:
    with refusal("argument-value", "tile must be 0, or left out, where maps are pooled"):
        run = RunOptions(mask="mask", tile=4)
        precompute(teacher, vector_samples(2, 17), tmp_path / "a", OPTIONS(groups="patches:4x4:2x2:1"), run)


def test_logits_of_positions_are_not_stored_beside_pooled_maps(tmp_path: Path) -> None:
    data = token_samples(2, LENGTH, least=LENGTH) | {"parts": np.zeros((2, LENGTH), int)}
    options = PrecomputeOptions(num_student_heads=2, logits="topk", logits_top=4, groups="ids:parts")
    with refusal("argument-value", "groups must be left out where rows of positions are stored; got logits"):
        precompute(saved(language_model(), tmp_path), data, tmp_path / "cache", options)
