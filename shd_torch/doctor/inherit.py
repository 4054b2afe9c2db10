"""Whether the student could start as its squeezed teacher, in the place of random weights."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from shd_ref.errors import ShdError
from shd_ref.shrink.depth import kept_layers
from shd_torch.doctor.models import Student, Teacher
from shd_torch.shrink.families import check_config
from shd_torch.shrink.sizes import choose_sizes, sizes_of


@dataclass(frozen=True)
class Inheritance:
    """What ``shrink`` can do for a pair.

    Attributes:
        is_possible: whether it can make this very student.
        command: that does; None where it cannot.
        reason: in a sentence.
    """

    is_possible: bool
    command: str | None
    reason: str


def find_inheritance(teacher: Teacher, student: Student, data: str | None) -> Inheritance:
    """Whether ``shd-torch shrink`` makes a student of these sizes from this teacher.

    Args:
        teacher: a graph has no weights that could be taken over.
        student: that is wanted.
        data: for the command.
    """
    if student.is_squeezed:
        return Inheritance(True, None, "it has already: shrink made it")
    if teacher.model is None:
        return Inheritance(False, None, "a graph has none to take over: give the teacher's folder")
    config, wanted = teacher.model.config, student.config
    if wanted.model_type != config.model_type:
        return Inheritance(
            False, None, f"no: the teacher is a {config.model_type}, the student a {wanted.model_type}"
        )
    try:
        family = check_config(config)
        own, sizes = sizes_of(config), sizes_of(wanted)
        kept_layers(own.layers, sizes.layers)
        fixed = {} if family.free_head_dim else {"head_dim": None}
        chosen = choose_sizes(own, family, **(asdict(sizes) | fixed))
        usual = choose_sizes(own, family, **(asdict(sizes) | {"kv_heads": None, "head_dim": None}))
    except (ShdError, AttributeError, TypeError) as error:
        return Inheritance(False, None, f"no: {error}")
    if chosen != sizes:
        return Inheritance(False, None, "no: shrink makes other sizes of this teacher")
    folder = teacher.name if Path(teacher.name).is_dir() else str(teacher.folder)  # of a hub id, where it lies
    # What shrink takes by itself: these two as the heads imply, all else as the teacher has it.
    implied = asdict(own) | {"kv_heads": usual.kv_heads, "head_dim": usual.head_dim}
    changed = [(name, size) for name, size in asdict(sizes).items() if size != implied[name]]
    options = [word for name, size in changed for word in (f"--{name.replace('_', '-')}", str(size))]
    words = ["shd-torch", "shrink", folder, *options, "--data", data or "DATA", "--out", "squeezed"]
    return Inheritance(True, shlex.join(words), "yes: start as the squeezed teacher, and compare with this start")
