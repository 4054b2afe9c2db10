"""The public names, and what loading them loads."""

import subprocess
import sys

import pytest

import shd_ref
import shd_torch
import shd_torch.maps as maps
from shd_ref.conformance import OUTPUTS

HEAVY = {"torch._dynamo", "sympy", "triton", "transformers", "onnx", "onnxruntime"}


def modules_loaded_by(code: str, before: str = "") -> set[str]:
    """What a fresh process has loaded after the code, less what it had loaded before."""
    program = f"import sys\n{before}\nbefore = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["shd_torch", "shd_torch.cli", "shd_torch.commands"])
def test_the_import_loads_no_pytorch(module: str) -> None:
    if module == "shd_torch.commands":
        pytest.importorskip("cyclopts", reason="the commands need cyclopts")
    assert not modules_loaded_by(f"import {module}") & {"torch", *HEAVY}


def test_names_load_neither_a_compiler_nor_another_framework() -> None:
    """PyTorch's compiler, with sympy and Triton, takes longer to load than PyTorch; a star needs no transformers."""
    before = "import torch; sys.modules['transformers'] = None"
    loaded = modules_loaded_by("import shd_torch.maps, shd_torch.kernels\nfrom shd_torch import *", before)
    assert {"shd_torch.kl.backends", "shd_torch.export", "shd_torch.kernels.divergence"} <= loaded
    assert not loaded & HEAVY


def test_every_public_name_is_there() -> None:
    assert set(shd_torch.__all__) <= set(dir(shd_torch))
    for name in shd_torch.__all__:
        assert callable(getattr(shd_torch, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        shd_torch.no_such_name  # noqa: B018


def test_maps_has_the_names_of_the_reference() -> None:
    lacking = {"Diagnosis", "SPEC_VERSION", "StrategyReport", "__version__", "diagnose", "matched_plan"}
    lacking |= {"patch_groups", "span_groups"}  # of positions and characters, before any tensor
    indexers = {"indexer_loss", "indexer_loss_gradient", "indexer_target"}  # of shd_torch.indexer, without maps
    assert set(shd_ref.__all__) - set(maps.__all__) == lacking | indexers
    assert set(OUTPUTS) - set(maps.__all__) == {"diagnose", "matched_plan", *indexers}
    assert shd_torch.squeeze_heads is maps.squeeze_heads
