"""What a start from the teacher adds to KD, and what SHD adds: three students of two heads, trained from one cache.

    python make_data.py                     # or bring teacher/ (a Hugging Face folder), train.jsonl and test.jsonl
    shd-torch export teacher --out teacher.onnx
    shd-torch shrink teacher --heads 2 --layers 2 --data train.jsonl --out student
    shd precompute teacher.onnx --inputs train.jsonl --tokenizer teacher --student student --logits topk --out cache
    python three_students.py

Test losses in nats per token, after one pass over the data; they are about

    random weights, KD 0.78; random weights, KD and SHD 0.62; from the teacher, KD 0.55
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments, set_seed

from shd_torch import KdTerm, SHDTrainer, SupervisedDataset, load_student, read_texts

STUDENTS = {
    "random weights, KD": ("random", 0.0),
    "random weights, KD and SHD": ("random", 0.1),
    "from the teacher, KD": ("student", 0.0),
}


def main() -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each student; means are printed")
    parser.add_argument("--json", type=Path, help="where to write the losses of every seed")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained("teacher")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # many decoders have none
    losses: dict[str, list[float]] = {name: [] for name in STUDENTS}
    for seed in range(given.seeds):
        for name, (start, beta) in STUDENTS.items():
            set_seed(seed)
            losses[name].append(train(start, beta, seed, given.epochs, tokenizer))
    print("; ".join(f"{name} {sum(values) / len(values):.2f}" for name, values in losses.items()))
    if given.json:
        given.json.write_text(json.dumps({"epochs": given.epochs, "losses": losses}, indent=1) + "\n")


def train(start: str, beta: float, seed: int, epochs: float, tokenizer: Any) -> float:
    """The test loss of one student, which stays in ``trained``."""
    student = load_student("student")
    trainer = SHDTrainer(
        model=student if start == "student" else type(student)(student.config),
        args=TrainingArguments(
            "trained",
            num_train_epochs=epochs,
            learning_rate=2e-3,
            seed=seed,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=SupervisedDataset(read_texts("train.jsonl", tokenizer), "cache"),
        eval_dataset=read_texts("test.jsonl", tokenizer),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        beta=beta,  # weight of SHD, the term on attention; 0 trains without it
        kd=KdTerm(),  # the term on logits, from the cache
    )
    trainer.train()
    loss: float = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    return loss


if __name__ == "__main__":
    main()
