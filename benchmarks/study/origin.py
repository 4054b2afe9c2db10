"""What a run came from: two runs are compared only if they agree in each of ``ORIGIN`` that both have stored.

Of a record these fields are hashes of the student's first weights with the order of samples, of samples and teachers,
of the code that trains and of the code that rivals run, without comments and docstrings; and the processor's name.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
ORIGIN = ("data", "code", "rival_code", "processor")
"""Beside ``start``, which runs of different starts do not share."""
ROOMS = {
    "code": ("benchmarks/study/training.py", "benchmarks/study/starts.py", "shd_torch/recipes"),
    "benchmark_code": tuple(f"benchmarks/study/{name}.py" for name in ("training", "starts", "rivals")),
    "rival_code": (
        "benchmarks/study/rivals.py",
        *(f"shd_torch/{room}" for room in ("capture", "maps", "supervision", "teacher")),
    ),
}


def fingerprint(*items: Tensor | nn.Module) -> str:
    """16 hex digits of tensors and of models' weights."""
    digest = hashlib.sha256()
    for item in items:
        state = item.state_dict() if isinstance(item, nn.Module) else {"": item}
        for name, tensor in sorted(state.items()):
            digest.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@functools.cache
def hash_code(field: str, task: str) -> str:
    """16 hex digits of the files of ``ROOMS[field]``, and of the task's, but with ``rival_code``."""
    names = ROOMS[field] if field == "rival_code" else (*ROOMS[field], f"benchmarks/study/tasks/{task}.py")
    places = (ROOT / name for name in names)
    files = (file for path in places for file in ([path] if path.is_file() else sorted(path.rglob("*.py"))))
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    return hashlib.sha256("\n".join(ast.unparse(_Bare().visit(tree)) for tree in trees).encode()).hexdigest()[:16]


class _Bare(ast.NodeTransformer):
    """Leaves out strings that stand alone."""

    def visit_Expr(self, node: ast.Expr) -> Any:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node


def name_processor(device: str) -> str:
    """Its model, as the driver or the system says it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
