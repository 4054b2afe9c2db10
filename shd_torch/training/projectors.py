"""From the student's width to the teacher's: small modules that are trained with the student and left behind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch import Tensor, nn

from shd_ref.errors import ShdError, need

FILE_NAME: Final = "hidden_projectors.safetensors"
"""In a checkpoint's folder, beside the student."""

EMBEDDING: Final = -1
"""The number of the projector of embeddings, beside those of hidden states from 0 on."""


class Projectors(nn.Module):
    """The projectors of all terms by the student's number of hidden states; one may serve several."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.by_number = nn.ModuleDict({str(number): module for number, module in modules.items()})

    def forward(self, states: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Hidden states by number, projected where there is a projector, in its dtype."""
        projected = dict(states)
        for number, module in self.by_number.items():
            if (state := states.get(int(number))) is not None:
                projected[int(number)] = module(state.to(next(module.parameters(), state).dtype))
        return projected

    def join_ranks(self) -> None:
        """Give every rank the first one's parameters, and average their gradients as each backward pass makes them.

        They stand outside of the student, which DDP and FSDP take care of. The mean of what ranks hold is also right
        where gradients accumulate, as what they share already is its own mean.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return
        for parameter in self.parameters():
            dist.broadcast(parameter.detach(), 0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_average_gradient)  # type: ignore[no-untyped-call]

    def save(self, folder: str | Path) -> None:
        """Write the parameters into a checkpoint, where there are any."""
        from safetensors.torch import save_model

        if self.state_dict():
            save_model(self, str(Path(folder) / FILE_NAME))

    def load(self, folder: str | Path) -> None:
        """Read them from one; ``argument-value`` where it has none for these projectors."""
        from safetensors.torch import load_model

        if not self.state_dict():
            return
        path = Path(folder) / FILE_NAME
        try:
            load_model(self, str(path))
        except (OSError, RuntimeError) as error:
            rule = f"resume_from_checkpoint must hold the projectors of these terms in {path}"
            raise ShdError("argument-value", f"{rule}; got: {error}") from error


def make_projector(
    projector: nn.Module | None, distance: str, student_width: int | None, teacher_width: int | None
) -> nn.Module | None:
    """Of embeddings: the given module, or a linear layer between different widths; None where neither is needed."""
    if distance == "similarity":
        rule = "be left out with distance='similarity', which compares embeddings of any widths"
        need(projector is None, "argument-value", "projector", rule, type(projector).__name__)
        return None
    if projector is not None or student_width is None or teacher_width in (None, student_width):
        return projector
    return nn.Linear(student_width, teacher_width)


def _average_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
