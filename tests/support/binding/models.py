"""Tiny models built from configurations: nothing is downloaded, every architecture has its own attention code."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEXT_MODELS = ("bert", "gpt2", "llama")
HF_MODELS = (*TEXT_MODELS, "vit")
NUM_LAYERS = 2
NUM_HEADS = 4


def hf_model(name: str, attn_implementation: str = "sdpa", **changes: Any) -> Any:
    """A tiny Hugging Face model with random weights, in eval mode."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": NUM_HEADS}
    mlp = {"intermediate_size": 48}
    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(vocab_size=50, max_position_embeddings=40, **(sizes | mlp | changes))
        model = transformers.BertModel(config)
    elif name == "gpt2":
        config = transformers.GPT2Config(vocab_size=50, n_positions=40, **(sizes | changes))
        model = transformers.GPT2LMHeadModel(config)
    elif name == "llama":
        config = transformers.LlamaConfig(
            vocab_size=50, num_key_value_heads=2, max_position_embeddings=40, **(sizes | mlp | changes)
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.ViTConfig(image_size=16, patch_size=4, **(sizes | mlp | changes))
        model = transformers.ViTForImageClassification(config)
    model.set_attn_implementation(attn_implementation)
    return model.eval()


def hf_inputs(name: str, batch: int = 2, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """Inputs for a model of that name; text is right-padded in the first sample."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length - 2 :] = 0
    return {"input_ids": torch.randint(0, 50, (batch, length), generator=generator), "attention_mask": mask}


class PlainBlock(nn.Module):
    """Pre-norm attention on scaled_dot_product_attention, and an MLP."""

    def __init__(self, width: int, num_heads: int, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm(hidden)).reshape(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        hidden = hidden + self.proj(self.attend(query, key, value).transpose(1, 2).reshape(batch, length, width))
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return out


class PlainViT(nn.Module):
    """A vision transformer as people write it by hand."""

    def __init__(self, width: int = 32, num_heads: int = NUM_HEADS, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 16, width))
        self.blocks = nn.ModuleList(PlainBlock(width, num_heads) for _ in range(num_layers))
        self.head = nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.mean(1))
        return logits
