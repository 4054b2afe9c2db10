"""Running a model layer by layer over the calibration set, and what its attention says on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from shd_ref.errors import ShdError
from shd_ref.shrink.align import HELD_OUT
from shd_ref.shrink.merges import HeadWeights
from shd_torch.maps.gram import gram_tensor
from shd_torch.shrink.families import Array, Family, as_array, base_of, find_part, has_part
from shd_torch.shrink.heads import AttentionStatistics

_RECORDED = "shd_recorded"
_GRAM_ENTRIES = 2**24  # of the products of one call: 128 MiB
_MAP_ENTRIES = 2**23  # of the maps of some rows


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch of the calibration set at the first layer."""

    stream: Tensor  # what the first layer reads (B, L, D)
    # for each layer of the teacher the arguments that follow the stream, by position and by name
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    counted: Tensor  # boolean (B, L), True = the row counts
    first: int  # the number of its first sample in the calibration set
    inputs: dict[str, Any]  # of the model

    @property
    def held_rows(self) -> Tensor:
        """Which of the rows that count belong to held-out samples: boolean ``(n,)``."""
        samples = self.first + torch.arange(len(self.counted), device=self.counted.device)
        return (samples % HELD_OUT == HELD_OUT - 1)[:, None].expand_as(self.counted)[self.counted]


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
    has_cache = family.stack != "encoder" and getattr(model.config, "use_cache", None) is not None
    batches = []
    with _attention(model):
        for start in range(0, len(next(iter(inputs.values()))), batch_size):
            some = {name: values[start : start + batch_size].to(device) for name, values in inputs.items()}
            if mask in some and some[mask].ndim == 2 and not model.config.is_encoder_decoder:
                some = _without_padding(some, some[mask])
            batches.append(_start_batch(runner, layers, some, mask, start, has_cache=has_cache))
    return batches


def _without_padding(inputs: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """A batch without the positions at its end that no sample counts: every run of a layer would compute them."""
    numbers = torch.arange(mask.shape[1], device=mask.device)
    length = 1 + int((mask.any(0) * numbers).max())
    return {name: values[:, :length] if values.shape[:2] == mask.shape else values for name, values in inputs.items()}


def read_data(data: Any) -> dict[str, Tensor]:
    """Inputs by name, as tensors with equally many samples."""
    if not isinstance(data, Mapping):
        message = f"data must be a mapping from the model's inputs to arrays; got a {type(data).__name__}"
        raise ShdError("argument-dtype", message)
    try:
        inputs = {name: torch.as_tensor(array) for name, array in data.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShdError("argument-dtype", f"data must hold arrays of numbers: {error}") from error
    sizes = {name: len(array) if array.ndim else 0 for name, array in inputs.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise ShdError("argument-shape", f"data must hold equally many samples in every input; got {sizes}")
    return inputs


def _start_batch(
    model: Any, layers: nn.ModuleList, inputs: dict[str, Tensor], mask_name: str, first: int, *, has_cache: bool
) -> Batch:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    streams: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = dict(kwargs)
        streams.append((args[0] if args else others.pop("hidden_states")).detach())
        del streams[1:]
        calls.append((args[1:], others))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    # A cache of keys would be filled by every later run of a layer.
    extra = {"use_cache": False} if has_cache else {}
    try:
        model(**inputs, **extra)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
        # An input that is missing is None to some models, which then miss its attributes.
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        rule = f"data must hold inputs that {type(model).__name__} takes"
        raise ShdError("inputs-invalid", f"{rule}; got {shapes}: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not torch.isfinite(streams[0]).all():
        raise ShdError("not-finite", "inputs of the first layer must be finite; got NaN or infinity: check data")
    counted = torch.ones(streams[0].shape[:2], dtype=torch.bool, device=streams[0].device)
    mask = inputs.get(mask_name)
    if mask is not None and mask.shape == counted.shape:
        counted = mask.bool()
    return Batch(streams[0], calls, counted, first, inputs | extra)


@torch.no_grad()
def run_layer(
    layer: nn.Module,
    streams: Sequence[Tensor],
    batches: Sequence[Batch],
    number: int,
    watched: Sequence[nn.Module] = (),
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """A layer of either model over every batch: what it returns, and what each watched module in it read.

    ``number`` is of the teacher layer whose arguments it gets.
    """

    def keep_input(at: int, _: nn.Module, args: tuple[Any, ...]) -> None:
        # OPT's FFN gets a row for each token.
        read[at] = args[0].reshape(*stream.shape[:2], -1) if args[0].ndim == 2 else args[0]

    for stream, batch in zip(streams, batches, strict=True):
        read: list[Tensor | None] = [None] * len(watched)
        handles = [module.register_forward_pre_hook(partial(keep_input, at)) for at, module in enumerate(watched)]
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


def join_rows(tensors: Sequence[Tensor], batches: Sequence[Batch]) -> Tensor:
    """Rows that count ``(n, D)`` of tensors ``(B, L, D)``, or all rows of ``(B, D)``."""
    pairs = zip(tensors, batches, strict=True)
    return torch.cat([tensor[batch.counted] if tensor.ndim == 3 else tensor for tensor, batch in pairs])


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
    if not torch.isfinite(moment).all():
        raise ShdError("not-finite", "the teacher's stream must be finite; got NaN or infinity")
    return as_array(moment), streams


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """What one teacher layer did, batch by batch: all that the making of a student layer needs of its streams."""

    neuron_squares: Array  # mean over counted rows of the squares of what the FFN's last matrix reads (F,)
    inputs: tuple[Tensor, ...]  # what queries, keys and values read
    middles: tuple[Tensor, ...]  # the stream after the attention
    ffn_inputs: tuple[Tensor, ...]  # what the FFN reads
    ends: tuple[Tensor, ...]  # the stream after the FFN, before a norm that lies on it
    outputs: tuple[Tensor, ...]  # what the layer returns


@torch.no_grad()
def study_layer(
    model: nn.Module,
    family: Family,
    number: int,
    streams: Sequence[Tensor],
    batches: Sequence[Batch],
    weights: HeadWeights,
    *,
    with_maps: bool,
    statistics: AttentionStatistics | None = None,
) -> tuple[AttentionStatistics, LayerTrace]:
    """Gram tensor and input moments of one teacher layer, and its streams.

    Without maps the gram tensor and the lengths of outputs are zeros: no heads merge. ``statistics`` of an earlier
    study are not gathered again.
    """
    layer = family.layers_of(model)[number]
    names = [family.projections[0], family.middle, family.ffn[0][0], family.ffn[1]]
    names += [] if family.end is None else [family.end]
    names += [family.maps] if family.maps is not None and with_maps else []
    sums = None if statistics is not None else _AttentionSums(weights, streams[0].device, with_maps=with_maps)
    squares, rows = torch.zeros((), dtype=torch.float64, device=streams[0].device), 0
    streams_of_batches = []
    masks = iter([batch.counted for batch in batches])  # the attention runs once for each batch

    def take(probs: Tensor, values: Tensor, rows: slice) -> None:
        if sums is not None:
            sums.add_maps(probs, values, next(masks) if rows.start == 0 else sums.counted, rows)

    watched_attention = find_part(layer, family.attention) if sums is not None and with_maps else None
    with _attention(model, watched_attention, take):
        watched = [find_part(layer, name) for name in names]
        runs = run_layer(layer, streams, batches, number, watched)
        for (out, read), stream, batch in zip(runs, streams, batches, strict=True):
            if sums is not None:
                if family.maps is not None and with_maps:
                    take(read.pop(), _project_values(read[0], weights), slice(0, None))
                sums.add(read[0], batch.counted)
            squares = squares + (read[3].double() * batch.counted[..., None]).square().sum((0, 1))
            rows += int(batch.counted.sum())
            middle = family.middle_of(read[1], stream)
            streams_of_batches.append((read[0], middle, read[2], read[4] if len(read) > 4 else out, out))
    if not rows:
        raise ShdError("argument-value", "data must hold a row that counts; got an attention_mask of zeros")
    if not torch.isfinite(squares).all() or (sums is not None and not torch.isfinite(sums.gram).all()):
        raise ShdError("not-finite", f"the teacher must give finite numbers; got NaN or infinity in layer {number}")
    if sums is not None:
        statistics = sums.read(max(stream.shape[1] for stream in streams), rows)
    assert statistics is not None
    return statistics, LayerTrace(as_array(squares / rows), *zip(*streams_of_batches, strict=True))


def _project_values(inputs: Tensor, weights: HeadWeights) -> Tensor:
    """Every head's values ``(B, H_kv, L, d_v)``."""
    bias = 0.0 if weights.value_bias is None else torch.from_numpy(weights.value_bias)[:, None].to(inputs.device)
    return inputs.double()[:, None] @ torch.from_numpy(weights.value).to(inputs.device) + bias


class _AttentionSums:
    """What ``AttentionStatistics`` are made of, batch by batch."""

    def __init__(self, weights: HeadWeights, device: torch.device, *, with_maps: bool) -> None:
        width, heads = weights.query.shape[1], weights.num_heads
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.gram = zeros((heads,) * 4)
        self._augmented, self._centred = zeros(width + 1, width + 1), zeros(width, width)
        self._sizes, self._lengths = zeros(heads), zeros(heads)
        self._query, self._projection = (
            torch.from_numpy(array).to(device) for array in (weights.query, weights.output)
        )
        shift = weights.query_bias
        self._bias = 0.0 if shift is None else torch.from_numpy(shift)[:, None].to(device)
        self._head_dim, self._with_maps = weights.head_dim, with_maps

    def add_maps(self, probs: Tensor, values: Tensor, counted: Tensor, rows: slice) -> None:
        """Some rows of a batch's maps, with the values; ``counted`` are all rows that count."""
        self.counted, there = counted, counted[:, rows]
        _add_gram(self.gram, probs, values, self._projection.flatten(0, 1), there)
        outputs = probs.to(values.dtype) @ values.repeat_interleave(probs.shape[1] // values.shape[1], 1)
        self._lengths += (outputs.double().norm(dim=-1) * there[:, None]).sum((0, 2))

    def add(self, inputs: Tensor, counted: Tensor) -> None:
        """What the projections read ``(B, L, D)``, and the rows that count."""
        there = counted[..., None]
        x = inputs.double() * there
        mean = x.sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp_min(1)
        away = ((x - mean) * there).flatten(0, 1)
        ones = torch.cat([x, there.double()], dim=2).flatten(0, 1)
        self._augmented += ones.mT @ ones
        self._centred += away.mT @ away
        self._sizes += ((x.flatten(0, 1) @ self._query + self._bias) * there.flatten(0, 1)).square().sum((1, 2))

    def read(self, length: int, rows: int) -> AttentionStatistics:
        """Over so many rows that count, of samples of at most this length."""
        query_size = (self._sizes / rows / self._head_dim).sqrt()
        means = (self._augmented / rows, self._centred / rows, query_size, self._lengths / rows)
        return AttentionStatistics(length, self._with_maps, *map(as_array, (self.gram, *means)))


def _add_gram(gram: Tensor, probs: Tensor, values: Tensor, projection: Tensor, counted: Tensor) -> None:
    batch, heads, rows, _ = probs.shape
    size = max(1, _GRAM_ENTRIES // (heads * heads * rows * values.shape[3]))
    for start in range(0, batch, size):
        some = slice(start, start + size)
        gram += gram_tensor(probs[some], values[some], projection, query_mask=counted[some], check=False).sum(0)


def rotary_frequencies(model: Any, family: Family) -> list[Array] | None:
    """Of each layer, radians a position of each pair of entries; None without rotary positions."""
    if family.rotary is None:
        return None
    base, count = base_of(model), len(family.layers_of(model))
    kinds = getattr(model.config, "layer_types", None) or [""] * count
    tables = {kind: family.rotary.format(kind) for kind in kinds}
    if not all(has_part(base, table) for table in tables.values()):
        raise ShdError("shrink-unsupported", "teacher must have one table of rotary frequencies; got none")
    return [as_array(find_part(base, tables[kind])) for kind in kinds]


@contextmanager
def _attention(
    model: Any, watched: nn.Module | None = None, take: Callable[[Tensor, Tensor, slice], None] | None = None
) -> Iterator[None]:
    """The model with fused attention and masks as tensors.

    Maps of the watched module are made some rows at a time: ``take`` gets these, its values, and which rows they are.
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
        size = max(1, min(_MAP_ENTRIES // key.shape[2], _GRAM_ENTRIES // (heads * width)) // (batch * heads))
        for start in range(0, rows, size):
            tile = slice(start, start + size)
            logits = query[:, :, tile] @ keys.mT * scaling
            probs = (logits if mask is None else logits + mask.expand(-1, -1, rows, -1)[:, :, tile]).softmax(-1)
            take(probs, value, tile)
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
