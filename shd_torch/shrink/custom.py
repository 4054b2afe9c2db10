"""Students whose layers no stock configuration can express.

Their layers differ in size, lack attention, or have a linear FFN. They are the stock class with some modules
replaced, under a ``model_type`` that plain transformers does not know: its Auto classes refuse the folder, and a
stock class finds weights of another shape.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError, need
from shd_ref.integers import as_index, check_integer
from shd_torch.shrink.families import Family, find_part, row_of

PREFIX = "Custom"
_KIND = "{} with custom layers (load it with shd_torch.load_student)"
_LISTS = ("dropped_attention", "dropped_activations")
MAX_SIZE = 1 << 20
"""Of heads, of their length and of neurons in a folder's configuration, which is not trusted."""


@dataclass(frozen=True)
class LayerSizes:
    """Of the attention and the FFN of one layer."""

    heads: int  # query heads
    kv_heads: int  # key and value heads
    head_dim: int  # entries of a head
    neurons: int  # of the FFN


@dataclass(frozen=True)
class Dropped:
    """What a model lacks, by number of layer."""

    attention: tuple[int, ...] = ()  # layers whose block has no attention
    activations: tuple[int, ...] = ()  # layers whose FFN is one linear map

    def __bool__(self) -> bool:
        return bool(self.attention or self.activations)

    def among(self, kept: Sequence[int]) -> Dropped:
        """The same layers by their place in ``kept``."""
        return Dropped(*(tuple(map(kept.index, layers)) for layers in (self.attention, self.activations)))


NOTHING = Dropped()


def as_dropped(attention: Any, activations: Any) -> Dropped:
    """What a caller asks for, or a configuration lists; ``check_dropped`` does the rest."""
    try:
        return Dropped(*(tuple(as_index(layer) for layer in layers) for layers in (attention, activations)))
    except TypeError:
        rule = "dropped attention and activations must be lists of layers"
        raise ShdError("layers-invalid", f"{rule}; got {attention!r} and {activations!r}") from None


def check_dropped(dropped: Dropped, family: Family, config: Any, kept: Sequence[int]) -> None:
    """Refuse what cannot be dropped from a teacher, of whose layers ``kept`` stay."""
    for name, layers in (("drop_attention", dropped.attention), ("drop_activations", dropped.activations)):
        rising = list(layers) == sorted(set(layers)) and set(layers) <= set(kept)
        rule = f"be a rising list of teacher layers that the student keeps, {list(kept)}"
        need(rising, "layers-invalid", name, rule, list(layers))
    rule = "leave a block with attention"
    need(len(dropped.attention) != len(kept), "layers-invalid", "drop_attention", rule, f"all of {list(kept)}")
    if dropped.activations and family.is_gated:
        rule = f"drop_activations must be empty for {config.model_type}: its gated FFNs multiply two functions of"
        message = f"{rule} their input, and no linear map equals them; drop attention or whole layers"
        raise ShdError("shrink-unsupported", message)
    kinds = set(getattr(config, "layer_types", None) or ())
    if dropped.attention and len(kinds) > 1 and getattr(config, "use_cache", None) is not None:
        rule = f"drop_attention must be empty where layers attend differently ({', '.join(sorted(kinds))})"
        message = f"{rule}: a cache of keys would give a layer another one's window; drop whole layers"
        raise ShdError("shrink-unsupported", message)


def build_layers(model: nn.Module, family: Family, config: Any) -> None:
    dropped, layers = read_dropped(config), family.layers_of(model)
    if (sizes := read_sizes(config, family)) is not None:
        for layer, own in zip(layers, sizes, strict=True):
            _resize_layer(layer, family, own)
    for number in dropped.attention:
        _drop_attention(layers[number], family)
    for number in dropped.activations:
        _drop_activation(layers[number], family)
    if dropped.attention:  # a cache of keys counts the blocks that fill it, and asks the first how far it is
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
    (first,), last = family.ffn
    assert family.activation is not None  # check_dropped
    layer.set_submodule(first, _Absent())
    path, _, name = family.activation.rpartition(".")
    setattr(layer.get_submodule(path), name, nn.Identity())  # some are functions
    _resize(layer, last, inputs=_sizes_of(find_part(layer, last))[1])


@functools.cache
def custom_class(stock: Any) -> Any:
    """The class of a stock class's models with custom layers, registered with transformers' Auto classes."""
    from transformers.models.auto import modeling_auto

    name = stock.config_class.model_type

    def make(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        family = row_of(name, config)
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
        with _stock_heads(self, row_of(stock.model_type, self)):
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
        entries["shrunk_stack"] = family.stack  # for row_of
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
    """What a configuration says; ``check_dropped`` says whether it may."""
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
