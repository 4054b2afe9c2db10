"""Make data and a small trained teacher to try everything with, without a network.

    python make_data.py             # text: teacher/, train.jsonl, test.jsonl
    python make_data.py images      # vit/, images.npz, test_images.npz
    python make_data.py labels      # bert/, labelled.jsonl, test_labelled.jsonl
    python make_data.py pairs       # bart/, pairs.jsonl, test_pairs.jsonl

Everything goes into the current folder. Each teacher is a Hugging Face folder, trained for some seconds on one
core, and comes out the same on every run. Your own folder and files take their place in every example.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

NAMES = ("anna", "ben", "carla", "dino", "emma", "frank", "gina", "hugo")
VERBS = ("bakes", "draws", "finds", "hides", "opens", "paints", "sells", "wants")
THINGS = ("ball", "book", "coin", "cup", "hat", "key", "lamp", "map")
WORDS = ("with", "the", "and", "it", "for", ".", *NAMES, *VERBS, *THINGS)
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
SIDE = 16  # pixels


def main() -> None:
    """Make what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", default="text", choices=MAKERS)
    parser.add_argument("--steps", type=int, default=300, help="training steps of the teacher")
    parser.add_argument("--samples", type=int, default=1024, help="training samples; an eighth as many are for tests")
    given = parser.parse_args()
    torch.manual_seed(0)
    MAKERS[given.kind](given.steps, given.samples)


def sentence(rng: random.Random) -> str:
    """Verb and receiver follow from the name, six and nine words before: a model must look back."""
    name, first, second = rng.randrange(8), rng.choice(THINGS), rng.choice(THINGS)
    gift = f"{NAMES[name]} with the {first} and the {second}"
    return f"{gift} {VERBS[name]} it for {NAMES[(name + 3) % 8]} ."


def story(rng: random.Random) -> str:
    """One to three sentences."""
    return " ".join(sentence(rng) for _ in range(rng.randint(1, 3)))


def make_text(steps: int, samples: int) -> None:
    """A decoder with grouped queries (8 heads over 4 key/value heads) that tells little stories."""
    rng = random.Random(0)
    texts = [story(rng) for _ in range(samples + samples // 8)]
    write_lines("train.jsonl", ({"text": text} for text in texts[:samples]))
    write_lines("test.jsonl", ({"text": text} for text in texts[samples:]))
    tokenizer = save_tokenizer("teacher")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=512,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )

    def batch() -> dict[str, Any]:
        tokens = tokenizer([story(rng) for _ in range(32)], padding=True, return_tensors="pt")
        return {**tokens, "labels": tokens["input_ids"].masked_fill(tokens["attention_mask"] == 0, -100)}

    train(model, batch, steps)
    save(model, "teacher")


def save_tokenizer(folder: str) -> Any:
    """A tokenizer with one token a word, as a Hugging Face folder holds it."""
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


def train(model: Any, batch: Callable[[], dict[str, Any]], steps: int) -> None:
    """Teach the teacher: AdamW on fresh batches, the rate falling to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
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


MAKERS = {"text": make_text}

if __name__ == "__main__":
    main()
