"""Two teachers, one student: the mean of their logits and the attention of the first, from one cache.

    python make_data.py                     # teacher/ and text
    python make_data.py second              # second/: another size, the same vocabulary
    shd-torch export teacher --out teacher.onnx
    shd-torch export second --out second.onnx
    shd-torch shrink teacher --heads 2 --layers 2 --data train.jsonl --out student
    shd precompute teacher.onnx --with-teacher second.onnx --inputs train.jsonl --tokenizer teacher --student student --logits topk --out two_cache
    python two_teachers.py

Logits are averaged before truncation, as in BabyLlama. Attention from both teachers requires live teachers:
`SHDTrainer(teacher=[OnlineTeacher(first, ...), OnlineTeacher(second, ...)])`. It prints about

    two teachers: student 0.56 before and 0.55 after training
"""  # noqa: E501  # commands are for copying

from __future__ import annotations

import argparse

from transformers import AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from shd_torch import KdTerm, SHDTrainer, SupervisedDataset, load_student, read_texts


def main() -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=2)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained("teacher")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # many decoders have none
    trainer = SHDTrainer(
        model=load_student("student"),
        args=TrainingArguments(
            "trained_by_two",
            num_train_epochs=given.epochs,
            learning_rate=1e-3,
            logging_steps=50,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=SupervisedDataset(read_texts("train.jsonl", tokenizer), "two_cache"),
        eval_dataset=read_texts("test.jsonl", tokenizer),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        beta=0.02,
        kd=KdTerm(rows="next_labels"),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    print(f"two teachers: student {before:.3f} before and {trainer.evaluate()['eval_loss']:.3f} after training")
    trainer.save_model("trained_by_two")


if __name__ == "__main__":
    main()
