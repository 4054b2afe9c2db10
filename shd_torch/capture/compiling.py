"""Code that ``torch.compile`` must leave alone, said without importing the compiler.

``torch.compiler.disable`` imports it (and with it sympy and Triton, more than PyTorch itself takes to load), although
most programs never compile. Here that waits until something has imported it: before, nothing can be compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def never_compiled(function: Callable[P, R], *, recursive: bool = True) -> Callable[P, R]:
    """As ``torch.compiler.disable``: the function, and where ``recursive`` also what it calls, is not compiled."""
    if _has_compiler():
        return _disable(function, recursive)
    disabled: Callable[P, R] | None = None

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            if not _has_compiler():
                return function(*args, **kwargs)
            disabled = _disable(function, recursive)
        return disabled(*args, **kwargs)

    return run


def run_eagerly() -> AbstractContextManager[object]:
    """A block in which what has been compiled runs as it was written."""
    return torch.compiler.set_stance("force_eager") if _has_compiler() else nullcontext()


def _has_compiler() -> bool:
    return "torch._dynamo" in sys.modules


def _disable(function: Callable[P, R], recursive: bool) -> Callable[P, R]:
    disabled: Callable[P, R] = torch.compiler.disable(function, recursive=recursive)  # type: ignore[no-untyped-call]
    return disabled
