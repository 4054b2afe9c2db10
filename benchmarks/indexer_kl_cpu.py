"""What does an indexer's loss cost on a CPU, compared with the same loss on maps in memory?

A layer of 16 teacher heads and a causal scorer of 4 heads with ReLU and weights, all of width 64, in float32. "maps"
is the loss as one writes it, with the maps of all heads and automatic differentiation. Time is processor time of this
process for the loss and its gradients, by turns; memory is what one loss with its gradients adds to a fresh process
at its peak, above the inputs. Prints tables and writes ``results/indexer_kl_cpu.json``.

    python -m benchmarks.indexer_kl_cpu [--rounds 3] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine, result_path, save
from benchmarks.attention_kl_cpu import peak
from shd_torch import indexer_kl
from shd_torch.supervision import Factored

RESULT = result_path(__file__)
HEADS, SCORERS, WIDTH, TOP_K = 16, 4, 64, 512
TIMED = (1024, 2048, 4096)
MEMORY = {"dense": (2048, 4096, 8192), "top-k": (2048, 4096, 8192), "maps": (2048, 4096)}
TARGETS = {"megabytes at 8192": 250.0, "ratio at 4096": 0.3}


def make_inputs(length: int) -> tuple[list[Tensor], Factored]:
    """The scorer's queries, keys and weights, and the teacher."""
    torch.manual_seed(0)
    queries, keys = torch.randn(1, SCORERS, length, WIDTH), torch.randn(1, 1, length, WIDTH)
    scorer = [tensor.requires_grad_() for tensor in (queries, keys, torch.rand(1, SCORERS, length))]
    return scorer, Factored.teacher(*torch.randn(2, 1, HEADS, length, WIDTH).unbind(), is_causal=True)


def map_loss(scorer: list[Tensor], teacher: Factored) -> Tensor:
    """The loss with whole maps, as public references write it."""
    queries, keys, weights = scorer
    length = queries.shape[2]
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    with torch.no_grad():
        logits = (WIDTH**-0.5 * teacher.queries @ teacher.keys.mT).masked_fill_(~allowed, -torch.inf)
        target = logits.softmax(-1).sum(1) / HEADS
    scores = WIDTH**-0.5 * ((queries @ keys.mT).relu() * weights[..., None]).sum(1)
    log_q = scores.masked_fill(~allowed, -torch.inf).log_softmax(-1)
    return (torch.special.xlogy(target, target) - target * log_q.masked_fill(~allowed, 0.0)).sum()


def loss_of(way: str, scorer: list[Tensor], teacher: Factored) -> Tensor:
    """The loss in one way."""
    if way == "maps":
        return map_loss(scorer, teacher)
    queries, keys, weights = scorer
    top_k = TOP_K if way == "top-k" else None
    return indexer_kl(queries, keys, teacher, scale=WIDTH**-0.5, weights=weights, top_k=top_k, check=False)


def measure_time(length: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of processor time and of the rounds' ratios to whole maps."""
    scorer, teacher = make_inputs(length)
    seconds: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        seconds.append({})
        for way in MEMORY:
            started = time.process_time()
            loss_of(way, scorer, teacher).backward()
            seconds[-1][way] = time.process_time() - started
    return {
        way: {
            "seconds": round(statistics.median(times[way] for times in seconds[1:]), 3),
            "ratio": round(statistics.median(times[way] / times["maps"] for times in seconds[1:]), 3),
        }
        for way in MEMORY
    }


def run_once(way: str, length: int) -> None:
    """One loss with gradients in this process; prints the megabytes that its peak adds to the inputs."""
    small, inputs = make_inputs(64), make_inputs(length)
    loss_of(way, *small).backward()  # what the first call loads is no memory of the loss
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5", encoding="ascii")
    before = peak()
    loss_of(way, *inputs).backward()
    print(round(peak() - before, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", nargs=2, metavar=("WAY", "LENGTH"), help="one measurement, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory:
        run_once(arguments.memory[0], int(arguments.memory[1]))
        return
    report: dict[str, Any] = {"machine": machine(arguments.threads), "rounds": arguments.rounds, "targets": TARGETS}
    report["time"] = {str(length): measure_time(length, arguments.rounds) for length in TIMED}
    for length, ways in report["time"].items():
        row = "".join(f"{way:>8} {times['seconds']:8.2f} s {times['ratio']:6.2f}" for way, times in ways.items())
        print(f"L={length:6}{row}", flush=True)
    report["memory_megabytes"] = {}
    for way, lengths in MEMORY.items():
        for length in lengths:
            words = ["--threads", str(arguments.threads), "--memory", way, str(length)]
            command = [sys.executable, "-m", "benchmarks.indexer_kl_cpu", *words]
            megabytes = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            report["memory_megabytes"].setdefault(way, {})[str(length)] = megabytes
            print(f"{way:8} L={length:6} {megabytes:8.1f} MB", flush=True)
    save(report, RESULT)


if __name__ == "__main__":
    main()
