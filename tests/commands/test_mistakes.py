"""Typical mistakes at the terminal: one message that names the option, and what mends it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="shd needs the extra 'teacher'")
pytest.importorskip("cyclopts", reason="the commands need cyclopts")
pytest.importorskip("onnxruntime", reason="shd needs the extra 'teacher'")

from support.attention_graphs import token_teacher  # noqa: E402  (after the skips)
from support.commands import invoke  # noqa: E402

from shd_ref import ShdError  # noqa: E402  (after the skips)
from shd_ref.cache import CacheReader  # noqa: E402
from shd_ref.cli import load_app  # noqa: E402
from shd_ref.commands.program import COMMANDS, Program  # noqa: E402

SHD = load_app()


def run(app: Any, *words: str, code: int | None = None) -> str:
    result = invoke(app, words, columns=80)
    assert result.exit_code in ((1, 2) if code is None else (code,)), result.output
    return " ".join(str(result.output).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    onnx.save(token_teacher(), folder / "t.onnx")
    rng = np.random.default_rng(0)
    ones = np.ones((4, 6), np.int64)
    np.savez(folder / "d.npz", input_ids=rng.integers(0, 50, (4, 6)), attention_mask=ones)
    np.savez(folder / "foreign.npz", input_ids=rng.integers(5000, 6000, (4, 6)), attention_mask=ones)
    np.savez(folder / "image.npz", image=np.zeros((4, 1, 8, 8), np.float32))
    (folder / "lines.jsonl").write_text(json.dumps({"content": "a b"}) + "\n")
    (folder / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    (folder / "file").write_text("dear")
    return folder


PRECOMPUTE = "precompute t.onnx --student-heads 2 --out new --inputs"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{PRECOMPUTE} gone.npz", "--inputs must exist; got gone.npz"),
        ("precompute gone.onnx --student-heads 2 --out new --inputs d.npz", "shd-torch export FOLDER --out"),
        (f"{PRECOMPUTE} latin.jsonl --tokenizer gone", "line 1 must be JSON in UTF-8"),
        (f"{PRECOMPUTE} file", "--inputs must be a folder or end in one of .npz"),
        (f"{PRECOMPUTE} image.npz", "missing attention_mask, input_ids, found image"),
        (f"{PRECOMPUTE} foreign.npz", "take the teacher's own tokenizer (--tokenizer)"),
        (f"{PRECOMPUTE} lines.jsonl --tokenizer gone", "--text-column must be one of content"),
        (f"{PRECOMPUTE} lines.jsonl --text-column content --tokenizer gone", "--tokenizer gone must be a readable"),
        (f"{PRECOMPUTE} d.npz --layer-pairs 0:9", "--layer-pairs must lie in 0..0 and"),
        (f"{PRECOMPUTE} d.npz --out file", "must be a folder; it is a file: name another --out"),
        ("plan t.onnx --inputs d.npz --student-heads 99", "--student-heads must be at most num_teacher_heads"),
        (f"{PRECOMPUTE} lines.jsonl --text-column content --tokenizer .", ".save_pretrained(FOLDER) of transformers"),
        ("compress t.onnx --faster 2", "compress is a command of shd-torch: shd-torch compress t.onnx --faster 2"),
        ("verify gone --teacher gone.onnx --inputs d.npz", "--teacher must be a file; got gone.onnx"),
        ("verify gone --teacher t.onnx --inputs gone.npz", "--inputs must exist; got gone.npz"),
    ],
)
def test_the_option_that_mends_it_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(folder)
    assert said in run(SHD, *words.split())
    assert not Path("new").exists()


NO_ROOM = ShdError("write-failed", "no room")
NO_ROOM.__cause__ = OSError("no room")


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (NO_ROOM, 1)])
def test_a_command_that_stops_says_what_the_same_command_does(error: BaseException, code: int) -> None:
    def work() -> None:
        raise error

    for options, said in (({}, "the same command starts over"), ({"after": "it resumes"}, "it resumes")):
        program = Program("mill", "Grind.")
        program.add(work, **options)
        assert run(program, "work", code=code).endswith(said)


EARLY = [
    ("shrink model --out new --data d.npz", "one of --heads, --layers, --hidden"),
    ("shrink model --out new --heads 2 --data file", "--data must be a folder or end in one of .npz, "),
    ("shrink model --out new --heads 2 --data gone.npz", "--data must exist; got gone.npz"),
    (
        "shrink model --out new --heads 2 --data lines.jsonl",
        "--data must hold texts in a column text, or arrays of the model's inputs; got the columns content",
    ),
    ("shrink model --out new --heads 9 --data d.npz", "--heads must lie in 1..4, the teacher's; got 9"),
    ("shrink model --out model --heads 2 --data d.npz", "--out must be a new or empty folder"),
    ("shrink pickled --out new --heads 2 --data d.npz", "python -c 'from transformers import BertModel as M; f ="),
    ("compress model --out new --faster 4 --data gone.jsonl", "--data must exist; got gone.jsonl"),
    ("compress model --out new --faster 4 --data gone.csv", 'write a line {"text": ...} for each text into a .jsonl'),
    ("compress model --out new --faster 4 --data lines.jsonl", "got the columns content of lines.jsonl"),
    ("compress model --out new --faster 4 --data texts.jsonl", ".save_pretrained(FOLDER) of transformers writes it"),
    ("compress model --out new --faster 4 --data d.npz --held-out gone.npz", "--held-out must exist; got gone.npz"),
    ("compress model --out new --faster 0.5 --data d.npz", "--faster must be a finite number above 1; got 0.5"),
    ("compress model --out new --faster 4 --ms 3 --data d.npz", "--faster, --ms and --mb must not be mixed"),
    ("compress model --out new --data d.npz", "--faster, --ms, --mb or --at-least must be given"),
    ("compress model --out model --faster 4 --data d.npz", "--out must be a new or empty folder"),
    ("export d.npz --out x.onnx", "got 'd.npz', which is no folder"),
    ("export empty --out x.onnx", "which has no config.json"),
    ("export model --out empty", "--out must be a file, such as teacher.onnx"),
    ("export model --out x.onnx --student --int8 --data gone.npz", "--data must exist; got gone.npz"),
    ("doctor gone.onnx model", "teacher must be a Hugging Face folder or hub id"),
    ("doctor model ./gone", "student must be a folder that save_pretrained wrote"),
    (
        "doctor model model --data lines.jsonl",
        "--data must hold texts in a column text, or arrays of the model's inputs; got the columns content",
    ),
    ("doctor model model --probe 9", "--probe must go with --data"),
    ("time gone.onnx", "gone.onnx must be an .onnx file"),
    ("precompute t.onnx --out c", "precompute is a command of shd: shd precompute t.onnx --out c"),
]
"""Commands of shd-torch with a mistake, and their messages."""


def test_mistakes_of_shd_torch_are_found_before_pytorch_is_imported(folder: Path) -> None:
    """The import takes seconds of processor time."""
    pytest.importorskip("torch", reason="shd-torch needs PyTorch")
    pytest.importorskip("transformers", reason="the commands load Hugging Face models")
    for name in ("model", "pickled", "empty"):
        (folder / name).mkdir()
    config = json.dumps({"model_type": "bert", "architectures": ["BertModel"], "num_attention_heads": 4})
    for name, weights in (("model", "model.safetensors"), ("pickled", "pytorch_model.bin")):
        (folder / name / "config.json").write_text(config)
        (folder / name / weights).touch()
    (folder / "texts.jsonl").write_text('{"text": "a"}\n')
    code = f"""
import json, sys
from support.commands import invoke
from shd_torch.cli import load_app
said = [invoke(load_app(), line.split(), columns=80) for line in {[words for words, _ in EARLY]!r}]
print(json.dumps([said, sorted({{"torch", "transformers"}} & set(sys.modules))]))
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    answers, imported = json.loads(done.stdout)
    for (words, expected), (status, said, _) in zip(EARLY, answers, strict=True):
        assert status, words
        assert expected in " ".join(said.replace("│", " ").split()), words
    assert imported == []


def test_programs_know_each_others_commands() -> None:
    pytest.importorskip("torch", reason="shd-torch needs PyTorch")
    from shd_torch.cli import load_app as load_shd_torch

    for program, app in (("shd", SHD), ("shd-torch", load_shd_torch())):
        assert set(app.app) - {"--help", "--version", "--install-completion"} == set(COMMANDS[program])


def test_a_student_of_any_folder_sets_heads_and_layers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    student = tmp_path / "student"
    student.mkdir()
    words = ("precompute", "t.onnx", "--inputs", "d.npz", "--student", str(student), "--out", str(tmp_path / "cache"))
    config = {"model_type": "gpt2", "n_head": 2, "n_layer": 1}
    for given, said in (
        ({}, "give --student-heads and --student-layers instead"),
        (config | {"is_encoder_decoder": True}, "give --student-heads and --student-layers instead"),
    ):
        (student / "config.json").write_text(json.dumps(given))
        assert said in run(SHD, *words)
    (student / "config.json").write_text(json.dumps(config))
    assert "--student-heads must not be given with --student" in run(SHD, *words, "--student-heads", "2")
    run(SHD, *words, code=0)
    form = CacheReader(tmp_path / "cache").manifest.attention
    assert (form.num_student_heads, form.num_student_layers) == (2, 1)


def test_samples_that_a_model_does_not_take_are_named(folder: Path, tmp_path: Path) -> None:
    """Some models give an AttributeError where an input is missing."""
    pytest.importorskip("torch", reason="shd-torch needs PyTorch")
    pytest.importorskip("transformers", reason="the commands load Hugging Face models")
    from support.binding.models import hf_model

    from shd_torch.cli import load_app as load_shd_torch

    hf_model("vit").save_pretrained(tmp_path / "vit")
    words = ("shrink", str(tmp_path / "vit"), "--heads", "2", "--out", str(tmp_path / "student"))
    said = run(load_shd_torch(), *words, "--data", str(folder / "image.npz"))
    assert "--data must hold inputs that ViT" in said
