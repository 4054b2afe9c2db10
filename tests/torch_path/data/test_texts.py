"""Texts read for training are the tokens that ``shd precompute`` showed the teacher."""

import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="texts need a tokenizer")
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shd_ref import ShdError
from shd_ref.teacher import open_source
from shd_torch import read_texts

TEXTS = ("a b c d e f", "b", "c a unheard")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(["?", "<s>", *"abcdef"])}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=5).save_pretrained(tmp_path)
    lines = [json.dumps({"text": text, "other": n}) for n, text in enumerate(TEXTS)]
    (tmp_path / "t.jsonl").write_text("\n".join([lines[0], "", *lines[1:]]), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("max_length", [None, 3])
def test_they_are_what_precompute_reads(folder: Path, max_length: int | None) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    read = read_texts(folder / "t.jsonl", tokenizer, max_length=max_length)
    shown = open_source(folder / "t.jsonl", tokenizer=folder, max_length=max_length)
    names = "input_ids", "attention_mask"
    rows = [{name: row[name].tolist() for name in names} for row in shown.rows(names)]
    assert [{name: sample[name] for name in names} for sample in read] == rows
    assert [len(sample["input_ids"]) for sample in read] == [max_length or 5, 2, max_length or 4]


def test_what_holds_no_text_is_named(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for arguments, output in (
        ({"text_column": "content"}, "text_column must be one of text, other"),
        ({"text_column": "other"}, "other must be text; got ndarray"),
    ):
        with pytest.raises(ShdError, match=output):
            read_texts(folder / "t.jsonl", tokenizer, **arguments)
    with pytest.raises(ShdError, match="must exist"):
        read_texts(folder / "gone.jsonl", tokenizer)
