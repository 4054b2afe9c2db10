"""The sizes of a student: from the options of ``shrink``, as its configuration says them, and where none can.

Layers that differ in size, lack attention, or have a linear FFN are those of the stock class with some modules
replaced, under a ``model_type`` that plain transformers does not know: its Auto classes refuse the folder, and a
stock class finds weights of another shape.
"""

from __future__ import annotations

import copy
import functools
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError, need
from shd_ref.integers import as_index, check_integer
from shd_torch.shrink.families import Family, custom_family, find_part
from shd_torch.shrink.options import ShrinkOptions

PREFIX = "Custom"
_KIND = "{} with custom layers (load it with shd_torch.load_student)"
_LISTS = ("dropped_attention", "dropped_activations")
MAX_SIZE = 1 << 20
"""Of heads, of their length and of neurons in a folder's configuration, which is not trusted."""


MAX_GRAM = 16 << 30
"""Bytes of the Gram tensor of a layer's heads: 215 heads."""


@dataclass(frozen=True)
class LayerSizes:
    """Of the attention and the FFN of one layer."""

    heads: int  # query heads
    kv_heads: int  # key and value heads
    head_dim: int  # entries of a head
    neurons: int  # of the FFN


@dataclass(frozen=True)
class Dropped:
    """Parts that a model lacks, by number of layer."""

    attention: tuple[int, ...] = ()  # layers whose block has no attention
    activations: tuple[int, ...] = ()  # layers whose FFN is one linear map

    def __bool__(self) -> bool:
        return bool(self.attention or self.activations)

    def among(self, sources: Sequence[int]) -> Dropped:
        """The same layers by their place in ``sources``."""
        return Dropped(*(tuple(map(sources.index, layers)) for layers in (self.attention, self.activations)))


NOTHING = Dropped()


@dataclass(frozen=True)
class Sizes:
    """Of a teacher or a student; a size that differs from layer to layer is a tuple with a number per layer."""

    heads: int | tuple[int, ...]  # query heads
    kv_heads: int | tuple[int, ...]  # key and value heads
    head_dim: int  # entries of a head
    layers: int  # how many
    hidden: int  # channels of the stream
    neurons: int | tuple[int, ...]  # of an FFN
    dropped: Dropped = NOTHING  # parts that layers lack, by their numbers

    def of_layer(self, number: int) -> LayerSizes:
        heads, kv_heads, neurons = (
            size[number] if isinstance(size, tuple) else size for size in (self.heads, self.kv_heads, self.neurons)
        )
        return LayerSizes(heads, kv_heads, self.head_dim, neurons)

    def report(self) -> dict[str, Any]:
        """The sizes in ``shrink.json``; parts that layers lack are listed by layer there."""
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


def check_refused(family: Family, model_type: str, teacher: Sizes, sizes: Sizes, sources: Sequence[int]) -> None:
    """Refuse changes that the family's architecture rules out, with its reason."""
    stays = f"must stay the teacher's in {model_type}"
    is_empty = f"must be empty for {model_type}"
    size = 8 * teacher.of_layer(0).heads ** 4
    if sizes.heads != teacher.heads and size > MAX_GRAM:
        rule = f"heads {stays}: merging them reads a Gram tensor of 8 H^4 bytes a layer, {size / 2**30:,.0f} GiB"
        message = f"{rule}, of which at most {MAX_GRAM >> 30} are allowed; drop attention blocks or whole layers"
        raise ShdError("shrink-unsupported", message)
    changes = {
        "heads": (stays, (sizes.heads, sizes.kv_heads) != (teacher.heads, teacher.kv_heads)),
        "head_dim": (stays, sizes.head_dim != teacher.head_dim),
        "heads by layer": (f"must be one number in {model_type}", not isinstance(sizes.heads, int)),
        "hidden": (stays, sizes.hidden != teacher.hidden),
        "neurons": (stays, sizes.neurons != teacher.neurons),
        "layers": (f"must keep layer 0 in {model_type}", sources[0] != 0),
        "drop_attention": (is_empty, sizes.dropped.attention),
        "drop_activations": (is_empty, sizes.dropped.activations),
    }
    refused = list(family.refused)
    if family.norms is None:
        refused.append(("hidden", "its norms lie on the stream; cut heads, neurons or layers"))
    for change, reason in refused:
        rule, is_asked = changes[change]
        if is_asked:
            raise ShdError("shrink-unsupported", f"{change} {rule}: {reason}")


def _join(sizes: tuple[int, ...]) -> int | tuple[int, ...]:
    """One number where all layers have it."""
    return sizes[0] if len(set(sizes)) == 1 else sizes


def choose_sizes(options: ShrinkOptions, teacher: Sizes, family: Family, model_type: str, layers: int) -> Sizes:
    limits = teacher.of_layer(0)
    heads = _read_counts("heads", options.heads, limits.heads, layers)
    neurons = _read_counts("neurons", options.neurons, limits.neurons, layers)
    hidden = teacher.hidden
    if options.hidden is not None:
        least = 2 if family.norm == "layer" else 1
        hidden = check_integer("hidden", options.hidden, least, teacher.hidden)
    kv_heads = _join(tuple(_choose_kv_heads(options.kv_heads, count, limits, family, model_type) for count in heads))
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


def _choose_kv_heads(value: int | None, heads: int, teacher: LayerSizes, family: Family, model_type: str) -> int:
    if value is None:
        fitting = (count for count in range(min(teacher.kv_heads, heads), 0, -1) if heads % count == 0)
        return next(fitting) if family.grouped else heads
    kv_heads = check_integer("kv_heads", value, 1, heads)
    if heads % kv_heads or (kv_heads != heads and not family.grouped):
        equal = "" if family.grouped else f", and be equal to it in {model_type}, which has no grouped heads"
        rule = f"kv_heads must divide heads={heads}{equal}"
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


def make_student(teacher: nn.Module, family: Family, sizes: Sizes, sources: Sequence[int]) -> Any:
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
            config.layer_types = [types[layer] for layer in sources]
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


def as_dropped(attention: Any, activations: Any) -> Dropped:
    """From options or a configuration, types checked; ``check_dropped`` does the rest."""
    try:
        return Dropped(*(tuple(as_index(layer) for layer in layers) for layers in (attention, activations)))
    except TypeError:
        rule = "dropped attention and activations must be lists of layers"
        raise ShdError("layers-invalid", f"{rule}; got {attention!r} and {activations!r}") from None


def check_dropped(dropped: Dropped, family: Family, config: Any, sources: Sequence[int]) -> None:
    """Refuse what cannot be dropped from a teacher, of whose layers ``sources`` stay."""
    for name, layers in (("drop_attention", dropped.attention), ("drop_activations", dropped.activations)):
        rising = list(layers) == sorted(set(layers)) and set(layers) <= set(sources)
        rule = f"be a rising list of teacher layers that the student keeps, {list(sources)}"
        need(rising, "layers-invalid", name, rule, list(layers))
    rule = "leave a block with attention"
    need(len(dropped.attention) != len(sources), "layers-invalid", "drop_attention", rule, f"all of {list(sources)}")
    kinds = set(getattr(config, "layer_types", None) or ())
    if dropped.attention and len(kinds) > 1 and getattr(config, "use_cache", None) is not None:
        rule = f"drop_attention must be empty where layers attend differently ({', '.join(sorted(kinds))})"
        message = f"{rule}: a cache of keys would give a layer another one's window; drop whole layers"
        raise ShdError("shrink-unsupported", message)


def build_layers(model: nn.Module, family: Family, config: Any) -> None:
    dropped, layers = read_dropped(config), family.layers_of(model)
    if (sizes := read_sizes(config, family)) is not None:
        for layer, layer_sizes in zip(layers, sizes, strict=True):
            _resize_layer(layer, family, layer_sizes)
    for number in dropped.attention:
        _drop_attention(layers[number], family)
    for number in dropped.activations:
        _drop_activation(layers[number], family)
    if dropped.attention:  # a cache of keys counts the blocks that fill it, and takes its length from the first
        blocks = [layer for number, layer in enumerate(layers) if number not in dropped.attention]
        for order, layer in enumerate(blocks):
            attention = find_part(layer, family.attention)
            if hasattr(attention, "layer_idx"):
                attention.layer_idx = order


def _resize_layer(layer: nn.Module, family: Family, sizes: LayerSizes) -> None:
    """Give the matrices of a layer their sizes, and its attention the counts that it computes with."""
    *inputs, last = family.projections
    widths = [count * sizes.head_dim for count in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
    for name, width in zip(inputs, [sum(widths)] if len(inputs) == 1 else widths, strict=True):
        _resize(layer, name, outputs=width)
    _resize(layer, last, inputs=widths[0])
    for name in family.ffn[0]:
        _resize(layer, name, outputs=sizes.neurons * (2 if family.is_gated and len(family.ffn[0]) == 1 else 1))
    _resize(layer, family.ffn[1], inputs=sizes.neurons)
    attention = find_part(layer, family.attention)
    counts = dict.fromkeys(("num_attention_heads", "num_heads", "n_heads"), sizes.heads)
    counts |= {"num_key_value_heads": sizes.kv_heads, "num_key_value_groups": sizes.heads // sizes.kv_heads}
    counts |= dict.fromkeys(("head_dim", "attention_head_size", "head_size"), sizes.head_dim)
    counts |= dict.fromkeys(("all_head_size", "split_size"), widths[0])
    for name in counts.keys() & vars(attention).keys():
        setattr(attention, name, counts[name])
    if "scaling" in vars(attention) and family.is_scaled:
        attention.scaling = sizes.head_dim**-0.5


def _resize(layer: nn.Module, name: str, *, inputs: int | None = None, outputs: int | None = None) -> None:
    """A Linear or a Conv1D of other sizes, where they are not as they are."""
    old = find_part(layer, name)
    before = _sizes_of(old)
    after = (inputs or before[0], outputs or before[1])
    if before != after:
        is_linear = isinstance(old, nn.Linear)
        new = nn.Linear(*after, bias=old.bias is not None) if is_linear else type(old)(after[1], after[0])
        layer.set_submodule(name, new.to(dtype=old.weight.dtype, device=old.weight.device))


def _sizes_of(module: Any) -> tuple[int, int]:
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (module.nx, module.nf)


class _Absent(nn.Module):
    """Passes its input on, where a projection was.

    A checkpoint holds one number under its name: a stock class refuses the shape, and would make up missing weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(1))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class _NoAttention(nn.Module):
    """Adds nothing to the stream; ``name`` is the projection whose place is marked."""

    attention_is_dropped = True  # for capture, which counts the layers that attend

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, _Absent())

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return hidden_states.new_zeros(1, 1, 1), None


def _drop_attention(layer: nn.Module, family: Family) -> None:
    layer.set_submodule(family.attention, _NoAttention(family.projections[0].rpartition(".")[2]))
    unread = [] if family.projections[-1].startswith(f"{family.attention}.") else [family.projections[-1]]
    unread += [] if family.norms is None else [family.norms[0]]
    unread += [] if family.layer_scales is None else [family.layer_scales[0].rpartition(".")[0]]
    for name in unread:
        layer.set_submodule(name, nn.Identity())


def _drop_activation(layer: nn.Module, family: Family) -> None:
    """One linear map, with a bias, in place of an FFN; it has the name of the last matrix."""
    (first, *_), last = family.ffn
    old = find_part(layer, last)
    linear = nn.Linear(*2 * _sizes_of(old)[1:], dtype=old.weight.dtype, device=old.weight.device)
    if family.activation is None:  # the block computes its product of two functions itself
        block, _, name = last.rpartition(".")
        layer.set_submodule(block, nn.Sequential(OrderedDict({first.rpartition(".")[2]: _Absent(), name: linear})))
        return
    layer.set_submodule(first, _Absent())
    layer.set_submodule(last, linear)
    path, _, name = family.activation.rpartition(".")
    setattr(layer.get_submodule(path), name, nn.Identity())  # some are functions


@functools.cache
def custom_class(stock: Any) -> Any:
    """The class of a stock class's models with custom layers, registered with transformers' Auto classes."""
    from transformers.models.auto import modeling_auto

    name = stock.config_class.model_type

    def make(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        family = custom_family(name, config)
        with _stock_heads(config, family):
            stock.__init__(self, config, *args, **kwargs)
        build_layers(self, family, config)
        self.init_weights()  # of the modules that are new

    config_class = _config_class(stock.config_class)
    members = {"__init__": make, "config_class": config_class, "__module__": __name__, "__doc__": stock.__doc__}
    custom = type(PREFIX + stock.__name__, (stock,), members)
    for auto in vars(modeling_auto).values():
        mapping: Any = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        kind = None if mapping is None else mapping.get(stock.config_class, None)
        if kind is stock or (auto is modeling_auto.AutoModel and isinstance(kind, type)):
            auto.register(config_class, custom if kind is stock else custom_class(kind), exist_ok=True)
    return custom


@contextmanager
def _stock_heads(config: Any, family: Family) -> Iterator[None]:
    """One head, if those do not fit the width, while a stock class checks, or builds layers that are resized then."""
    heads = getattr(config, family.sizes.heads)
    if getattr(config, "layer_sizes", None) is None or config.hidden_size % heads == 0 or family.biases is not None:
        yield
        return
    setattr(config, family.sizes.heads, 1)
    try:
        yield
    finally:
        setattr(config, family.sizes.heads, heads)


@functools.cache
def _config_class(stock: Any) -> Any:
    import transformers

    def validate(self: Any) -> None:
        with _stock_heads(self, custom_family(stock.model_type, self)):
            stock.validate(self)

    name = _KIND.format(stock.model_type)
    members = {"model_type": name, "validate": validate, "__module__": __name__}
    custom = type(PREFIX + stock.__name__, (stock,), members)
    transformers.AutoConfig.register(name, custom, exist_ok=True)
    return custom


def custom_config(config: Any, family: Family, dropped: Dropped, sizes: Sequence[LayerSizes] | None) -> Any:
    """A stock configuration as one that says what is dropped, and the sizes of each layer where they are custom."""
    entries = {name: value for name, value in config.to_dict().items() if name not in ("model_type", "architectures")}
    entries |= {_LISTS[0]: list(dropped.attention), _LISTS[1]: list(dropped.activations)}
    if family.stack is not None:
        entries["shrunk_stack"] = family.stack  # for custom_family
    if sizes is not None:
        entries["layer_sizes"] = [asdict(layer) for layer in sizes]
    stock: Any = type(config)
    custom = _config_class(stock)(**entries)
    custom._attn_implementation = config._attn_implementation
    return custom


def read_kind(raw: Mapping[str, Any]) -> str | None:
    """The ``model_type`` of the stock class, from a configuration of such a student; None from another's."""
    match = re.fullmatch(re.escape(_KIND).replace(r"\{\}", "(.+)"), str(raw.get("model_type")))
    return None if match is None else match[1]


def read_dropped(config: Any) -> Dropped:
    """Dropped parts in a configuration, before ``check_dropped``."""
    return as_dropped(*(getattr(config, name, None) for name in _LISTS))


def read_sizes(config: Any, family: Family) -> tuple[LayerSizes, ...] | None:
    """The sizes of each layer that a configuration lists, checked; None where it lists none."""
    listed = getattr(config, "layer_sizes", None)
    if listed is None:
        return None
    count = getattr(config, family.sizes.layers)
    names = [field.name for field in fields(LayerSizes)]
    is_listed = isinstance(listed, list) and len(listed) == count
    is_listed = is_listed and all(isinstance(entry, dict) and sorted(entry) == sorted(names) for entry in listed)
    rule = f"list {', '.join(names)} of each of {count} layers"
    need(is_listed, "layers-invalid", "layer_sizes", rule, f"{listed!r:.200}")
    for number, entry in enumerate(listed):
        for name in names:
            check_integer(f"layer_sizes[{number}][{name!r}]", entry[name], 1, MAX_SIZE)
        if entry["heads"] % entry["kv_heads"] or (not family.grouped and entry["heads"] != entry["kv_heads"]):
            rule = f"must have {'a multiple of' if family.grouped else 'as many heads as'} its kv_heads"
            message = f"layer_sizes[{number}] {rule}{' as heads' if family.grouped else ''}; got {entry}"
            raise ShdError("layers-invalid", message)
        is_one = entry["head_dim"] == listed[0]["head_dim"]
        need(is_one, "layers-invalid", "layer_sizes", "have one head_dim in all layers", f"{listed!r:.200}")
    return tuple(LayerSizes(**entry) for entry in listed)
