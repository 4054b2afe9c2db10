"""Where the parts of a layer are, family by family: the only place that knows Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shd_ref.errors import ShdError, need
from shd_ref.shrink.heads import HeadWeights, join_heads, split_heads

Array: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = tuple[Array, Array | None]
"""A projection as it is read: its matrix ``(in, out)`` and its bias ``(out,)``, float64."""


class SizeNames(NamedTuple):
    """Fields of a configuration; others have one name in all families, by transformers' ``attribute_map``."""

    heads: str = "num_attention_heads"
    layers: str = "num_hidden_layers"
    neurons: str = "intermediate_size"  # "mlp_ratio" multiplies the width; a value of None is four times it
    widths: tuple[str, ...] = ("hidden_size",)  # all that hold the width of the stream


_USUAL_NAMES = SizeNames()


@dataclass(frozen=True)
class Family:
    """Names of the parts of a model, below its base model and below a layer."""

    layers: str  # the list of layers
    # queries, keys, values and output; one name for a fused matrix of queries, keys and values
    projections: tuple[str, ...]
    middle: str  # the module whose input is the stream after the attention; see is_parallel
    end: str | None  # the module whose input is the stream after the FFN; None: the layer's output
    ffn: tuple[tuple[str, ...], str]  # readers of the stream (gate and values may be one matrix), and the last matrix
    norms: tuple[str, str] | None  # of the attention and of the FFN; none where a norm lies on the stream
    final_norm: str | None  # after the last layer; None where there is none
    activation: str | None = None  # of the FFN; None where that is gated
    norm: str = "layer"  # "rms", "rms-plus-one" (the scale is stored less one) or "layer"
    # parameters that write to the stream, each with the axis of its channels
    embeddings: tuple[tuple[str, int], ...] = ()
    rotary: str | None = None  # frequencies by which positions rotate queries and keys, or by kind of layer ("{}")
    grouped: bool = False  # whether the configuration names key and value heads
    is_scaled: bool = True  # whether logits are scaled by a head's length
    free_head_dim: bool = True  # whether the configuration may name head_dim
    query_norm: str | None = None  # a norm of the queries of a head, or None
    layer_scales: tuple[str, str] | None = None  # scales after the two blocks
    embedding_scale: bool = False  # whether embeddings are multiplied by sqrt(hidden)
    # whether a fused matrix has queries, keys and values head by head, not all queries first
    by_head: bool = False
    # whether both blocks read the layer's input: what the middle reads is then what the attention adds to it
    is_parallel: bool = False
    sizes: SizeNames = _USUAL_NAMES
    stack: str | None = None  # "encoder" or "decoder" of an architecture that has both
    is_alone: bool = False  # whether a model has this stack only
    # "heads" or "neurons" whose number in the configuration holds for other parts of the model too
    shared: tuple[str, ...] = ()
    first_only: tuple[str, ...] = ()  # modules of the first layer that serve all layers
    maps: str | None = None  # the module that reads the maps of an attention that transformers cannot exchange
    biases: str | None = None  # the table (buckets, heads) of position biases that all layers add
    is_aligned: bool = True  # False where a norm after a block rules out the refit of its last matrix
    # options of shrink that the architecture rules out (as in check_refused), each with the reason
    refused: tuple[tuple[str, str], ...] = ()
    # an option of the configuration, its value, and what differs in the models that have it
    variants: tuple[tuple[str, Any, Mapping[str, Any]], ...] = ()

    def fitted(self, config: Any) -> Family:
        """The family with the variants that a configuration describes."""
        changes = [change for option, value, change in self.variants if getattr(config, option) == value]
        return replace(self, **{name: entry for change in changes for name, entry in change.items()})

    @property
    def attention(self) -> str:
        return self.projections[0].rpartition(".")[0]

    @property
    def is_gated(self) -> bool:
        """Whether the FFN multiplies two functions of its input."""
        return self.activation is None

    def layers_of(self, model: nn.Module) -> nn.ModuleList:
        layers = find_part(base_of(model), self.layers)
        if not isinstance(layers, nn.ModuleList):
            raise ShdError("shrink-unsupported", f"{type(model).__name__}.{self.layers} must be a list of layers")
        return layers

    def read_attention(self, layer: nn.Module, num_heads: int, num_kv_heads: int) -> HeadWeights:
        linears = [read_linear(find_part(layer, name)) for name in self.projections[:-1]]
        counts = (num_heads, num_kv_heads, num_kv_heads)
        if len(linears) == 1:
            columns = np.arange(linears[0][0].shape[1])
            if self.by_head:
                columns = columns.reshape(num_heads, 3, -1).swapaxes(0, 1).ravel()
            ends = np.cumsum(counts)[:-1] * (len(columns) // sum(counts))
            linears = [take_columns(linears[0], part) for part in np.split(columns, ends)]
        query, key, value = (split_heads(matrix, count) for (matrix, _), count in zip(linears, counts, strict=True))
        query_bias, key_bias, value_bias = (
            None if bias is None else bias.reshape(count, -1)
            for (_, bias), count in zip(linears, counts, strict=True)
        )
        output, output_bias = self._read_scaled(layer, self.projections[-1], 0)
        output = output.reshape(num_heads, -1, output.shape[1])
        return HeadWeights(query, key, value, output, query_bias, key_bias, value_bias, output_bias)

    def write_attention(self, layer: nn.Module, weights: HeadWeights) -> None:
        """Put an attention into a layer of the right sizes; a scale after the block becomes 1."""
        for name, rows in zip(self.projections[:-1], self.attention_inputs(weights), strict=True):
            write_linear(find_part(layer, name), *rows)
        output = weights.output.reshape(-1, weights.output.shape[2]), weights.output_bias
        self._write_unscaled(layer, self.projections[-1], 0, output)

    def attention_inputs(self, weights: HeadWeights) -> list[Rows]:
        """The matrices of queries, keys and values as a layer stores them."""
        stacks = ((getattr(weights, name), getattr(weights, f"{name}_bias")) for name in ("query", "key", "value"))
        rows = [(join_heads(heads), None if bias is None else bias.ravel()) for heads, bias in stacks]
        if len(self.projections) > 2:
            return rows
        fused = side_by_side(rows)
        if self.by_head:
            columns = np.arange(fused[0].shape[1]).reshape(3, weights.num_heads, -1).swapaxes(0, 1).ravel()
            fused = take_columns(fused, columns)
        return [fused]

    def read_readers(self, layer: nn.Module) -> list[Rows]:
        """The FFN's matrices that read the stream, each ``(D, F)``, and their biases."""
        rows = [read_linear(find_part(layer, name)) for name in self.ffn[0]]
        if not (self.is_gated and len(rows) == 1):
            return rows
        return [take_columns(rows[0], half) for half in np.split(np.arange(rows[0][0].shape[1]), 2)]

    def write_readers(self, layer: nn.Module, readers: Sequence[Rows]) -> None:
        """Put the matrices of ``read_readers``, or narrower ones, into a layer."""
        rows = readers if len(readers) == len(self.ffn[0]) else [side_by_side(readers)]
        for name, reader in zip(self.ffn[0], rows, strict=True):
            write_linear(find_part(layer, name), *reader)

    def middle_of(self, read: Tensor, stream: Tensor) -> Tensor:
        """The stream after the attention, from the middle's input and the stream before the layer."""
        return stream + read if self.is_parallel else read

    def read_last(self, layer: nn.Module) -> Rows:
        """The FFN's last matrix, as rows ``(F, D)``, and its bias; a scale after the block is folded in."""
        return self._read_scaled(layer, self.ffn[1], 1)

    def write_last(self, layer: nn.Module, matrix: Array, bias: Array | None) -> None:
        self._write_unscaled(layer, self.ffn[1], 1, (matrix, bias))

    def _read_scaled(self, layer: nn.Module, name: str, block: int) -> Rows:
        """The matrix that writes to the stream, with the scale after its block."""
        matrix, bias = read_linear(find_part(layer, name))
        scale = 1.0 if self.layer_scales is None else as_array(find_part(layer, self.layer_scales[block]))
        return matrix * scale, None if bias is None else bias * scale

    @torch.no_grad()
    def _write_unscaled(self, layer: nn.Module, name: str, block: int, rows: Rows) -> None:
        write_linear(find_part(layer, name), *rows)
        if self.layer_scales is not None:
            find_part(layer, self.layer_scales[block]).fill_(1.0)


_LLAMA = Family(
    layers="layers",
    projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    middle="post_attention_layernorm",
    end=None,
    ffn=(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    norms=("input_layernorm", "post_attention_layernorm"),
    final_norm="norm",
    norm="rms",
    embeddings=(("embed_tokens.weight", 1),),
    rotary="rotary_emb.inv_freq",
    grouped=True,
)
_VIT = Family(
    layers="layers",
    projections=("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj"),
    middle="layernorm_after",
    end=None,
    ffn=(("mlp.fc1",), "mlp.fc2"),
    activation="mlp.activation_fn",
    norms=("layernorm_before", "layernorm_after"),
    final_norm="layernorm",
    embeddings=(
        ("embeddings.mask_token", -1),
        *((f"embeddings.{name}", 2) for name in ("cls_token", "distillation_token", "position_embeddings")),
        *((f"embeddings.patch_embeddings.projection.{name}", 0) for name in ("weight", "bias")),
    ),
)
_BERT = Family(
    layers="encoder.layer",
    projections=("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    middle="attention.output.LayerNorm",
    end="output.LayerNorm",
    ffn=(("intermediate.dense",), "output.dense"),
    activation="intermediate.intermediate_act_fn",
    norms=None,
    final_norm=None,
    free_head_dim=False,
)
_BART = Family(
    layers="encoder.layers",
    projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
    middle="self_attn_layer_norm",
    end="final_layer_norm",
    ffn=(("fc1",), "fc2"),
    activation="activation_fn",
    norms=None,
    final_norm=None,
    free_head_dim=False,
)
_PRE_NORM: dict[str, Any] = {
    "middle": "final_layer_norm",
    "end": None,
    "norms": ("self_attn_layer_norm", "final_layer_norm"),
}
_BOTH_STACKS = "both stacks have the same channels"


def _bart(stack: str, **changes: Any) -> Family:
    return replace(
        _BART,
        layers=f"{stack}.layers",
        sizes=SizeNames(f"{stack}_attention_heads", f"{stack}_layers", f"{stack}_ffn_dim"),
        stack=stack,
        shared=("heads",) if stack == "decoder" else (),  # cross attention has them
        refused=(("hidden", _BOTH_STACKS),),
        **changes,
    )


def _t5(stack: str, block: str, layers: str) -> Family:
    """A stack whose FFN is that block of a layer, and whose layers this field of the configuration counts."""
    dense = f"{block}.DenseReluDense"
    return Family(
        layers=f"{stack}.block",
        projections=tuple(f"layer.0.SelfAttention.{name}" for name in "qkvo"),
        middle="layer.1.layer_norm",
        end=None,
        ffn=((f"{dense}.wi",), f"{dense}.wo"),
        activation=f"{dense}.act",
        norms=("layer.0.layer_norm", f"{block}.layer_norm"),
        final_norm="encoder.final_layer_norm",
        norm="rms",
        is_scaled=False,
        sizes=SizeNames("num_heads", layers, "d_ff"),
        stack=stack,
        shared=("neurons",),
        first_only=("layer.0.SelfAttention.relative_attention_bias",),
        refused=(
            ("heads", "all layers of both stacks have the same number, and position biases for each"),
            ("head_dim", "its logits are not scaled by a head's length"),
            ("hidden", _BOTH_STACKS),
            ("drop_attention", "the attention of each layer passes the position biases on to the next"),
        ),
        variants=(
            ("is_gated_act", True, {"ffn": ((f"{dense}.wi_0", f"{dense}.wi_1"), f"{dense}.wo"), "activation": None}),
        ),
    )


FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": replace(_LLAMA, query_norm="self_attn.q_norm"),
    "gemma": replace(_LLAMA, norm="rms-plus-one", embedding_scale=True),
    "phi3": replace(
        _LLAMA,
        projections=("self_attn.qkv_proj", "self_attn.o_proj"),
        ffn=(("mlp.gate_up_proj",), "mlp.down_proj"),
        refused=(("heads by layer", "its attention reads their number from the configuration"),),
    ),
    "olmo2": replace(
        _LLAMA,
        middle="mlp.gate_proj",
        norms=None,
        final_norm=None,
        is_aligned=False,
        refused=(
            ("heads", "its norms of queries and of keys run over all heads together"),
            ("head_dim", "its norms of queries and of keys run over all heads together"),
            ("hidden", "its norms after the blocks do not fold"),
        ),
    ),
    "modernbert": Family(
        layers="layers",
        projections=("attn.Wqkv", "attn.Wo"),
        middle="mlp_norm",
        end=None,
        ffn=(("mlp.Wi",), "mlp.Wo"),
        norms=("attn_norm", "mlp_norm"),
        final_norm="final_norm",
        rotary="rotary_emb.{}_inv_freq",
        free_head_dim=False,
        refused=(
            ("layers", "it alone has no norm before its attention"),
            ("hidden", "its embeddings end in a norm that lies on the stream"),
        ),
    ),
    "opt": replace(
        _BART,
        layers="decoder.layers",
        variants=(("do_layer_norm_before", True, _PRE_NORM | {"final_norm": "decoder.final_layer_norm"}),),
        embeddings=(("decoder.embed_tokens.weight", 1), ("decoder.embed_positions.weight", 1)),
        sizes=SizeNames(neurons="ffn_dim", widths=("hidden_size", "word_embed_proj_dim")),
    ),
    "gpt_neox": Family(
        layers="layers",
        projections=("attention.query_key_value", "attention.dense"),
        middle="post_attention_layernorm",
        end=None,
        ffn=(("mlp.dense_h_to_4h",), "mlp.dense_4h_to_h"),
        activation="mlp.act",
        norms=("input_layernorm", "post_attention_layernorm"),
        final_norm="final_layer_norm",
        embeddings=(("embed_in.weight", 1),),
        rotary="rotary_emb.inv_freq",
        free_head_dim=False,
        by_head=True,
        variants=(("use_parallel_residual", True, {"is_parallel": True, "middle": "post_attention_dropout"}),),
    ),
    "gpt2": Family(
        layers="h",
        projections=("attn.c_attn", "attn.c_proj"),
        middle="ln_2",
        end=None,
        ffn=(("mlp.c_fc",), "mlp.c_proj"),
        activation="mlp.act",
        norms=("ln_1", "ln_2"),
        final_norm="ln_f",
        embeddings=(("wte.weight", 1), ("wpe.weight", 1)),
        free_head_dim=False,
        sizes=SizeNames(neurons="n_inner"),
    ),
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "electra": _BERT,
    "distilbert": replace(
        _BERT,
        layers="transformer.layer",
        projections=("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
        middle="sa_layer_norm",
        end="output_layer_norm",
        ffn=(("ffn.lin1",), "ffn.lin2"),
        activation="ffn.activation",
        sizes=SizeNames(neurons="hidden_dim"),
    ),
    "mpnet": replace(
        _BERT,
        projections=("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o"),
        middle="attention.LayerNorm",
        maps="attention.attn.dropout",
        biases="encoder.relative_attention_bias.weight",
        refused=(("heads by layer", "all layers add the same position biases, one per head"),),
    ),
    "bart": _bart("encoder"),
    "whisper": _bart("encoder", **_PRE_NORM),
    "t5": _t5("encoder", "layer.1", "num_layers"),
    "vit": _VIT,
    "deit": _VIT,
    "dinov2": replace(
        _VIT,
        layers="encoder.layer",
        middle="norm2",
        norms=("norm1", "norm2"),
        layer_scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
        sizes=SizeNames(neurons="mlp_ratio"),
    ),
}
"""By ``config.model_type``; of an architecture with two stacks, the encoder."""

DECODERS: dict[str, Family] = {
    "bart": _bart("decoder"),
    "whisper": _bart("decoder", **_PRE_NORM | {"middle": "encoder_attn_layer_norm"}),
    "t5": _t5("decoder", "layer.2", "num_decoder_layers"),
}
"""The decoders of those; their cross attention stays as it is."""


def family_of(model: nn.Module, stack: str | None = None) -> Family:
    """The family of a Hugging Face model, or the error that lists those that are known."""
    config = getattr(model, "config", None)
    name = getattr(config, "model_type", None) or type(model).__name__
    family = check_config(config, name)
    stacks = {entry.stack: entry for entry in (family, DECODERS.get(name, family))}
    present = [key for key, entry in stacks.items() if key is None or has_part(base_of(model), entry.layers)]
    chosen = present[0] if stack is None and len(present) == 1 else stack
    rule = f"be {' or '.join(map(str, present))} for a {type(model).__name__}"
    need(chosen in present, "argument-value", "stack", rule, repr(stack))
    family = stacks[chosen].fitted(config)
    if chosen is None or len(present) > 1:
        return family
    # A decoder's cross attention stays, alone too, and shares the number of heads.
    return replace(family, is_alone=True, shared=() if chosen == "encoder" else family.shared)


def custom_family(name: str, config: Any) -> Family:
    """The family of a configuration that ``custom_config`` wrote; ``name`` is that of its model type."""
    is_decoder = getattr(config, "shrunk_stack", None) == "decoder"
    return (DECODERS if is_decoder and name in DECODERS else FAMILIES)[name].fitted(config)


def check_config(config: Any, name: str | None = None) -> Family:
    """The family of a configuration, before any weight is read; ``name`` stands for a model of no family."""
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        rule = f"teacher must be of one of the families {', '.join(FAMILIES)}; got {name or kind!r}"
        reason = dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), ": its norms after the blocks do not fold")
        reason |= dict.fromkeys(("bloom", "mpt", "falcon"), ": its position slopes are fixed by the head count")
        raise ShdError("shrink-unsupported", rule + reason.get(str(kind), ""))
    usual = dict.fromkeys(("add_cross_attention", "use_swiglu_ffn", "scale_attn_by_inverse_layer_idx"), False)
    for option, value in (usual | {"scale_attn_weights": True}).items():
        if getattr(config, option, value) != value:
            rule = "teacher must be a stack of self-attention, scaled by its head's length, and its family's FFNs"
            message = f"{rule}; got {option}={getattr(config, option)} in its configuration"
            raise ShdError("shrink-unsupported", message)
    return FAMILIES[kind].fitted(config)


def base_of(model: nn.Module) -> nn.Module:
    base = getattr(model, "base_model", model)
    return base if isinstance(base, nn.Module) else model


def find_part(module: nn.Module, path: str) -> Any:
    """The module or parameter at a dotted path, or the error that says which transformers layout was expected."""
    member = _get_part(module, path)
    if member is None:
        import transformers

        layout = f"its layout in transformers {transformers.__version__} is not known"
        raise ShdError("shrink-unsupported", f"{type(module).__name__} has no {path}: {layout}")
    return member


def has_part(module: Any, path: str) -> bool:
    return _get_part(module, path) is not None


def _get_part(module: Any, path: str) -> Any:
    return reduce(lambda part, name: getattr(part, name, None), path.split("."), module)


def side_by_side(linears: Sequence[Rows]) -> Rows:
    """Several matrices that read the same rows, as one; a missing bias is zero where others have one."""
    if len(linears) == 1:
        return linears[0]
    matrix = np.concatenate([matrix for matrix, _ in linears], axis=1)
    if all(bias is None for _, bias in linears):
        return matrix, None
    return matrix, np.concatenate([np.zeros(part.shape[1]) if bias is None else bias for part, bias in linears])


def take_columns(rows: Rows, columns: NDArray[np.intp] | list[int]) -> Rows:
    matrix, bias = rows
    return matrix[:, columns], None if bias is None else bias[columns]


def as_array(tensor: Tensor) -> Array:
    """A float64 copy in the host's memory."""
    array: Array = tensor.detach().double().cpu().numpy().copy()
    return array


def read_linear(module: Any) -> Rows:
    """Rows ``(in, out)`` and bias of a Linear or of GPT-2's Conv1D, float64 copies."""
    matrix = as_array(module.weight)
    bias = None if module.bias is None else as_array(module.bias)
    return matrix.T if isinstance(module, nn.Linear) else matrix, bias


@torch.no_grad()
def write_linear(module: Any, matrix: Array, bias: Array | None) -> None:
    """Put rows ``(in, out)`` and a bias into a Linear or a Conv1D; a bias without a place must be zero."""
    module.weight.copy_(torch.from_numpy(matrix.T if isinstance(module, nn.Linear) else matrix))
    if module.bias is not None:
        module.bias.copy_(torch.zeros_like(module.bias) if bias is None else torch.from_numpy(bias))
    elif bias is not None and bias.any():
        message = f"a {type(module).__name__} of the student must hold a bias, which its configuration cannot say"
        raise ShdError("shrink-unsupported", message)
