"""``shd-torch shrink``, as a user types it."""

import io
import json
import re
import shlex
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cyclopts", reason="the commands need cyclopts")

from support.binding.sentences import TEXTS, write_encoder
from support.commands import invoke
from support.refusals import refusal
from support.shrink.models import make_data, make_teacher

from shd_torch.cli import load_app
from shd_torch.shrink_command import following_commands, read_inputs


def run(*words: object, code: int = 0) -> str:
    result = invoke(load_app(), ["shrink", *words])
    assert result.exit_code == code, result.output
    return result.output


def test_a_folder_in_and_a_folder_out(tmp_path: Path) -> None:
    import transformers

    make_teacher("llama").float().save_pretrained(tmp_path / "teacher")
    np.savez(tmp_path / "data.npz", **{name: part.numpy() for name, part in make_data("llama", samples=9).items()})
    words = [tmp_path / "teacher", "--data", tmp_path / "data.npz", "--out", tmp_path / "student"]
    output = run(*words, "--heads", 2, "--layers", "0,2", "--hidden", 20, "--samples", 8)
    assert "heads: 4 -> 2" in output
    assert "hidden: 24 -> 20" in output
    assert len(re.findall("layer . of 2", output)) == 2
    report = json.loads((tmp_path / "student" / "shrink.json").read_text(encoding="utf-8"))
    assert (report["layer_map"], report["calibration_rows"]) == ([[0, 0], [1, 2]], 8 * 9 - 2)
    student = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert sum(part.numel() for part in student.parameters()) == report["student"]["parameters"]
    assert "matrices stay in closed form; more --samples may help" in output
    assert f"next: shd-torch export {tmp_path / 'teacher'} --out teacher.onnx\n" in output
    assert (
        f"next: shd precompute teacher.onnx --inputs {tmp_path / 'data.npz'} --student {tmp_path / 'student'} "
        in output
    )
    assert "write-failed" in run(*words, "--heads", 2, code=1)
    words[-1] = tmp_path / "other"
    assert "rows of data" not in run(*words, "--heads", 2, "--no-align")
    assert "--ridge must be a finite number" in run(
        *words[:-1], tmp_path / "more", "--heads", 2, "--ridge=-1", code=1
    )


def test_what_follows_a_sentence_encoder_are_its_embeddings(tmp_path: Path) -> None:
    teacher = write_encoder(tmp_path / "teacher")
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    words = [teacher, "--data", tmp_path / "texts.jsonl", "--layers", 1, "--no-align", "--out"]
    encode = f"--tokenizer {teacher} --embeddings {teacher} --no-attention --out cache\n"
    assert encode in run(*words, tmp_path / "student")
    (teacher / "1_Pooling/config.json").write_text('{"pooling_mode": "weightedmean"}')
    assert f"--student {tmp_path / 'other'} --out cache\n" in run(*words, tmp_path / "other")


def test_dropped_layers(tmp_path: Path) -> None:
    make_teacher("bert").float().save_pretrained(tmp_path / "teacher")
    np.save(tmp_path / "ids.npy", make_data("bert")["input_ids"].numpy())
    words = [tmp_path / "teacher", "--data", tmp_path / "ids.npy", "--out", tmp_path / "student"]
    assert "--drop-attention must be numbers" in run(*words, "--drop-attention", "half", code=1)
    assert "--layers must be" in run(*words, "--layers", "half", code=1)
    assert "one of --heads, --layers" in run(*words, "--plan", "balanced", code=1)
    assert "layers-invalid" in run(*words, "--drop-attention", 3, code=1)
    assert "load_student" in run(*words, "--heads", 2, "--drop-attention", 1, "--drop-activations", "0,2")
    report = json.loads((tmp_path / "student" / "shrink.json").read_text(encoding="utf-8"))
    assert [layer["case"] == "dropped" for layer in report["layers"]] == [False, True, False]
    assert [layer.get("ffn") for layer in report["layers"]] == ["linear", None, "linear"]


def test_next_lines_follow_the_student(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No logits of a student without a head, whole rows of a classifier, and a file that shd can read."""
    import transformers

    monkeypatch.chdir(tmp_path)
    student, ids = make_teacher("bert"), np.full((3, 5), 4)
    np.save("ids.npy", ids)
    for kind, logits in (
        (transformers.BertForMaskedLM, " --logits topk"),
        (transformers.BertForSequenceClassification, " --logits float16"),
        (transformers.BertModel, ""),
    ):
        folders = Path("teacher"), Path("ids.npy"), Path("student")
        made = following_commands(*folders, kind(student.config), {"input_ids": ids})
        assert made[0] == "shd-torch export teacher --out teacher.onnx"
        assert made[2] == f"shd precompute teacher.onnx --inputs ids.npz --student student{logits} --out cache"
        # With heads by layer there are no maps to store.
        others = following_commands(*folders, kind(student.config), {"input_ids": ids}, has_equal_layers=False)
        command = f"shd precompute teacher.onnx --inputs ids.npz --no-attention{logits} --out cache"
        assert others[2:] == ([command] if logits else [])
        program, option, code = shlex.split(made[1])
        assert (program, option) == ("python", "-c")
        exec(code, {})
        with np.load("ids.npz") as arrays:
            assert {name: arrays[name].tolist() for name in arrays.files} == {
                "input_ids": ids.tolist(),
                "attention_mask": np.ones((3, 5)).tolist(),
            }


def header(shape: tuple[int, ...]) -> bytes:
    """Of a .npy file whose values are missing."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<i8", "fortran_order": False, "shape": shape})
    return stream.getvalue()


def test_data_files(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.ones((3, 5), dtype=np.uint16))
    assert read_inputs(tmp_path / "ids.npy", 9)["input_ids"].dtype == np.int64
    np.save(tmp_path / "pixels.npy", np.ones((3, 2, 4, 4), dtype=np.float32))
    assert list(read_inputs(tmp_path / "pixels.npy", 9)) == ["pixel_values"]
    np.savez_compressed(tmp_path / "masked.npz", input_ids=np.ones((3, 5), int), attention_mask=np.ones((3, 5), bool))
    masked = read_inputs(tmp_path / "masked.npz", 2)
    assert {name: (part.shape, str(part.dtype)) for name, part in masked.items()} == dict.fromkeys(
        ("input_ids", "attention_mask"), ((2, 5), "int64")
    )
    np.savez(tmp_path / "prices.npz", input_ids=np.ones((3, 5), dtype=int), price=np.ones(3))
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("no array")
    with zipfile.ZipFile(tmp_path / "false.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("input_ids.npy", header((10**9, 10**3)))
    (tmp_path / "false.npy").write_bytes(header((10**9, 10**3)))
    for name in ("prices.npz", "pickled.npy", "text.npy", "none.npy", "false.npy", "false.npz", "none.npz"):
        with refusal("inputs-invalid"):
            read_inputs(tmp_path / name, 9)
