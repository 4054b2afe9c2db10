"""The two models of a pair: a teacher to run and a student to make, and what they are made of."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from shd_ref.errors import ShdError
from shd_torch.shrink.folders import (
    find_folder,
    implementation_of,
    load_student,
    load_weights,
    model_class,
    read_config,
)
from shd_torch.training.recipe import is_causal_model

_LAYER_SCALE: Final = re.compile(r"layer_?scale|lambda_?[12]$|\.ls[12]\.|gamma_[12]$")
_REGISTERS: Final = re.compile(r"register_tokens?$|reg_token$")
_QK_NORM: Final = re.compile(r"(q|k|query|key)_?(layer)?_?norm$|(q|k)_ln$")
_RELATIVE: Final = re.compile(r"relative_(position|attention)_bias|rel_pos")
_LEARNED: Final = re.compile(r"(position_embeddings?|wpe|embed_positions|pos_embed)(\.weight)?$")
_ALIBI: Final = ("bloom", "mpt")


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


@dataclass(frozen=True)
class Parts:
    """Sizes of a model, and what else its attention depends on.

    Attributes:
        layer_scale: whether blocks are scaled channel by channel after their end.
        registers: tokens beside class and patches.
        qk_norm: whether queries and keys of a head are normalised.
        positions: ``learned``, ``rotary``, ``relative``, ``alibi`` or ``none``.
        is_causal: whether a row sees earlier positions alone.
        window: how many positions a row sees at most; None = all.
        learned_sinks: whether rows may give attention to nothing.
        vocabulary: classes of a text's tokens; None of images.
        patches: of an image, with its size and channels; None of texts.
        labels: classes of a classifier's head.
    """

    name: str
    heads: int
    kv_heads: int
    layers: int
    hidden: int
    parameters: int
    layer_scale: bool
    registers: int
    class_token: bool
    distillation_token: bool
    qk_norm: bool
    positions: str
    is_causal: bool
    window: int | None
    learned_sinks: bool
    vocabulary: int | None
    patches: tuple[int, ...] | None
    labels: int | None

    @property
    def specials(self) -> int:
        """Tokens of an image that are no patches."""
        return int(self.class_token) + int(self.distillation_token) + self.registers


def parts_of(model: nn.Module) -> Parts:
    """Read off a Hugging Face model, from its modules' names and its configuration."""
    config: Any = model.config
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    modules = dict(model.named_modules())
    heads = _first(config, "num_attention_heads", "n_head") or 0
    is_image = getattr(model, "main_input_name", "") == "pixel_values"
    registers = next((shape[-2] for name, shape in shapes.items() if _REGISTERS.search(name)), 0)
    return Parts(
        name=type(model).__name__,
        heads=heads,
        kv_heads=_first(config, "num_key_value_heads") or heads,
        layers=_first(config, "num_hidden_layers", "n_layer") or 0,
        hidden=_first(config, "hidden_size", "n_embd") or 0,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layer_scale=_any(_LAYER_SCALE, shapes),
        registers=registers,
        class_token=any(name.endswith("cls_token") for name in shapes),
        distillation_token=any(name.endswith(("distillation_token", "dist_token")) for name in shapes),
        qk_norm=_any(_QK_NORM, modules),
        positions=_positions(config, shapes, modules),
        is_causal=is_causal_model(model)  # of old models no module says so
        or any(getattr(module, "is_causal", False) is True for module in modules.values()),
        window=_window(config),
        learned_sinks=any(name.endswith(("sinks", "attn_sink")) for name in shapes),
        vocabulary=None if is_image else _first(config, "vocab_size"),
        patches=_patches(config) if is_image else None,
        labels=getattr(config, "num_labels", None) if "Classification" in type(model).__name__ else None,
    )


def _positions(config: Any, shapes: Iterable[str], modules: Iterable[str]) -> str:
    if _any(_RELATIVE, shapes):
        return "relative"
    if any(name.rpartition(".")[2].startswith(("rotary", "rope")) for name in modules):
        return "rotary"
    if getattr(config, "model_type", "") in _ALIBI or getattr(config, "alibi", False) is True:
        return "alibi"
    return "learned" if _any(_LEARNED, [*shapes, *modules]) else "none"


def _window(config: Any) -> int | None:
    window = getattr(config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True)
    return window if isinstance(window, int) and used else None


def _patches(config: Any) -> tuple[int, ...] | None:
    """Rows and columns of patches, and channels."""
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if image is None or patch is None:
        return None
    height, width = image if isinstance(image, list | tuple) else (image, image)
    down, across = patch if isinstance(patch, list | tuple) else (patch, patch)
    return height // down, width // across, getattr(config, "num_channels", 3)


def _any(pattern: re.Pattern[str], names: Iterable[str]) -> bool:
    return any(pattern.search(name) for name in names)


def _first(config: Any, *names: str) -> int | None:
    """The first of a configuration's numbers that is there."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)
