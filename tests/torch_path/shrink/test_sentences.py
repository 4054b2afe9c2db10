"""A sentence-transformers folder comes out of shrink whole: pooling, normalisation, projection, prompts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.binding.sentences import write_encoder
from support.refusals import refusal
from support.shrink.models import make_teacher

from shd_ref.teacher.sentence_folder import find_pooling, modules_after_model, read_pooling
from shd_torch import load_student
from shd_torch.shrink import shrink
from shd_torch.shrink.folders import check_files

transformers = pytest.importorskip("transformers", reason="the teachers are models of transformers")

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w3 w2 w1 w0"]
MODULES = "modules.json"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As versions 2 to 5 wrote it: mean pooling, a projection, normalisation with an empty folder."""
    folder = write_encoder(tmp_path_factory.mktemp("sentences") / "teacher", None, "Dense", "Normalize")
    transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)  # the bare one
    (folder / "3_Normalize").mkdir(exist_ok=True)
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    dense = {"in_features": width, "out_features": 6, "bias": True}
    files: dict[str, Any] = {
        "config_sentence_transformers.json": {"prompts": {"query": "w9 "}, "default_prompt_name": None},
        "sentence_bert_config.json": {"max_seq_length": 5, "do_lower_case": False},
        "2_Dense/config.json": dense | {"activation_function": "torch.nn.modules.activation.Tanh"},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    weights = {"linear.weight": torch.randn(6, width), "linear.bias": torch.randn(6)}
    save_file(weights, folder / "2_Dense/model.safetensors")
    return folder


def calibration() -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 31, (8, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_embeddings_of_the_student(teacher: Path, tmp_path: Path) -> None:
    """Its folder has the teacher's files, which sentence-transformers loads."""
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="it loads the student")
    out = tmp_path / "student"
    shrink(teacher, calibration(), heads=2, layers=1, out=out)
    encoder = sentence_transformers.SentenceTransformer(str(out), device="cpu")
    model: Any = load_student(out)
    reader = transformers.AutoTokenizer.from_pretrained(out)
    batch = reader(TEXTS, padding=True, truncation=True, max_length=5, return_tensors="pt")
    dense, counted = encoder[2], batch["attention_mask"][..., None].float()
    with torch.no_grad():
        states = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        embeddings = torch.tanh(dense.linear((states * counted).sum(1) / counted.sum(1)))
    expected = torch.nn.functional.normalize(embeddings, dim=-1)
    torch.testing.assert_close(encoder.encode(TEXTS, convert_to_tensor=True), expected, atol=1e-6, rtol=0)
    assert encoder.prompts["query"] == "w9 "
    assert encoder.max_seq_length == 5
    kept = ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json")
    for name in (*kept, "2_Dense/config.json", "2_Dense/model.safetensors"):
        assert (out / name).read_bytes() == (teacher / name).read_bytes()
    assert not (out / "3_Normalize").exists()


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "a/" * 3000])
def test_names_that_no_file_can_have(name: str, teacher: Path, tmp_path: Path) -> None:
    """In files of a folder from elsewhere, and as the folder itself."""
    (tmp_path / "config.json").write_text("{}")
    listed = json.loads((teacher / MODULES).read_text())
    (tmp_path / MODULES).write_text(json.dumps([listed[0], listed[1] | {"path": name}]))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    for read in (check_files, modules_after_model, read_pooling):
        with refusal("read-failed", r"readable files|a folder of its own") as caught:
            read(tmp_path)
        assert len(str(caught.value)) < 400
    assert find_pooling(Path(name)) is None


def test_a_narrower_student(teacher: Path, tmp_path: Path) -> None:
    """Pooling is told the width; a projection of the teacher's width is refused before any work."""
    source, out = tmp_path / "teacher", tmp_path / "student"
    shutil.copytree(teacher, source)
    make_teacher("llama").float().save_pretrained(source)  # embeds texts, with the class of a decoder with a head
    with refusal("shrink-unsupported", r"hidden size Dense and LayerNorm; got .*Dense: remove modules.json"):
        shrink(source, calibration(), hidden=16, out=out)
    (source / MODULES).write_text(json.dumps(json.loads((source / MODULES).read_text())[:2]))
    width = json.loads((source / "config.json").read_text())["hidden_size"]
    (source / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": width, "other": width}))
    shrink(source, calibration(), hidden=16, out=out)
    assert json.loads((out / "1_Pooling/config.json").read_text()) == {"word_embedding_dimension": 16, "other": width}


def edit_modules(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        listed = json.loads((folder / MODULES).read_text())
        (folder / MODULES).write_text(json.dumps(change(listed) or listed))

    return edit


def link_pooling(folder: Path) -> None:
    file = folder / "1_Pooling/config.json"
    file.rename(folder.parent / "pooling.json")
    file.symlink_to("../../pooling.json")


def pickle_dense(folder: Path) -> None:
    (folder / "2_Dense/model.safetensors").rename(folder / "2_Dense/pytorch_model.bin")


@pytest.mark.parametrize(
    ("edit", "code", "says"),
    [
        (edit_modules(lambda listed: listed[2].update(type="other.Module")), "shrink-unsupported", "other.Module"),
        (edit_modules(lambda listed: listed[1].update(path="../teacher")), "read-failed", "folder of its own"),
        (edit_modules(lambda listed: listed[1].update(path="2_Dense")), "read-failed", "folder of its own"),
        (edit_modules(lambda listed: listed[0].update(path="0_Transformer")), "read-failed", "first the model"),
        (edit_modules(lambda listed: {"modules": listed}), "read-failed", "first the model"),
        (edit_modules(lambda listed: listed[3].pop("idx") and None), "read-failed", "first the model"),
        (link_pooling, "read-failed", "none of them"),
        (pickle_dense, "read-failed", "safetensors"),
    ],
)
def test_modules_that_are_refused(
    edit: Callable[[Path], None], code: str, says: str, teacher: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "teacher", tmp_path / "student"
    shutil.copytree(teacher, source)
    edit(source)
    with refusal(code, says):
        shrink(source, calibration(), heads=2, out=out)
    assert not out.exists()
