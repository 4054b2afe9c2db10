"""Shared by the tests of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def trainer_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that ``trainer_cases`` trains with."""
    for package in ("transformers", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason="a cache of a Hugging Face teacher is made")
    from support.binding.trainer_cases import write_cache

    return write_cache(tmp_path_factory.mktemp("recipes"))
