"""Small modules from the student's width to the teacher's, which a checkpoint holds beside it; and whole checkpoints.

A file that is written last says that a checkpoint was written to its end: no run resumes from others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch import Tensor, nn

from shd_ref.cache.storage.documents import read_json
from shd_ref.cache.storage.drafts import hash_files, put, settle, sync
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


MARKER: Final = "shd_checkpoint.json"
"""Hashes of a checkpoint's files; empty until all of them are on the disk."""


def finish_checkpoint(folder: Path, *, is_shared: bool) -> None:
    """Mark a checkpoint as whole; without hashes where other machines wrote some of its files."""
    draft = folder / f".{MARKER}"
    draft.write_text(json.dumps({} if is_shared else _hash(folder)), encoding="utf-8")
    settle(folder)
    put(draft, folder / MARKER)
    sync(folder.parent)


def is_whole(folder: Path) -> bool:
    try:
        return read_json(folder / MARKER) in ({}, _hash(folder))
    except (OSError, ValueError):
        return False


def _hash(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in hash_files(folder, "**/*").items() if not name.endswith(MARKER)}


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole one; newer ones of this trainer, which are of no use, are removed."""
    numbers = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    found = [path for path in numbers if numbers[path].isdecimal() and (path / MARKER).exists()]
    for path in sorted(found, key=lambda path: -int(numbers[path])):
        if is_whole(path):
            return path
        shutil.rmtree(path, ignore_errors=True)
    return None
