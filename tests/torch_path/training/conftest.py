"""Shared by the tests of training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Caches of ``trainer_cases``' samples, each made once for its options of precompute."""
    from support.binding.trainer_cases import write_cache

    folder, made = tmp_path_factory.mktemp("cached"), {}

    def cache(**options: Any) -> Path:
        key = str(options)
        if key not in made:
            made[key] = write_cache(folder, **options)
        return made[key]

    return cache
