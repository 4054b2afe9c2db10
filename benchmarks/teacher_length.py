"""How do memory and time of `shd precompute` grow with the length of a sample, with and without tiles?

The teacher is a Llama of 2 layers, 8 heads over 4 and width 256 (FFN 512, vocabulary 512, random weights); samples
run one at a time on one thread, each in a shard of its own: coding errors are measured on every sample, not on the
first of a shard of 256 MiB. Rivals are the same run with whole maps (``--tile 0``), PyTorch's fused attention, which
gives nothing but the output, and PyTorch's eager attention with ``output_attentions``, which gives maps of all heads.
Each run is a separate process. The figures are its peak of resident memory; the processor seconds of one more sample,
from runs of two and of four; and those of all else but imports, the checks before the first record among them. Whole
maps are left out where they would not fit.

Prints a table, and writes ``teacher_length.json`` here and ``docs/pictures/teacher_length.svg``.

    python benchmarks/teacher_length.py [--lengths 1024 2048 4096 8192 16384]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from squeeze_overhead import machine

RESULT = Path(__file__).with_suffix(".json")
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "teacher_length.svg"
FEW, MANY, THREADS = 2, 4, 1
LONGEST = {"factored": 16384, "maps": 8192, "PyTorch fused": 16384}
"""Tokens of the longest samples by way; 4,096 for those with whole maps of all heads."""
WAYS = ("factored", "PyTorch fused", "maps", "PyTorch maps", "factored, whole maps", "maps, whole maps")
RUN = """
import sys, time
from pathlib import Path
import numpy as np
way, length, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
tokens = np.random.default_rng(0).integers(1, 512, (int(sys.argv[4]), length))
started = time.process_time()
if way.startswith("PyTorch"):
    import torch, transformers
    torch.set_num_threads(THREADS)
    attention = "sdpa" if way == "PyTorch fused" else "eager"
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model", attn_implementation=attention).eval()
    started = time.process_time()
    with torch.no_grad():
        for row in torch.from_numpy(tokens):
            model(row[None], use_cache=False, output_attentions=attention == "eager")
else:
    from shd_ref.teacher import PrecomputeOptions, RunOptions
    from shd_ref.teacher.precompute import precompute
    form, _, whole = way.partition(", ")
    run = RunOptions(batch_size=1, num_threads=THREADS, tile=0 if whole else None)
    inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    cache = folder / way / "-".join(sys.argv[2::2])
    precompute(folder / "teacher.onnx", inputs, [(cache, PrecomputeOptions(4, form=form))], run)
seconds = time.process_time() - started
# Of this process alone: getrusage also knows its parent's peak.
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024 / 1e9, seconds)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    lengths = parser.parse_args().lengths
    rows: dict[str, dict[str, dict[str, float]]] = {way: {} for way in WAYS}
    with tempfile.TemporaryDirectory() as name:
        make_teacher(Path(name), max(lengths))
        for way in WAYS:
            for length in lengths:
                if length > LONGEST.get(way, 4096):
                    continue
                rows[way][str(length)] = measure(way, length, name)
                print(f"{way:22} {length:6} tokens  {rows[way][str(length)]}", flush=True)
    report = {"machine": machine(THREADS), "samples": [FEW, MANY], "runs": rows}
    RESULT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    draw(rows)


def make_teacher(folder: Path, length: int) -> None:
    import torch
    import transformers

    from shd_torch import export_teacher

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=length,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "model")
    ids = torch.ones(2, 8, dtype=torch.int64)
    export_teacher(model, {"input_ids": ids, "attention_mask": ids}, folder / "teacher.onnx")


def measure(way: str, length: int, folder: str) -> dict[str, float]:
    """Gigabytes at the peak, processor seconds a sample, and those before the first."""
    peaks, seconds = zip(*(run(way, length, folder, count) for count in (FEW, MANY)), strict=True)
    each = (seconds[1] - seconds[0]) / (MANY - FEW)
    return {"gigabytes": round(max(peaks), 3), "seconds": round(each, 3), "start": round(seconds[0] - FEW * each, 2)}


def run(way: str, length: int, folder: str, count: int) -> tuple[float, float]:
    command = [sys.executable, "-c", f"THREADS = {THREADS}\n{RUN}", way, str(length), folder, str(count)]
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode:
        raise SystemExit(process.stderr)
    peak, seconds = map(float, process.stdout.split()[-2:])
    return peak, seconds


def draw(rows: dict[str, dict[str, dict[str, float]]]) -> None:
    from matplotlib.figure import Figure  # without pyplot: files, no window

    figure = Figure(figsize=(8, 3.9), layout="constrained")
    for axis, (key, label) in zip(
        figure.subplots(1, 2),
        (("gigabytes", "peak memory of the process, GB"), ("seconds", "processor seconds a sample")),
        strict=True,
    ):
        for way, points in rows.items():
            lengths = list(map(int, points))
            axis.plot(lengths, [point[key] for point in points.values()], marker="o", markersize=3, label=way)
        axis.set(xscale="log", yscale="log", xlabel="tokens of a sample", ylabel=label)
        axis.set_xticks(list(map(int, rows[WAYS[0]])), list(rows[WAYS[0]]))
        ticks = (0.5, 1, 2, 4, 8) if key == "gigabytes" else (0.01, 0.1, 1, 10)
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
