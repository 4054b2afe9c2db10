"""What the models of a pair are made of, what differs, and what each difference does to attention supervision."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from shd_ref.cache.storage.documents import read_json
from shd_ref.errors import ShdError
from shd_torch.shrink import folders
from shd_torch.training.recipe import is_causal_model

_LAYER_SCALE: Final = re.compile(r"layer_?scale|lambda_?[12]$|\.ls[12]\.|gamma_[12]$")
_REGISTERS: Final = re.compile(r"register_tokens?$|reg_token$")
_QK_NORM: Final = re.compile(r"(q|k|query|key)_?(layer)?_?norm$|(q|k)_ln$")
_RELATIVE: Final = re.compile(r"relative_(position|attention)_bias|rel_pos")
_LEARNED: Final = re.compile(r"(position_embeddings?|wpe|embed_positions|pos_embed)(\.weight)?$")
_ALIBI: Final = ("bloom", "mpt")


@dataclass(frozen=True, eq=False)
class Student:
    """A Hugging Face model to be made."""

    folder: Path  # with its configuration
    config: Any
    has_weights: bool  # whether the folder holds any; otherwise it starts at random
    is_squeezed: bool  # whether shrink made it

    def make(self, seed: int) -> Any:
        """A new one in float32: with the folder's weights, or with random ones by the seed."""
        if self.is_squeezed:
            return folders.load_student(self.folder).float()
        config = copy.deepcopy(self.config)
        if self.has_weights:
            return folders.load_weights(self.folder, config).float()
        kind = folders.model_class(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = getattr(kind, "_from_config", getattr(kind, "from_config", None))
            assert made is not None  # every class of transformers has one of them
            return made(config, attn_implementation=folders.implementation_of(kind)).float().eval()


def read_student(source: str) -> Student:
    """A student from a folder or a hub id; a configuration without weights will do."""
    folder = folders.find_folder(source, "student")
    is_squeezed = (folder / "shrink.json").is_file()
    config = folders.load_student(folder).config if is_squeezed else folders.read_config(folder, "student")
    return Student(folder, config, any(folder.glob("*.safetensors")), is_squeezed)


@dataclass(frozen=True)
class Parts:
    """Sizes of a model, and what else its attention depends on."""

    name: str
    heads: int
    layers: int
    layer_scale: bool  # whether blocks are scaled channel by channel after their end
    registers: int  # tokens beside class and patches
    specials: int  # tokens of an image that are no patches, registers among them
    qk_norm: bool  # whether queries and keys of a head are normalised
    positions: str  # learned, rotary, relative, alibi or none
    is_causal: bool  # whether a row sees earlier positions alone
    window: int | None  # how many positions a row sees at most; None = all
    learned_sinks: bool  # whether rows may give attention to nothing
    vocabulary: int | None  # classes of a text's tokens; None of images
    patches: tuple[int, ...] | None  # rows, columns and channels of an image; None of texts
    labels: int | None  # classes of a classifier's head


def parts_of(model: nn.Module) -> Parts:
    config: Any = model.config
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    modules = dict(model.named_modules())
    is_image = getattr(model, "main_input_name", "") == "pixel_values"
    of_class, of_distillation = (
        any(name.endswith(ends) for name in shapes) for ends in ("cls_token", ("distillation_token", "dist_token"))
    )
    registers = next((shape[-2] for name, shape in shapes.items() if _REGISTERS.search(name)), 0)
    return Parts(
        name=type(model).__name__,
        heads=_first(config, "num_attention_heads", "n_head") or 0,
        layers=_first(config, "num_hidden_layers", "n_layer") or 0,
        layer_scale=_any(_LAYER_SCALE, shapes),
        registers=registers,
        specials=registers + of_class + of_distillation,
        qk_norm=_any(_QK_NORM, modules),
        positions=_positions(config, shapes, modules),
        is_causal=is_causal_model(model)  # of old models no module says so
        or any(getattr(module, "is_causal", False) is True for module in modules.values()),
        window=_first(config, "sliding_window") if getattr(config, "use_sliding_window", True) else None,
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


def _patches(config: Any) -> tuple[int, ...] | None:
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if image is None or patch is None:
        return None
    height, width = image if isinstance(image, list | tuple) else (image, image)
    down, across = patch if isinstance(patch, list | tuple) else (patch, patch)
    return height // down, width // across, getattr(config, "num_channels", 3)


def _any(pattern: re.Pattern[str], names: Iterable[str]) -> bool:
    return any(pattern.search(name) for name in names)


def _first(config: Any, *names: str) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


BLOCKS, HURTS, NOTE = EFFECTS = ("blocks", "hurts", "note")
"""Supervision cannot work with it; is known to do worse with it; good to know."""

TOKENIZER_BYTES: Final = 2**27
"""A larger tokenizer.json is not read."""

_OF_TOKENS: Final = ("normalizer", "pre_tokenizer", "model", "post_processor", "added_tokens")
"""Sections of tokenizer.json that decide which ids a text becomes."""


@dataclass(frozen=True)
class Difference:
    """Attributes:
    part: of the models.
    teacher, student: what each has.
    effect: ``blocks``, ``hurts`` or ``note``.
    remedy: what to do about it, in a sentence.
    """

    part: str
    teacher: str
    student: str
    effect: str
    remedy: str


def compare_parts(teacher: Parts, student: Parts) -> list[Difference]:
    """All differences of two Hugging Face models, those that block first.

    What hurts is what arXiv 2605.07191 found: where the teacher's attention relies on LayerScale or registers,
    students without them lose by attention transfer.
    """
    found: list[Difference] = []

    def note(part: str, own: object, other: object, effect: str, remedy: str) -> None:
        words = ("no", "yes")[own is True], ("no", "yes")[other is True]
        own, other = words if isinstance(own, bool) else (own, other)
        found.append(Difference(part, str(own), str(other), effect, remedy))

    if student.heads > teacher.heads:
        note("heads", teacher.heads, student.heads, BLOCKS, "heads can be merged, not split: use fewer")
    if student.layers > teacher.layers:
        note("layers", teacher.layers, student.layers, NOTE, "name the pairs: some layers stay untaught")
    if teacher.learned_sinks:
        effect = NOTE if student.learned_sinks else HURTS
        remedy = "the teacher's rows sum to less than one; give the student sinks too"
        note("learned sinks", teacher.learned_sinks, student.learned_sinks, effect, remedy)
    if (teacher.patches is None) != (student.patches is None):
        own, other = ("images" if parts.patches else "texts" for parts in (teacher, student))
        note("input", own, other, BLOCKS, "choose a teacher with the same kind of input")
    else:
        _compare_inputs(teacher, student, note)
    for name, has, has_too, remedy in (
        ("LayerScale", teacher.layer_scale, student.layer_scale, "one too, at its usual start (arXiv 2605.07191)"),
        ("registers", bool(teacher.registers), bool(student.registers), "as many, at random (arXiv 2605.07191)"),
        ("QK-norm", teacher.qk_norm, student.qk_norm, "one too"),
    ):
        if has and not has_too:
            note(name, has, has_too, HURTS, f"give the student {remedy}")
        elif has_too and not has:
            note(name, has, has_too, NOTE, "the student has a part that the teacher lacks")
    if teacher.positions != student.positions:
        remedy = "distance is encoded differently: use the teacher's kind of positions"
        note("positions", teacher.positions, student.positions, HURTS, remedy)
    return sorted(found, key=lambda one: EFFECTS.index(one.effect))


def _compare_inputs(teacher: Parts, student: Parts, note: Callable[[str, object, object, str, str], None]) -> None:
    """Tokens and their order, of two models of texts or of images."""
    if teacher.patches != student.patches:
        own, other = (" x ".join(map(str, parts.patches or ())) for parts in (teacher, student))
        note("patches", own, other, BLOCKS, "choose image size, patch size and channels so that the grids agree")
    elif teacher.specials != student.specials:
        remedy = "give the student the same, or cut merged maps with shd_torch.maps.align_tokens"
        note("tokens beside patches", teacher.specials, student.specials, HURTS, remedy)
    if teacher.vocabulary != student.vocabulary and teacher.vocabulary and student.vocabulary:
        remedy = "fine for attention if both make the same tokens; KD reads the first classes (vocab_size)"
        note("vocabulary", teacher.vocabulary, student.vocabulary, NOTE, remedy)
    if teacher.is_causal != student.is_causal:
        own, other = ("causal" if parts.is_causal else "both ways" for parts in (teacher, student))
        remedy = "the student would learn not to look ahead: choose a bidirectional teacher"
        if student.is_causal:
            remedy = "the teacher attends where the student may not: choose a causal teacher"
        note("direction", own, other, BLOCKS if student.is_causal else HURTS, remedy)
    if student.window is not None and (teacher.window is None or teacher.window > student.window):
        remedy = "texts longer than the window have mass where the student may not look: support='intersect'"
        note("window", teacher.window or "all", student.window, HURTS, remedy)


def compare_tokenizers(teacher: Path | None, student: Path) -> list[Difference]:
    """Whether both folders make the same tokens of a text: maps of different tokens do not correspond."""
    own, other = (None if folder is None else _read_tokenizer(folder) for folder in (teacher, student))
    names = [name for name in _OF_TOKENS if own and other and own.get(name) != other.get(name)]
    if not names:
        return []
    # Tokens that were added do not change what other text becomes.
    is_model = names != ["added_tokens"]
    effect = BLOCKS if is_model else NOTE
    remedy = "train the student with the teacher's tokenizer" if is_model else "keep added tokens out of shared texts"
    another = f"another {', '.join(name.replace('_', ' ') for name in names)}"
    return [Difference("tokenizer", "its own", another, effect, remedy)]


def _read_tokenizer(folder: Path) -> dict[str, Any] | None:
    path = folder / "tokenizer.json"
    if not path.is_file() or path.stat().st_size > TOKENIZER_BYTES:
        return None
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise ShdError("read-failed", f"{path} must be a tokenizer's JSON: {error!r}") from error
    return document if isinstance(document, dict) else None
