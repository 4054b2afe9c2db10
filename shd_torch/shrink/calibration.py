"""The calibration set, run through a model layer by layer: outputs of each layer, and inputs of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from shd_ref.errors import ShdError, need
from shd_ref.shrink.align import HELD_OUT
from shd_torch.shrink.families import Array, Family, as_array, base_of, find_part, has_part

_RECORDED = "shd_recorded"
GRAM_ENTRIES = 2**24  # of the products of one call: 128 MiB
_MAP_ENTRIES = 2**23  # of the maps of some rows


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch of the calibration set at the first layer."""

    stream: Tensor  # inputs of the first layer (B, L, D)
    # for each layer of the teacher the arguments that follow the stream, by position and by name
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    counted: Tensor  # boolean (B, L), True = the row counts
    first: int  # the number of its first sample in the calibration set
    inputs: dict[str, Any]  # of the model

    def rows(self, tensor: Tensor) -> Tensor:
        """Rows that count ``(n, D)`` of a tensor ``(B, L, D)``, or all rows of ``(B, D)``."""
        return tensor[self.counted] if tensor.ndim == 3 else tensor

    def held_rows(self, tensor: Tensor) -> Tensor:
        """Which of these rows belong to is_held_out-out samples: boolean ``(n,)``."""
        samples = self.first + torch.arange(len(tensor), device=tensor.device)
        is_held_out = samples % HELD_OUT == HELD_OUT - 1
        return is_held_out[:, None].expand_as(self.counted)[self.counted] if tensor.ndim == 3 else is_held_out


def join_rows(tensors: Sequence[Tensor], batches: Sequence[Batch]) -> Tensor:
    return torch.cat([batch.rows(tensor) for tensor, batch in zip(tensors, batches, strict=True)])


def read_data(data: Any) -> dict[str, Tensor]:
    """Inputs by name, as tensors with equally many samples."""
    rule = "be a mapping from the model's inputs to arrays"
    need(isinstance(data, Mapping), "argument-dtype", "data", rule, f"a {type(data).__name__}")
    try:
        inputs = {name: torch.as_tensor(array) for name, array in data.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShdError("argument-dtype", f"data must hold arrays of numbers: {error}") from error
    sizes = {name: len(array) if array.ndim else 0 for name, array in inputs.items()}
    fits = len(set(sizes.values())) == 1 and 0 not in sizes.values()
    need(fits, "argument-shape", "data", "hold equally many samples in every input", sizes)
    return inputs


@torch.no_grad()
def start_batches(model: Any, family: Family, data: Mapping[str, Any], batch_size: int) -> list[Batch]:
    """Every batch as the first layer gets it, with the arguments of all layers; the layers run, the streams go."""
    layers, device = family.layers_of(model), next(model.parameters()).device
    inputs = read_data(data)
    runner, mask = model, "attention_mask"
    if family.stack == "encoder" and not family.is_alone:  # runs alone, without inputs of the decoder
        runner = find_part(base_of(model), "encoder")
        inputs = {name: tensor for name, tensor in inputs.items() if not name.startswith(("decoder_", "labels"))}
    elif family.stack == "decoder" and model.config.is_encoder_decoder:
        mask = "decoder_attention_mask"
    # A cache of keys would be filled by every later run of a layer.
    has_cache = family.stack != "encoder" and getattr(model.config, "use_cache", None) is not None
    extra = {"use_cache": False} if has_cache else {}
    batches = []
    with recorded_attention(model):
        for start in range(0, len(next(iter(inputs.values()))), batch_size):
            some = {name: values[start : start + batch_size].to(device) for name, values in inputs.items()}
            if mask in some and some[mask].ndim == 2 and not model.config.is_encoder_decoder:
                some = _without_padding(some, some[mask])
            stream, calls = _note_calls(runner, layers, some | extra)
            counted = torch.ones(stream.shape[:2], dtype=torch.bool, device=stream.device)
            if mask in some and some[mask].shape == counted.shape:
                counted = some[mask].bool()
            batches.append(Batch(stream, calls, counted, start, some | extra))
    return batches


def _without_padding(inputs: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """A batch without the positions at its end that no sample counts: every run of a layer would compute them."""
    numbers = torch.arange(mask.shape[1], device=mask.device)
    length = 1 + int((mask.any(0) * numbers).max())
    return {name: values[:, :length] if values.shape[:2] == mask.shape else values for name, values in inputs.items()}


def _note_calls(
    model: Any, layers: nn.ModuleList, inputs: dict[str, Any]
) -> tuple[Tensor, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    streams: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = dict(kwargs)
        streams.append((args[0] if args else others.pop("hidden_states")).detach())
        del streams[1:]
        calls.append((args[1:], others))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        model(**inputs)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        # An input that is missing is None to some models, which then miss its attributes.
        shapes = {name: tuple(value.shape) for name, value in inputs.items() if isinstance(value, Tensor)}
        rule = f"data must hold inputs that {type(model).__name__} takes"
        raise ShdError("inputs-invalid", f"{rule}; got {shapes}: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    finite = bool(torch.isfinite(streams[0]).all())
    need(finite, "not-finite", "inputs of the first layer", "be finite", "NaN or infinity", remedy="check data")
    return streams[0], calls


@torch.no_grad()
def run_layer(
    layer: nn.Module,
    streams: Sequence[Tensor],
    batches: Sequence[Batch],
    number: int,
    watched: Sequence[nn.Module] = (),
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """A layer of either model over every batch: its output, and the input of each watched module in it.

    ``number`` is of the teacher layer whose arguments it gets.
    """

    def keep_input(place: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        # OPT's FFN gets a row for each token.
        read[place] = args[0].reshape(*stream.shape[:2], -1) if args[0].ndim == 2 else args[0]

    for stream, batch in zip(streams, batches, strict=True):
        read: list[Tensor | None] = [None] * len(watched)
        handles = [
            module.register_forward_pre_hook(partial(keep_input, place)) for place, module in enumerate(watched)
        ]
        args, kwargs = batch.calls[number]
        try:
            out = layer(stream, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        inputs = [tensor for tensor in read if tensor is not None]
        if len(inputs) < len(read):  # cross attention of a decoder that runs alone
            rule = f"every part of a {type(layer).__name__} must run on data"
            raise ShdError("inputs-invalid", f"{rule}: a decoder with cross attention needs encoder states")
        yield (out[0] if isinstance(out, tuple) else out), inputs


@torch.no_grad()
def sum_moments(
    model: nn.Module,
    family: Family,
    batches: Sequence[Batch],
    site: str,
    moment_of: Callable[[Tensor], Tensor],
    tell: Callable[..., None],
) -> tuple[Array, list[Tensor]]:
    """The moments of the stream before and after all layers and of what ``site`` reads in them, and the last stream.

    ``moment_of`` takes rows ``(n, D)`` to ``(D, D)``.
    """
    layers, streams = family.layers_of(model), [batch.stream for batch in batches]
    moment = moment_of(join_rows(streams, batches))
    for number, layer in enumerate(layers):
        tell(f"layer {number + 1}/{len(layers)} axes")
        runs = list(run_layer(layer, streams, batches, number, [find_part(layer, site)]))
        streams = [stream for stream, _ in runs]
        for tensors in ([read[0] for _, read in runs], streams):
            moment += moment_of(join_rows(tensors, batches))
    finite = bool(torch.isfinite(moment).all())
    need(finite, "not-finite", "the teacher's stream", "be finite", "NaN or infinity")
    return as_array(moment), streams


def rotary_frequencies(model: Any, family: Family) -> list[Array] | None:
    """Of each layer, radians a position of each pair of entries; None without rotary positions."""
    if family.rotary is None:
        return None
    base, count = base_of(model), len(family.layers_of(model))
    kinds = getattr(model.config, "layer_types", None) or [""] * count
    tables = {kind: family.rotary.format(kind) for kind in kinds}
    has_tables = all(has_part(base, table) for table in tables.values())
    need(has_tables, "shrink-unsupported", "teacher", "have one table of rotary frequencies", "none")
    return [as_array(find_part(base, tables[kind])) for kind in kinds]


@contextmanager
def recorded_attention(
    model: Any, watched: nn.Module | None = None, take: Callable[..., None] | None = None
) -> Iterator[None]:
    """The model with fused attention and masks as tensors.

    Maps of the watched module are made some rows at a time: ``take`` gets these, its values, which rows they are, its
    scaled queries of these rows, and its keys.
    """
    from transformers.masking_utils import AttentionMaskInterface, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        groups = query.shape[1] // key.shape[1]
        added = [term for term in (attention_mask, kwargs.get("position_bias")) if term is not None]
        mask = sum(added[1:], added[0]).to(query.dtype) if added else None
        keys, values = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        if module is not watched or take is None:
            out = scaled_dot_product_attention(query, keys, values, mask, scale=scaling)
            return out.transpose(1, 2).contiguous(), None
        outputs = []
        batch, heads, rows, width = *query.shape[:3], value.shape[3]
        size = max(1, min(_MAP_ENTRIES // key.shape[2], GRAM_ENTRIES // (heads * width)) // (batch * heads))
        for start in range(0, rows, size):
            tile = slice(start, start + size)
            asking = query[:, :, tile] * scaling
            logits = asking @ keys.mT
            probs = (logits if mask is None else logits + mask.expand(-1, -1, rows, -1)[:, :, tile]).softmax(-1)
            take(probs, value, tile, asking, key)
            outputs.append(probs @ values)
        return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None

    # The stacks of T5 have copies of the configuration.
    owned: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in owned if hasattr(config, "_attn_implementation")}
    before = [config._attn_implementation for config in configs.values()]
    ALL_ATTENTION_FUNCTIONS[_RECORDED] = attend
    AttentionMaskInterface.register(_RECORDED, eager_mask)  # others make none for a function that they do not know
    try:
        for config in configs.values():
            config._attn_implementation = _RECORDED
        yield
    finally:
        for config, implementation in zip(configs.values(), before, strict=True):
            config._attn_implementation = implementation
        ALL_ATTENTION_FUNCTIONS.pop(_RECORDED)
