"""Tiny sentence encoders as folders of sentence-transformers, and texts for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("transformers", reason="the encoders are models of transformers")

import transformers

from support.binding.models import hf_model
from support.exported_models import trace

WORDS = ["[PAD]", "[UNK]", *(f"w{index}" for index in range(40))]
TEXTS = [" ".join(f"w{(7 * i + 3 * j * j) % 40}" for j in range(1 + i * 5 % 9)) for i in range(12)]
MEAN = {"pooling_mode_mean_tokens": True}


def write_encoder(folder: Path, pooling: dict[str, Any] | None = None, *others: str, **changes: Any) -> Path:
    """A BERT with a tokenizer of whole words, its pooling and what follows it."""
    model = hf_model("bert", **changes)
    model.save_pretrained(folder)
    words = {"type": "WordLevel", "vocab": {word: index for index, word in enumerate(WORDS)}, "unk_token": "[UNK]"}
    reader = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    reader |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": words}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    modules = ["Transformer", "Pooling", *others]
    files: dict[str, Any] = {
        "tokenizer.json": reader,
        "tokenizer_config.json": named | {"model_max_length": 16},
        "1_Pooling/config.json": {"word_embedding_dimension": model.config.hidden_size} | (pooling or MEAN),
        "modules.json": [
            {
                "idx": i,
                "name": str(i),
                "path": f"{i}_{kind}" * (i > 0),
                "type": f"sentence_transformers.models.{kind}",
            }
            for i, kind in enumerate(modules)
        ],
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


def tokens_of(folder: Path, side: str = "right") -> dict[str, NDArray[Any]]:
    """The texts as the teacher's arrays."""
    reader = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
    batch = reader(TEXTS, padding=True, return_tensors="np")
    return {name: np.asarray(batch[name]).astype(np.int64) for name in ("input_ids", "attention_mask")}


def samples_of(folder: Path) -> list[dict[str, Any]]:
    """The same one by one, without padding."""
    reader = transformers.AutoTokenizer.from_pretrained(folder)
    return [{name: reader(text)[name] for name in ("input_ids", "attention_mask")} for text in TEXTS]


def export_encoder(folder: Path) -> Path:
    """Its graph, beside it."""
    import torch

    example = {name: torch.from_numpy(array[:2]) for name, array in tokens_of(folder).items()}
    return trace(transformers.AutoModel.from_pretrained(folder), example, folder.with_suffix(".onnx"))
