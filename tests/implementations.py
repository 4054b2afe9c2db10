"""The table of everything that is judged: one adapter an implementation, NumPy arrays in and out."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Implementation:
    """Calls one implementation with NumPy arrays, whatever it computes with."""

    name: str
    module: ModuleType = field(repr=False)
    tensors: bool = False
    dtype: str = "float64"

    def give(self, value: Any) -> Any:
        """Arrays become tensors where the implementation wants them; floats take its dtype."""
        if isinstance(value, list):
            return [self.give(v) for v in value]
        if not isinstance(value, np.ndarray):
            return value
        if not self.tensors:
            return value
        import torch

        tensor = torch.from_numpy(np.ascontiguousarray(value))
        return tensor.to(getattr(torch, self.dtype)) if tensor.is_floating_point() else tensor

    def take(self, value: Any) -> Any:
        """Tensors become float64 arrays (masks stay boolean)."""
        if isinstance(value, tuple):
            return tuple(self.take(v) for v in value)
        if self.tensors and hasattr(value, "detach"):
            tensor = value.detach().cpu()
            return tensor.double().numpy() if tensor.is_floating_point() else tensor.numpy()
        return value

    def call(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.module, operation)(
            *(self.give(a) for a in args), **{k: self.give(v) for k, v in kwargs.items()}
        )
        return self.take(result)

    def softmax(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("softmax", *args, **kwargs)

    def soften(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("soften", *args, **kwargs)

    def value_outputs(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("value_outputs", *args, **kwargs)

    def solve_alpha(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("solve_alpha", *args, **kwargs)

    def mix_heads(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("mix_heads", *args, **kwargs)

    def shd_loss(self, *args: Any, **kwargs: Any) -> float:
        return float(self.call("shd_loss", *args, **kwargs))

    def squeeze_heads(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        result = self.call("squeeze_heads", *args, **kwargs)
        fields = ("probs", "mixing", "alphas", "residual", "num_clipped", "num_degenerate", "plan")
        return {name: self.take(getattr(result, name)) for name in fields}


def _implementations() -> list[Implementation]:
    found = [Implementation("shd_ref", importlib.import_module("shd_ref"))]
    if importlib.util.find_spec("torch") is not None:
        found.append(Implementation("shd_torch", importlib.import_module("shd_torch"), tensors=True))
    return found


IMPLEMENTATIONS = _implementations()
