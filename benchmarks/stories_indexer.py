"""What does a language model lose when a trained indexer picks the keys that its attention reads?

The model is stories260K: 5 layers of 8 heads over 4 key/value heads, frozen. Each layer has a scorer of 4 heads with
ReLU and weights, trained dense (warm-up) and then on its own top-16, from the layer's input and the frozen layer's
queries and keys. Then every layer reads 16 of up to 128 keys: those of the trained scorers, the last 16, or those of
scorers as they were drawn. Losses are cross entropies in nats a token on sequences that no scorer saw; intervals are
95% over sequences, of the difference to dense attention.

Prints a table and writes ``results/stories_indexer.json``. python -m benchmarks.stories_indexer [--steps 200]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from support.binding.stories import Stories, _rotate, load_stories
from torch import Tensor, nn

from benchmarks import STORIES, result_path, save
from shd_torch import indexer_kl
from shd_torch.indexer import KeptMass, indexer_scores, indexer_select, probe_indexer
from shd_torch.supervision import Factored

RESULT = result_path(__file__)
LENGTH, TOP_K, HEADS, WIDTH, BATCH, VALIDATION = 128, 16, 4, 16, 8, 256
SCALE = WIDTH**-0.5
Select = Callable[[int, Tensor], Tensor | None]


class Scorer(nn.Module):
    """Queries, a key and weights from a layer's input, rotated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(width, HEADS * WIDTH, bias=False), nn.Linear(width, WIDTH, bias=False)
        self.weights = nn.Linear(width, HEADS)
        angles = torch.arange(LENGTH)[:, None] / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        queries = self.queries(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        parts = [_rotate(part, self.cos, self.sin) for part in (queries, self.keys(x)[:, None])]
        return {"queries": parts[0], "keys": parts[1], "weights": self.weights(x).transpose(1, 2)}


@torch.no_grad()
def run(model: Stories, tokens: Tensor, select: Select) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
    """Logits, and each layer's normalised input, queries and keys; a layer reads the keys that ``select`` picks."""
    hidden, seen = model.embed(tokens), []
    cos, sin = model.cos[:LENGTH], model.sin[:LENGTH]
    for number, layer in enumerate(model.layers):
        x = layer.attn_norm(hidden)
        query = _rotate(layer.wq(x).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2), cos, sin)
        key = _rotate(layer.wk(x).unflatten(-1, (layer.num_kv_heads, -1)).transpose(1, 2), cos, sin)
        value = layer.wv(x).unflatten(-1, (layer.num_kv_heads, -1)).transpose(1, 2)
        seen.append((x, query, key))
        share, mask = layer.num_heads // layer.num_kv_heads, select(number, x)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if mask is None else mask
        spread = [part.repeat_interleave(share, 1) for part in (key, value)]
        mixed = F.scaled_dot_product_attention(query, spread[0], spread[1], attn_mask=mask)
        hidden = hidden + layer.wo(mixed.transpose(1, 2).flatten(2))
        x = layer.mlp_norm(hidden)
        hidden = hidden + layer.w2(F.silu(layer.w1(x)) * layer.w3(x))
    return F.linear(model.norm(hidden), model.embed.weight), seen


def train(
    model: Stories, scorers: nn.ModuleList, tokens: Tensor, steps: int, top_k: int | None, rate: float
) -> float:
    """Train every layer's scorer; the mean loss of the last tenth, in nats a row and layer."""
    optimizer = torch.optim.Adam(scorers.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        batch = tokens[torch.arange(step * BATCH, (step + 1) * BATCH) % len(tokens)]
        _, seen = run(model, batch, lambda *_: None)
        terms = [
            indexer_kl(
                **scorer(x),
                teacher=Factored.teacher(q, k, is_causal=True),
                scale=SCALE,
                top_k=top_k,
                reduction="rows",
            )
            for scorer, (x, q, k) in zip(scorers, seen, strict=True)
        ]
        optimizer.zero_grad()
        torch.stack(terms).sum().backward()
        optimizer.step()
        losses.append(sum(term.item() for term in terms) / len(terms))
    return statistics.mean(losses[-max(1, steps // 10) :])


def selection(scorers: nn.ModuleList) -> Select:
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return lambda number, x: indexer_select(indexer_scores(**scorers[number](x), scale=SCALE), TOP_K, causal)


def evaluate(model: Stories, tokens: Tensor, select: Select) -> Tensor:
    """The loss of each sequence."""
    losses = []
    for batch in tokens.split(32):
        logits, _ = run(model, batch, select)
        losses.append(F.cross_entropy(logits[:, :-1].mT, batch[:, 1:], reduction="none").mean(1))
    return torch.cat(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of each phase")
    parser.add_argument("--source", type=Path, default=STORIES, help="folder of stories260K")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = load_stories(arguments.source / "stories260K.bin")
    tokens = torch.from_numpy(np.load(arguments.source / "self_sampled_1024x256_uint16.npy").astype(np.int64))
    tokens = tokens[:, :LENGTH]
    learned, valid = tokens[:-VALIDATION], tokens[-VALIDATION:]
    width = model.embed.weight.shape[1]
    drawn, scorers = (nn.ModuleList(Scorer(width) for _ in model.layers) for _ in range(2))
    report: dict[str, Any] = {"steps": arguments.steps, "top_k": TOP_K, "length": LENGTH, "sequences": VALIDATION}
    report["warm_up_loss"] = train(model, scorers, learned, arguments.steps, None, 1e-2)
    warm = evaluate(model, valid, selection(scorers))
    report["sparse_loss"] = train(model, scorers, learned, arguments.steps, TOP_K, 2e-3)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    recent = (distance >= 0) & (distance < TOP_K)
    ways: dict[str, Tensor] = {
        "dense": evaluate(model, valid, lambda *_: None),
        "warm-up": warm,
        "trained": evaluate(model, valid, selection(scorers)),
        "recency": evaluate(model, valid, lambda *_: recent),
        "random scorers": evaluate(model, valid, selection(drawn)),
    }
    for name, losses in ways.items():
        lost = losses - ways["dense"]
        half = 1.96 * float(lost.std()) / len(lost) ** 0.5
        figures = {"nats": float(losses.mean()), "lost": float(lost.mean()), "interval": half}
        report[name] = {key: round(value, 4) for key, value in figures.items()}
        print(f"{name:16} {report[name]['nats']:.4f} lost {report[name]['lost']:+.4f} +- {half:.4f}", flush=True)
    kept: dict[str, KeptMass] = {}
    _, seen = run(model, valid[:64], lambda *_: None)
    with torch.no_grad():
        for number, (scorer, (x, q, k)) in enumerate(zip(scorers, seen, strict=True)):
            teacher = Factored.teacher(q, k, is_causal=True)
            kept[f"layer {number}"] = probe_indexer(**scorer(x), teacher=teacher, top_k=TOP_K, scale=SCALE)
            spans = kept[f"layer {number}"].spans(4)
            report.setdefault("kept", {})[str(number)] = [[round(value, 4) for value in span] for span in spans]
            print(f"layer {number}: " + ", ".join(f"{span.kept:.3f} of {span.best:.3f}" for span in spans))
    save(report, RESULT)


if __name__ == "__main__":
    main()
