"""What waits for a GPU, in one call of at most nine minutes: kernels' errors, steps, the loss, a live teacher, tests.

    python -m benchmarks.gpu_pass                # results go to --out, else to $OUT, else to gpu/
    python -m benchmarks.gpu_pass --rehearse     # everything on a processor, in sizes that mean nothing
    python -m benchmarks.gpu_pass --pack wheels  # what a machine without internet lacks, and how to carry it there

A piece (``gpu_pieces.py``) is a process with a deadline, and a file ``<piece>.json``, written after each of its
cases. It is done when every case passed. Where machine and code are the same, the next call repeats the others, those
that were not tried first; what earlier calls found is read in --out, or in gpu/, to which the files are brought back.

Once kernels and loss have passed, ``measured.json`` is among the results; ``backend="auto"`` reads it when it has
been copied to ``shd_torch/kl/``. Exit status: 0 if every piece is done.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import hashlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.gpu_pieces import GPU, PIECES, REHEARSAL, ROOT, Cases, Facts, Piece, Sizes, find_threshold

MEASURED, EARLIER = ROOT / "shd_torch" / "kl" / "measured.json", ROOT / "gpu"
SECONDS: Final = 540.0
"""Of a call."""
MARGIN, LEAST = 10.0, 15.0
"""Seconds kept for ending a piece and for the table, and those under which none is begun."""

Start = Callable[[str, float], tuple[str, str]]
"""Runs a piece for so many seconds at most; how it ended ("ended", "timed out", "crashed"), and what it said last."""


def read(piece: str, *folders: Path) -> Facts:
    """What is known of a piece, from the first folder that has its file."""
    for path in (folder / f"{piece}.json" for folder in folders):
        if path.is_file():
            found: Facts = json.loads(path.read_text(encoding="utf-8"))
            return found
    return {}


def write(out: Path, name: str, found: Facts) -> None:
    """Whole or not at all, as the process may be ended at any moment."""
    draft = out / f"{name}.part"
    draft.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draft.replace(out / f"{name}.json")


def run_cases(piece: str, cases: Cases, out: Path) -> None:
    """In the piece's own process: the cases that have not passed, those that were never begun first."""
    found = read(piece, out)
    found["cases"] = {name: found["cases"].get(name, {}) for name in cases}
    for name in sorted(cases, key=lambda name: bool(found["cases"][name])):
        if found["cases"][name].get("passed"):
            continue
        found["cases"][name] = {"passed": False, "error": "not finished"}
        write(out, piece, found)
        started, fatal = time.monotonic(), False
        try:
            facts = cases[name]()
        except Exception as error:  # one case that fails must not cost the others their hour
            facts = {"passed": False, "error": f"{type(error).__name__}: {error}"[:500]}
            fatal = "CUDA error" in facts["error"]  # after which nothing runs in this process
        found["cases"][name] = facts | {"seconds": round(time.monotonic() - started, 1)}
        write(out, piece, found)
        print(f"{piece}: {name}: {json.dumps(found['cases'][name])[:300]}", flush=True)
        if fatal:
            raise SystemExit(f"{piece}: {name}: {facts['error']}")
        gc.collect()
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
            sys.modules["torch"].cuda.empty_cache()


def start_process(command: Sequence[str], piece: str, seconds: float) -> tuple[str, str]:
    """Run a piece in a process of its own, ended with all that it started when its time is over."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen([*command, piece], cwd=ROOT, stderr=errors, process_group=0)
        try:
            ended = "ended" if process.wait(seconds) == 0 else "crashed"
        except subprocess.TimeoutExpired:
            ended = "timed out"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        return ended, errors.read()[-1000:]


def run_call(
    pieces: Mapping[str, Piece],
    out: Path,
    machine: Facts,
    start: Start,
    *,
    seconds: float = SECONDS,
    earlier: Path = EARLIER,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run what is not done, in order, each piece within what is left of the call; whether all is done."""
    end, rows = clock() + seconds, []
    out.mkdir(parents=True, exist_ok=True)
    for name, piece in pieces.items():
        found = read(name, out, earlier)
        if found.get("machine") != machine:  # or one would be named for what the other measured
            found = {"piece": name, "machine": machine, "status": "not reached", "cases": {}}
        left = end - clock() - MARGIN
        if found["status"] != "passed" and left >= LEAST:
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            write(out, name, found | {"status": "not finished", "date": date})
            ended, said = start(name, min(piece.seconds, left))
            found = read(name, out)
            passed = [bool(facts.get("passed")) for facts in found["cases"].values()]
            found["status"] = "failed" if ended == "ended" else ended
            if ended == "ended" and passed and all(passed):
                found["status"] = "passed"
            found["said"] = said if ended == "crashed" else ""
            print(found["said"], end="", flush=True)
        elif found["status"] != "passed":
            found["status"] = "not reached"
        write(out, name, found)
        rows.append(found)
        (out / f"{name}.part").unlink(missing_ok=True)
    print_table(rows)
    return all(found["status"] == "passed" for found in rows)


def print_table(rows: list[Facts]) -> None:
    """What became of each piece, and what the next call does, in 80 columns."""
    print(f"\n{'piece':9}{'status':14}{'passed':>9}  the next call")
    for found in rows:
        cases = found["cases"]
        left = [name for name, facts in cases.items() if not facts.get("passed")]
        plan = f"repeats {', '.join(left)}" if left else "measures it" if found["status"] != "passed" else "nothing"
        count = f"{len(cases) - len(left)}/{len(cases)}" if cases else "-"
        plan = plan if len(plan) <= 46 else f"repeats {len(left)} cases, from {left[0]}"[:46]
        print(f"{found['piece']:9}{found['status']:14}{count:>9}  {plan}", flush=True)


def describe(rehearse: bool) -> Facts:
    """Machine and code, which must be the same for a call to go on with another's results; imports no PyTorch."""
    code = hashlib.sha256()
    for path in sorted([*ROOT.glob("shd_torch/**/*.py"), *ROOT.glob("benchmarks/gpu_*.py")]):
        code.update(path.read_bytes())
    versions = {}
    for package in ("torch", "triton", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    facts = {"code": code.hexdigest()[:12], "python": platform.python_version(), **versions}
    if rehearse:
        return facts | {"device": f"cpu {platform.machine()}", "driver": "none"}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        raise SystemExit("gpu_pass needs a CUDA device; nvidia-smi finds none: try --rehearse") from None
    device, driver, capability = (part.strip() for part in text.splitlines()[0].split(","))
    return facts | {"device": device, "driver": driver, "capability": [int(part) for part in capability.split(".")]}


def write_measured(out: Path, sizes: Sizes) -> None:
    """``measured.json`` with this device, once its kernels are right and timed; with no length if they never pay."""
    kernels, loss = read("kernels", out), read("loss", out)
    if sizes.device != "cuda" or not kernels["status"] == loss["status"] == "passed":
        return
    machine, known = loss["machine"], json.loads(MEASURED.read_text(encoding="utf-8"))["devices"]
    devices = [each for each in known if each["capability"] != machine["capability"]]
    least = find_threshold(loss["cases"], sizes.lengths)
    devices.append({"capability": machine["capability"], "triton_from": least, "measured_on": machine["device"]})
    write(out, "measured", {"devices": devices})
    print(f"the kernels pay from {least} keys on: copy {out}/measured.json to shd_torch/kl/")


PACKED: Final = (
    "accelerate",
    "onnx",
    "onnxscript",
    "pytest",
    "cyclopts",
    "rich",
    "safetensors",
    "transformers",
    "xxhash",
)
"""What tests and pieces import beside what is there."""
THERE: Final = ("numpy", "onnxruntime", "onnxruntime-gpu", "torch", "triton")
"""What a machine for PyTorch has; what PyTorch needs itself too."""
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LIMIT_MIB: Final = 40


def needed(names: Sequence[str]) -> set[str]:
    """Packages with all that they require, as those that are installed here say."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name in found or (name in THERE and name not in names):
            continue
        found.add(name)
        required = map(Requirement, importlib.metadata.requires(name) or ())
        left += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def pack(folder: Path, python: str) -> None:
    """Download wheels for a Linux machine without internet, in the versions that CI tests."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0]: line for line in lines if "==" in line}
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    missing = needed(PACKED) - needed(("torch",)) - {*THERE, "hf-xet"}  # which only downloads
    wanted = [pinned.get(name, name) for name in missing]
    command = ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]
    subprocess.run([sys.executable, *command, "-q", "-d", str(folder), *wanted], check=True)
    wheels = sorted(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    if size > LIMIT_MIB:
        raise SystemExit(f"{len(wheels)} wheels have {size:.0f} MiB, more than {LIMIT_MIB}: leave some out of PACKED")
    print(f"{len(wheels)} wheels, {size:.0f} MiB, for Python {python}. Carry {folder} and this checkout; then there:")
    print(f"  python3 -m pip install --no-index --no-deps --target /tmp/site {folder}/*.whl")
    print("  PYTHONPATH=/tmp/site:. python3 -m benchmarks.gpu_pass")
    print("and bring the results back into gpu/, where the next call goes on from them.")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_pass", description=(__doc__ or "").splitlines()[0]
    )
    default = Path(os.environ.get("OUT") or EARLIER)
    parser.add_argument("--out", type=Path, default=default, help="folder of the results")
    parser.add_argument("--rehearse", action="store_true", help="everything on a processor, to see that it runs")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="download wheels for a machine without internet")
    parser.add_argument("--python", default="3.12", help="with --pack: that machine's Python")
    parser.add_argument("--piece", choices=PIECES, help=argparse.SUPPRESS)  # as the call starts it
    began, given = time.monotonic(), parser.parse_args(arguments)
    sizes = REHEARSAL if given.rehearse else GPU
    if given.pack is not None:
        pack(given.pack, given.python)
        return
    if given.piece is not None:
        if given.rehearse:
            os.environ["TRITON_INTERPRET"] = "1"  # counts when the kernels are first imported
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for two passes
        run_cases(given.piece, PIECES[given.piece].cases(sizes), given.out)
        return
    out = (given.out / "rehearsal" if given.rehearse else given.out).resolve()
    words = ["--out", str(out), *["--rehearse"] * given.rehearse, "--piece"]
    command = [sys.executable, "-m", "benchmarks.gpu_pass", *words]
    machine = describe(given.rehearse)
    print(json.dumps(machine), flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no piece outlives the call
    earlier, left = EARLIER / "rehearsal" if given.rehearse else EARLIER, SECONDS - (time.monotonic() - began)
    done = run_call(PIECES, out, machine, partial(start_process, command), seconds=left, earlier=earlier)
    write_measured(out, sizes)
    raise SystemExit(0 if done else 1)


if __name__ == "__main__":
    main()
