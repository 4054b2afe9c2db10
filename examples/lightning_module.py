"""The language model's student in Lightning: text, cached logits and cached attention in one training step.

    python make_data.py
    shd-torch export teacher --out teacher.onnx
    shd-torch shrink teacher --heads 2 --layers 2 --data train.jsonl --out student
    shd precompute teacher.onnx --inputs train.jsonl --tokenizer teacher --student student --logits topk --out cache
    pip install lightning
    python lightning_module.py

No callback is needed: Lightning moves the supervision to the device with the batch. It prints about

    student 0.56 before and 0.55 after training
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

from shd_torch import SupervisedDataset, batch_share, capture_attention, kd_loss, layer_kls, load_student, read_texts


class Distilled(lightning.LightningModule):
    """A student with three losses."""

    def __init__(self, student: torch.nn.Module, beta: float = 0.02) -> None:
        super().__init__()
        self.student, self.beta = student, beta

    def training_step(self, batch: Any, batch_index: int) -> torch.Tensor:
        """The student's loss, KD and SHD; the last two are means over rows, weighted accordingly over ranks."""
        inputs, supervision = batch
        with capture_attention(self.student, layers=supervision.layers) as captured:
            output = self.student(**inputs)
        share = batch_share(sum(supervision.lengths))
        shd = share * sum(layer_kls(captured, supervision, check=self.global_step == 0).values())
        kd = share * kd_loss(supervision.targets(), output.logits, loss_mask=supervision.query_mask())
        logs = {"base_loss": output.loss, "kd_loss": kd, "shd_loss": shd}
        self.log_dict({name: value.detach() for name, value in logs.items()}, batch_size=len(supervision.lengths))
        return output.loss + kd + self.beta * shd

    def validation_step(self, batch: Any, batch_index: int) -> None:
        """The student's loss, on plain samples."""
        self.log("valid_loss", self.student(**batch).loss, batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.student.parameters(), 1e-3)


def main() -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    tokenizer = AutoTokenizer.from_pretrained("teacher")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # many decoders have none
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    joined = SupervisedDataset(read_texts("train.jsonl", tokenizer), "cache")
    loader = DataLoader(joined, batch_size=8, shuffle=True, collate_fn=joined.collate_with(collate))
    valid = DataLoader(read_texts("test.jsonl", tokenizer), batch_size=8, collate_fn=collate)
    module = Distilled(load_student("student").train())
    trainer = lightning.Trainer(max_epochs=given.epochs, logger=False, enable_checkpointing=False)
    (before,) = trainer.validate(module, valid, verbose=False)
    trainer.fit(module, loader)
    (after,) = trainer.validate(module, valid, verbose=False)
    print(f"student {before['valid_loss']:.3f} before and {after['valid_loss']:.3f} after training")
    module.student.save_pretrained("trained_lightning")


if __name__ == "__main__":
    main()
