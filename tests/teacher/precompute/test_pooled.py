"""Caches for a student with fewer tokens: maps pooled in the graph, identified by their groups."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.attention_graphs import encoder_layer, saved, vector_samples
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
