"""Shared by the tests of recipes."""

from pathlib import Path

import pytest

for package in ("torch", "transformers"):
    pytest.importorskip(package, reason="recipes are PyTorch's, and some train Hugging Face students")


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``trainer_cases`` exports its teacher once and writes caches of it."""
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason="a cache of a Hugging Face teacher is made")
    return tmp_path_factory.mktemp("recipes")


@pytest.fixture(scope="session")
def trainer_cache(cache_folder: Path) -> Path:
    """The cache that ``trainer_cases`` trains with: attention alone."""
    from support.binding.trainer_cases import write_cache

    return write_cache(cache_folder)
