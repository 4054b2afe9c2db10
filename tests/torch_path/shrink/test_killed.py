"""A run that is killed goes on where it was, to the same bytes, and nothing is left beside the student."""

import fcntl
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="students are Hugging Face models: pip install '.[hf]' (in a checkout)")
pytest.importorskip("cyclopts", reason="the commands need cyclopts")

from safetensors.torch import load_file, save_file
from support.calls import run_killed
from support.faults import file_size_limit
from support.refusals import refusal
from support.shrink.models import make_data, make_teacher

from shd_ref import ShdError
from shd_torch.shrink import shrink
from shd_torch.shrink.unfinished import Unfinished, run_key

SIZES: dict[str, Any] = {"heads": 2, "hidden": 20, "batch_size": 4}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "teacher"
    make_teacher("llama").float().save_pretrained(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_killed_run_gives_the_undisturbed_bytes(teacher: Path, tmp_path: Path) -> None:
    data = make_data("llama")

    def run(out: Path, progress: Any = None) -> None:
        shrink(teacher, data, **SIZES, out=out, progress=progress)

    run(tmp_path / "whole")
    out = tmp_path / "student"
    killed = 0
    # Before a draft is on the disk, before its name is, within a layer, and while the student is written.
    syncs = [("sync", calls) for calls in (1, 3, 2, 6)]
    for name, calls in [*syncs, ("flock", 1), ("copy_readers", 1), ("put", 1)]:
        killed += run_killed(lambda: run(out), name, calls)
        assert not out.exists()
        assert [path.name for path in tmp_path.glob(".*")] == [".student.part"]
    assert killed == 7
    told: list[tuple[int, int, str]] = []
    run(out, lambda *step: told.append(step))
    assert told == [(2, 6, "axes found"), (5, 6, "layer 3/3 found"), (6, 6, "the folder is written")]
    assert contents(out) == contents(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "student"}


def test_a_kill_after_the_student_took_its_name(teacher: Path, tmp_path: Path) -> None:
    data, out = make_data("llama"), tmp_path / "student"
    assert run_killed(lambda: shrink(teacher, data, **SIZES, out=out), "DraftFolder.clear", 2)
    assert out.exists()
    with pytest.raises(ShdError, match="taken"):
        shrink(teacher, data, **SIZES, out=out)
    assert [path.name for path in tmp_path.iterdir()] == ["student"]


@pytest.mark.parametrize("left", [["lock", "layer-0.safetensors"], []], ids=len)
def test_a_kill_while_a_finished_run_is_cleared_away(tmp_path: Path, left: list[str]) -> None:
    """The lock goes last: at any moment what is left is known by it, or empty."""
    out, part = tmp_path / "student", tmp_path / ".student.part"
    for folder in (out, part):
        folder.mkdir()
    (out / "shrink.json").write_text("{}", encoding="utf-8")
    for name in left:
        (part / name).touch()
    with pytest.raises(ShdError, match="taken"):
        shrink(make_teacher("llama"), {}, out=out)
    assert [path.name for path in tmp_path.iterdir()] == ["student"]


def test_pieces_that_do_not_fit(teacher: Path, tmp_path: Path) -> None:
    data, out = make_data("llama"), tmp_path / "student"
    part = tmp_path / ".student.part"
    assert run_killed(lambda: shrink(teacher, data, **SIZES, out=out), "copy_readers", 1)
    for options, other in (({**SIZES, "ridge": 0.5}, "options"), (SIZES, "data")):
        with refusal("argument-value", f"same {other}"):
            shrink(teacher, data if other == "options" else make_data("llama", seed=2), **options, out=out)
    with pytest.raises(ShdError, match="same teacher"):
        shrink(make_teacher("llama", seed=1).float(), data, **SIZES, out=out)
    with (part / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ShdError, match="at work"):
            shrink(teacher, data, **SIZES, out=out)
    piece = load_file(part / "layer-0.safetensors")
    for damage in (piece | {"more": torch.zeros(1)}, {name: part[:1] for name, part in piece.items()}):
        save_file(damage, part / "layer-0.safetensors", {"notes": "{}"})
        with refusal("read-failed", "begins at its start"):
            shrink(teacher, data, **SIZES, out=out)
    (part / "layer-0.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ShdError, match="begins at its start"):
        shrink(teacher, data, **SIZES, out=out)
    assert not out.exists()


def test_a_flipped_bit_is_never_taken(tmp_path: Path) -> None:
    """In a piece or in a file that belongs to it: refused, or without effect."""
    with Unfinished(tmp_path / "run", {}) as keeper:
        graph = keeper.folder / "graphs" / "a.onnx"
        graph.parent.mkdir()
        graph.write_bytes(b"a graph")
        keeper.put("piece", {"a": torch.arange(6.0), "b": torch.ones(2, 2)}, {"value": 0.5}, "graphs/a.*")
        whole = keeper.require("piece")
        for path in (graph, keeper.folder / "piece.safetensors"):
            content = path.read_bytes()
            for at in range(len(content)):
                path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
                with suppress(ShdError):
                    found = keeper.require("piece")
                    assert path != graph
                    assert (found[1], found[0].keys()) == (whole[1], whole[0].keys())
                    assert all(torch.equal(tensor, whole[0][name]) for name, tensor in found[0].items())
            path.write_bytes(content)
        graph.unlink()
        with refusal("read-failed", "damaged files graphs"):
            keeper.get("piece")


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "parts/model-1.safetensors", "vocab.txt", "config.json"])
def test_the_key_covers_all_that_is_read_of_a_folder(tmp_path: Path, name: str) -> None:
    for file in (name, "config.json", "1_Pooling/config.json", "onnx/model.onnx", "notes.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"{}")
    weights = {"weight_map": {"a": "parts/model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(weights))
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    listed = [
        {"idx": at, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    before = run_key(tmp_path, {})
    for other in ("onnx/model.onnx", "notes.txt"):  # which nothing reads
        (tmp_path / other).write_bytes(b"other")
    assert run_key(tmp_path, {}) == before
    (tmp_path / name).write_bytes(b'{"a": 1}')
    assert run_key(tmp_path, {})["teacher"] != before["teacher"]


@pytest.mark.parametrize("size", [3_000, 12_000])
def test_a_full_disk_is_an_error_after_which_the_run_resumes(teacher: Path, tmp_path: Path, size: int) -> None:
    """Before the first piece is kept, and while the student is written."""
    data, out = make_data("llama"), tmp_path / "student"
    with refusal("write-failed", "make room"), file_size_limit(size):
        shrink(teacher, data, **SIZES, out=out)
    assert not out.exists()
    shrink(teacher, data, **SIZES, out=out)
    shrink(teacher, data, **SIZES, out=tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "student"}
