"""Is a student with shorter attention and FFN matrices as fast as a model patched by hand, and how fast is that?

Five families in their published sizes (random weights: time does not depend on them): the teacher, the student of
``shrink`` with half of its heads at their old length and fewer neurons, and a stock model whose attention and FFN
were replaced by hand with modules of the same sizes. All three are exported with fused attention and timed by turns,
one thread. Writes ``inner_width.json``: ``python -m benchmarks.shrink.inner_width``
"""

from __future__ import annotations

import json
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from benchmarks import result_path, save
from shd_torch.deploy import time_graphs
from shd_torch.export import export_student
from shd_torch.shrink import shrink
from shd_torch.shrink.sizes import count_parameters

RESULT = result_path(__file__)
HEADS, LENGTH, NEURONS = 6, 32, 768
SIZES: dict[str, Any] = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
TEXT: dict[str, Any] = {**SIZES, "intermediate_size": 1536, "vocab_size": 2000}
IMAGE: dict[str, Any] = {**SIZES, "image_size": 112, "patch_size": 14}
GPT2: dict[str, Any] = {"n_embd": 384, "n_layer": 6, "n_head": 12, "vocab_size": 2000}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", TEXT),
    "roberta": ("RobertaModel", TEXT),
    "vit": ("ViTModel", {**IMAGE, "intermediate_size": 1536}),
    "dinov2": ("Dinov2Model", {**IMAGE, "mlp_ratio": 4}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
}


def patch_by_hand(model: Any) -> Any:
    """The stock model with smaller modules in their places, written out for each family."""
    width, inner = 384, HEADS * LENGTH
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("BertSelfAttention", "RobertaSelfAttention"):
            module.query, module.key, module.value = (nn.Linear(width, inner) for _ in range(3))
            module.num_attention_heads, module.all_head_size = HEADS, inner
        elif kind in ("BertSelfOutput", "RobertaSelfOutput"):
            module.dense = nn.Linear(inner, width)
        elif kind in ("BertIntermediate", "RobertaIntermediate"):
            module.dense = nn.Linear(width, NEURONS)
        elif kind in ("BertOutput", "RobertaOutput"):
            module.dense = nn.Linear(NEURONS, width)
        elif kind in ("ViTAttention", "Dinov2Attention"):
            module.q_proj, module.k_proj, module.v_proj = (nn.Linear(width, inner) for _ in range(3))
            module.o_proj = nn.Linear(inner, width)
            module.num_attention_heads = HEADS
        elif kind in ("ViTMLP", "Dinov2MLP"):
            module.fc1, module.fc2 = nn.Linear(width, NEURONS), nn.Linear(NEURONS, width)
        elif kind == "GPT2Attention":
            module.c_attn, module.c_proj = type(module.c_attn)(3 * inner, width), type(module.c_proj)(width, inner)
            module.num_heads, module.split_size = HEADS, inner
        elif kind == "GPT2MLP":
            module.c_fc, module.c_proj = type(module.c_fc)(NEURONS, width), type(module.c_proj)(width, NEURONS)
    return model.eval()


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Times and ratios of one family."""
    kind, options = MODELS[name]
    torch.manual_seed(0)
    make = getattr(transformers, kind)
    teacher = make(make.config_class(**options)).eval()
    if name in ("vit", "dinov2"):
        data = {"pixel_values": torch.randn(4, 3, 112, 112)}
    else:
        ids = torch.randint(5, 2000, (4, 24))
        data = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    student = shrink(teacher, data, heads=HEADS, head_dim=LENGTH, neurons=NEURONS, align=False).student
    by_hand = patch_by_hand(make(make.config_class(**options)))
    if count_parameters(student) != count_parameters(by_hand):
        raise SystemExit(f"{name}: {count_parameters(student)} parameters, by hand {count_parameters(by_hand)}")
    graphs, fused = {}, {}
    for row, model in (("teacher", teacher), ("by hand", by_hand), ("shrink", student)):
        example = {key: tensor[:2] for key, tensor in data.items()}
        report = export_student(model, example, folder / f"{name}-{row[:2]}.onnx")
        graphs[row], fused[row] = report.path, report.num_fused
    times = {
        f"batch {batch}": time_graphs(graphs, reference=reference, batch=[batch], rounds=15)
        for batch, reference in ((1, "by hand"), (8, "by hand"))
    }
    teachers = {f"batch {batch}": time_graphs(graphs, reference="teacher", batch=[batch]) for batch in (1, 8)}
    return {
        "fused": fused,
        "shrink over by hand": {key: asdict(rows[2].times_faster) for key, rows in times.items()},
        "times faster than the teacher": {key: asdict(rows[2].times_faster) for key, rows in teachers.items()},
    }


def main() -> None:
    """All families, one after another."""
    result: dict[str, Any] = {"machine": f"{platform.machine()}, one thread", "heads": HEADS, "head_dim": LENGTH}
    result |= {"neurons": NEURONS, "families": {}}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            result["families"][name] = measure(name, Path(folder))
        print(name, json.dumps(result["families"][name]))
    save(result, RESULT)


if __name__ == "__main__":
    main()
