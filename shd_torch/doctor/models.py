"""The two models of a pair: a teacher to run, and a student to make, from folders, ids or a graph."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shd_ref.errors import ShdError
from shd_torch.shrink.folders import (
    find_folder,
    implementation_of,
    load_student,
    load_weights,
    model_class,
    read_config,
)


@dataclass(frozen=True, eq=False)
class Teacher:
    """Attributes:
    name: for people.
    folder: of a Hugging Face model; None of a graph.
    graph: an ``.onnx`` file; None of a Hugging Face model.
    model: in evaluation mode, float32; None of a graph.
    """

    name: str
    folder: Path | None
    graph: Path | None
    model: Any


@dataclass(frozen=True, eq=False)
class Student:
    """Attributes:
    name: for people.
    folder: with its configuration.
    config: of Hugging Face.
    has_weights: whether the folder holds any; otherwise it starts at random.
    is_squeezed: whether ``shrink`` made it.
    """

    name: str
    folder: Path
    config: Any
    has_weights: bool
    is_squeezed: bool

    def make(self, seed: int) -> Any:
        """A new one in float32: with the folder's weights, or with random ones by the seed."""
        if self.is_squeezed:
            return load_student(self.folder).float()
        config = copy.deepcopy(self.config)
        if self.has_weights:
            return load_weights(self.folder, config).float()
        kind = model_class(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = getattr(kind, "_from_config", getattr(kind, "from_config", None))
            assert made is not None  # every class of transformers has one of them
            return made(config, attn_implementation=implementation_of(kind)).float().eval()


def read_teacher(source: str) -> Teacher:
    """A teacher from an ``.onnx`` file, a folder or a hub id.

    Raises:
        ShdError: ``read-failed``, ``shrink-unsupported`` (quantised weights).
    """
    if source.endswith(".onnx"):
        if not Path(source).is_file():
            raise ShdError("read-failed", f"teacher must be an .onnx file, a folder or a hub id; got {source!r}")
        return Teacher(Path(source).name, None, Path(source), None)
    folder = find_folder(source, "teacher")
    model = load_weights(folder, read_config(folder)).float()
    return Teacher(source, folder, None, model)


def read_student(source: str) -> Student:
    """A student from a folder or a hub id; a configuration without weights will do.

    Raises:
        ShdError: ``read-failed``.
    """
    folder = find_folder(source, "student")
    is_squeezed = (folder / "shrink.json").is_file()
    config = load_student(folder).config if is_squeezed else read_config(folder, "student")
    has_weights = any(folder.glob("*.safetensors"))
    if not has_weights and any(folder.glob("*.bin")):
        raise ShdError(
            "read-failed",
            f"student must hold safetensors, or a configuration alone; got {source!r} with weights that run code "
            "when they are read: save it again with save_pretrained",
        )
    return Student(source, folder, config, has_weights, is_squeezed)
