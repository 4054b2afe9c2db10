"""Tasks: data, a teacher, students, and a base loss each. ``TASKS`` names them as their grids are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.study.arms import Arm


class Task(Protocol):
    """One of the source's domains; what arms share is made once and kept, on the device."""

    def __init__(self, folder: Path, settings: dict[str, Any], device: str = "cpu") -> None: ...

    def train(self, arm: Arm, seed: int) -> dict[str, Any]:
        """A run's result: ``train`` of ``training.py``, with ``valid_...`` figures, by which beta may be chosen, and
        ``test_...`` of other samples."""


def load_task(name: str) -> Callable[[Path, dict[str, Any], str], Task]:
    """The class of a task, imported when it is asked for."""
    if name == "images":
        from benchmarks.study.tasks.images import Images

        return Images
    if name == "language":
        from benchmarks.study.tasks.language import Language

        return Language
    if name == "instructions":
        from benchmarks.study.tasks.instructions import Instructions

        return Instructions
    if name == "generation":
        from benchmarks.study.tasks.generation import Generation

        return Generation
    if name == "encoder":
        from benchmarks.study.tasks.encoder import Encoder

        return Encoder
    if name == "vit_s":
        from benchmarks.study.tasks.vit_s import VitS

        return VitS
    raise KeyError(name)


TASKS = ("images", "language", "instructions", "generation", "vit_s")
