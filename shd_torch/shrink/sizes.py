"""What a student is asked to be: the options of ``shrink``, and sizes that its configuration can say (STUDENT-2)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from torch import nn

from shd_ref.errors import ShdError
from shd_ref.integers import check_integer, check_number
from shd_ref.shrink.ffn import score_neurons
from shd_ref.shrink.merges import PLANS
from shd_ref.shrink.width import Axes, principal_axes
from shd_torch.checks import check_option
from shd_torch.shrink.dropped import NOTHING, Dropped, dropped_class, dropped_config
from shd_torch.shrink.families import Array, Family
from shd_torch.shrink.heads import Squeezed, squeeze_attention

Squeezer: TypeAlias = Callable[..., Squeezed]
Principal: TypeAlias = Callable[[Array, int, str], Axes]
Importance: TypeAlias = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class ShrinkOptions:
    """Options of ``shrink``; each field is also a keyword of ``shrink``.

    Attributes:
        heads: query heads of the student; default the teacher's.
        layers: number of layers, or a list of the teacher's; default all.
        hidden: channels of the stream; default the teacher's.
        neurons: per FFN, the most important ones; default the teacher's.
        kv_heads: key and value heads; see HEAD-17.
        head_dim: width of a head, if the family's configuration allows it.
        drop_attention: teacher layers that lose their attention block; such a student loads with ``load_student``.
        drop_activations: teacher layers whose FFN becomes one linear map; also.
        plan: ``"matched"`` (needs networkx), ``"balanced"``, ``"progressive"``, or ``"auto"``.
        align: refit last matrices on the student's residual stream.
        ridge: of the alignment (ALIGN-2); by default chosen per matrix on every fourth sample, which may also keep
            the closed form (ALIGN-7).
        batch_size: samples per batch.
        squeezer: makes a layer's attention; another than the default is for comparison, as are the next two.
        axes: chooses the kept axes from the moment of WIDTH-3.
        importance: of neurons, from the mean of their squares and their rows of the last matrix.

    Raises:
        ShdError: ``argument-value``.
    """

    heads: int | None = None
    layers: int | Sequence[int] | None = None
    hidden: int | None = None
    neurons: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    drop_attention: Sequence[int] = ()
    drop_activations: Sequence[int] = ()
    plan: str = "auto"
    align: bool = True
    ridge: float | None = None
    batch_size: int = 16
    squeezer: Squeezer = squeeze_attention
    axes: Principal = principal_axes
    importance: Importance = score_neurons

    def __post_init__(self) -> None:
        check_option("plan", self.plan, PLANS, "HEAD-4")
        object.__setattr__(self, "batch_size", check_integer("batch_size", self.batch_size, 1, None, "STUDENT-4"))
        if self.ridge is not None:
            check_number("ridge", self.ridge, "ALIGN-2", least=0)

    @property
    def is_usual(self) -> bool:
        """Whether no function is replaced: of another one no key of an unfinished run could tell."""
        return (self.squeezer, self.axes, self.importance) == (squeeze_attention, principal_axes, score_neurons)

    def changed(self, changes: Mapping[str, Any]) -> ShrinkOptions:
        """These options with some replaced by name, or ``argument-value``."""
        known = [field.name for field in fields(self)]
        if unknown := [name for name in changes if name not in known]:
            raise ShdError("argument-value", f"options must be of {', '.join(known)}; got {', '.join(unknown)}")
        return replace(self, **changes)


@dataclass(frozen=True)
class Sizes:
    """Of a teacher or a student."""

    heads: int  # query heads
    kv_heads: int  # key and value heads
    head_dim: int  # entries of a head
    layers: int  # how many
    hidden: int  # channels of the stream
    neurons: int  # of an FFN


def sizes_of(config: Any, family: Family) -> Sizes:
    """What a configuration says."""
    heads = getattr(config, family.sizes.heads)
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


def check_refused(
    family: Family, model_type: str, teacher: Sizes, sizes: Sizes, kept: Sequence[int], dropped: Dropped
) -> None:
    """Refuse changes that the family's architecture rules out, with its reason (STUDENT-2)."""
    stays = f"must stay the teacher's in {model_type}"
    is_empty = f"must be empty for {model_type}"
    asked = {
        "heads": (stays, (sizes.heads, sizes.kv_heads) != (teacher.heads, teacher.kv_heads)),
        "head_dim": (stays, sizes.head_dim != teacher.head_dim),
        "hidden": (stays, sizes.hidden != teacher.hidden),
        "neurons": (stays, sizes.neurons != teacher.neurons),
        "layers": (f"must keep layer 0 in {model_type}", kept[0] != 0),
        "drop_attention": (is_empty, dropped.attention),
        "drop_activations": (is_empty, dropped.activations),
    }
    for change, reason in family.refused:
        rule, is_asked = asked[change]
        if is_asked:
            raise ShdError("shrink-unsupported", f"{change} {rule}: {reason}", "STUDENT-2")


def choose_sizes(options: ShrinkOptions, teacher: Sizes, family: Family, layers: int) -> Sizes:
    """The student's sizes, with the defaults of HEAD-17 and STUDENT-2."""

    def read(name: str, default: Any, low: int, high: int | None, spec_id: str) -> Any:
        value = getattr(options, name)
        return default if value is None else check_integer(name, value, low, high, spec_id)

    heads = read("heads", teacher.heads, 1, None, "STUDENT-2")
    if heads > teacher.heads:
        message = f"heads must lie in 1..{teacher.heads}, the teacher's; got {heads}"
        raise ShdError("heads-exceed", message, "STUDENT-2")
    hidden = read("hidden", teacher.hidden, 2 if family.norm == "layer" else 1, teacher.hidden, "WIDTH-3")
    neurons = read("neurons", teacher.neurons, 1, teacher.neurons, "STUDENT-2")
    head_dim = read("head_dim", None, 1, None, "STUDENT-2")
    fitting = (count for count in range(min(teacher.kv_heads, heads), 0, -1) if heads % count == 0)
    kv_heads = read("kv_heads", next(fitting) if family.grouped else heads, 1, heads, "HEAD-17")
    if heads % kv_heads or (kv_heads != heads and not family.grouped):
        rule = f"kv_heads must divide heads={heads}{'' if family.grouped else ', and be equal to it in this family'}"
        raise ShdError("argument-value", f"{rule}; got {kv_heads!r}", "HEAD-17")
    fixed = None if family.free_head_dim else hidden // heads
    chosen = head_dim or fixed or teacher.head_dim
    if fixed is not None and (chosen != fixed or hidden % heads):
        divisors = ", ".join(str(count) for count in range(1, teacher.heads + 1) if hidden % count == 0)
        rule = f"head_dim is hidden / heads in this family, a whole number; got hidden={hidden}, heads={heads} and"
        message = f"{rule} head_dim={head_dim}: with this hidden, heads may be {divisors}"
        raise ShdError("shrink-unsupported", message, "STUDENT-2")
    if family.rotary and chosen != teacher.head_dim:
        rule = f"head_dim must stay {teacher.head_dim} with rotary positions, whose frequencies depend on it"
        raise ShdError("shrink-unsupported", f"{rule}; got {chosen}", "HEAD-14")
    return Sizes(heads, kv_heads, chosen, layers, hidden, neurons)


def make_student(
    teacher: nn.Module, family: Family, sizes: Sizes, kept: Sequence[int], dropped: Dropped = NOTHING
) -> Any:
    """A model of the teacher's class, or of its ``dropped_class``, with these sizes, its weights still random."""
    config: Any = copy.deepcopy(teacher.config)
    before = sizes_of(config, family)
    try:
        if family.grouped:
            config.num_key_value_heads = sizes.kv_heads
        setattr(config, family.sizes.heads, sizes.heads)
        setattr(config, family.sizes.layers, sizes.layers)
        if (types := getattr(config, "layer_types", None)) is not None:
            config.layer_types = [types[layer] for layer in kept]  # DEPTH-3
        if hasattr(config, "stage_names"):  # a backbone names its layers
            config.stage_names = ["stem", *(f"stage{layer + 1}" for layer in range(sizes.layers))]
            config.set_output_features_output_indices(out_features=None, out_indices=None)
        if family.free_head_dim:
            config.head_dim = sizes.head_dim
        if sizes.hidden != before.hidden:
            config.hidden_size = sizes.hidden
            config.tie_word_embeddings = False  # the last norm's scale folds into the output layer alone (WIDTH-1)
        if (sizes.hidden, sizes.neurons) != (before.hidden, before.neurons):
            _write_neurons(config, family, sizes)
        if hasattr(config, "validate_architecture"):
            config.validate_architecture()
        kind: Any = type(teacher)
        if dropped:
            config, kind = dropped_config(config, dropped), dropped_class(kind)
        student = kind(config)
    except (TypeError, ValueError) as error:
        if isinstance(error, ShdError):
            raise
        rule = f"a {config.model_type} configuration cannot say {sizes.heads} heads, {sizes.layers} layers, hidden"
        message = f"{rule} {sizes.hidden} and {sizes.neurons} neurons: {error}"
        raise ShdError("shrink-unsupported", message, "STUDENT-2") from error
    generation: Any = getattr(teacher, "generation_config", None)
    if generation is not None:  # it may hold the only word of where a text ends
        with suppress(ValueError):  # of a contradiction, with which it could not be saved
            generation.validate(strict=True)
            student.generation_config = copy.deepcopy(generation)
    example = next(teacher.parameters())
    return student.to(device=example.device, dtype=example.dtype).eval()


def _write_neurons(config: Any, family: Family, sizes: Sizes) -> None:
    if family.sizes.neurons == "mlp_ratio":
        if sizes.neurons % sizes.hidden:
            rule = "mlp_ratio must be a whole number"
            raise ValueError(f"{rule}, and {sizes.neurons} neurons are not a multiple of {sizes.hidden}")
        config.mlp_ratio = sizes.neurons // sizes.hidden
    else:
        setattr(config, family.sizes.neurons, sizes.neurons)


def count_parameters(model: nn.Module) -> int:
    """How many numbers a model has; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
