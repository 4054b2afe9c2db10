"""A vocabulary cut to what texts use: the same pieces and outputs on them, smaller pieces elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refusals import refusal
from torch import Tensor

from shd_torch.shrink import cut_vocabulary, load_student, shrink

transformers = pytest.importorskip("transformers", reason="the models are those of transformers")
tokenizers = pytest.importorskip("tokenizers", reason="their tokenizers are cut")

CORPUS = ["the cat sat on the mat and the dog sat", "a catalogue of matters and dogmas of the mathematics"] * 9
TEXTS = ["the cat sat", "dogmas of the cat", "the mat"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
ROWS = 7  # of embeddings that belong to no piece
KINDS = ("wordpiece bert", "bpe gpt2", "bpe bart", "unigram roberta")


def make_tokenizer(kind: str) -> Any:
    models, trainers, before = tokenizers.models, tokenizers.trainers, tokenizers.pre_tokenizers
    common = {"vocab_size": 90, "special_tokens": SPECIAL, "show_progress": False}
    if kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = before.Whitespace(), tokenizers.decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**common)
    elif kind == "bpe":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = before.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
        alphabet = before.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(**common | {"vocab_size": 310}, initial_alphabet=alphabet)
    else:
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = before.Metaspace(), tokenizers.decoders.Metaspace()
        trainer = trainers.UnigramTrainer(**common, unk_token="<unk>")
    made.train_from_iterator(CORPUS, trainer)
    pairs = [(piece, made.token_to_id(piece)) for piece in ("<s>", "</s>")]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=pairs)
    made.add_tokens(["catflap"])  # behind the pieces of the model
    return made


def make_folder(kind: str, folder: Path) -> Any:
    """A model with its tokenizer, whose special pieces are named; returns the model."""
    name, family = kind.split()
    tokenizer = make_tokenizer(name)
    named = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    (folder / "vocab.txt").write_text("what other programs read")
    ids = {f"{role}_token_id": tokenizer.token_to_id(named[f"{role}_token"]) for role in ("bos", "pad", "eos")}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
    positions = {"max_position_embeddings": 40}
    made: dict[str, tuple[str, dict[str, Any]]] = {
        "bert": ("BertForMaskedLM", {**sizes, **positions}),
        "roberta": ("RobertaForMaskedLM", {**sizes, **positions}),
        "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 40}),
        "bart": (
            "BartForConditionalGeneration",
            {
                **positions,
                **{f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")},
                **{"d_model": 16, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "decoder_start_token_id": 2},
            },
        ),
    }
    kind, options = made[family]
    torch.manual_seed(0)
    model: Any = getattr(transformers, kind)
    model = model(model.config_class(vocab_size=tokenizer.get_vocab_size() + ROWS, **options, **ids)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    if model.can_generate():
        model.generation_config.suppress_tokens = [ids["pad_token_id"], tokenizer.get_vocab_size()]
    model.save_pretrained(folder)
    return model


def write_texts(folder: Path, texts: list[str] = TEXTS) -> Path:
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@torch.no_grad()
def logits_of(model: Any, ids: list[int]) -> Tensor:
    inputs = {"input_ids": torch.tensor([ids])}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    logits: Tensor = model(**inputs).logits
    return logits[0]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_the_data_keep_their_pieces_and_outputs(kind: str, tmp_path: Path) -> None:
    model = make_folder(kind, tmp_path / "old")
    report = cut_vocabulary(tmp_path / "old", write_texts(tmp_path), tmp_path / "new")
    kept = report["kept"]
    assert report == json.loads((tmp_path / "new/vocabulary.json").read_text())
    assert (report["texts"], report["changed_texts"], report["old_size"]) == (3, 0, model.config.vocab_size)
    new = type(model).from_pretrained(tmp_path / "new").eval()
    before, after = (transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("old", "new"))
    assert len(kept) == report["size"] == new.config.vocab_size == len(after) < len(before)
    assert sum(part.numel() for part in new.parameters()) == report["parameters"] < report["old_parameters"]
    for text in TEXTS:
        old_ids, new_ids = before(text)["input_ids"], after(text)["input_ids"]
        assert [kept[number] for number in new_ids] == old_ids
        torch.testing.assert_close(logits_of(new, new_ids), logits_of(model, old_ids)[:, kept], atol=1e-5, rtol=0.0)
    for text in CORPUS[:2]:  # smaller pieces of the same characters
        assert after.decode(after(text)["input_ids"]) == before.decode(before(text)["input_ids"])
        assert len(after(text)["input_ids"]) > len(before(text)["input_ids"])
    for role in ("bos", "pad", "eos"):
        number = getattr(new.config, f"{role}_token_id")
        assert (
            after.convert_ids_to_tokens(number) == getattr(before, f"{role}_token") == getattr(after, f"{role}_token")
        )
    assert after("catflap")["input_ids"][1] == after.convert_tokens_to_ids("catflap") == len(after) - 1
    if new.can_generate():
        assert new.generation_config.suppress_tokens == [new.config.pad_token_id]
    assert not (tmp_path / "new/vocab.txt").exists()


def test_a_size_keeps_the_most_frequent_pieces(tmp_path: Path) -> None:
    make_folder("bpe gpt2", tmp_path / "old")
    least = cut_vocabulary(tmp_path / "old", write_texts(tmp_path, [" "]), tmp_path / "least")["size"]
    with refusal("argument-value", str(least)):
        cut_vocabulary(tmp_path / "old", write_texts(tmp_path), tmp_path / "small", size=least - 1)
    texts = write_texts(tmp_path, [*TEXTS, "of the the the the"])
    report = cut_vocabulary(tmp_path / "old", texts, tmp_path / "small", size=least + 4)
    assert least < report["size"] <= least + 4
    assert report["changed_texts"] == 3
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "small")
    assert "Ġthe" in tokenizer.get_vocab()


def test_of_a_student_without_stock_layers(tmp_path: Path) -> None:
    """Its report stays with it, and its blocks stay dropped."""
    make_folder("wordpiece bert", tmp_path / "old")
    made = shrink(
        tmp_path / "old", {"input_ids": torch.full((4, 5), 6)}, drop_attention=[1], out=tmp_path / "student"
    )
    report = cut_vocabulary(tmp_path / "student", write_texts(tmp_path), tmp_path / "new")
    shrunk = json.loads((tmp_path / "new/shrink.json").read_text())
    assert shrunk["layers"] == made.report["layers"]
    assert shrunk["student"]["parameters"] == report["parameters"] == load_student(tmp_path / "new").num_parameters()


def test_what_cannot_be_cut(tmp_path: Path) -> None:
    make_folder("bpe gpt2", tmp_path / "old")
    texts, file = write_texts(tmp_path), tmp_path / "old/tokenizer.json"
    content = json.loads(file.read_text())
    for change, says in (({"end_of_word_suffix": "</w>"}, "suffix"), ({"merges": [["a"]]}, "tokenizer.json")):
        file.write_text(json.dumps(content | {"model": content["model"] | change}))
        with refusal("shrink-unsupported", says):
            cut_vocabulary(tmp_path / "old", texts, tmp_path / "new")
    file.unlink()
    with refusal("shrink-unsupported", "must hold a tokenizer.json .*AutoTokenizer"):
        cut_vocabulary(tmp_path / "old", texts, tmp_path / "new")
    assert not (tmp_path / "new").exists()
