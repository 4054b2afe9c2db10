"""The losses on logits and hidden states as the goldens call them; gradients come from automatic differentiation."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import shd_torch.kd
from shd_ref import ShdError
from shd_torch.maps.judged import Adapter

_GRADIENTS: dict[str, tuple[str, ...]] = {
    "kd_loss_gradient": ("student_logits",),
    "linear_kd_loss_gradient": ("hidden", "weight", "bias"),
    "hidden_loss_gradient": ("student_hidden",),
}
_OUTPUTS = {"linear_kd_loss_gradient": ("dhidden", "dweight", "dbias")}


class KdAdapter(Adapter):
    """Runs the losses on logits and hidden states on one device."""

    def call(self, operation: str, **arguments: Any) -> Any:
        """The function of that name, or the gradient of one."""
        if "targets" in arguments:
            arguments["targets"] = as_record(arguments["targets"])
        names = _GRADIENTS.get(operation)
        if names is None:
            function = getattr(shd_torch.kd, operation, None)
            if function is None:
                raise NotImplementedError(f"shd_torch.kd has no {operation}")
            return function(**arguments)
        given = {name: _leaves(arguments[name]) for name in names if arguments.get(name) is not None}
        loss = getattr(shd_torch.kd, operation.removesuffix("_gradient"))(**{**arguments, **given})
        loss.backward()
        found = [_gradients(given[name]) if name in given else None for name in names]
        return dict(zip(_OUTPUTS[operation], found, strict=True)) if operation in _OUTPUTS else found[0]


def as_record(targets: Any) -> Any:
    """Fields by name as ``TopkTargets``."""
    if not isinstance(targets, Mapping):
        return targets
    if set(targets) != set(shd_torch.kd.TopkTargets._fields):
        raise ShdError("argument-value", f"targets must have the fields of TopkTargets; got {sorted(targets)}")
    return shd_torch.kd.TopkTargets(**targets)


def _leaves(value: Any) -> Any:
    if isinstance(value, list):
        return [_leaves(item) for item in value]
    real = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if real else value


def _gradients(value: Any) -> Any:
    if isinstance(value, list):
        return [_gradients(item) for item in value]
    return torch.zeros_like(value) if value.grad is None else value.grad
