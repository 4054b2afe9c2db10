"""An encoder-decoder: self-attention on both sides, cross-attention and the decoder's logits, from one cache.

    python make_data.py pairs               # or bring bart/, pairs.jsonl and test_pairs.jsonl
    shd-torch export bart --out bart.onnx
    python encoder_decoder.py tokens        # pairs.npz: the graph's inputs, as the trainer will see them
    shd precompute bart.onnx --inputs pairs.npz --student-heads 4 --student-layers encoder=1,decoder=1,cross=1 --logits topk --out bart_cache
    python encoder_decoder.py train

The student is a stock BART with half the heads and layers, from random weights. It prints about

    teacher 0.06, student 3.7 before and 0.02 after training
"""  # noqa: E501  # commands are for copying

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers

from shd_torch import KdTerm, SHDTrainer, SupervisedDataset

NAMES = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")


def main() -> None:
    """Write the tokens, or train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("tokens", "train"))
    parser.add_argument("--epochs", type=float, default=4)
    given = parser.parse_args()
    if given.step == "tokens":
        batch = pad(read("pairs.jsonl"))
        np.savez("pairs.npz", **{name: batch[name].numpy() for name in NAMES})
    else:
        train(given.epochs)


def read(path: str) -> list[dict[str, torch.Tensor]]:
    """Tokens of both sides. The decoder reads the target shifted right by one, as in BART's loss."""
    tokenizer = transformers.AutoTokenizer.from_pretrained("bart")
    start = transformers.AutoConfig.from_pretrained("bart").decoder_start_token_id
    samples = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        pair = json.loads(line)
        source, target = (torch.tensor(tokenizer(pair[side])["input_ids"]) for side in ("source", "target"))
        decoder = torch.cat([torch.tensor([start]), target[:-1]])
        masks = torch.ones_like(source), torch.ones_like(decoder)
        samples.append(dict(zip(NAMES, (source, masks[0], decoder, masks[1]), strict=True)) | {"labels": target})
    return samples


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad on the right, labels with -100, which losses ignore. Token 0 is this tokenizer's padding."""
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [sample[name] for sample in samples], batch_first=True, padding_value=-100 if name == "labels" else 0
        )
        for name in samples[0]
    }


def train(epochs: float) -> None:
    """Train and compare."""
    config = transformers.AutoConfig.from_pretrained("bart")
    config.update({f"{side}_attention_heads": 4 for side in ("encoder", "decoder")})
    config.update({f"{side}_layers": 1 for side in ("encoder", "decoder")})
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        "trained_bart",
        num_train_epochs=epochs,
        learning_rate=3e-3,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
    )
    test = read("test_pairs.jsonl")
    trainer = SHDTrainer(
        model=transformers.BartForConditionalGeneration(config),
        args=arguments,
        train_dataset=SupervisedDataset(read("pairs.jsonl"), "bart_cache"),
        eval_dataset=test,
        data_collator=pad,
        beta=0.02,
        kd=KdTerm(rows="labels"),  # the decoder's rows that its loss counts
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model("trained_bart")
    teacher = transformers.AutoModelForSeq2SeqLM.from_pretrained("bart")
    best = transformers.Trainer(teacher, arguments, pad).evaluate(test)["eval_loss"]
    print(f"teacher {best:.3f}, student {before:.3f} before and {after:.3f} after training")


if __name__ == "__main__":
    main()
