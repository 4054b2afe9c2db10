"""What does a step of training with SHD cost on a processor? Time over the same student without SHD, and memory.

The student is a causal transformer of fused attention, which is captured; the supervision comes from a cache's bytes
(codec ``sqrt8-row``) or from the teacher's queries and keys. All ways run interleaved, round after round, so that a
busy machine hits them alike; figures are medians of the rounds' ratios. "eager" has the maps of both sides in memory,
"compiled" is eager's loss under ``torch.compile``. Both read maps that are decoded already, which flatters them.

Memory is what one loss with its gradients adds to a fresh process at its peak, for one layer of two heads: taught by
the teacher's queries and keys, or by a cache's codes, which are there already (one byte for each of L (L + 1) / 2
entries a head; they alone grow with the square of the length).
Prints tables and writes ``results/attention_kl_cpu.json``.

    python -m benchmarks.attention_kl_cpu [--rounds 7] [--threads 1] [--no-compile]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import machine, result_path, save
from shd_ref.cache import encode, pack
from shd_torch import attention_kl, capture_attention
from shd_torch.supervision import Coded, Factored, Supervision

RESULT = result_path(__file__)
LAYERS, HEADS, WIDTH, VOCABULARY = 4, 6, 64, 1000
TEACHER_HEADS = 12  # two of them merged into each of the student's
LENGTHS = (512, 2048)
MEMORY_LENGTHS = (1024, 2048, 4096, 8192)
EAGER_MEMORY_LENGTHS = (1024, 2048, 4096)  # the next would need gigabytes
TARGET = 1.15


class Block(nn.Module):
    """Attention and a feed-forward network, both behind norms."""

    def __init__(self) -> None:
        super().__init__()
        size = HEADS * WIDTH
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.projections, self.output = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.feed = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, size = hidden.shape
        parts = self.projections(self.norms[0](hidden)).view(batch, length, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden = hidden + self.output(read.transpose(1, 2).reshape(batch, length, size))
        fed: Tensor = self.feed(self.norms[1](hidden))
        return hidden + fed


class Student(nn.Module):
    """A small causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HEADS * WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(HEADS * WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits


class Way(NamedTuple):
    """How a step gets its SHD term from the captured queries and keys."""

    name: str
    loss: Callable[[list[Tensor], list[Tensor]], Tensor] | None


def make_factored(length: int, heads: int = TEACHER_HEADS, students: int = HEADS) -> Factored:
    queries, keys = torch.randn(2, 1, heads, length, WIDTH).unbind()
    mixing = torch.eye(students).repeat_interleave(heads // students, 1)[None] / (heads // students)
    groups = tuple(tuple(range(h * heads // students, (h + 1) * heads // students)) for h in range(students))
    return Factored(queries, keys, mixing, is_causal=True, groups=groups)


def make_coded(factored: Factored) -> Coded:
    blob = torch.from_numpy(pack(encode("sqrt8-row", factored.probs()[0].numpy()), "causal", "sqrt8-row"))
    _, heads, length, _ = factored.shape
    return Coded(blob, (0,), (length,), heads, "sqrt8-row", "causal", length)


def eager_loss(queries: Tensor, keys: Tensor, maps: Tensor, entropy: Tensor) -> Tensor:
    """The loss as one writes it who has both maps."""
    length = queries.shape[2]
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    log_probs = (WIDTH**-0.5 * queries @ keys.mT).masked_fill(~allowed, -torch.inf).log_softmax(-1)
    cross = (maps * log_probs.masked_fill(~allowed, 0.0)).sum(-1)
    return -(cross + entropy).mean((0, 2)).sum()


def ours(supervision: Supervision, **options: Any) -> Callable[[list[Tensor], list[Tensor]], Tensor]:
    taught = [supervision] * LAYERS
    attention_kl(*(torch.zeros(1, HEADS, supervision.shape[2], WIDTH),) * 2, supervision, is_causal=True)  # the check

    def loss(queries: list[Tensor], keys: list[Tensor]) -> Tensor:
        return attention_kl(queries, keys, taught, is_causal=True, check=False, **options)

    return loss


def make_ways(length: int, compiled: bool) -> list[Way]:
    factored = make_factored(length)
    coded = make_coded(factored)
    maps = coded.probs()
    entropy = -torch.special.xlogy(maps, maps).sum(-1)

    def eager(function: Callable[..., Tensor]) -> Callable[[list[Tensor], list[Tensor]], Tensor]:
        return lambda queries, keys: torch.stack(
            [function(q, k, maps, entropy) for q, k in zip(queries, keys, strict=True)]
        ).sum()

    ways = [
        Way("without SHD", None),
        Way("cache, dense", ours(coded, backend="dense")),
        Way("cache, sdpa", ours(coded, backend="sdpa", value="surrogate")),
        Way("queries and keys, dense", ours(factored, backend="dense")),
        Way("queries and keys, sdpa", ours(factored, backend="sdpa", value="surrogate")),
        Way("eager", eager(eager_loss)),
    ]
    return [*ways, Way("compiled", eager(torch.compile(eager_loss)))] if compiled else ways


def step(student: Student, tokens: Tensor, way: Way) -> float:
    """Seconds of forward and backward."""
    student.zero_grad()
    started = time.perf_counter()
    if way.loss is None:
        logits, term = student(tokens), torch.zeros(())
    else:
        with capture_attention(student, layers=LAYERS) as captured:
            logits = student(tokens)
        term = way.loss([call.query for call in captured.calls], [call.key for call in captured.calls])
    (F.cross_entropy(logits[0], tokens[0]) + 0.1 * term).backward()
    return time.perf_counter() - started


def measure_time(length: int, rounds: int, compiled: bool) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    student, tokens, ways = Student(), torch.randint(VOCABULARY, (1, length)), make_ways(length, compiled)
    for way in ways:
        step(student, tokens, way)
    taken = [{way.name: step(student, tokens, way) for way in ways} for _ in range(rounds)]
    return {
        way.name: {
            "milliseconds": round(1000 * statistics.median(each[way.name] for each in taken), 1),
            "ratio": round(statistics.median(each[way.name] / each["without SHD"] for each in taken), 3),
        }
        for way in ways
    }


def run_once(way: str, length: int) -> None:
    """One loss with gradients in this process; prints the megabytes that its peak adds."""

    def loss(length: int) -> None:
        queries, keys = (torch.randn(1, 2, length, WIDTH).requires_grad_() for _ in range(2))
        taught = supervision[length]
        if way == "eager":
            maps = taught.probs()
            eager_loss(queries, keys, maps, -torch.xlogy(maps, maps).sum(-1)).backward()
        else:
            value = "exact" if way.endswith("dense") else "surrogate"
            options: dict[str, Any] = {"is_causal": True, "value": value, "check": False}
            attention_kl(queries, keys, taught, backend=way.split()[-1], **options).backward()

    make: Callable[[int], Supervision] = make_codes if way.startswith("codes") else lambda n: make_factored(n, 4, 2)
    supervision = {size: make(size) for size in (64, length)}
    loss(64)  # what the first call loads is no memory of the loss
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5", encoding="ascii")  # the peak of importing is not the loss's
    before = peak()
    loss(length)
    print(round(peak() - before, 1))


def make_codes(length: int) -> Coded:
    """A causal layer of two heads as a cache's bytes; any bytes decode to maps."""
    buffer = torch.randint(1, 256, (length * (length + 1),), dtype=torch.uint8)
    return Coded(buffer, (0,), (length,), 2, "sqrt8-row", "causal", length)


def peak() -> float:
    """Megabytes that were resident at most, of this process alone: what getrusage says begins with its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(
            int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM")
        )
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (1024**2 if sys.platform == "darwin" else 1024)


def measure_memory(threads: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for way in ("dense", "sdpa", "codes dense", "codes sdpa", "eager"):
        for length in EAGER_MEMORY_LENGTHS if way == "eager" else MEMORY_LENGTHS:
            words = ["--threads", str(threads), "--memory", way, str(length)]
            command = [sys.executable, "-m", "benchmarks.attention_kl_cpu", *words]
            answer = subprocess.run(command, check=True, capture_output=True, text=True)
            found.setdefault(way, {})[str(length)] = float(answer.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out, which needs a C++ compiler"
    )
    parser.add_argument("--memory", nargs=2, metavar=("WAY", "LENGTH"), help="one measurement, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory:
        run_once(arguments.memory[0], int(arguments.memory[1]))
        return
    report: dict[str, Any] = {"machine": machine(arguments.threads), "rounds": arguments.rounds, "time": {}}
    for length in LENGTHS:
        figures = measure_time(length, arguments.rounds, not arguments.no_compile)
        report["time"][str(length)] = figures
        print(f"\n{f'L={length}':26}{'ms':>10}{'ratio':>8}")
        for name, row in figures.items():
            print(f"{name:26}{row['milliseconds']:10.1f}{row['ratio']:8.2f}", flush=True)
        verdict = "met" if figures["cache, dense"]["ratio"] <= TARGET else "missed"
        print(f"the accelerator's target of {TARGET:.2f}, from the cache: {verdict}")
    report["memory_megabytes"] = measure_memory(arguments.threads)
    print(f"\n{'MB at the peak':16}" + "".join(f"{f'L={length}':>10}" for length in MEMORY_LENGTHS))
    for way, by_length in report["memory_megabytes"].items():
        print(f"{way:16}" + "".join(f"{by_length.get(str(length), float('nan')):10.1f}" for length in MEMORY_LENGTHS))
    save(report, RESULT)


if __name__ == "__main__":
    main()
