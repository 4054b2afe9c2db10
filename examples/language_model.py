"""JSON lines in, a distilled and evaluated student out; the teacher is never in training memory.

    python make_data.py                     # or bring teacher/ (a Hugging Face folder), train.jsonl and test.jsonl
    shd-torch export teacher --out teacher.onnx
    shd-torch shrink teacher --heads 2 --layers 2 --data train.jsonl --out student
    shd precompute teacher.onnx --inputs train.jsonl --tokenizer teacher --student student --logits topk --out cache
    python language_model.py

The student starts from the squeezed teacher and learns from the text, the cached logits (KD) and the cached attention
(SHD). The loop in README.md shows what the start and SHD add. The last line compares test losses, in nats per token;
it is about

    teacher 0.55, student 0.56 before and 0.55 after training, with 41% of the parameters
"""

from __future__ import annotations

import argparse

import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from shd_torch import KdTerm, SHDTrainer, SupervisedDataset, load_student, read_texts


def main() -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--beta", type=float, default=0.02, help="weight of SHD; sweep it for your task")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained("teacher")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # many decoders have none
    # As for the teacher: the same tokenizer and the same maximum length.
    train, test = read_texts("train.jsonl", tokenizer), read_texts("test.jsonl", tokenizer)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)  # pads on the right, as the cache expects
    arguments = TrainingArguments(
        "trained",
        num_train_epochs=given.epochs,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        logging_steps=50,
        save_strategy="no",
        report_to="none",
    )
    trainer = SHDTrainer(
        model=load_student("student"),
        args=arguments,
        train_dataset=SupervisedDataset(train, "cache"),  # joined by a hash of the tokens, in any order
        eval_dataset=test,
        data_collator=collate,
        beta=given.beta,
        kd=KdTerm(rows="next_labels"),  # the rows that the student's loss counts
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model("trained")
    teacher = AutoModelForCausalLM.from_pretrained("teacher")
    best = transformers.Trainer(teacher, arguments, collate).evaluate(test)["eval_loss"]
    part = trainer.model.num_parameters() / teacher.num_parameters()
    print(
        f"teacher {best:.3f}, student {before:.3f} before and {after:.3f} after training, "
        f"with {part:.0%} of the parameters"
    )


if __name__ == "__main__":
    main()
