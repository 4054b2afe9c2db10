"""Shared by the tests of the PyTorch binding; they skip, with the reason, where its packages are not installed."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the PyTorch binding needs torch")
for package in ("transformers", "onnxruntime", "onnxscript", "cyclopts"):
    pytest.importorskip(package, reason="its tests go from Hugging Face models through graphs and commands")
# Many small problems: threads would only wait for each other.
torch.set_num_threads(1)

from support.exporter import quicken_exports  # noqa: E402  (after the skip)

quicken_exports()


@pytest.fixture(scope="session")
def trainer_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that ``trainer_cases`` trains with; its modules skip where a package for it is absent."""
    from support.binding.trainer_cases import write_cache

    return write_cache(tmp_path_factory.mktemp("trainer"))
