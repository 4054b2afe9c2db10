"""A squeezed teacher beside a forward pass in NumPy that shares nothing with the graph."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.binding.stories import Stories
from support.exported_models import trace

pytest.importorskip("networkx", reason="matched plans need networkx")

from shd_ref import plan_groups, softmax, squeeze_heads
from shd_ref.teacher import Fidelity, PrecomputeOptions, RunOptions, measure_fidelity

# The exporter and its own dependencies deprecate one another's interfaces.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::PendingDeprecationWarning"
)
SINGLE = RunOptions(num_threads=1)
Weights = dict[str, NDArray[np.float64]]


def logits_in_numpy(model: Stories, ids: NDArray[np.int64], squeeze: Any = None) -> NDArray[np.float64]:
    """The language model from its weights, with ``sum_h A~_h X'_h`` of ``squeeze`` for its attention output."""
    w = {name: tensor.detach().numpy().astype(np.float64) for name, tensor in model.state_dict().items()}
    length = ids.shape[1]
    causal = np.tril(np.ones((length, length), dtype=bool))
    x = w["embed.weight"][ids]
    for number, layer in enumerate(model.layers):
        p = f"layers.{number}"
        normed = rms_norm(x, w[f"{p}.attn_norm.weight"])
        heads, kv_heads = layer.num_heads, layer.num_kv_heads
        query, key, value = (
            split_heads(normed @ w[f"{p}.{name}.weight"].T, count)
            for name, count in (("wq", heads), ("wk", kv_heads), ("wv", kv_heads))
        )
        query, key = rotate(query, w, length), rotate(key, w, length)
        key, value = (np.repeat(array, heads // kv_heads, axis=1) for array in (key, value))
        width = query.shape[-1]
        maps = softmax(query @ key.swapaxes(-1, -2) / np.sqrt(width), causal)
        projection = w[f"{p}.wo.weight"].T.reshape(heads, width, -1)  # W_i of every head
        outputs = value @ projection
        if squeeze is not None:
            maps, outputs = squeeze(number, maps, outputs)
        x = x + (maps @ outputs).sum(axis=1)
        normed = rms_norm(x, w[f"{p}.mlp_norm.weight"])
        gate = normed @ w[f"{p}.w1.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w[f"{p}.w3.weight"].T)) @ w[f"{p}.w2.weight"].T
    logits: NDArray[np.float64] = rms_norm(x, w["norm.weight"]) @ w["embed.weight"].T
    return logits


def rms_norm(x: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    normed: NDArray[np.float64] = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight
    return normed


def split_heads(x: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def rotate(x: NDArray[np.float64], w: Weights, length: int) -> NDArray[np.float64]:
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    turned = pairs * (w["cos"] + 1j * w["sin"])[:length]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def squeezer(setting: Fidelity) -> Any:
    def squeeze(layer: int, maps: NDArray[Any], outputs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        result = squeeze_heads(maps, outputs, 2, plan=setting.plans[layer], strategy=setting.strategy)
        groups = plan_groups(result.plan, maps.shape[1])
        return result.probs, np.stack([outputs[:, list(group)].sum(axis=1) for group in groups], axis=1)

    return squeeze


@pytest.mark.slow
def test_graph_agrees_with_an_independent_forward_pass(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stories(width=24, hidden=32, num_layers=2, num_heads=6, num_kv_heads=3, vocabulary=40, length=16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.5)  # peaked maps, far from equal
    ids = np.random.default_rng(0).integers(0, 40, (6, 12))
    trace(model, {"input_ids": torch.from_numpy(ids[:2])}, tmp_path / "teacher.onnx")
    results = measure_fidelity(tmp_path / "teacher.onnx", {"input_ids": ids}, PrecomputeOptions(2), SINGLE)
    own = logits_in_numpy(model, ids)
    assert len(results) == 2 * 2
    for result in results:
        squeezed = logits_in_numpy(model, ids, squeezer(result))
        means = squeezed.mean(1), own.mean(1)
        cosine = (means[0] * means[1]).sum(1) / np.linalg.norm(means[0], axis=1) / np.linalg.norm(means[1], axis=1)
        assert result.cost == pytest.approx(1 - cosine.mean(), rel=1e-3, abs=1e-6), result
        assert result.cost > 1e-4  # squeezing changed something
