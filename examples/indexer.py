"""Sparse attention: each layer's scorer learns, from the cache alone, which 8 keys the layer may read.

    python make_data.py                     # the teacher, train.jsonl and test.jsonl
    shd-torch export teacher --out teacher.onnx
    shd precompute teacher.onnx --inputs train.jsonl --tokenizer teacher --student-heads 1 --form factored --hidden 0,1,2,3 --out indexer_cache
    python indexer.py

The cache holds queries, keys and inputs of all layers, so training needs no model: first on all keys (warm-up), then
on the keys that the scorer selects. The model is loaded for the losses on held-out texts. It prints about

    nats per token: all keys 0.55, the untrained scorers' 8 keys 1.1, after the warm-up 0.58, after training 0.58
"""  # noqa: E501  # commands are for copying

from __future__ import annotations

import argparse
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

from shd_torch import SupervisedDataset, indexer_kl, read_texts
from shd_torch.indexer import indexer_scores, indexer_select

HEADS, WIDTH = 4, 16


class Scorer(nn.Module):
    """Four heads with ReLU over one key, from a layer's input, with rotary positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.weights = nn.RMSNorm(width), nn.Linear(width, HEADS)
        self.project = nn.Linear(width, (HEADS + 1) * WIDTH, bias=False)

    def forward(self, states: Tensor) -> dict[str, Any]:
        """The scorer's arguments of ``indexer_kl``."""
        states = self.norm(states)
        even, odd = self.project(states).unflatten(-1, (HEADS + 1, WIDTH // 2, 2)).transpose(1, 2).unbind(-1)
        angles = torch.arange(states.shape[1])[:, None] / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        turned = torch.cat([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], -1)
        weights = self.weights(states).transpose(1, 2)
        return {"queries": turned[:, 1:], "keys": turned[:, :1], "weights": weights, "scale": WIDTH**-0.5}


def main() -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each phase")
    parser.add_argument("--top-k", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained("teacher")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # many decoders have none
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    data = SupervisedDataset(read_texts("train.jsonl", tokenizer), "indexer_cache")
    batches = DataLoader(data, batch_size=8, shuffle=True, collate_fn=data.collate_with(collate))
    test = DataLoader(read_texts("test.jsonl", tokenizer), batch_size=8, collate_fn=collate)
    model = AutoModelForCausalLM.from_pretrained("teacher").eval()
    scorers = nn.ModuleList(Scorer(model.config.hidden_size) for _ in model.model.layers)

    losses = [loss_on(model, test), loss_on(model, test, scorers, options.top_k)]
    for top_k, rate in ((None, 1e-2), (options.top_k, 2e-3)):
        optimizer = torch.optim.Adam(scorers.parameters(), rate)
        for _, taught in islice(cycle(batches), options.steps):
            teachers, states = taught.supervise(), taught.hidden_states()
            form = {"top_k": top_k, "reduction": "rows", "loss_mask": taught.query_mask()}
            terms = [indexer_kl(**scorer(states[n]), teacher=teachers[n], **form) for n, scorer in enumerate(scorers)]
            optimizer.zero_grad()
            torch.stack(terms).sum().backward()
            optimizer.step()
        losses.append(loss_on(model, test, scorers, options.top_k))
    dense, drawn, warm, trained = (f"{loss:.3f}" for loss in losses)
    print(f"nats per token: all keys {dense}, the untrained scorers' {options.top_k} keys {drawn}, ", end="")
    print(f"after the warm-up {warm}, after training {trained}")


@torch.no_grad()
def loss_on(model: Any, loader: Any, scorers: Any = (), top_k: int = 1) -> float:
    """Mean loss of the batches; layers read the keys that their scorers select, or all."""

    def select(layer: Any, args: Any, kwargs: Any) -> Any:
        scores = indexer_scores(**scorers[layer.self_attn.layer_idx](args[0]))
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return args, {**kwargs, "attention_mask": indexer_select(scores, top_k, causal)}

    layers = model.model.layers[: len(scorers)]
    hooks = [layer.register_forward_pre_hook(select, with_kwargs=True) for layer in layers]
    losses = [model(**batch).loss.item() for batch in loader]
    for hook in hooks:
        hook.remove()
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
