"""All that waits for a GPU, the most valuable first, in calls of at most ten minutes.

    python -m benchmarks.gpu_pass --out gpu          # what is not done yet, until the time is over; again: goes on
    python -m benchmarks.gpu_pass --rehearse         # everything on a processor, in sizes that mean nothing
    python -m benchmarks.gpu_pass --pack wheels      # what a machine without internet lacks, and what to carry there

Each stage has a file ``<stage>.json`` in the folder: what is in it is not measured again. Stages: the CUDA tests;
the kernels beside the float64 reference; a step with SHD beside one without, in time and memory
(``attention_kl_cuda.py``); SHD's forward and backward pass as multiples of a flash call's; from which length on the
kernels pay, written to ``shd_torch/kl/measured.json``, which ``backend="auto"`` reads; onnxruntime's CUDA provider;
the study.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MEASURED = ROOT / "shd_torch" / "kl" / "measured.json"
TARGETS: Final = {"length": 2048, "step_ratio": 1.05, "faster_than_eager": 20.0, "faster_than_compile": 4.0}
TILELANG_DSA: Final = {"forward": 2.2, "backward": 5.0}
"""Multiples of a flash call that its authors state for another fused loss on attention, for comparison."""

Facts: TypeAlias = dict[str, Any]
Piece: TypeAlias = tuple[str, float, Callable[[], Facts]]
"""Name, seconds that it may take, and what measures it."""


class NotHereError(Exception):
    """A piece that this machine cannot run, and why; it is tried again by the next call."""


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    device: str
    dtype: str
    lengths: tuple[int, ...]
    forms: tuple[str, ...]
    names: tuple[str, ...]
    rounds: int
    shape: dict[str, int]


GPU: Final = Sizes(
    "cuda",
    "bfloat16",
    (2048, 512, 1024, 4096, 8192),  # that of the targets first
    ("factored", "coded"),
    ("sdpa", "triton", "triton-deterministic", "eager", "compile"),
    20,
    {"batch": 8, "heads": 12, "members": 2, "width": 64},
)
REHEARSAL: Final = Sizes(
    "cpu",
    "float32",
    (16, 32),
    ("factored", "coded"),
    ("sdpa", "triton", "eager"),
    1,
    {"batch": 1, "heads": 1, "members": 2, "width": 16},
)


def test_pieces(sizes: Sizes, out: Path) -> Iterator[Piece]:
    """The tests that are skipped without a GPU, a file at a time."""
    if sizes is REHEARSAL:
        yield "collected", 60, partial(_pytest, ["--collect-only", "tests/torch_path/kernels"], 60)
        return
    for name in ("tests/torch_path/kernels", "tests/judge/test_implementations.py", "tests/kd", "tests/recipes"):
        yield name, 120, partial(_pytest, [name], 240)
    yield "the others", 240, partial(_pytest, ["tests"], 420)


def _pytest(words: list[str], seconds: float) -> Facts:
    if importlib.util.find_spec("pytest") is None:
        raise NotHereError("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *words]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code, text = _run(command, seconds, environment)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    # 5: nothing was collected in that place.
    return {"code": code, "ok": code in (0, 5), "said": text.strip().splitlines()[-1:], "failed": failed}


def _run(command: list[str], seconds: float, environment: dict[str, str] | None = None) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        return 124, str(error)
    return done.returncode, done.stdout + done.stderr[-2000:]


def kernel_pieces(sizes: Sizes, out: Path) -> Iterator[Piece]:
    """Loss and gradients of the kernels beside those of ``dense`` in float64, for every dtype and form."""
    dtypes = ("float32",) if sizes is REHEARSAL else ("bfloat16", "float16", "float32")
    for form in sizes.forms:
        for dtype in dtypes:
            for length in sizes.lengths[:1] if sizes is REHEARSAL else (257, 1024):
                yield f"{form} {dtype} {length}", 30, partial(_kernel_error, sizes, form, dtype, length)


def _kernel_error(sizes: Sizes, form: str, dtype: str, length: int) -> Facts:
    import torch

    from benchmarks.attention_kl_cuda import Step
    from shd_torch import attention_kl

    device, shape = torch.device(sizes.device), sizes.shape | {"batch": min(2, sizes.shape["batch"])}
    step = Step(device, getattr(torch, dtype), length, form, **shape)
    keywords: Facts = {"is_causal": True, "check": False}
    loss = attention_kl(step.q, step.k, step.supervision, backend="triton", **keywords)
    found = [loss.detach(), *torch.autograd.grad(loss, (step.q, step.k))]
    wide = [part.detach().double().requires_grad_() for part in (step.q, step.k)]
    loss = attention_kl(*wide, step.supervision, backend="dense", product_dtype=torch.float64, **keywords)
    wanted = [loss.detach(), *torch.autograd.grad(loss, wide)]
    errors = [float((a.double() - b).norm() / b.norm().clamp_min(1e-300)) for a, b in zip(found, wanted, strict=True)]
    return dict(zip(("loss", "dq", "dk"), errors, strict=True))


def step_pieces(sizes: Sizes, out: Path) -> Iterator[Piece]:
    """Attention with SHD over attention without, forward and backward, every way beside every other."""
    for length in sizes.lengths:
        for form in sizes.forms:
            yield f"{form} {length}", 60, partial(_compare, sizes, form, length)


def _compare(sizes: Sizes, form: str, length: int) -> Facts:
    from benchmarks.attention_kl_cuda import compare

    rows = compare(_make_step(sizes, form, length), list(sizes.names), "surrogate", _device(sizes), sizes.rounds)
    return {"rows": rows}


def flash_pieces(sizes: Sizes, out: Path) -> Iterator[Piece]:
    """SHD's passes as multiples of a flash call's, and a block with SHD over the block without."""
    for length in sizes.lengths:
        yield f"passes {length}", 30, partial(_passes, sizes, length)
    for length in sizes.lengths[:1]:
        yield f"block {length}", 30, partial(_block, sizes, length)


def _passes(sizes: Sizes, length: int) -> Facts:
    from torch.nn.functional import scaled_dot_product_attention

    from shd_torch import attention_kl

    step = _make_step(sizes, "factored", length)
    keywords: Facts = {"is_causal": True, "check": False, "value": "surrogate", "backend": "triton"}

    def flash() -> Any:
        return scaled_dot_product_attention(step.q, step.k, step.v, is_causal=True)

    def shd() -> Any:
        return attention_kl(step.q, step.k, step.supervision, **keywords)

    taken = {}
    for name, forward, upstream in (("flash", flash, step.upstream), ("shd", shd, None)):
        made: list[Any] = []
        taken[f"{name}_forward"] = _time(sizes, step, lambda run=forward, kept=made: kept.append(run()))
        taken[f"{name}_backward"] = _time(sizes, step, lambda kept=made, up=upstream: kept.pop().backward(up))
    ratios = {one: taken[f"shd_{one}"] / taken[f"flash_{one}"] for one in ("forward", "backward")}
    # The gradients are made with the value: only the sum compares fairly.
    both = sum(taken[f"shd_{one}"] for one in ratios) / sum(taken[f"flash_{one}"] for one in ratios)
    return {"milliseconds": taken, "multiples": ratios | {"together": both}, "tilelang_dsa": TILELANG_DSA}


def _block(sizes: Sizes, length: int) -> Facts:
    """A student's whole block, with projections and FFN, forward and backward."""
    import torch

    from shd_torch import attention_kl

    step, heads = _make_step(sizes, "factored", length), sizes.shape["heads"]
    width = heads * sizes.shape["width"]
    make = partial(torch.nn.Linear, device=step.q.device, dtype=step.q.dtype)
    qkv, out, up, down = make(width, 3 * width), make(width, width), make(width, 4 * width), make(4 * width, width)
    stream = torch.randn(step.q.shape[0], length, width, device=step.q.device, dtype=step.q.dtype)

    def run(with_shd: bool) -> None:
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv(stream).chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        after = stream + out(mixed.transpose(1, 2).flatten(2))
        loss = (after + down(torch.nn.functional.gelu(up(after)))).float().square().mean()
        if with_shd:
            keywords: Facts = {"is_causal": True, "check": False, "value": "surrogate", "backend": "triton"}
            loss = loss + attention_kl(q, k, step.supervision, **keywords)
        loss.backward()

    plain, taught = (_time(sizes, step, partial(run, with_shd)) for with_shd in (False, True))
    return {"milliseconds": {"plain": plain, "taught": taught}, "step_ratio": taught / plain}


def _time(sizes: Sizes, step: Any, run: Callable[[], Any]) -> float:
    """Median milliseconds; what does not count runs first."""
    from benchmarks.attention_kl_cuda import measure

    warm = 1 if sizes is REHEARSAL else 5
    return statistics.median([measure(step, run, _device(sizes))[0] for _ in range(warm + sizes.rounds)][warm:])


def _make_step(sizes: Sizes, form: str, length: int) -> Any:
    import torch

    from benchmarks.attention_kl_cuda import Step

    return Step(_device(sizes), getattr(torch, sizes.dtype), length, form, **sizes.shape)


def _device(sizes: Sizes) -> Any:
    import torch

    return torch.device(sizes.device)


def threshold_pieces(sizes: Sizes, out: Path) -> Iterator[Piece]:
    """From which length on the kernels pay, from the stage of steps; on a GPU also for ``backend="auto"``."""
    yield "lengths", 1, partial(_threshold, sizes, out)


def _threshold(sizes: Sizes, out: Path) -> Facts:
    done = read(out, "steps")["pieces"]
    if len(done) < len(sizes.lengths) * len(sizes.forms):
        raise NotHereError("the stage of steps is not done")
    rows = [
        row | {"form": name.split()[0], "length": int(name.split()[1])} for name in done for row in done[name]["rows"]
    ]
    least = find_threshold(rows)
    found: Facts = {"triton_from": least}
    if sizes is GPU:
        machine = describe(sizes)
        devices = json.loads(MEASURED.read_text(encoding="utf-8"))["devices"]
        kept = [each for each in devices if each["capability"] != machine["capability"]]
        # A device on which they do not pay is written too, with no length.
        entry = {"capability": machine["capability"], "triton_from": least, "measured_on": machine["device"]}
        text = json.dumps({"devices": [*kept, entry]}, indent=1) + "\n"
        MEASURED.write_text(text, encoding="utf-8")
        (out / MEASURED.name).write_text(text, encoding="utf-8")  # where the working tree is not brought back
    return found


def find_threshold(rows: list[Facts]) -> int | None:
    """The least length from which on the kernels are faster than fused attention in every form; None without any."""
    taken = {(row["form"], row["length"], row["name"]): row.get("time_ratio") for row in rows}
    least = None
    for length in sorted({row["length"] for row in rows}, reverse=True):
        pairs = [
            (taken.get((form, length, "triton")), taken.get((form, length, "sdpa")))
            for form in {row["form"] for row in rows}
        ]
        if not all(ours is not None and (theirs is None or ours < theirs) for ours, theirs in pairs):
            break
        least = length
    return least


def target_pieces(sizes: Sizes, out: Path) -> Iterator[Piece]:
    """Whether the targets are met, from the stages of steps and of flash calls."""
    yield f"length {sizes.lengths[0]}", 1, partial(_judge, sizes, out)


def _judge(sizes: Sizes, out: Path) -> Facts:
    length = sizes.lengths[0]
    steps, flash = (read(out, stage)["pieces"] for stage in ("steps", "flash"))
    try:
        rows = {row["name"]: row.get("milliseconds") for row in steps[f"factored {length}"]["rows"]}
        ratio, multiples = flash[f"block {length}"]["step_ratio"], flash[f"passes {length}"]["multiples"]
    except KeyError as error:
        raise NotHereError(f"{error.args[0]} is not measured") from None
    found: Facts = {"step_ratio": ratio, "multiples_of_flash": multiples, "tilelang_dsa": TILELANG_DSA}
    if rows.get("triton"):
        # Of what the loss adds; rounding may leave nothing.
        added = max(rows["triton"] - rows["plain"], 1e-3)
        for name in ("eager", "compile"):
            if rows.get(name):
                found[f"faster_than_{name}"] = (rows[name] - rows["plain"]) / added
    met = {
        name: found[name] <= TARGETS[name] if name == "step_ratio" else found[name] >= TARGETS[name]
        for name in TARGETS
        if name in found
    }
    return found | {"targets": TARGETS, "met": met}


def onnx_pieces(sizes: Sizes, out: Path) -> Iterator[Piece]:
    """A graph of attention layers in onnxruntime, with arrays of the host and with everything left on the device."""
    yield "binding", 60, partial(_bind, sizes)


def _bind(sizes: Sizes) -> Facts:
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise NotHereError(f"{package} is not installed")
    import numpy as np
    import onnx
    import onnxruntime

    provider = "CPUExecutionProvider" if sizes is REHEARSAL else "CUDAExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        raise NotHereError(f"onnxruntime {onnxruntime.__version__} has no {provider}: install onnxruntime-gpu")
    heads, width, length = sizes.shape["heads"], sizes.shape["width"], sizes.lengths[0]
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (float[b, {heads}, l, {width}] q) => (float[b, {heads}, l, l] p) {{
        k = Transpose <perm = [0, 1, 3, 2]> (q)
        s = MatMul (q, k)
        p = Softmax <axis = -1> (s)
    }}"""
    session = onnxruntime.InferenceSession(onnx.parser.parse_model(text).SerializeToString(), providers=[provider])
    if session.get_providers()[0] != provider:
        raise NotHereError(f"{provider} could not be loaded")
    array = np.random.default_rng(0).normal(size=(sizes.shape["batch"], heads, length, width)).astype(np.float32)
    place = "cpu" if sizes is REHEARSAL else "cuda"
    binding = session.io_binding()
    binding.bind_ortvalue_input("q", onnxruntime.OrtValue.ortvalue_from_numpy(array, place, 0))
    binding.bind_output("p", place)

    def bound() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    taken = {}
    for name, run in (("host", lambda: session.run(None, {"q": array})), ("bound", bound)):
        times = []
        for _ in range(3 + sizes.rounds):
            started = time.perf_counter()
            run()
            times.append(1000 * (time.perf_counter() - started))
        taken[name] = statistics.median(times[3:])
    difference = float(np.abs(binding.copy_outputs_to_cpu()[0] - session.run(None, {"q": array})[0]).max())
    return {"provider": provider, "milliseconds": taken, "difference": difference}


def study_pieces(sizes: Sizes, out: Path) -> Iterator[Piece]:
    """The study's preset for a GPU, one task after the other; each goes on where the last call stopped."""
    if sizes is REHEARSAL:
        yield "images", 20, partial(_study, "images", ["--quick", "--parts", "beta"], out, 900)
        return
    for task in ("images", "language", "generation", "instructions"):
        yield task, 240, partial(_study, task, ["--preset", "gpu"], out, 480)


def _study(task: str, words: list[str], out: Path, seconds: float) -> Facts:
    command = [sys.executable, "-m", "benchmarks.study", task, *words, "--out", str(out / "study")]
    code, text = _run([*command, "--budget", f"{seconds / 2:g}s"], seconds)
    if f"{task}: not run." in text:
        raise NotHereError(text.split("not run.")[1].strip())
    missing = re.search(r" (\d+) of \d+ missing", text)
    if code == 124 or (missing is not None and missing[1] != "0"):
        raise NotHereError("not finished: call again")
    return {"code": code, "ok": code == 0, "runs": str(out / "study" / "runs.jsonl")}


STAGES: Final[dict[str, Callable[[Sizes, Path], Iterator[Piece]]]] = {
    "tests": test_pieces,
    "kernels": kernel_pieces,
    "steps": step_pieces,
    "flash": flash_pieces,
    "thresholds": threshold_pieces,
    "targets": target_pieces,
    "onnxruntime": onnx_pieces,
    "study": study_pieces,
}
"""In the order of their value."""


def describe(sizes: Sizes) -> Facts:
    from benchmarks.attention_kl_cuda import describe as describe_device

    return describe_device(_device(sizes))


def read(out: Path, stage: str) -> Facts:
    """What a stage has found so far."""
    path = out / f"{stage}.json"
    found: Facts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"pieces": {}}
    return found


def run_stages(sizes: Sizes, out: Path, stages: list[str], minutes: float) -> bool:
    """Measure what is missing, until the time is over; whether everything that can be measured here is."""
    out.mkdir(parents=True, exist_ok=True)
    end, complete = time.monotonic() + 60 * minutes, True
    for stage in stages:
        found, machine = read(out, stage), describe(sizes)
        if found.setdefault("machine", machine) != machine:  # or one would be named for what the other measured
            raise SystemExit(f"{out} was measured on {found['machine']}, and this is {machine}: name another --out")
        for name, seconds, measure in STAGES[stage](sizes, out):
            if name in found["pieces"] and "error" not in found["pieces"][name]:
                continue
            if time.monotonic() + seconds > end:
                print(
                    f"{stage}: {name} and what follows do not fit these {minutes:g} minutes: call again", flush=True
                )
                return False
            started = time.monotonic()
            try:
                facts = measure()
            except NotHereError as error:
                print(f"{stage}: {name}: not here: {error}", flush=True)
                complete = False
                continue
            except Exception as error:  # one piece that fails must not cost the others their hour
                facts = {"ok": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
            facts["seconds"] = round(time.monotonic() - started, 1)
            found["pieces"][name] = facts
            # Whole or not at all, as the call may be ended at any moment.
            draft = out / f".{stage}.json"
            draft.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            draft.replace(out / f"{stage}.json")
            print(f"{stage}: {name}: {json.dumps(facts)[:200]}", flush=True)
    return complete


PACKED: Final = (
    "accelerate",
    "onnx",
    "onnxscript",
    "pytest",
    "rich",
    "safetensors",
    "transformers",
    "typer",
    "xxhash",
)
"""What tests and stages import beside what is there."""
PACKED_FOR_STUDY: Final = ("matplotlib", "scipy")
"""What the study needs beside those; with them one call would carry too much."""
THERE: Final = ("numpy", "onnxruntime", "onnxruntime-gpu", "torch", "triton")
"""What a machine for PyTorch has; what PyTorch needs itself too."""
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LIMIT_MIB: Final = 64


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


def pack(folder: Path, python: str, *, study: bool) -> None:
    """Download wheels for a Linux machine without internet, in the versions that CI tests."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0]: line for line in lines if "==" in line}
    packages = needed(PACKED_FOR_STUDY) - needed(PACKED) if study else needed(PACKED)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    wanted = [pinned.get(name, name) for name in packages - needed(("torch",)) - set(THERE)]
    command = ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", python, *platforms]
    subprocess.run([sys.executable, *command, "-q", "-d", str(folder), *wanted], check=True)
    wheels = sorted(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    if size > LIMIT_MIB:
        raise SystemExit(f"{len(wheels)} wheels have {size:.0f} MiB, more than {LIMIT_MIB}: leave some out of PACKED")
    if study:
        from benchmarks.study.digits import load_digits

        for task in ("images", "generation"):
            load_digits(ROOT / "build" / "study" / task)
        print("Carry build/study too: it has the digits.")
    print(f"{len(wheels)} wheels, {size:.0f} MiB, for Python {python}. Carry {folder} and this checkout; then there:")
    print(f"  python3 -m pip install --no-index --no-deps --target /tmp/site {folder}/*.whl")
    print(
        "  PYTHONPATH=/tmp/site:. python3 -m benchmarks.gpu_pass --out gpu   # again, until it says that all is done"
    )
    print("and bring back gpu/, with measured.json for shd_torch/kl.")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_pass", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default all, in this order"
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu_pass"), help="folder of what is measured")
    parser.add_argument("--minutes", type=float, default=9.5, help="of one call")
    parser.add_argument("--rehearse", action="store_true", help="everything on a processor, to see that it runs")
    parser.add_argument(
        "--pack",
        type=Path,
        metavar="FOLDER",
        help="download wheels for a machine without internet; of the study with STAGE study",
    )
    parser.add_argument("--python", default="3.12", help="with --pack: that machine's Python")
    given = parser.parse_args(arguments)
    if unknown := sorted(set(given.stages) - set(STAGES)):
        parser.error(f"stages are {', '.join(STAGES)}; got {', '.join(unknown)}")
    if given.pack is not None:
        pack(given.pack, given.python, study=given.stages == ["study"])
        return
    if given.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # counts when the kernels are first imported
    else:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit(f"gpu_pass needs a CUDA device; torch {torch.__version__} finds none: try --rehearse")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sizes, out = (REHEARSAL, given.out / "rehearsal") if given.rehearse else (GPU, given.out)
    complete = run_stages(sizes, out, given.stages or list(STAGES), given.minutes)
    print("all is done" if complete else "something is left: call again", flush=True)


if __name__ == "__main__":
    main()
