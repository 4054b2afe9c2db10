"""shd-torch doctor: what models are made of, what differs, and what a user is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import invoke
from support.shrink.models import make_data, make_teacher

from shd_ref import ShdError
from shd_torch.cli import load_app
from shd_torch.commands import read_data
from shd_torch.doctor import (
    DiagnosisOptions,
    Difference,
    Parts,
    Probe,
    compare_parts,
    compare_tokenizers,
    diagnose,
    parts_of,
)
from shd_torch.doctor.diagnosis import EFFECTS, judge


def parts(name: str, **changes: Any) -> Parts:
    return parts_of(make_teacher(name, **changes))


def test_registers_are_special_tokens() -> None:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Dinov2WithRegistersConfig(**sizes, image_size=8, patch_size=4, num_register_tokens=3)
    registers = parts_of(transformers.Dinov2WithRegistersModel(config))
    assert (registers.registers, registers.specials) == (3, 4)


@pytest.mark.parametrize(
    ("teacher", "student", "part", "effect"),
    [
        ("dinov2", "vit", "LayerScale", "hurts"),
        ("vit", "dinov2", "LayerScale", "note"),
        ("qwen3", "llama", "QK-norm", "hurts"),
        ("bert", "llama", "direction", "blocks"),
        ("llama", "bert", "direction", "hurts"),
        ("llama", "mistral", "window", "hurts"),
        ("llama", "gpt2", "positions", "hurts"),
        ("vit", "deit", "tokens besides patches", "hurts"),
        ("vit", "bert", "input", "blocks"),
    ],
)
def test_what_differs(teacher: str, student: str, part: str, effect: str) -> None:
    differences = compare_parts(parts(teacher), parts(student))
    assert {one.part: one.effect for one in differences}[part] == effect
    assert [one.effect for one in differences] == sorted((one.effect for one in differences), key=EFFECTS.index)


def test_sizes_that_differ() -> None:
    assert compare_parts(parts("llama"), parts("llama", heads=2, layers=2)) == []
    more = compare_parts(parts("llama", heads=2), parts("llama", layers=4, vocab_size=40))
    assert {one.part: one.effect for one in more} == {"heads": "blocks", "layers": "note", "vocabulary": "note"}
    (grid,) = compare_parts(parts("vit"), parts("vit", patch_size=6))
    assert (grid.part, grid.teacher, grid.student, grid.effect) == ("patches", "3 x 3 x 2", "2 x 2 x 2", "hurts")
    assert "--groups patches:3x3:2x2:1" in grid.remedy
    (grid,) = compare_parts(parts("vit"), parts("vit", patch_size=6, num_channels=1))
    assert grid.effect == "blocks"


def test_tokenizers(tmp_path: Path) -> None:
    folders = []
    for number, (vocabulary, added) in enumerate(((2, 0), (2, 1), (3, 0))):
        folder = tmp_path / str(number)
        folder.mkdir()
        model = {"type": "WordLevel", "vocab": {str(token): token for token in range(vocabulary)}}
        text = json.dumps({"model": model, "added_tokens": [added], "truncation": number})
        (folder / "tokenizer.json").write_text(text)
        folders.append(folder)
    assert compare_tokenizers(folders[0], folders[0]) == []
    assert compare_tokenizers(folders[0], tmp_path) == []
    assert [one.effect for one in compare_tokenizers(folders[0], folders[1])] == ["note"]
    (other,) = compare_tokenizers(folders[0], folders[2])
    assert (other.effect, other.student) == ("hurts", "another model")
    (folders[0] / "tokenizer.json").write_text("{")
    with pytest.raises(ShdError, match="must be a tokenizer's JSON"):
        compare_tokenizers(folders[0], folders[1])


def probe_of(gain: float, margin: float) -> Probe:
    return Probe(10, 3, 0.1, "cross_entropy", 9, (1.0,) * 3, (1 - gain,) * 3, gain, margin)


@pytest.mark.parametrize(
    ("effects", "probe", "squeezed", "failure", "expected"),
    [
        (["note"], None, False, None, ("yes", "no obstacle")),
        (["hurts"], None, False, None, ("probably not", "differ")),
        (["blocks", "hurts"], probe_of(0.2, 0.0), False, None, ("no", "differ in")),
        (["hurts"], probe_of(0.2, 0.02), True, None, ("yes", "lowers")),
        ([], probe_of(-0.2, 0.02), False, None, ("no", "raises")),
        ([], probe_of(0.1, 0.6), False, None, ("probably not", "not significant")),
        ([], None, True, None, ("probably not", "squeezed")),
        (["hurts"], None, False, "it has other lengths", ("no", "other lengths")),
    ],
)
def test_one_answer(
    effects: list[str], probe: Probe | None, squeezed: bool, failure: str | None, expected: tuple[str, str]
) -> None:
    differences = [Difference("LayerScale", "yes", "no", effect, "do something") for effect in effects]
    verdict = judge(differences, probe, is_squeezed=squeezed, is_sentence_encoder=False, failure=failure)
    answer, reason = expected
    assert verdict.answer == answer
    assert reason in verdict.because


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with weights, a student's configuration, texts, and pictures for a pair with LayerScale."""
    folder = tmp_path_factory.mktemp("pair")
    make_teacher("llama", layers=2).float().save_pretrained(folder / "teacher")
    make_teacher("llama", heads=2, layers=1).config.save_pretrained(folder / "student")
    config = json.loads((folder / "student" / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "student" / "config.json").write_text(json.dumps(config))
    np.save(folder / "single.npy", np.full((30, 1), 3))
    np.save(folder / "unknown.npy", np.full((30, 4), 99))
    np.save(folder / "tokens.npy", make_data("llama", samples=40)["input_ids"].numpy())
    make_teacher("dinov2", layers=2).float().save_pretrained(folder / "dino")
    make_teacher("vit", heads=2, layers=1).float().save_pretrained(folder / "vit")
    return folder


def run(*arguments: object) -> Any:
    return invoke(load_app(), ["doctor", *arguments], columns=80)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shd_torch.doctor.training.WARM_UP", 3)


def test_a_pair_is_probed(pair: Path, short: None) -> None:
    """Students of a pair differ by SHD alone: at beta 0 not at all."""
    words = (pair / "teacher", pair / "student", "--data", pair / "tokens.npy", "--probe", 4, "--seeds", 2)
    result = run(*words, "--beta", 0, "--batch-size", 8, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["probe"]["gain"], found["probe"]["margin"], found["indistinguishable"]) == (0.0, 0.0, True)
    assert len(set(found["probe"]["without"])) == 2  # a seed is another student
    assert found["verdict"]["answer"] == "probably not"
    assert found["objective"]["recipe"] == "language_kd"
    assert found["beta"]["middle"] == pytest.approx(3 * found["beta"]["low"])
    assert found["beta"]["high"] == pytest.approx(5 * found["beta"]["low"])
    assert found["beta"]["low"] > 0


def test_texts_take_the_tokenizer_of_a_folder(pair: Path, tmp_path: Path, short: None) -> None:
    """The teacher's first, else the student's; rows of padding are masked."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    texts = tmp_path / "train.jsonl"
    texts.write_text("".join(json.dumps({"text": "a b " * (2 + number % 3)}) + "\n" for number in range(40)))
    with pytest.raises(ShdError, match="where no model's folder has a tokenizer"):
        read_data(texts, 40, ("hub/id", str(tmp_path)))
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    arrays = read_data(texts, 3, ("hub/id", str(tmp_path)))
    assert arrays["input_ids"].tolist()[0] == [1, 2, 1, 2, 0, 0, 0, 0]
    assert arrays["attention_mask"].sum(-1).tolist() == [4, 6, 8]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((pair / "teacher" / name).read_bytes())
    result = run(tmp_path, pair / "student", "--data", texts, "--batch-size", 8, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["objective"]["recipe"] == "language_kd"


def test_what_a_user_sees(pair: Path, short: None) -> None:
    pictures = make_data("dinov2", samples=24)["pixel_values"].float().numpy()
    np.savez(pair / "pictures.npz", pixel_values=pictures, labels=np.arange(24) % 5)
    result = run(pair / "dino", pair / "vit", "--data", pair / "pictures.npz", "--batch-size", 8)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("probably not, because they differ in LayerScale (teacher yes")
    assert "with image_kd" in result.stdout


def test_a_teacher_that_cannot_teach_live(pair: Path, tmp_path: Path) -> None:
    """Its attention cannot be read as it runs; a cache may hold it."""
    import transformers

    sizes = {"vocab_size": 31, "hidden_size": 24, "n_layer": 1, "n_head": 4}
    transformers.BloomForCausalLM(transformers.BloomConfig(**sizes)).save_pretrained(tmp_path / "bloom")
    found = diagnose(str(tmp_path / "bloom"), str(pair / "student"), {"input_ids": np.full((4, 5), 3)})
    assert found.teacher.positions == "alibi"
    assert found.failure is None
    assert "teach from a cache" in str(found.untried)
    assert found.verdict.answer == "probably not"
    # A cache does not help a student that cannot be read.
    found = diagnose(str(tmp_path / "bloom"), str(tmp_path / "bloom"), {"input_ids": np.full((4, 5), 3)})
    assert found.untried is None
    assert "the student cannot be read" in str(found.failure)
    assert found.verdict.answer == "no"


def test_a_student_without_a_head(tmp_path: Path, short: None) -> None:
    """It is judged by its last hidden states, where they have the teacher's shape; else by nothing."""
    from transformers import BertModel

    sizes: dict[str, dict[str, int]] = {"teacher": {}, "student": {"heads": 2, "layers": 1}}
    for name, changes in {**sizes, "narrow": {"heads": 2, "hidden_size": 12}}.items():
        BertModel(make_teacher("bert", **changes).config).save_pretrained(tmp_path / name)
    teacher, student, narrow = (str(tmp_path / name) for name in ("teacher", "student", "narrow"))
    data = {"input_ids": make_data("bert", samples=24)["input_ids"].numpy()}
    options = DiagnosisOptions(probe=2, seeds=2, batch_size=8)
    found = diagnose(teacher, student, data, options)
    assert (found.failure, found.untried) == (None, None)
    assert found.objective is not None
    assert (found.objective.recipe, found.objective.measure) == ("hidden_loss", "hidden_distance")
    assert found.probe is not None
    assert all(0 < value < 2 for value in (*found.probe.without, *found.probe.with_shd))
    assert found.probe.without != found.probe.with_shd
    found = diagnose(teacher, narrow, data, options)
    assert (found.probe, found.objective, "has no head" in str(found.untried)) == (None, None, True)
    kinds = [("", "Transformer"), ("Pooling", "Pooling")]
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (tmp_path / "teacher/modules.json").write_text(json.dumps(modules))
    (tmp_path / "teacher/Pooling").mkdir()
    (tmp_path / "teacher/Pooling/config.json").write_text('{"pooling_mode": "cls"}')
    found = diagnose(teacher, narrow, data, DiagnosisOptions(batch_size=8))
    assert found.objective is not None
    assert found.objective.options == {"pooling": "cls", "distance": "similarity"}
    assert found.verdict.answer == "probably not"
    assert found.beta is not None


def test_tokens_and_labels_that_the_student_lacks(pair: Path, short: None, tmp_path: Path) -> None:
    config = make_teacher("llama", heads=2, layers=1, vocab_size=12).config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "few")
    result = run(pair / "teacher", tmp_path / "few", "--data", pair / "tokens.npy", "--json")
    assert result.exit_code == 0, result.output
    verdict = json.loads(result.stdout)["verdict"]
    assert verdict["answer"] == "no"
    assert "a vocabulary of 12" in verdict["because"]
    tokens = np.load(pair / "tokens.npy")
    np.savez(tmp_path / "labelled.npz", input_ids=tokens, labels=np.where(tokens % 2, 9999, -100))
    result = run(pair / "teacher", pair / "student", "--data", tmp_path / "labelled.npz")
    assert result.exit_code == 1
    assert "labels below the student's 31 classes, or -100; got 9999 to 9999" in " ".join(result.output.split())


DATA = ("teacher", "student", "--data")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nothing-of-that-name", "student"), "must be a folder that save_pretrained wrote"),
        (("none.onnx", "student"), "make a cache (shd precompute)"),
        ((*DATA, "tokens.npy", "--samples", 9, "--probe", 5), "--data must hold at least 20"),
        (
            (*DATA, "tokens.npy", "--probe", 5, "--learning-rate", 0),
            "--learning-rate must be a finite number above 0",
        ),
        ((*DATA, "single.npy"), "--data must hold texts of at least 2 tokens"),
        ((*DATA, "unknown.npy"), "tokens below the teacher's vocabulary of 31; got 99"),
    ],
)
def test_errors_name_the_option(
    words: tuple[Any, ...], message: str, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pair)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = run(*words)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
