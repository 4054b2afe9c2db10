from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.makers import MEASURED, contents, job, key_of, length_of, record_of, write_cache, write_shards
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import CacheReader, CacheWriter, Dataset, ShardPlan, Skipped, dataset_fingerprint, verify_cache


@pytest.mark.parametrize("samples_per_shard", [1, 2])
def test_skipped_samples_are_named_and_never_made_up(tmp_path: Path, samples_per_shard: int) -> None:
    manifest = job(samples_per_shard=samples_per_shard, on_error="skip")
    reader = CacheReader(write_cache(tmp_path, manifest))
    assert verify_cache(tmp_path).ok
    assert len(reader) == 5
    assert set(reader.skipped) == {key_of(1), key_of(4)}
    for index in (1, 4):
        assert key_of(index) not in reader
        with refusal("sample-missing", f"skipped, as head {index} gave NaN"):
            reader.read(key_of(index))
    skipped = [Skipped(index, key_of(index), "") for index in job().shard_samples(0)]
    with pytest.raises(ShdError, match="must be empty where on_error is 'stop'"):
        CacheWriter(tmp_path / "other", job()).write_shard(0, [], MEASURED, skipped)


def test_padding_is_cut_off(tmp_path: Path) -> None:
    manifest = job(num_samples=2, samples_per_shard=2)
    padded = []
    for index in (0, 1):
        record, length = record_of(manifest, index), length_of(index)
        parts = {name: np.pad(record.parts[name], ((0, 0), (0, 3), (0, 3))) for name in ("L01", "L02")}
        for array in parts.values():
            array[:, length:, 0] = 77  # padding rows may hold anything
        padded.append(replace(record, parts={**record.parts, **parts}))
    CacheWriter(tmp_path / "padded", manifest).write_shard(0, padded, MEASURED)
    write_shards(CacheWriter(tmp_path / "cut", manifest), [0])
    assert contents(tmp_path / "padded") == contents(tmp_path / "cut")


def test_alphas_and_mixing_may_be_absent(tmp_path: Path) -> None:
    manifest = job(strategy="mean")
    gone = {"alphas": None, "mixing": None}
    write_cache(tmp_path, manifest, lambda record: record_of(manifest, record.index, parts=gone))
    record = CacheReader(tmp_path).read(key_of(3))
    assert manifest.attention.alphas(record).shape == (2, 0)
    assert list(record.parts) == ["L01", "L02"]
    assert verify_cache(tmp_path).ok


def test_arrays_belong_to_the_caller(tmp_path: Path) -> None:
    reader = CacheReader(write_cache(tmp_path, job()))
    record = reader.read(key_of(4))
    record.parts["L01"][:] = 0
    record.parts["alphas"][:] = 0
    assert reader.read(key_of(4)).parts["L01"].any()


def test_equal_samples_share_a_key_and_the_first_is_read(tmp_path: Path) -> None:
    keys = [key_of(index % 3) for index in range(6)]
    manifest = job(dataset=Dataset(dataset_fingerprint(keys), 6), shards=ShardPlan(1, 17, 6))
    reader = CacheReader(write_cache(tmp_path, manifest, lambda record: replace(record, key=keys[record.index])))
    assert len(reader) == len(reader.keys()) == 6
    assert [reader.read(key).index for key in keys] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("framework", ["numpy", "pt"])
def test_shards_are_safetensors_files(tmp_path: Path, framework: str) -> None:
    safetensors = pytest.importorskip("safetensors")
    pytest.importorskip("torch" if framework == "pt" else "numpy")
    manifest = job(support="causal")
    reader = CacheReader(write_cache(tmp_path, manifest))
    for shard in range(4):
        with safetensors.safe_open(tmp_path / f"shards/{shard:02d}/{shard:06d}.safetensors", framework) as file:
            assert file.metadata() == {"format": "shd-cache-1", "manifest": manifest.id, "shard": str(shard)}
            names = {f"{index:08d}/{part}" for index in manifest.shard_samples(shard) for part in PARTS}
            assert set(file.keys()) == names
            for index in manifest.shard_samples(shard):
                record = reader.read(key_of(index))
                np.testing.assert_array_equal(file.get_tensor(f"{index:08d}/L02"), record.parts["L02"])
                np.testing.assert_array_equal(file.get_tensor(f"{index:08d}/alphas"), record.parts["alphas"])
                np.testing.assert_array_equal(file.get_tensor(f"{index:08d}/mixing"), record.parts["mixing"])


PARTS = ("alphas", "mixing", "L01", "L02")
