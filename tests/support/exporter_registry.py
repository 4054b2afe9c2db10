"""torch.onnx makes its table of operators at every export, which takes a second: tests make it once a process."""

from __future__ import annotations

from functools import cache
from typing import Any


def keep_registry() -> None:
    """Give every export a copy of one table; nothing where torch has it elsewhere."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:
        return
    make = cache(ONNXRegistry.from_torchlib)

    def from_torchlib(*opset: Any, **options: Any) -> ONNXRegistry:
        made = make(*opset, **options)
        copied = ONNXRegistry()
        copied.__dict__.update(made.__dict__)
        copied.functions = {target: list(meanings) for target, meanings in made.functions.items()}
        return copied

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)
