"""Optional packages that read inputs; one that is missing is an error with the remedy."""

from __future__ import annotations

import importlib
from typing import Any

from shd_ref.errors import ShdError


def import_package(name: str) -> Any:
    """An optional module of the extra ``inputs``.

    Raises:
        ShdError: ``dependency-missing``.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ShdError(
            "dependency-missing",
            f"reading these inputs needs the package {name.split('.')[0]}: pip install 'squeezing-heads[inputs]'",
        ) from error
