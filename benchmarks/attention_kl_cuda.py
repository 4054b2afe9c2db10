"""What does SHD add to a student's step on a GPU? Time and peak memory of attention with SHD over attention without.

One layer of a student with fused attention, forward and backward; every way to compute the loss runs interleaved with
the plain step, round after round, and figures are medians of ratios within a round. Beside each stands the plan: what
bandwidth and arithmetic of an H200 allow. Memory is that of attention alone, without the supervision in the plain
step. Prints a table and writes ``attention_kl_cuda.json`` beside this file.

    python benchmarks/attention_kl_cuda.py [--lengths 512 1024 2048 4096 8192] [--rounds 30]

``--device cpu --lengths 64 --backends dense sdpa`` runs the script itself through without a GPU; such figures mean
nothing for one, and are written only where ``--output`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shd_ref.cache import packed_size
from shd_torch import ShdError, attention_kl
from shd_torch.kl.backends import BACKENDS
from shd_torch.supervision import Factored
from shd_torch.supervision.coded import Coded
from shd_torch.supervision.supervision import Supervision

RESULT = Path(__file__).with_suffix(".json")
LENGTHS = (512, 1024, 2048, 4096, 8192)
RIVALS = ("eager", "compile")
NAMES = (*BACKENDS, "triton-deterministic", *RIVALS)
TARGET = {"length": 2048, "time_ratio": 1.15, "memory_ratio": 1.10}

# Milliseconds that an H200's bandwidth and arithmetic allow for one layer of these settings, by length: a plan.
PLAN_SETTINGS = {"batch": 8, "heads": 12, "members": 2, "width": 64}
PLAN = {
    "plain": (0.03, 0.14, 0.55, 2.2, 8.7),
    "eager": (1.6, 6.2, 25, 99, 395),
    "compile": (0.25, 1.0, 3.8, 15, 60),
    "sdpa": (0.11, 0.45, 1.8, 7.2, 29),
    "triton": (0.03, 0.12, 0.46, 1.8, 7.4),
    "triton-deterministic": (0.05, 0.18, 0.74, 2.9, 12),
}

Loss: TypeAlias = Callable[[Tensor, Tensor, Supervision], Tensor]


class Step:
    """One student layer and its supervision.

    Args:
        device: where it runs.
        dtype: of queries, keys and values.
        length: L = S.
        form: ``"factored"`` or ``"coded"``.
        batch: samples.
        heads: H_s.
        members: teacher heads a student head.
        width: d of all heads.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        length: int,
        form: str,
        *,
        batch: int,
        heads: int,
        members: int,
        width: int,
    ) -> None:
        generator = torch.Generator(device).manual_seed(length)

        def draw(number: int) -> Tensor:
            shape = (batch, number, length, width)
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        self.q, self.k, self.v = (draw(heads).requires_grad_() for _ in range(3))
        self.upstream = draw(heads)
        before = _count_bytes(device)
        self.supervision = _code(batch, heads, length, device) if form == "coded" else _factor(draw, heads, members)

        self.supervision_bytes = _count_bytes(device) - before

    def run_plain(self) -> Tensor | None:
        """Attention forward and backward."""
        self._attend().backward(self.upstream)
        return None

    def run_with(self, loss_of: Loss) -> Tensor:
        """The same with SHD."""
        output = self._attend()
        loss = loss_of(self.q, self.k, self.supervision)
        torch.autograd.backward((output, loss), (self.upstream, None))
        return loss.detach()

    def clear(self) -> None:
        for tensor in (self.q, self.k, self.v):
            tensor.grad = None

    def _attend(self) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=True)


def _count_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _factor(draw: Callable[[int], Tensor], heads: int, members: int) -> Factored:
    groups = tuple(tuple(range(head * members, (head + 1) * members)) for head in range(heads))
    queries, keys = draw(heads * members), draw(heads * members)
    weights = torch.zeros(queries.shape[0], heads, heads * members, device=queries.device)
    for head, group in enumerate(groups):
        weights[:, head, list(group)] = 1.0 / members
    return Factored(queries, keys, weights, is_causal=True, groups=groups)


def _code(batch: int, heads: int, length: int, device: torch.device) -> Coded:
    """Codes of a cache with the lower triangle; which ones costs nothing."""
    size = packed_size("sqrt8-row", "causal", heads, length)
    generator = torch.Generator(device).manual_seed(0)
    buffer = torch.randint(1, 256, (batch * size,), generator=generator, device=device, dtype=torch.uint8)
    starts = tuple(sample * size for sample in range(batch))
    return Coded(buffer, starts, (length,) * batch, heads, "sqrt8-row", "causal", length)


def eager_loss(q: Tensor, k: Tensor, supervision: Supervision) -> Tensor:
    """What one writes without this library: both maps in full."""
    logits = q.shape[3] ** -0.5 * (q @ k.mT).float()
    mask = torch.ones(logits.shape[2:], dtype=torch.bool, device=q.device).tril()
    log_probs = logits.masked_fill(~mask, -torch.inf).log_softmax(-1)
    with torch.no_grad():
        maps = supervision.probs()
    kl = torch.where(maps > 0, torch.xlogy(maps, maps) - maps * log_probs.masked_fill(~mask, 0.0), 0.0)
    return kl.sum() / (q.shape[0] * q.shape[2])


def losses(names: list[str], value: str) -> dict[str, Loss]:
    """How each name computes the loss."""

    def by_backend(name: str) -> Loss:
        backend, _, deterministic = name.partition("-")

        def loss_of(q: Tensor, k: Tensor, taught: Supervision) -> Tensor:
            torch.use_deterministic_algorithms(bool(deterministic))
            try:
                return attention_kl(q, k, taught, is_causal=True, backend=backend, value=value, check=False)
            finally:
                torch.use_deterministic_algorithms(False)

        return loss_of

    rivals = {"eager": eager_loss, "compile": torch.compile(eager_loss) if "compile" in names else eager_loss}
    return {name: rivals.get(name) or by_backend(name) for name in names}


def measure(step: Step, run: Callable[[], Any], device: torch.device) -> tuple[float, int]:
    """Milliseconds and peak bytes; no bytes without a CUDA device."""
    step.clear()
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - started), 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end), torch.cuda.max_memory_allocated(device)


def compare(step: Step, names: list[str], value: str, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """A row for the plain step and for each way; a way that fails says why instead of figures."""
    runs: dict[str, Callable[[], Any]] = {"plain": step.run_plain}
    failures: dict[str, str] = {}
    for name, loss_of in losses(names, value).items():
        try:
            for _ in range(3):  # compiled, tuned, warm
                step.clear()
                step.run_with(loss_of)
        except (ShdError, RuntimeError) as error:
            failures[name] = str(error).splitlines()[0]
        else:
            runs[name] = lambda loss_of=loss_of: step.run_with(loss_of)  # type: ignore[misc]
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(measure(step, run, device))
    rows: list[dict[str, Any]] = []
    held = step.supervision_bytes
    for name, figures in taken.items():
        pairs = list(zip(figures, taken["plain"], strict=True))
        rows.append(
            {
                "name": name,
                "milliseconds": statistics.median(ms for ms, _ in figures),
                "time_ratio": statistics.median(ms / plain for (ms, _), (plain, _) in pairs),
                "peak_bytes": max(peak for _, peak in figures) or None,
                "memory_ratio": statistics.median(peak / (plain - held) for (_, peak), (_, plain) in pairs)
                if device.type == "cuda"
                else None,
            }
        )
    return rows + [{"name": name, "refused": reason} for name, reason in failures.items()]


def plan_ratio(name: str, length: int) -> float | None:
    """What the plan says of a step with SHD over one without."""
    if name not in PLAN or length not in LENGTHS:
        return None
    at = LENGTHS.index(length)
    return 1.0 + (PLAN[name][at] / PLAN["plain"][at] if name != "plain" else 0.0)


def find_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--device {name} needs a CUDA device; torch {torch.__version__} finds none")
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """The machine."""
    machine = {"host": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    if device.type != "cuda":
        return machine | {"device": "cpu"}
    major, minor = torch.cuda.get_device_capability(device)
    return machine | {
        "device": torch.cuda.get_device_name(device),
        "capability": [major, minor],
        "cuda": torch.version.cuda,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--forms", nargs="+", choices=["factored", "coded"], default=["factored", "coded"])
    parser.add_argument("--backends", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument(
        "--value", choices=["surrogate", "exact"], default="surrogate", help="exact: a step that logs"
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", type=int, default=12, help="of the student")
    parser.add_argument("--members", type=int, default=2, help="teacher heads a student head")
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--output", type=Path, help=f"default {RESULT.name} beside this file, for a CUDA device")
    chosen = parser.parse_args()
    device = find_device(chosen.device)
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # what cuBLAS needs where algorithms are deterministic
    shape = {name: getattr(chosen, name) for name in ("batch", "heads", "members", "width")}
    report: dict[str, Any] = {
        "machine": describe(device),
        "settings": shape | {"dtype": chosen.dtype, "value": chosen.value, "rounds": chosen.rounds},
        "target": TARGET,
        "rows": [],
    }
    print(f"{report['machine']['device']}, {chosen.dtype}, {shape}\n")
    print(f"{'form':10}{'L':>6}  {'':22}{'ms':>10}{'time ratio':>12}{'plan':>8}{'memory ratio':>14}")
    for form in chosen.forms:
        for length in chosen.lengths:
            step = Step(device, getattr(torch, chosen.dtype), length, form, **shape)
            for row in compare(step, chosen.backends, chosen.value, device, chosen.rounds):
                planned = form == "factored" and shape == PLAN_SETTINGS
                row |= {"form": form, "length": length}
                row["plan_ratio"] = plan_ratio(row["name"], length) if planned else None
                report["rows"].append(row)
                _print_row(row)
    _print_verdict(report["rows"])
    output = chosen.output or (RESULT if device.type == "cuda" else None)
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _print_row(row: dict[str, Any]) -> None:
    start = f"{row['form']:10}{row['length']:6}  {row['name']:22}"
    if "refused" in row:
        print(f"{start}{row['refused']}", flush=True)
        return
    ratios = ((row["time_ratio"], 12), (row["plan_ratio"], 8), (row["memory_ratio"], 14))
    cells = "".join(" " * size if ratio is None else f"{ratio:{size}.2f}" for ratio, size in ratios)
    print(f"{start}{row['milliseconds']:10.3f}{cells}", flush=True)


def _print_verdict(rows: list[dict[str, Any]]) -> None:
    """Where the kernels pay, of which ``gpu_pass.py`` writes ``shd_torch/kl/measured.json``."""
    ratios = {(row["form"], row["length"], row["name"]): row.get("time_ratio") for row in rows}
    lengths = sorted({row["length"] for row in rows})
    forms = sorted({row["form"] for row in rows})
    wins = []
    for length in reversed(lengths):
        ours = [ratios.get((form, length, "triton")) for form in forms]
        theirs = [
            min((r for n in BACKENDS if n != "triton" and (r := ratios.get((form, length, n)))), default=None)
            for form in forms
        ]
        if any(a is None or b is None or a >= b for a, b in zip(ours, theirs, strict=True)):
            break
        wins.append(length)
    print(f"\nthe kernels pay from {wins[-1]} keys on" if wins else "\nthe kernels do not pay, or were not measured")


if __name__ == "__main__":
    main()
