"""What is computed here keeps its own dtypes, also inside a training step's ``torch.autocast``.

Autocast would make every product in bfloat16, and lose a small divergence in the difference of two rounded maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with autocast off for the device of its first argument that has one, or is a list of tensors."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device_type = _device_type([*args, *kwargs.values()])
        if device_type is None or not torch.is_autocast_enabled(device_type):
            return function(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    return run


def _device_type(arguments: Iterable[Any]) -> str | None:
    for argument in arguments:
        first = argument[0] if isinstance(argument, list | tuple) and argument else argument
        device = getattr(first, "device", None)
        if isinstance(device, torch.device):
            return device.type
    return None
