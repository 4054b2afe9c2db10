"""What the teacher tools need, and what they must never load."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = ("precompute.compare", "graph.find", "opening.load", "session", "rewrite.squeeze")
IMPORTS = f"import {', '.join(f'shd_ref.teacher.{module}' for module in MODULES)}"


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_torch_and_transformers_are_never_loaded() -> None:
    assert run_python(f"{IMPORTS}; import sys; print({{'torch', 'transformers'}} & set(sys.modules))") == "set()"


@pytest.mark.parametrize("module", ["onnx", "onnx_ir"])
def test_a_missing_package_is_named_with_the_remedy(module: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from shd_ref.errors import ShdError\n"
        f"try:\n    {IMPORTS}\n"
        "except ShdError as error: print(error.code, error)"
    )
    printed = run_python(code)
    assert printed.startswith("dependency-missing")
    assert module in printed
    assert "pip install 'squeezing-heads[teacher]'" in printed


def test_onnxruntime_is_needed_to_run_only() -> None:
    code = (
        f"import sys; sys.modules['onnxruntime'] = None\n{IMPORTS}\n"
        "from shd_ref.errors import ShdError\n"
        "try:\n    shd_ref.teacher.session.open_session(b'')\n"
        "except ShdError as error: print(error.code)"
    )
    assert run_python(code) == "dependency-missing"
