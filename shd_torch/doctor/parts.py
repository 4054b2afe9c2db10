"""What a model is made of, as far as attention meets it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from shd_torch.training.recipe import is_causal_model

_LAYER_SCALE: Final = re.compile(r"layer_?scale|lambda_?[12]$|\.ls[12]\.|gamma_[12]$")
_REGISTERS: Final = re.compile(r"register_tokens?$|reg_token$")
_QK_NORM: Final = re.compile(r"(q|k|query|key)_?(layer)?_?norm$|(q|k)_ln$")
_RELATIVE: Final = re.compile(r"relative_(position|attention)_bias|rel_pos")
_LEARNED: Final = re.compile(r"(position_embeddings?|wpe|embed_positions|pos_embed)(\.weight)?$")
_ALIBI: Final = ("bloom", "mpt")


@dataclass(frozen=True)
class Parts:
    """Attributes:
    name: of the class.
    heads, kv_heads, layers, hidden: sizes.
    parameters: how many numbers.
    layer_scale: whether blocks are scaled channel by channel after their end.
    registers: tokens beside class and patches.
    class_token, distillation_token: whether there is one.
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
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)
