"""Every two options of the loss on logits together, drawn at random, against a plain computation."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the PyTorch binding needs torch")

from support.plain_kd import plain_kd_loss  # noqa: E402

import shd_torch.kd  # noqa: E402

V, PADDED, ROWS, WIDTH = 11, 14, (3, 4), 5
OPTIONS: dict[str, tuple[Any, ...]] = {
    "targets": ("logits", "topk", "whole", "one"),
    "divergence": ("kl", "reverse_kl", "jsd", "cross_entropy"),
    "mixing": (0, 0.3, 1),
    "temperature": (0.5, 1.0, 3.0),
    "t_squared": (True, False),
    "loss_mask": ("none", "some", "one sample", "nothing"),
    "reduction": ("mean", "sum", "batch_mean"),
    "vocab_size": (None, V),
    "form": ("logits", "head", "head and bias"),
    "ids": ("int64", "uint16"),
    "rows": ("sequence", "classifier"),
    "chunk": (1 << 22, 1, 5 * V),
    "check": (True, False),
}
NUM_CASES = 160


def draw(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: values[rng.integers(len(values))] for name, values in OPTIONS.items()}


def targets_of(case: dict[str, Any], rng: np.random.Generator) -> Any:
    rows = ROWS if case["rows"] == "sequence" else ROWS[:1]
    array = np.full((*rows, PADDED if case["vocab_size"] else V), -40.0)
    array[..., :V] = 3 * rng.standard_normal((*rows, V))
    teacher = torch.from_numpy(array)
    options = {"temperature": case["temperature"], "vocab_size": case["vocab_size"]}
    kd = shd_torch.kd
    if case["targets"] == "logits":
        return teacher
    made = kd.kd_targets_topk(teacher, {"topk": 4, "whole": V, "one": 1}[case["targets"]], **options)
    return made._replace(ids=made.ids.to(getattr(torch, case["ids"])))


def mask_of(case: dict[str, Any], rows: tuple[int, ...], rng: np.random.Generator) -> Any:
    mask = rng.random(rows) < 0.5
    if case["loss_mask"] == "one sample":
        mask[:] = False
        mask[0] = True
    return {"none": None, "nothing": np.zeros(rows, bool)}.get(case["loss_mask"], mask)


@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_binding_agrees(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, rng = draw(seed), np.random.default_rng(10_000 + seed)
    targets = targets_of(case, rng)
    size = PADDED if case["vocab_size"] else V
    rows = ROWS if case["rows"] == "sequence" else ROWS[:1]
    keywords = {name: case[name] for name in ("divergence", "mixing", "t_squared", "reduction", "vocab_size")}
    keywords["loss_mask"] = mask_of(case, rows, rng)
    if case["targets"] == "logits" or seed % 2:
        keywords["temperature"] = case["temperature"]
    if case["form"] == "logits":
        arrays, name = [2 * rng.standard_normal((*rows, size))], "kd_loss"
    else:
        arrays, name = [rng.standard_normal((*rows, WIDTH)), rng.standard_normal((size, WIDTH))], "linear_kd_loss"
        arrays += [rng.standard_normal(size)] if case["form"] == "head and bias" else []
    if keywords["loss_mask"] is not None:
        keywords["loss_mask"] = torch.from_numpy(keywords["loss_mask"])
    leaves = [torch.from_numpy(array).requires_grad_() for array in arrays]
    logits = leaves[0] if name == "kd_loss" else torch.nn.functional.linear(*leaves)
    wanted = plain_kd_loss(targets, logits, **keywords)
    slopes = torch.autograd.grad(wanted, leaves)
    monkeypatch.setitem(shd_torch.kd.targets._ENTRIES, "cpu", case["chunk"])
    loss = getattr(shd_torch.kd, name)(targets, *leaves, **keywords, check=case["check"])
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-11, abs=1e-13), case
    for leaf, slope in zip(leaves, slopes, strict=True):
        np.testing.assert_allclose(leaf.grad.numpy(), slope.numpy(), rtol=1e-9, atol=1e-11, err_msg=str(case))


def test_every_two_options_meet() -> None:
    met = {
        (one, case[one], other, case[other])
        for case in map(draw, range(NUM_CASES))
        for one, other in combinations(OPTIONS, 2)
    }
    asked = {
        (one, first, other, second)
        for one, other in combinations(OPTIONS, 2)
        for first in OPTIONS[one]
        for second in OPTIONS[other]
    }
    assert asked - met == set()
