"""Exported tar files hold what the reader decodes, and are read without our code."""

from __future__ import annotations

import gc
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.calls import run_killed
from support.faults import file_size_limit
from support.makers import ALONE, FORMS, contents, job, write_cache, write_shards
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import Attention, CacheReader, CacheWriter, SampleInputs, export_webdataset

JOBS = {
    "plain": job(),
    "causal rows in u4": job(codec="u4", support="causal", alpha_per="row"),
    "classes and hidden states": job(**FORMS["topk"]),
    "classes of five bits": job(**FORMS["narrow"], compression="zstd"),
    "all logits": job(**FORMS["float16"]),
    "without attention": job(**ALONE["topk"]),
    "skipped, with seeds": job(on_error="skip", inputs=SampleInputs(("input_ids",), None, "seed")),
}

ATTENTION = {"alphas.npy", "mixing.npy", "L01.npy", "L02.npy"}


def read_tars(folder: Path) -> dict[str, dict[str, Any]]:
    """Samples by the name before the first dot, as any reader of WebDataset groups them."""
    samples: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                name, _, kind = member.name.partition(".")
                file = tar.extractfile(member)
                assert file is not None
                data = file.read()
                value = json.loads(data) if kind == "json" else np.load(io.BytesIO(data), allow_pickle=False)
                samples.setdefault(name, {})[kind] = value
    return samples


@pytest.mark.parametrize("name", JOBS)
def test_samples_are_what_the_reader_decodes(tmp_path: Path, name: str) -> None:
    cache = write_cache(tmp_path / "cache", JOBS[name])
    seen: list[tuple[int, int]] = []
    summary = export_webdataset(cache, tmp_path / "out", on_progress=lambda *step: seen.append(step))
    reader = CacheReader(cache)
    samples = read_tars(tmp_path / "out")
    assert len(samples) == len(reader) == summary.samples
    assert (summary.written, summary.present, seen[-1]) == (4, 0, (4, 4))
    assert [sample["json"]["key"] for sample in samples.values()] == reader.keys()
    for title, sample in samples.items():
        record = reader.read(sample["json"]["key"])
        assert title == f"{record.index:08d}-{record.key}"
        assert sample["json"] == {
            "index": record.index,
            "key": record.key,
            "length": record.length,
            "seed": record.seed,
        }
        forms = [form for form in (reader.manifest.logits, reader.manifest.hidden) if form is not None]
        rows = {f"{name}.npy": array for form in forms for name, array in form.arrays(record)}
        layers = [] if reader.manifest.find(Attention) is None else reader.manifest.attention.student_layers
        assert sample.keys() == {"json", *rows} | (ATTENTION if layers else set())
        for kind, array in rows.items():
            assert sample[kind].dtype == (np.int32 if kind == "logits_ids.npy" else np.float32)
            np.testing.assert_array_equal(sample[kind], array)
        if layers:
            np.testing.assert_array_equal(sample["alphas.npy"], record.parts["alphas"])
            np.testing.assert_array_equal(sample["mixing.npy"], record.parts["mixing"])
        for layer in layers:
            maps = sample[f"L{layer:02d}.npy"]
            assert maps.dtype == np.float32
            np.testing.assert_array_equal(maps, reader.decode(record, layer))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_webdataset_package_reads_them(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="the package webdataset is not installed")
    cache = write_cache(tmp_path / "cache", job())
    export_webdataset(cache, tmp_path / "out")
    tars = [str(path) for path in sorted((tmp_path / "out").glob("*.tar"))]
    samples = list(webdataset.WebDataset(tars, shardshuffle=False).decode())
    gc.collect()  # the package leaves its files to the collector: here, where that is no warning
    reader = CacheReader(cache)
    assert [sample["json"]["key"] for sample in samples] == reader.keys()
    for sample in samples:
        # The package takes what follows the first dot for the kind, in lower case.
        record = reader.read(sample["json"]["key"])
        np.testing.assert_array_equal(sample["l01.npy"], reader.decode(record, 1))


def test_a_killed_export_goes_on_and_leaves_nothing(tmp_path: Path) -> None:
    cache, out = write_cache(tmp_path / "cache", job()), tmp_path / "out"
    export_webdataset(cache, tmp_path / "whole")
    # The manifest complete, at its place; a tar begun, complete, at its place; all done.
    moments = [("put", 1), ("sync", 2), ("_add_record", 2), ("sync", 3), ("sync", 4), ("DraftFolder.clear", 2)]
    for name, calls in moments:
        assert run_killed(lambda: export_webdataset(cache, out), name, calls), (name, calls)
        assert (out / ".export.part").exists()
    assert export_webdataset(cache, out).present
    assert contents(out) == contents(tmp_path / "whole")


def test_a_tar_that_is_not_whole_is_written_again(tmp_path: Path) -> None:
    cache, out = write_cache(tmp_path / "cache", job()), tmp_path / "out"
    export_webdataset(cache, out)
    whole, path = contents(out), out / "000001.tar"
    assert whole["manifest.json"] == (cache / "manifest.json").read_bytes()
    data = path.read_bytes()
    for damaged in (b"", data[:-1], data[:512], data[: len(data) // 2], data + bytes(512), whole["000002.tar"]):
        path.write_bytes(damaged)
        assert export_webdataset(cache, out).written == 1
        assert contents(out) == whole


def test_of_two_exports_at_a_time_one_is_refused(tmp_path: Path) -> None:
    cache, out = write_cache(tmp_path / "cache", job()), tmp_path / "out"

    def begin_another(done: int, _: int) -> None:
        with pytest.raises(ShdError, match="another run is at work"):
            export_webdataset(cache, out)

    assert export_webdataset(cache, out, on_progress=begin_another).written == 4


@pytest.mark.parametrize("size", [0, 1000, 4000])
def test_a_full_disk_leaves_nothing_that_looks_whole(tmp_path: Path, size: int) -> None:
    cache, out = write_cache(tmp_path / "cache", job()), tmp_path / "out"
    with pytest.raises(ShdError) as caught, file_size_limit(size):
        export_webdataset(cache, out)
    assert caught.value.code == "write-failed"
    assert not list(out.glob("*.tar"))
    export_webdataset(cache, out)
    export_webdataset(cache, tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


def test_what_is_not_exported(tmp_path: Path) -> None:
    write_shards(CacheWriter(tmp_path / "partial", job()), [0])
    cases = [("cache-incomplete", tmp_path / "partial", tmp_path / "out")]
    cache = write_cache(tmp_path / "cache", job())
    other = write_cache(tmp_path / "other", job(temperature=2.0))
    export_webdataset(other, tmp_path / "taken")
    cases.append(("cache-mismatch", cache, tmp_path / "taken"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("dear")
    cases.append(("cache-exists", cache, tmp_path / "full"))
    for code, source, out in cases:
        with refusal(code):
            export_webdataset(source, out)
    assert not (tmp_path / "out").exists()
    data = bytearray((cache / "shards/01/000001.safetensors").read_bytes())
    data[-3] ^= 1
    (cache / "shards/01/000001.safetensors").write_bytes(data)
    with refusal("cache-corrupt", r"000001\.safetensors"):
        export_webdataset(cache, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000000.tar", "manifest.json"]
