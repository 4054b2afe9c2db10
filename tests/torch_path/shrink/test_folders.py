"""The teacher's folder is read without trust; the student's appears whole or not at all."""

import json
import shlex
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="students are Hugging Face models: pip install '.[hf]' (in a checkout)")

from safetensors.torch import load_file, save_file
from support.refusals import refusal
from support.shrink.models import make_data, make_teacher

from shd_ref import ShdError
from shd_torch.doctor import diagnose
from shd_torch.export import load_hf_model
from shd_torch.shrink import load_teacher, shrink
from shd_torch.shrink.folders import find_folder, new_folder, save_student

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "teacher"
    make_teacher("llama").float().save_pretrained(folder)
    return folder


def configure(**entries: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))

    return edit


def cut_weights(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def drop_a_weight(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def name_files_elsewhere(folder: Path) -> None:
    names = list(load_file(folder / WEIGHTS))
    (folder / WEIGHTS).rename(folder.parent / "elsewhere.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../elsewhere.safetensors")}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def link_weights(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "elsewhere.safetensors")
    (folder / WEIGHTS).symlink_to("../elsewhere.safetensors")


def pickle_weights(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def add_an_adapter(folder: Path) -> None:
    about = {"peft_type": "LORA", "base_model_name_or_path": str(folder.parent / "other")}
    (folder / "adapter_config.json").write_text(json.dumps(about))


def test_pickled_weights_are_converted_by_the_command_that_is_named(teacher_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my 'own' teacher"
    shutil.copytree(teacher_folder, folder)
    pickle_weights(folder)
    with refusal("read-failed", "convert them with python -c") as caught:
        load_teacher(folder)
    command = shlex.split(str(caught.value).split("convert them with ")[1])
    assert command[:2] == ["python", "-c"]
    exec(command[2], {})  # here: another Python would import torch and transformers again
    assert load_teacher(folder)
    (folder / WEIGHTS).unlink()
    configure(architectures=["A; import os"])(folder)
    with refusal("read-failed", "from transformers import AutoModel as M"):  # nothing of the folder's own
        load_teacher(folder)


@pytest.mark.parametrize(
    ("edit", "code", "says"),
    [
        (shutil.rmtree, "read-failed", "which is no folder"),
        (cut_weights, "read-failed", "safetensors"),
        (drop_a_weight, "read-failed", "model.layers.1.mlp.up_proj.weight"),
        (configure(num_hidden_layers=4), "read-failed", "model.layers.3."),
        (configure(intermediate_size=21), "read-failed", "other sizes"),
        (configure(num_attention_heads="4"), "read-failed", "num_attention_heads"),
        (configure(architectures=-1), "read-failed", "architectures"),
        (configure(architectures=[["LlamaForCausalLM"]]), "read-failed", "architectures"),
        (name_files_elsewhere, "read-failed", "elsewhere"),
        (link_weights, "read-failed", "links"),
        (pickle_weights, "read-failed", "safetensors"),
        (add_an_adapter, "read-failed", "adapter"),
        (configure(model_type="mamba"), "shrink-unsupported", "'mamba'"),
        (configure(quantization_config={"quant_method": "bitsandbytes"}), "shrink-unsupported", "quantised"),
        (configure(model_type="own", auto_map={"AutoConfig": "own.Config"}), "read-failed", "custom code"),
    ],
)
def test_folders_that_cannot_be_trusted(
    edit: Callable[[Path], None], code: str, says: str, teacher_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(teacher_folder, folder)
    edit(folder)
    with refusal(code, says):
        load_teacher(folder)


def test_a_student_ends_its_texts_where_the_teacher_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    teacher = make_teacher("llama")
    for name, settings, wanted in (
        ("sound", {"eos_token_id": [2, 7]}, [2, 7]),
        ("contradicting", {"temperature": 0.5, "do_sample": False}, 2),  # transformers would not save it
    ):
        teacher.generation_config.update(**settings)
        shrink(teacher, make_data("llama"), layers=1, align=False, out=tmp_path / name)
        student = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert student.generation_config.eos_token_id == wanted


def test_the_tokenizer_goes_along(teacher_folder: Path, tmp_path: Path) -> None:
    """As it is; neither code, nor pickles, nor a configuration that names code."""
    folder, kept = (
        tmp_path / "teacher",
        {"tokenizer.json": "{}", "vocab.txt": "a b", "chat_template.jinja": "{{ a }}"},
    )
    shutil.copytree(teacher_folder, folder)
    left = {"tokenization_own.py": "code", "optimizer.bin": "pickle", "tokenizer_config.json": '{"auto_map": {}}'}
    for name, text in (kept | left).items():
        (folder / name).write_text(text)
    shrink(folder, make_data("llama"), layers=1, align=False, out=tmp_path / "student")
    found = {file.name: file for file in (tmp_path / "student").iterdir()}
    assert {name: found[name].read_text() for name in kept} == kept
    assert not found.keys() & left
    (folder / "vocab.txt").rename(tmp_path / "vocab.txt")
    (folder / "vocab.txt").symlink_to(tmp_path / "vocab.txt")
    with refusal("read-failed", "lies elsewhere"):
        shrink(folder, make_data("llama"), layers=1, align=False, out=tmp_path / "other")


def test_snapshots_of_the_hubs_cache_link_to_its_blobs(teacher_folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0a1b"
    shutil.copytree(teacher_folder, snapshot)
    (snapshot.parents[1] / "blobs").mkdir()
    (snapshot / WEIGHTS).rename(snapshot.parents[1] / "blobs" / "77")
    (snapshot / WEIGHTS).symlink_to("../../blobs/77")
    (snapshot.parents[1] / "blobs" / "78").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/78")
    assert load_teacher(snapshot).config.num_hidden_layers == 3
    shrink(snapshot, make_data("llama"), layers=1, align=False, out=tmp_path / "student")
    copied = tmp_path / "student" / "tokenizer.json"
    assert copied.read_text() == "{}"
    assert not copied.is_symlink()


@pytest.mark.parametrize("answers", [False, True], ids=["refused", "silent"])
def test_a_hub_that_is_not_reached(
    answers: bool, teacher_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("shd_torch.shrink.folders.HUB_SECONDS", 0.2)
    with socket.socket() as hub:
        hub.bind(("127.0.0.1", 0))
        if answers:
            hub.listen()  # and never says a word
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        known = str(teacher_folder)
        for read in (load_hf_model, lambda name: diagnose(known, name)):
            with refusal("read-failed", r"cannot be reached: download it .*hf download some/model"):
                read("some/model")
        with pytest.raises(ShdError, match="which is no folder"):
            find_folder("some/model/of mine", "model")
        kept = tmp_path / "models--some--model"
        shutil.copytree(teacher_folder, kept / "snapshots" / ("0a" * 20))
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text("0a" * 20)
        assert find_folder("some/model", "model") == kept / "snapshots" / ("0a" * 20)
        monkeypatch.chdir(tmp_path)
        shutil.copytree(teacher_folder, Path("some/model"))
        assert find_folder("some/model", "model") == Path("some/model")


@pytest.mark.parametrize(
    ("out", "code"),
    [
        ("s3://bucket/student", "argument-value"),
        ("", "argument-value"),
        ("file/student", "write-failed"),
        ("loop", "write-failed"),
    ],
)
def test_places_that_cannot_hold_a_student(
    out: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("loop").symlink_to("loop")
    with refusal(code):
        shrink(make_teacher("llama"), {}, out=out)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "loop"}


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "student").mkdir()
    save_student(make_teacher("llama"), {"format": 1}, new_folder(tmp_path / "student"))
    assert {"config.json", "shrink.json", WEIGHTS} <= {path.name for path in (tmp_path / "student").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["student"]
