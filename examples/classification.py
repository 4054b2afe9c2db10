"""A BERT-like classifier with fewer heads and layers, distilled from cached attention and logits.

    python make_data.py labels              # or bring bert/, labels.jsonl and test_labels.jsonl
    shd-torch export bert --out bert.onnx
    shd-torch shrink bert --heads 2 --layers 1 --data labels.jsonl --out bert2
    shd precompute bert.onnx --inputs labels.jsonl --tokenizer bert --student bert2 --logits float16 --out bert_maps
    python classification.py

A classifier has few logits, so the cache keeps all of them (--logits float16). It prints about

    accuracy: teacher 100%, student 94% before and 100% after training
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, TrainingArguments

from shd_torch import KdTerm, SHDTrainer, SupervisedDataset, load_student


def main() -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=3)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained("bert")
    train, test = read("labels.jsonl", tokenizer), read("test_labels.jsonl", tokenizer)
    collate = DataCollatorWithPadding(tokenizer)
    arguments = TrainingArguments(
        "trained_bert",
        num_train_epochs=given.epochs,
        learning_rate=5e-4,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
    )
    trainer = SHDTrainer(
        model=load_student("bert2"),
        args=arguments,
        train_dataset=SupervisedDataset(train, "bert_maps"),
        eval_dataset=test,
        data_collator=collate,
        compute_metrics=accuracy,
        beta=0.02,
        kd=KdTerm(temperature=2.0),  # complete logits work at any temperature
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = trainer.evaluate()["eval_accuracy"]
    trainer.save_model("trained_bert")
    teacher = AutoModelForSequenceClassification.from_pretrained("bert")
    best = transformers.Trainer(teacher, arguments, collate, compute_metrics=accuracy).evaluate(test)["eval_accuracy"]
    print(f"accuracy: teacher {best:.1%}, student {before:.1%} before and {after:.1%} after training")


def read(path: str, tokenizer: Any) -> list[dict[str, Any]]:
    """The teacher's tokens, and the label."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    return [{**tokenizer(row["text"], truncation=True), "labels": row["label"]} for row in rows]


def accuracy(predicted: transformers.EvalPrediction) -> dict[str, float]:
    """Share of samples whose largest logit is the label's."""
    return {"accuracy": float(np.mean(predicted.predictions.argmax(-1) == predicted.label_ids))}


if __name__ == "__main__":
    main()
