"""From the student's width to the teacher's: small modules that are trained with the student and left behind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_torch.training.terms import HiddenTerm

FILE_NAME: Final = "hidden_projectors.safetensors"
"""In a checkpoint's folder, beside the student."""


class Projectors(nn.Module):
    """The projectors of a ``HiddenTerm`` by the student's number of hidden states; one may serve several.

    That of an ``EmbeddingTerm`` has the number ``EMBEDDING``.
    """

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


def make_projectors(
    term: HiddenTerm, student_width: int | None, teacher_widths: Mapping[int, int]
) -> dict[int, nn.Module]:
    """The term's own modules, or a linear layer for each pair of different widths, as far as they are known."""
    students = [student for student, _ in term.pairs]
    if isinstance(term.projectors, nn.Module):
        return dict.fromkeys(students, term.projectors)
    if term.projectors is not None:
        unknown = sorted(set(term.projectors) - set(students))
        if unknown:
            rule = f"projectors must be by the student numbers of pairs, {students}"
            raise ShdError("argument-value", f"{rule}; got {unknown}")
        return dict(term.projectors)
    modules: dict[int, nn.Module] = {}
    for student, teacher in term.pairs:
        width = teacher_widths.get(teacher)
        if student_width is not None and width not in (None, student_width):
            modules[student] = nn.Linear(student_width, width)
    return modules


def _average_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
