"""Folders of small models with random weights, and of tokenizers of a few words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers: Any = pytest.importorskip("transformers", reason="teachers are Hugging Face models")
tokenizers: Any = pytest.importorskip("tokenizers", reason="texts need the extra 'inputs'")

WORDS = ["the", "cat", "The", "dog", "sat", "on", "a", "mat", "Cat", "ran", "far", "no", "yes", "red", "fox", "Mat"]
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>"]
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
Settings = dict[str, Any]


def make_texts() -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, random.integers(1, 12))) for _ in range(60)]


TEXTS = make_texts()


def save_tokenizer(folder: Path, kind: str, *, pad: int | None = 0, **settings: Any) -> None:
    """Words by whitespace; BERT's marks around them, or the one at the end."""
    marks = MARKS if pad is None else [*MARKS[1 : pad + 1], MARKS[0], *MARKS[pad + 1 :]]
    vocabulary = {word: number for number, word in enumerate([*marks, *WORDS])}
    if kind == "bert":
        transformers.BertTokenizer(vocab=vocabulary, **settings).save_pretrained(folder)
        return
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    end = [("</s>", vocabulary["</s>"])]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=end)
    settings |= {} if pad is None else {"pad_token": "[PAD]"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="</s>", **settings
    ).save_pretrained(folder)


def save_model(folder: Path, name: str, **changes: Any) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    text = {"vocab_size": 30, "max_position_embeddings": 64, "initializer_range": 0.4, "num_labels": 3}
    model = kind(kind.config_class(**SIZES | text | changes))
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape)
    model.save_pretrained(folder)


def save_modules(folder: Path, *modules: str, pooling: Settings, **files: Settings) -> None:
    names = ["Transformer", "Pooling", *modules]
    listed = [
        {"idx": at, "name": str(at), "path": f"part_{at}" * (at > 0), "type": f"sentence_transformers.models.{name}"}
        for at, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "part_1").mkdir()
    (folder / "part_1" / "config.json").write_text(json.dumps({"word_embedding_dimension": 16} | pooling))
    for name, settings in files.items():
        (folder / f"{name}.json").write_text(json.dumps(settings))


def random_like(model: Any) -> Any:
    """A student that learned nothing."""
    torch.manual_seed(7)
    return type(model)(model.config).eval()
