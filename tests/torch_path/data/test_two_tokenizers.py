"""A teacher and a student with other tokenizers, over one text: from the command to training."""

import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="texts need a tokenizer")
import torch
import transformers
from support.attention_graphs import saved, token_teacher
from support.binding.trainer_cases import trained
from support.commands import invoke
from support.pooled import pool_by_loops
from support.refusals import refusal
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from shd_ref.cache import CacheReader
from shd_ref.cli import load_app
from shd_ref.teacher import open_source
from shd_torch import SupervisedDataset, read_texts

TEXTS = ["the unbelievable story of a believer", "no story", "naïve ﬁsh, twice: ﬁsh 🐟"]
WORDS = ["the", "story", "of", "a", "believe", "un", "believer", "unbelievable", "no", "naïve", "fish", "twice"]


def write_tokenizer(folder: Path, size: int) -> Path:
    """A byte-level tokenizer of so many pieces, with a token in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=["<s>"])
    tokenizer.train_from_iterator(WORDS * 9, trainer)
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])]
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=40, pad_token="<s>")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with texts, both tokenizers and a teacher; caches of whole and of pooled maps, from the command."""
    root = tmp_path_factory.mktemp("two")
    (root / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), encoding="utf-8")
    write_tokenizer(root / "teacher", 300)
    write_tokenizer(root / "student", 262)
    teacher = saved(token_teacher(vocabulary=320), root)
    words = [
        "precompute",
        teacher,
        "--inputs",
        root / "t.jsonl",
        "--tokenizer",
        root / "teacher",
        "--codec",
        "float32",
    ]
    words += ["--student-heads", 2, "--out"]
    for more in (["whole"], ["pooled", "--student-tokenizer", root / "student"]):
        result = invoke(load_app(), [*words, root / more[0], *more[1:]])
        assert result.exit_code == 0, result.output
    return root, result.output


def join(root: Path) -> tuple[SupervisedDataset, list[Any]]:
    student, teacher = (transformers.AutoTokenizer.from_pretrained(root / name) for name in ("student", "teacher"))
    data = read_texts(root / "t.jsonl", student, teacher_tokenizer=teacher)
    return SupervisedDataset(data, root / "pooled", model_inputs=operator.itemgetter("teacher")), data


def test_maps_are_pooled_by_characters(folders: Any) -> None:
    """Beside plain loops over the characters that two tokens have in common."""
    root, _ = folders
    (pooled, data), whole = join(root), CacheReader(root / "whole")
    assert pooled.cache.manifest.attention.groups == "weights:token_groups"
    plain = SupervisedDataset([sample["teacher"] for sample in data], whole, model_inputs=tokens_of)
    tokenizers = [transformers.AutoTokenizer.from_pretrained(root / name) for name in ("student", "teacher")]
    for number, text in enumerate(TEXTS):
        spans = [tokenizer(text, return_offsets_mapping=True)["offset_mapping"] for tokenizer in tokenizers]
        groups = np.zeros([len(side) for side in spans])
        for i, mine in enumerate(spans[0]):
            for j, theirs in enumerate(spans[1]):
                groups[i, j] = len({*range(*mine)} & {*range(*theirs)})
        groups[0, 0] = 1  # <s> of both
        maps = whole.decode(plain[number][1], 0)[None].astype(np.float64)
        expected, _ = pool_by_loops(maps, groups, groups, np.ones(maps.shape[1:3]))
        assert expected.shape[-1] == len(data[number]["input_ids"]) != maps.shape[-1]
        np.testing.assert_allclose(pooled.cache.decode(pooled[number][1], 0), expected[0], rtol=0, atol=4e-5)


def tokens_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: sample[name] for name in ("input_ids", "attention_mask")}


def pad(samples: list[Any]) -> dict[str, torch.Tensor]:
    columns = {
        name: [torch.as_tensor(sample[name]) for sample in samples] for name in ("input_ids", "attention_mask")
    }
    return {name: torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for name, column in columns.items()}


def pad_in_front(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {name: column.flip(1) for name, column in pad(samples).items()}


def test_a_student_with_another_tokenizer_is_trained(folders: Any, tmp_path: Path) -> None:
    data, _ = join(folders[0])
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    student = transformers.BertModel(transformers.BertConfig(vocab_size=262, **sizes), add_pooling_layer=False)
    arguments = {"train": data, "model": student, "beta": 1.0, "arguments": {"remove_unused_columns": False}}
    with refusal("inputs-invalid", "attention_mask must be ones"):
        trained(tmp_path / "a", **arguments, collate=pad_in_front)
    trainer = trained(tmp_path / "b", **arguments, collate=pad)
    assert all(entry["shd_loss"] > 0 for entry in trainer.state.log_history if "shd_loss" in entry)


def test_a_cache_says_how_it_is_verified(folders: Any) -> None:
    root, output = folders
    assert f"--student-tokenizer {root / 'student'}" in " ".join(output.split())
    words = ["verify", root / "pooled", "--teacher", root / "teacher.onnx", "--inputs", root / "t.jsonl"]
    words += ["--tokenizer", root / "teacher"]
    assert invoke(load_app(), [*words, "--student-tokenizer", root / "student"]).exit_code == 0
    assert "give the student's tokenizer too (--student-tokenizer FOLDER)" in invoke(load_app(), words).output


def test_refusals(folders: Any) -> None:
    root, _ = folders
    with refusal("argument-value", "student_tokenizer must be given with a tokenizer alone"):
        open_source(root / "t.jsonl", student_tokenizer=root / "student")
    with refusal("argument-value", "must be left out for pairs"):
        two = {"tokenizer": root / "teacher", "student_tokenizer": root / "student"}
        open_source(root / "t.jsonl", pair_column="text", **two)
