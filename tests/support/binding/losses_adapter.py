"""The losses on logits and hidden states, and the recipes, as the goldens call them; autograd makes the gradients."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from shd_torch import kd, recipes
from shd_torch.maps.judged import Adapter

_STUDENT_SIDE: dict[str, tuple[str, ...]] = {
    "kd_loss": ("student_logits",),
    "linear_kd_loss": ("hidden", "weight", "bias"),
    "hidden_loss": ("student_hidden",),
}


class LossesAdapter(Adapter):
    """Runs the losses and the recipes on one device."""

    def call(self, operation: str, **arguments: Any) -> Any:
        """The function of that name, or the gradient of one; ``vitkd`` by a module that is given the parameters."""
        if isinstance(arguments.get("targets"), Mapping):
            arguments["targets"] = kd.TopkTargets(**arguments["targets"])
        if "rollout" in arguments:
            arguments["rollout"] = recipes.Rollout(**arguments["rollout"])
        if operation == "vitkd":
            return _vitkd(**arguments)
        name = operation.removesuffix("_gradient")
        function = getattr(kd, name, None) or getattr(recipes, name)
        if name == operation:
            return function(**arguments)
        student = {key: arguments[key] for key in _STUDENT_SIDE[name] if arguments.get(key) is not None}
        leaves, structure = tree_flatten(student)
        leaves = [leaf.detach().requires_grad_(leaf.is_floating_point()) for leaf in leaves]
        loss = function(**arguments | tree_unflatten(leaves, structure))
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        named = tree_unflatten(gradients, structure)
        if name == "linear_kd_loss":
            return {f"d{key}": named.get(key) for key in _STUDENT_SIDE[name]}
        return named[_STUDENT_SIDE[name][0]]


class HeadAdapter(LossesAdapter):
    """``kd_loss`` by ``linear_kd_loss``: logits are products too, of themselves with the identity."""

    def call(self, operation: str, **arguments: Any) -> Any:
        logits = arguments.pop("student_logits")
        head = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        answer = super().call(f"linear_{operation}", hidden=logits, weight=head, **arguments)
        return answer["dhidden"] if operation.endswith("_gradient") else answer


def _vitkd(parameters: Mapping[str, Tensor], noise: Tensor, *, grid: Any = None, **arguments: Any) -> Any:
    sides = [arguments.pop(f"{side}_{part}") for side in ("student", "teacher") for part in ("layers", "last")]
    module = recipes.ViTKD(sides[1].shape[-1], sides[3].shape[-1], num_layers=len(sides[0]), **arguments)
    state = {name: parameters[name.replace(".", "_")] for name in module.state_dict()}
    module.to(noise.device, noise.dtype).load_state_dict(state)
    return module(*sides, noise, grid=grid)
