"""Decoders exported as optimum's text-generation-with-past does; importing this needs torch and transformers."""

import warnings
from pathlib import Path
from typing import Any, Final

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
)

VOCABULARY, LONGEST = 40, 32
_BATCH, _LENGTH, _PAST = 2, 5, 3  # of the example that is traced
_TOKENS: Final = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# Optimum gives OPT no position_ids: the model counts them from the mask.
DECODERS: Final = ("gpt2", "llama", "opt", "gpt_neox")


def make_decoder(name: str, num_heads: int = 4, num_layers: int = 2) -> Any:
    """A tiny random decoder with eager attention and maps that are far from uniform."""
    sizes = {"hidden_size": 16, "num_hidden_layers": num_layers, "num_attention_heads": num_heads}
    configs: dict[str, PretrainedConfig] = {
        "gpt2": GPT2Config(n_embd=16, n_layer=num_layers, n_head=num_heads, n_positions=LONGEST, **_TOKENS),
        "llama": LlamaConfig(
            **sizes,
            num_key_value_heads=num_heads // 2,
            intermediate_size=24,
            max_position_embeddings=LONGEST,
            **_TOKENS,
        ),
        "opt": OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=16, max_position_embeddings=LONGEST, **_TOKENS),
        "gpt_neox": GPTNeoXConfig(**sizes, intermediate_size=24, max_position_embeddings=LONGEST, **_TOKENS),
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs[name], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


class _WithPast(torch.nn.Module):
    """Flat inputs and outputs, as a graph has them: ids, mask, positions, past keys and values by layer."""

    def __init__(self, model: Any, positions: bool) -> None:
        super().__init__()
        self.model = model
        self.positions = positions

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *rest: torch.Tensor) -> Any:
        past = rest[self.positions :]
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=DynamicCache(list(zip(past[::2], past[1::2], strict=True))),
            use_cache=True,
            **({"position_ids": rest[0]} if self.positions else {}),
        )
        present = [tensor for layer in output.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return (output.logits, *present)


def export_with_past(
    model: Any, path: Path, *, mask_axis: str = "past_sequence_length + sequence_length", positions: bool = True
) -> Path:
    """Write the graph with the names and axes that optimum gives, by the exporter that optimum uses."""
    config = model.config
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    width = config.hidden_size // heads
    heads = getattr(config, "num_key_value_heads", None) or heads
    ids = torch.ones(_BATCH, _LENGTH, dtype=torch.int64)
    mask = torch.ones(_BATCH, _PAST + _LENGTH, dtype=torch.int64)
    numbers = (torch.arange(_PAST, _PAST + _LENGTH).expand(_BATCH, _LENGTH),) if positions else ()
    past = tuple(torch.randn(_BATCH, heads, _PAST, width) for _ in range(2 * layers))
    kinds = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    tokens = {0: "batch_size", 1: "sequence_length"}
    inputs = {"input_ids": tokens, "attention_mask": {0: "batch_size", 1: mask_axis}}
    inputs |= {"position_ids": tokens} if positions else {}
    inputs |= {f"past_key_values.{kind}": {0: "batch_size", 2: "past_sequence_length"} for kind in kinds}
    outputs = {"logits": tokens} | {f"present.{kind}": {0: "batch_size", 2: mask_axis} for kind in kinds}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the tracer warns of every branch, and of its age
        torch.onnx.export(
            _WithPast(model, positions).eval(),
            (ids, mask, *numbers, *past),
            str(path),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=inputs | outputs,
            opset_version=18,
            dynamo=False,
        )
    return path
