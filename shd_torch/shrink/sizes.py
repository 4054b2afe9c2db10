"""The sizes of a student: from the options of ``shrink``, and as its configuration can say them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_integer
from shd_torch.shrink.custom import NOTHING, Dropped, LayerSizes, custom_class, custom_config, read_sizes
from shd_torch.shrink.families import Family
from shd_torch.shrink.options import ShrinkOptions


@dataclass(frozen=True)
class Sizes:
    """Of a teacher or a student: what differs from layer to layer is a tuple with a number per layer."""

    heads: int | tuple[int, ...]  # query heads
    kv_heads: int | tuple[int, ...]  # key and value heads
    head_dim: int  # entries of a head
    layers: int  # how many
    hidden: int  # channels of the stream
    neurons: int | tuple[int, ...]  # of an FFN
    dropped: Dropped = NOTHING  # what its layers lack, by their numbers

    def of_layer(self, number: int) -> LayerSizes:
        heads, kv_heads, neurons = (
            size[number] if isinstance(size, tuple) else size for size in (self.heads, self.kv_heads, self.neurons)
        )
        return LayerSizes(heads, kv_heads, self.head_dim, neurons)

    def report(self) -> dict[str, Any]:
        """What ``shrink.json`` says of them; its layers say what they lack."""
        return {name: value for name, value in vars(self).items() if name != "dropped"}

    @property
    def of_layers(self) -> tuple[LayerSizes, ...]:
        return tuple(map(self.of_layer, range(self.layers)))


def sizes_of(config: Any, family: Family) -> Sizes:
    heads = getattr(config, family.sizes.heads)
    if (listed := read_sizes(config, family)) is not None:
        heads, kv_heads, neurons = (
            _join(tuple(getattr(layer, name) for layer in listed)) for name in ("heads", "kv_heads", "neurons")
        )
        return Sizes(heads, kv_heads, listed[0].head_dim, len(listed), config.hidden_size, neurons)
    return Sizes(
        heads=heads,
        kv_heads=config.num_key_value_heads if family.grouped else heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        layers=getattr(config, family.sizes.layers),
        hidden=config.hidden_size,
        neurons=_count_neurons(config, family),
    )


def _count_neurons(config: Any, family: Family) -> int:
    value, hidden = getattr(config, family.sizes.neurons), int(config.hidden_size)
    return int(hidden * value) if family.sizes.neurons == "mlp_ratio" else int(value or 4 * hidden)


def check_refused(family: Family, model_type: str, teacher: Sizes, sizes: Sizes, kept: Sequence[int]) -> None:
    """Refuse changes that the family's architecture rules out, with its reason."""
    stays = f"must stay the teacher's in {model_type}"
    is_empty = f"must be empty for {model_type}"
    asked = {
        "heads": (stays, (sizes.heads, sizes.kv_heads) != (teacher.heads, teacher.kv_heads)),
        "head_dim": (stays, sizes.head_dim != teacher.head_dim),
        "heads by layer": (f"must be one number in {model_type}", not isinstance(sizes.heads, int)),
        "hidden": (stays, sizes.hidden != teacher.hidden),
        "neurons": (stays, sizes.neurons != teacher.neurons),
        "layers": (f"must keep layer 0 in {model_type}", kept[0] != 0),
        "drop_attention": (is_empty, sizes.dropped.attention),
        "drop_activations": (is_empty, sizes.dropped.activations),
    }
    for change, reason in family.refused:
        rule, is_asked = asked[change]
        if is_asked:
            raise ShdError("shrink-unsupported", f"{change} {rule}: {reason}")


def _join(sizes: tuple[int, ...]) -> int | tuple[int, ...]:
    """One number where all layers have it."""
    return sizes[0] if len(set(sizes)) == 1 else sizes


def choose_sizes(options: ShrinkOptions, teacher: Sizes, family: Family, layers: int) -> Sizes:
    limits = teacher.of_layer(0)
    heads = _read_counts("heads", options.heads, limits.heads, layers)
    neurons = _read_counts("neurons", options.neurons, limits.neurons, layers)
    hidden = teacher.hidden
    if options.hidden is not None:
        least = 2 if family.norm == "layer" else 1
        hidden = check_integer("hidden", options.hidden, least, teacher.hidden)
    kv_heads = _join(tuple(_choose_kv_heads(options.kv_heads, count, limits, family) for count in heads))
    is_whole = len(set(heads)) == 1 and hidden % heads[0] == 0
    head_dim = teacher.head_dim if family.free_head_dim or family.rotary or not is_whole else hidden // heads[0]
    if options.head_dim is not None:
        head_dim = check_integer("head_dim", options.head_dim, 1, None)
    rule = f"stay {teacher.head_dim} with rotary positions, whose frequencies depend on it"
    need(not (family.rotary and head_dim != teacher.head_dim), "shrink-unsupported", "head_dim", rule, head_dim)
    return Sizes(_join(heads), kv_heads, head_dim, layers, hidden, _join(neurons))


def _read_counts(name: str, value: int | Sequence[int] | None, most: int, layers: int) -> tuple[int, ...]:
    """One number for every layer of the student, from a number, a list or the default."""
    if value is None:
        return (most,) * layers
    counts = tuple(value) if isinstance(value, Iterable) else (value,) * layers
    rule = f"be a number, or a list of one for each of the student's {layers} layers"
    need(len(counts) == layers, "argument-value", name, rule, len(counts), remedy=repr(value))
    checked = tuple(check_integer(name, count, 1, None) for count in counts)
    if max(checked) > most:
        code = "heads-exceed" if name == "heads" else "argument-value"
        raise ShdError(code, f"{name} must lie in 1..{most}, the teacher's; got {value!r}")
    return checked


def _choose_kv_heads(value: int | None, heads: int, teacher: LayerSizes, family: Family) -> int:
    if value is None:
        fitting = (count for count in range(min(teacher.kv_heads, heads), 0, -1) if heads % count == 0)
        return next(fitting) if family.grouped else heads
    kv_heads = check_integer("kv_heads", value, 1, heads)
    if heads % kv_heads or (kv_heads != heads and not family.grouped):
        rule = f"kv_heads must divide heads={heads}{'' if family.grouped else ', and be equal to it in this family'}"
        raise ShdError("argument-value", f"{rule}; got {kv_heads!r}")
    return kv_heads


def find_remarks(teacher: Sizes, student: Sizes) -> list[str]:
    """Changes that make the student smaller in name only: attention takes time by heads times their length."""
    before, layers = teacher.of_layer(0), student.of_layers
    is_as_slow = all(layer.heads * layer.head_dim >= before.heads * before.head_dim for layer in layers)
    if not is_as_slow or all(layer.heads == before.heads for layer in layers):
        return []
    longer = (
        f"heads of {student.head_dim} instead of {before.head_dim} make fewer heads take as long as the teacher's"
    )
    return [f"{longer} {before.heads}: head_dim={before.head_dim} saves time"]


def make_student(teacher: nn.Module, family: Family, sizes: Sizes, kept: Sequence[int]) -> Any:
    """A model of the teacher's class, or of its ``custom_class``, with these sizes, its weights still random."""
    from huggingface_hub.errors import StrictDataclassError

    config: Any = copy.deepcopy(teacher.config)
    before = sizes_of(config, family)
    # What stock fields say of layers that differ: the largest of them.
    heads, kv_heads, neurons = (
        max(getattr(layer, name) for layer in sizes.of_layers) for name in ("heads", "kv_heads", "neurons")
    )
    try:
        if family.grouped:
            config.num_key_value_heads = kv_heads
        if "heads" not in family.shared:
            setattr(config, family.sizes.heads, heads)
        setattr(config, family.sizes.layers, sizes.layers)
        if (types := getattr(config, "layer_types", None)) is not None:
            config.layer_types = [types[layer] for layer in kept]
        if hasattr(config, "stage_names"):  # a backbone names its layers
            config.stage_names = ["stem", *(f"stage{layer + 1}" for layer in range(sizes.layers))]
            config.set_output_features_output_indices(out_features=None, out_indices=None)
        if family.free_head_dim or family.rotary:  # rotary tables read it, also where attention does not
            config.head_dim = sizes.head_dim
        if sizes.hidden != before.hidden:
            for name in family.sizes.widths:
                setattr(config, name, sizes.hidden)
            config.tie_word_embeddings = False  # the last norm's scale folds into the output layer alone
        if (sizes.hidden, sizes.neurons) != (before.hidden, before.neurons) and "neurons" not in family.shared:
            is_ratio = family.sizes.neurons == "mlp_ratio"
            setattr(config, family.sizes.neurons, -(-neurons // sizes.hidden) if is_ratio else neurons)
        kind: Any = type(teacher)
        listed = None if is_stock(sizes, family, config) else sizes.of_layers
        if sizes.dropped or listed is not None:
            config, kind = custom_config(config, family, sizes.dropped, listed), custom_class(kind)
        config.validate()  # it would be refused when it is read again
        student = kind(config)
    except (TypeError, ValueError, StrictDataclassError) as error:
        if isinstance(error, ShdError):
            raise
        rule = f"a {config.model_type} configuration cannot say {sizes.heads} heads, {sizes.layers} layers, hidden"
        message = f"{rule} {sizes.hidden} and {sizes.neurons} neurons: {error}"
        raise ShdError("shrink-unsupported", message) from error
    generation: Any = getattr(teacher, "generation_config", None)
    if generation is not None:  # it may hold the only word of where a text ends
        with suppress(ValueError):  # of a contradiction, with which it could not be saved
            generation.validate(strict=True)
            student.generation_config = copy.deepcopy(generation)
    example = next(teacher.parameters())
    return student.to(device=example.device, dtype=example.dtype).eval()


def is_stock(sizes: Sizes, family: Family, config: Any) -> bool:
    """Whether a configuration, with the largest sizes written, expresses these."""
    if any(isinstance(size, tuple) for size in (sizes.heads, sizes.kv_heads, sizes.neurons)):
        return False
    try:
        if hasattr(config, "validate_architecture"):
            config.validate_architecture()
    except ValueError:  # of heads that do not divide the width, though they have any length
        return False
    is_long = family.free_head_dim or sizes.of_layer(0).heads * sizes.head_dim == sizes.hidden
    stock = getattr(config, family.sizes.heads), _count_neurons(config, family)
    return is_long and stock == (sizes.heads, sizes.neurons)


def count_parameters(model: nn.Module) -> int:
    """How many numbers a model has; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
