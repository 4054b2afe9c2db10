"""How do memory and time of `shd precompute` grow with the length of a sample, with and without tiles?

The teacher is a Llama of 2 layers, 8 heads over 4 and width 256 (FFN 512, vocabulary 512, random weights); others
have a sliding window of 512 (Mistral) or 32 heads of 64 (width 2048). Samples run one at a time on one thread. Rivals
are the same run with whole maps (``--tile 0``), PyTorch's fused attention, which gives nothing but the output, and
PyTorch's eager attention with ``output_attentions``, which gives maps of all heads; ``graph alone`` is the pass of
onnxruntime without what Python makes of it.

Each run is a separate process of 32,768 tokens, at least four samples (two of 32 heads, and of one a shard), and the
ways take turns at each length: the figures are the peak of resident memory, and the least processor seconds of a
turn. ``seconds`` are of one more sample of a shard, its share of the writing included; ``start`` are all up to the
second sample and with it, imports left out: the checks before the first record, the shard's coding errors, and the
opening of sessions. Whole maps are left out where they would not fit.

Prints a table and writes ``results/teacher_length.json``.

    python -m benchmarks.teacher_length [--lengths 1024 2048 4096 8192 16384] [--ways factored "PyTorch fused"]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import machine, result_path, save

RESULT = result_path(__file__)
THREADS = 1
LONGEST = {"factored": 16384, "graph alone": 16384, "factored, window of 512": 16384, "PyTorch fused": 16384}
LONGEST |= {"maps": 8192, "maps, shards of one sample": 8192, "factored, 32 heads of 64": 8192}
"""Tokens of the longest samples by way; 4,096 for those with whole maps of all heads."""
WAYS = (
    "factored",
    "graph alone",
    "PyTorch fused",
    "maps",
    "PyTorch maps",
    "factored, whole maps",
    "maps, whole maps",
)
OTHERS = ("factored, window of 512", "factored, 32 heads of 64")
"""Other teachers, which are not drawn; nor is ``maps, shards of one sample``."""
RUN = """
import sys, time
from pathlib import Path
import numpy as np
way, length, folder, samples = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
tokens = np.random.default_rng(0).integers(1, 512, (samples, length))
form, _, kind = way.partition(", ")
teacher = folder / (kind if (folder / kind).is_dir() and kind else "plain")
times = []
def note(*done): times.append(time.process_time())
if way.startswith("PyTorch"):
    import torch, transformers
    torch.set_num_threads(THREADS)
    attention = "sdpa" if way == "PyTorch fused" else "eager"
    model = transformers.LlamaForCausalLM.from_pretrained(teacher / "model", attn_implementation=attention).eval()
    note()
    with torch.no_grad():
        for row in torch.from_numpy(tokens):
            model(row[None], use_cache=False, output_attentions=attention == "eager")
            note()
else:
    from shd_ref.teacher import PrecomputeOptions, RunOptions
    from shd_ref.teacher.precompute.engine import precompute
    from shd_ref.teacher.run.inputs import run_batch
    from shd_ref.teacher.run.teacher import TeacherRun
    tile = 0 if kind == "whole maps" else None
    most = 2**28 // (4 * length**2) if form == "maps" else samples  # causal maps of a shard of the default size
    shard = 1 if kind == "shards of one sample" else max(1, min(samples, most))
    run = RunOptions(batch_size=1, num_threads=THREADS, tile=tile, samples_per_shard=shard)
    inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    options = PrecomputeOptions(4, form="factored" if form == "graph alone" else form)
    note()
    if form == "graph alone":
        work = TeacherRun.open(teacher / "teacher.onnx", inputs, options, run)
        opened = work.sessions.open()
        for sample in range(samples):
            run_batch(opened.session, opened.names, work.inputs.batch([sample]))
            note()
    else:
        progress = lambda done, *rest: note() if done > len(times) - 1 else None
        precompute(teacher / "teacher.onnx", inputs, folder / "-".join(sys.argv[1:]), options, run,
                   on_progress=progress)
# Of this process alone: getrusage also knows its parent's peak.
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
begun = min(2, samples - 1)  # the second sample opens a session without check outputs
seconds = (time.process_time() - times[begun]) / (samples - begun)
print(int(peak.split()[1]) * 1024 / 1e9, seconds, times[begun] - times[0])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument(
        "--ways", nargs="+", default=[*WAYS, *OTHERS], help="the others keep the figures that are there"
    )
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    report = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"runs": {}}
    rows: dict[str, dict[str, dict[str, float]]] = report["runs"]
    report |= {"machine": machine(THREADS)}
    with tempfile.TemporaryDirectory() as name:
        for kind in {way.partition(", ")[2] if way in OTHERS else "plain" for way in arguments.ways}:
            make_teacher(Path(name) / kind, max(arguments.lengths), kind)
        for length in arguments.lengths:
            ways = [way for way in arguments.ways if length <= LONGEST.get(way, 4096)]
            turns = [{way: run(way, length, name, turn) for way in ways} for turn in range(arguments.turns)]
            for way in ways:
                peaks, seconds, starts = zip(*(turn[way] for turn in turns), strict=True)
                row = {"gigabytes": round(max(peaks), 3), "seconds": round(min(seconds), 3)}
                rows.setdefault(way, {})[str(length)] = row | {
                    "start": round(min(starts), 2),
                    "samples": count_samples(way, length),
                    "turns": len(turns),
                }
                print(f"{way:24} {length:6} tokens  {row}", flush=True)
            save(report, RESULT)


def make_teacher(folder: Path, length: int, kind: str = "plain") -> None:
    import torch
    import transformers

    from shd_torch import export_teacher

    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}
    if kind == "32 heads of 64":
        sizes |= {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 32}
    window = {"sliding_window": 512} if kind == "window of 512" else {}
    build = transformers.MistralConfig if window else transformers.LlamaConfig
    config = build(vocab_size=512, num_hidden_layers=2, max_position_embeddings=length, **sizes, **window)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder / "model")
    ids = torch.ones(2, 8, dtype=torch.int64)
    export_teacher(model, {"input_ids": ids, "attention_mask": ids}, folder / "teacher.onnx")


def count_samples(way: str, length: int) -> int:
    return 2 if "heads" in way or "shards" in way else max(4, 32768 // length)


def run(way: str, length: int, folder: str, turn: int) -> list[float]:
    """Gigabytes at the peak, processor seconds of a sample after the first, and those up to it."""
    command = [
        sys.executable,
        "-c",
        f"THREADS = {THREADS}\n{RUN}",
        way,
        str(length),
        folder,
        str(count_samples(way, length)),
        str(turn),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        raise SystemExit(process.stderr)
    return list(map(float, process.stdout.split()[-3:]))


if __name__ == "__main__":
    main()
