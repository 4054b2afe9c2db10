"""What do reading and training take at 8,192 to 32,768 tokens, and exact targets over 151,936 classes?

- ``attention``: a cache of queries and keys of one sample a length (teacher of ``teacher_length.py``, int8), read by
  a ``DataLoader``, and steps of a Llama student (2 layers, 4 heads, width 128) on its own loss and ``attention_kl``.
  ``base`` are the same steps without the term, and ``products`` the term's matrix products alone, in its tiles: the
  logits of two teacher heads and of the student, and the gradients of queries and keys, for each student head.
- ``exact``: forward and backward pass of ``linear_kd_loss`` with ``ExactTargets``, width 64 on both sides, at 151,936
  classes; the logits of either side would take ``whole`` gigabytes.
- ``live`` and ``calibration``: a forward pass of ``OnlineTeacher``, and ``shrink`` to half of the heads, of the same
  teacher: how much the peak grows above that of the process before.

Each row is a separate process on one thread: its peak of resident memory in gigabytes, and processor seconds a step.

Prints rows and writes ``results/long_training.json``.

    python -m benchmarks.long_training [--attention 8192 16384 32768] [--exact 8192 32768] [--live 2048 4096 8192]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine, result_path, save
from benchmarks.teacher_length import make_teacher

RESULT = result_path(__file__)
CLASSES, STEPS = 151_936, 2
RUN = """
import json, sys, time
from pathlib import Path
import numpy as np, torch
way, length, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
torch.manual_seed(0)
tokens = np.random.default_rng(0).integers(1, 512, (1, length))
inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
row = {}

def peak():
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024 / 1e9

def teacher():
    import transformers
    return transformers.LlamaForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa").eval()

if way == "cache":
    from shd_ref.teacher import PrecomputeOptions, RunOptions
    from shd_ref.teacher.precompute.engine import precompute
    options = PrecomputeOptions(4, form="factored")
    run = RunOptions(batch_size=1, num_threads=1)
    precompute(folder / "teacher.onnx", inputs, folder / f"cache-{length}", options, run)
elif way in ("attention", "base"):
    import transformers
    from shd_torch import SupervisedDataset, capture_attention, layer_kls
    config = transformers.LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=length)
    student = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
    sample = {name: torch.from_numpy(array[0]) for name, array in inputs.items()}
    sample["labels"] = sample["input_ids"]
    def pad(samples):
        return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
    joined = SupervisedDataset([sample] * STEPS, folder / f"cache-{length}")
    loader = torch.utils.data.DataLoader(joined, batch_size=1, collate_fn=joined.collate_with(pad))
    row["before"], spent, values = peak(), [], []
    for step, (batch, supervision) in enumerate(loader):
        row["codes"] = supervision.buffer.nbytes / 1e9
        started = time.process_time()
        if way == "base":
            loss = student(**batch).loss
        else:
            with capture_attention(student, layers=supervision.layers) as captured:
                base = student(**batch).loss
            term = sum(layer_kls(captured, supervision, beta=1.0, check=step == 0).values())
            values.append(term.item() / (length * 8))
            loss = base + term / length
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent.append(time.process_time() - started)
    row |= {"seconds": min(spent)} | ({"nats a row": values} if values else {})
elif way == "products":
    from shd_torch.supervision.factored import Factored
    taught = Factored(torch.randn(1, 8, length, 32), torch.randn(1, 4, length, 32), torch.full((1, 4, 8), 1 / 8),
        is_causal=True)
    queries, keys = torch.randn(2, 4, length, 32)
    gradient = torch.zeros(4, 32, length)
    started = time.process_time()
    for _, _, rows in taught.tiles():
        columns = taught.key_range(rows)
        taught.rule.products(taught.queries[:, :, rows], taught.keys[:, :, columns])
        logits = queries[:, rows] @ keys[:, columns].mT
        logits @ keys[:, columns]
        gradient[..., columns].baddbmm_(queries[:, rows].mT, logits)
    row["seconds"] = 2 * (time.process_time() - started)  # of both layers
elif way == "exact":
    from shd_torch import ExactTargets, TeacherHead, linear_kd_loss
    draw = torch.Generator().manual_seed(0)
    width = 64
    states, hidden = torch.randn(2, 1, length, width, generator=draw)
    heads = torch.randn(2, CLASSES, width, generator=draw) / 4
    weight, hidden = heads[1].requires_grad_(), hidden.requires_grad_()
    row["before"], started = peak(), time.process_time()
    linear_kd_loss(ExactTargets(states, TeacherHead(heads[0])), hidden, weight).backward()
    row |= {"seconds": time.process_time() - started, "whole": 4 * length * CLASSES / 1e9}
else:
    model, mask = teacher(), torch.ones(1, length, dtype=torch.int64)
    ids = torch.from_numpy(tokens)
    row["before"], started = peak(), time.process_time()
    if way == "live":
        from shd_torch import OnlineTeacher
        with torch.no_grad():
            OnlineTeacher(model, 4, 2)(input_ids=ids, attention_mask=mask)
    else:
        from shd_torch.shrink import shrink
        shrink(model, {"input_ids": ids, "attention_mask": mask}, heads=4, align=False)
    row["seconds"] = time.process_time() - started
print(json.dumps({"gigabytes": peak()} | row))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attention", type=int, nargs="*", default=[8192, 16384, 32768])
    parser.add_argument("--exact", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--live", type=int, nargs="*", default=[2048, 4096, 8192])
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        make_teacher(Path(name), max([*options.attention, *options.live, 64]))
        for way, lengths in (
            ("cache", options.attention),
            ("base", options.attention),
            ("attention", options.attention),
            ("products", options.attention),
            ("exact", options.exact),
            ("live", options.live),
            ("calibration", options.live),
        ):
            for length in lengths:
                row = run(way, length, name)
                rows.setdefault(way, {})[str(length)] = row
                print(f"{way:12}{length:6}  {row}", flush=True)
                report = {"machine": machine(1), "backend": "dense"}  # of attention: what "auto" takes on a processor
                report |= {"classes": CLASSES, "steps": STEPS, "runs": rows}
                save(report, RESULT)


def run(way: str, length: int, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-c", f"CLASSES, STEPS = {CLASSES}, {STEPS}\n{RUN}", way, str(length), folder]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if process.returncode:
        raise SystemExit(process.stderr)
    row: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    values = row.pop("nats a row", [])
    rounded: dict[str, Any] = {key: round(value, 3) for key, value in row.items()}
    return rounded | ({"nats a row": [float(f"{value:.4g}") for value in values]} if values else {})


if __name__ == "__main__":
    main()
