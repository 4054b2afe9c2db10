"""The recipes as the goldens call them: terms as records of value and weight."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

import shd_torch.recipes
from shd_ref import ShdError
from shd_torch.maps.judged import Adapter
from support.binding.kd_adapter import as_record


class RecipesAdapter(Adapter):
    """Runs the recipes on one device."""

    def call(self, operation: str, **arguments: Any) -> Any:
        """The function of that name; ``vitkd`` by a module that is given the parameters."""
        if operation == "vitkd":
            return _vitkd(**arguments)
        function = getattr(shd_torch.recipes, operation, None)
        if function is None:
            raise NotImplementedError(f"shd_torch.recipes has no {operation}")
        if "targets" in arguments:
            arguments["targets"] = as_record(arguments["targets"])
        return function(**arguments)


def _vitkd(
    student_layers: Sequence[Tensor],
    student_last: Tensor,
    teacher_layers: Sequence[Tensor],
    teacher_last: Tensor,
    parameters: Mapping[str, Tensor],
    noise: Tensor,
    *,
    grid: Sequence[int] | None = None,
    **options: Any,
) -> Any:
    module = shd_torch.recipes.ViTKD(
        student_last.shape[-1], teacher_last.shape[-1], num_layers=len(student_layers), **options
    )
    state = {
        name.replace("_weight", ".weight").replace("_bias", ".bias"): value for name, value in parameters.items()
    }
    state = {
        name.replace("mimic_", "mimic.").replace("generate_", "generate."): value for name, value in state.items()
    }
    missing = set(module.state_dict()) - set(state)
    if missing:
        raise ShdError("argument-value", f"parameters must hold {', '.join(sorted(missing))} as well")
    module.to(noise.device, noise.dtype).load_state_dict({name: state[name] for name in module.state_dict()})
    return module(
        student_layers,
        student_last,
        teacher_layers,
        teacher_last,
        noise,
        grid=None if grid is None else (int(grid[0]), int(grid[1])),
    )
