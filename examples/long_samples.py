"""A decoder with grouped queries and long samples: the cache holds queries and keys instead of maps.

    python make_data.py                     # the teacher: 8 heads over 4 key/value heads
    python make_data.py long                # long.jsonl and test_long.jsonl: 240 tokens per text
    shd-torch export teacher --out teacher.onnx
    shd-torch shrink teacher --heads 2 --layers 2 --data train.jsonl --out student
    shd plan teacher.onnx --inputs long.jsonl --tokenizer teacher --student-heads 2
    shd precompute teacher.onnx --inputs long.jsonl --tokenizer teacher --student student --form factored --logits topk --out long_cache
    python long_samples.py

Maps grow quadratically with the length, queries and keys linearly. `shd plan` compares the two. The loop is plain
PyTorch; the student keeps its fused attention, and with a fused loss no map is materialised on either side. It prints
about

    long texts: student 1.7-1.9 before and 0.8 after training
"""  # noqa: E501  # commands are for copying

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

from shd_torch import SupervisedDataset, capture_attention, kd_loss, layer_kls, load_student, read_texts


def main() -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained("teacher")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # many decoders have none
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    joined = SupervisedDataset(read_texts("long.jsonl", tokenizer), "long_cache")
    loader = DataLoader(joined, batch_size=4, shuffle=True, collate_fn=joined.collate_with(collate))
    test = DataLoader(read_texts("test_long.jsonl", tokenizer), batch_size=4, collate_fn=collate)

    student = load_student("student").to(device)
    optimizer = torch.optim.AdamW(student.parameters(), 5e-4)
    before = loss_on(student, test, device)
    first = True
    for _ in range(given.epochs):
        for inputs, stored in loader:
            batch, supervision = inputs.to(device), stored.to(device, non_blocking=True)
            with capture_attention(student, layers=supervision.layers) as captured:
                output = student(**batch)
            # One term per layer; values and masks are checked only in the first step, as a check syncs the device.
            terms = layer_kls(captured, supervision, beta=0.02, check=first)
            kd = kd_loss(supervision.targets(), output.logits, loss_mask=supervision.query_mask())
            loss = output.loss + kd + sum(terms.values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            first = False
    print(f"long texts: student {before:.3f} before and {loss_on(student, test, device):.3f} after training")
    student.save_pretrained("trained_long")


@torch.no_grad()
def loss_on(model: torch.nn.Module, loader: Any, device: str) -> float:
    """Mean loss of the batches, in nats per token."""
    model.eval()
    losses = [model(**batch.to(device)).loss.item() for batch in loader]
    model.train()
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
