"""stories260K as a Hugging Face Llama: the real language model that is shrunk."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from support.binding.stories import load_stories


def load_llama(path: Path) -> Any:
    """The model of the llama2.c file; its interleaved rotary pairs become Llama's halves."""
    from transformers import LlamaConfig, LlamaForCausalLM

    source = load_stories(path)
    layers, width = source.layers, source.embed.weight.shape[1]
    first: Any = layers[0]
    sizes = {"vocab_size": source.embed.weight.shape[0], "hidden_size": width, "max_position_embeddings": 512}
    sizes |= {"intermediate_size": first.w1.out_features, "num_hidden_layers": len(layers)}
    sizes |= {"num_attention_heads": first.num_heads, "num_key_value_heads": first.num_kv_heads}
    config = LlamaConfig(rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, **sizes)
    model = LlamaForCausalLM(config).eval()

    def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
        return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)

    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(source.embed.weight)
        model.model.norm.weight.copy_(source.norm.weight)
        for there, here in zip(model.model.layers, layers, strict=True):
            attention, ffn, given = there.self_attn, there.mlp, here
            attention.q_proj.weight.copy_(halves(given.wq.weight, given.num_heads))
            attention.k_proj.weight.copy_(halves(given.wk.weight, given.num_kv_heads))
            attention.v_proj.weight.copy_(given.wv.weight)
            attention.o_proj.weight.copy_(given.wo.weight)
            ffn.gate_proj.weight.copy_(given.w1.weight)
            ffn.up_proj.weight.copy_(given.w3.weight)
            ffn.down_proj.weight.copy_(given.w2.weight)
            there.input_layernorm.weight.copy_(given.attn_norm.weight)
            there.post_attention_layernorm.weight.copy_(given.mlp_norm.weight)
    return model


@torch.no_grad()
def measure_loss(model: Any, tokens: torch.Tensor) -> float:
    """Cross entropy of the next token, in nats."""
    total = 0.0
    for part in tokens.split(32):
        logits = model(input_ids=part).logits[:, :-1]
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return total / tokens[:, 1:].numel()
