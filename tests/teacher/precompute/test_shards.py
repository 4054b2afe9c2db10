"""One job divided among processes: whoever makes which shards, the cache is the same."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.attention_graphs import saved, token_samples, token_teacher
from support.commands import shd
from support.makers import contents
from support.started_processes import start_command

from shd_ref.cache import list_cache, merge_caches, verify_cache
from shd_ref.teacher import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.run.inputs import share_shards

NUM_SAMPLES = 41
OPTIONS = PrecomputeOptions(num_student_heads=2)
make_tokens = partial(token_samples, NUM_SAMPLES, 10, seed=3)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(token_teacher(), tmp_path_factory.mktemp("teacher"))


@pytest.mark.parametrize(("apart", "per_shard"), [(False, 3), (True, 10)], ids=["one folder", "a folder each"])
def test_parts_give_the_bytes_of_a_single_run(teacher: Path, tmp_path: Path, per_shard: int, apart: bool) -> None:
    """Also where one batch holds samples of shards that different processes write."""
    whole, parts = tmp_path / "whole", 3
    precompute(teacher, make_tokens(), whole, OPTIONS, RunOptions(batch_size=4, samples_per_shard=per_shard))
    num_shards = -(-NUM_SAMPLES // per_shard)
    folders = [tmp_path / (f"part-{part}" if apart else "shared") for part in range(parts)]
    left = num_shards
    for part in (2, 0, 1):
        run = RunOptions(batch_size=4, samples_per_shard=per_shard, shards=(part, parts))
        summary = precompute(teacher, make_tokens(), folders[part], OPTIONS, run)
        left = (num_shards if apart else left) - len(share_shards(num_shards, part, parts))
        assert summary.missing_shards == left
        assert summary.resumed == 0
        assert 0 < summary.written < NUM_SAMPLES
        assert list_cache(folders[part]).sealed == (left == 0)
    if apart:
        merge_caches(folders, tmp_path / "merged")
    assert contents(tmp_path / ("merged" if apart else "shared")) == contents(whole)


def test_each_of_two_at_once_says_what_it_wrote(teacher: Path, tmp_path: Path) -> None:
    run, inner = RunOptions(samples_per_shard=3, batch_size=3, num_threads=1), []

    def race(done: int, _total: int, _size: int) -> None:
        if done > 20 and not inner:
            inner.append(precompute(teacher, make_tokens(), tmp_path, OPTIONS, run))

    outer = precompute(teacher, make_tokens(), tmp_path, OPTIONS, run, on_progress=race)
    assert 0 < outer.written < NUM_SAMPLES
    assert (outer.resumed, outer.written_by_others) == (0, inner[0].written)
    assert (inner[0].resumed, inner[0].written_by_others) == (outer.written, 0)
    assert outer.written + inner[0].written == NUM_SAMPLES


@pytest.mark.slow
def test_processes_begin_one_folder_at_once(teacher: Path, tmp_path: Path) -> None:
    """They race for the manifest, for temporary files of each other, and for the seal."""
    np.savez(tmp_path / "data.npz", **make_tokens())
    arguments = [str(teacher), "--inputs", str(tmp_path / "data.npz"), "--student-heads", "2"]
    arguments += ["--samples-per-shard", "3", "--out", str(tmp_path / "cache")]
    processes = [start_command(["precompute", *arguments, "--shards", f"{part}/3"]) for part in range(3)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 3
    assert verify_cache(tmp_path / "cache").ok


def test_commands(teacher: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **make_tokens())
    job: list[str | Path] = ["precompute", teacher, "--inputs", tmp_path / "data.npz", "--student-heads", "2"]
    job += ["--samples-per-shard", "3"]
    parts = [tmp_path / "a", tmp_path / "b"]
    output = shd(*job, "--out", parts[0], "--shards", "0/2")
    assert "7 shards are left to other processes" in output
    assert "shd merge" in output
    listed = shd("ls", parts[0])
    assert "partial" in listed
    assert "7 of 14, missing 7-13" in listed
    assert "the other parts have them: merge them with shd merge" in " ".join(listed.replace("│ ", "").split())
    assert f"shd ls {parts[0]} lists the missing shards" in " ".join(shd("verify", parts[0], code=1).split())
    assert "missing 7-13: write them, then merge again" in shd("merge", parts[0], "--out", tmp_path / "all")
    shd(*job, "--out", parts[1], "--shards", "1/2")
    assert "7 shards copied" in shd("merge", *parts, "--out", tmp_path / "all")
    found = json.loads(shd("ls", tmp_path / "all", "--json"))
    assert (found["sealed"], found["shards"]) == (True, {"total": 14, "written": 14, "missing": []})
    assert found["samples"]["written"] == NUM_SAMPLES
    (tmp_path / "all/SEALED.json").unlink()
    assert "the same shd precompute, or shd merge, marks it as complete" in shd("ls", tmp_path / "all")
    assert "sealed" in shd("merge", *parts, "--out", tmp_path / "all")
    assert verify_cache(tmp_path / "all").ok
    (tmp_path / "all/receipts/000003.json").write_text("{}")
    assert "damaged: receipts/000003.json" in shd("ls", tmp_path / "all", code=1)
    assert "is not a cache" in shd("ls", tmp_path / "nothing", code=1)
    assert "--workers must go with --engine ray" in shd(*job, "--out", tmp_path / "c", "--workers", "2", code=1)
    assert not (tmp_path / "c").exists()
    assert "must be i/n with 0 <= i < n" in shd(*job, "--out", tmp_path / "c", "--shards", "2/2", code=1)
