"""128 heads (as in DeepSeek-V3) and 1,024: processor seconds and peak memory of one layer's squeeze.

One sample of 16 tokens, half as many student heads, the progressive plan, one thread; float64 in the reference,
float32 in the binding. 128 heads of 128 write to 7,168 channels, 1,024 heads of 64 to 1,024. ``factored`` forms no
map. The Gram tensor of all heads, 8 H^4 bytes, is read by ``shd-torch shrink`` alone; its heads are 16 wide here.
Every case runs in a process that may take 12 GB of addresses; peaks are above what its inputs took.

Prints a table and writes ``results/many_heads.json``. python -m benchmarks.many_heads
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import result_path, save

RESULT = result_path(__file__)
SHAPES = {32: (128, 4096), 128: (128, 7168), 1024: (64, 1024)}
"""By heads: width of a head, and of the stream."""
TOKENS, LIMIT = 16, 12 * 10**9
CASES = ("reference", "binding", "factored", "gram_tensor, reference", "gram_tensor, binding")


def prepare(case: str, heads: int) -> Callable[[], Any]:
    width, channels = SHAPES[heads]
    width = 16 if case.startswith("gram") else width
    random = np.random.default_rng(0)
    logits = random.normal(size=(1, heads, TOKENS, TOKENS)) + np.triu(np.full((TOKENS, TOKENS), -1e30), 1)
    values, projection = random.normal(size=(1, heads, TOKENS, width)), random.normal(size=(heads * width, channels))
    maps = np.exp(logits - logits.max(-1, keepdims=True))
    maps /= maps.sum(-1, keepdims=True)
    if case.endswith("reference"):
        import shd_ref

        if case.startswith("gram"):
            return lambda: shd_ref.gram_tensor(maps, values, projection)
        return lambda: shd_ref.squeeze_heads(maps, shd_ref.value_outputs(values, projection), heads // 2)
    import torch

    from shd_torch.live.squeeze import squeeze_factored
    from shd_torch.maps import gram_tensor, squeeze_heads, value_outputs
    from shd_torch.supervision.factored import Factored

    torch.set_num_threads(1)
    tensors = [torch.from_numpy(array).float() for array in (maps, values, projection)]
    if case.startswith("gram"):
        return lambda: gram_tensor(*tensors)
    if case == "factored":
        queries, keys = (torch.randn(1, heads, TOKENS, width) for _ in "qk")
        return lambda: squeeze_factored(Factored.teacher(queries, keys), *tensors[1:], heads // 2)
    return lambda: squeeze_heads(tensors[0], value_outputs(*tensors[1:]), heads // 2)


def measure(case: str, heads: int) -> dict[str, Any]:
    """In this process."""
    if case.startswith("gram") and 8 * heads**4 > LIMIT:
        return {"refused": f"8 H^4 bytes are {8 * heads**4 / 1e9:,.0f} GB"}
    run = prepare(case, heads)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak so far is forgotten
    before, started = read_kilobytes("VmRSS"), time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    try:
        run()
    except (MemoryError, RuntimeError, ValueError) as error:
        return {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300]}
    peak = (read_kilobytes("VmHWM") - before) / 1024
    return {"seconds": time.process_time() - started, "peak_megabytes": peak}


def read_kilobytes(name: str) -> int:
    """Of this process: VmRSS, or its peak VmHWM. Linux alone."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(f"{name}:")))


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
        return
    report: dict[str, Any] = {
        "machine": {"cpu": platform.machine(), "python": platform.python_version()},
        "cases": {},
    }
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    for heads in SHAPES:
        for case in CASES:
            command = [sys.executable, "-m", "benchmarks.many_heads", case, str(heads)]
            environment = os.environ | dict.fromkeys(names, "1")
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            lines = done.stdout.splitlines()
            found = json.loads(lines[-1]) if done.returncode == 0 else {"refused": f"ended by {done.returncode}"}
            report["cases"].setdefault(str(heads), {})[case] = found
            print(heads, case, found, flush=True)
    save(report, RESULT)


if __name__ == "__main__":
    main()
