"""The training loop: the loss that the formula says, reproducible, and nothing mismatched gets to a first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
pytest.importorskip("onnxscript", reason="export needs onnxscript")

from support.students import precompute

from shd_ref.cache import CacheReader
from shd_ref.teacher.run.options import PrecomputeOptions
from shd_torch import ShdError, capture_attention, export_teacher
from shd_torch.data.dataset import SupervisedDataset
from shd_torch.demo.train import ArrayDataset, TrainOptions, kd_loss, measure_accuracy, train_student
from shd_torch.demo.vit import VisionTransformer
from shd_torch.maps import shd_loss

NUM_IMAGES = 24


def make_model(heads: int = 2, layers: int = 2, seed: int = 0, patch_size: int = 4) -> VisionTransformer:
    torch.manual_seed(seed)
    return VisionTransformer(
        image_size=8, patch_size=patch_size, width=16, num_layers=layers, num_heads=heads, num_classes=3
    )


def make_arrays() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    labels = np.arange(NUM_IMAGES) % 3
    images = rng.uniform(size=(NUM_IMAGES, 8, 8)).astype(np.float32)
    for label in range(3):
        images[labels == label, label * 2 : label * 2 + 2] += 1
    return {"image": images, "label": labels}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("path")
    teacher = make_model(heads=8, layers=4)
    arrays = make_arrays()
    export_teacher(teacher, {"image": torch.from_numpy(arrays["image"][:2])}, folder / "teacher.onnx")
    options = PrecomputeOptions(num_student_heads=2, num_student_layers=2)
    precompute(folder / "teacher.onnx", arrays, folder / "cache", options)
    with torch.no_grad():
        arrays["teacher_logits"] = teacher.eval()(torch.from_numpy(arrays["image"])).numpy()
    np.savez(folder / "data.npz", **arrays)
    return folder


def load(path: Path) -> ArrayDataset:
    with np.load(path / "data.npz") as arrays:
        return ArrayDataset(dict(arrays))


def test_student_learns_what_the_cache_holds_and_repeats_itself(path: Path) -> None:
    cache = CacheReader(path / "cache")
    options = TrainOptions(steps=60, batch_size=12, beta=2.0, kd_weight=0.5, seed=3)
    runs = []
    for _ in range(2):
        student = make_model(seed=1)
        history = train_student(student, load(path), options, cache=cache)
        runs.append((history, student.state_dict()))
    (history, weights), (again, weights_again) = runs
    assert history == again
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    assert len(history.shd) == len(history.kd) == len(history.ce) == 60
    assert np.mean(history.shd[-10:]) < 0.7 * np.mean(history.shd[:10])
    expected = [
        0.5 * ce + 0.5 * kd + 2.0 * shd for ce, kd, shd in zip(history.ce, history.kd, history.shd, strict=True)
    ]
    np.testing.assert_allclose(history.total, expected, rtol=1e-5)
    assert not student.training


def test_without_beta_the_cache_plays_no_part(path: Path) -> None:
    options = TrainOptions(steps=20, batch_size=12, seed=3)
    plain, beside = make_model(seed=1), make_model(seed=1)
    assert train_student(plain, load(path), options) == train_student(
        beside, load(path), options, cache=CacheReader(path / "cache")
    )
    data = load(path)
    assert 0 <= measure_accuracy(plain, data.arrays["image"], data.arrays["label"]) <= 1


def test_first_step_loss_is_the_formula_on_the_teachers_own_maps(path: Path) -> None:
    """From the teacher's live maps through shd.squeeze_heads, against the cache's coded ones."""
    from shd_torch.maps import squeeze_heads, value_outputs

    data = load(path)
    images = data.arrays["image"]
    teacher, student = make_model(heads=8, layers=4).eval(), make_model(seed=1)
    values: list[torch.Tensor] = []
    hooks = [
        block.attention.qkv.register_forward_hook(lambda _m, _i, out: values.append(out.chunk(3, dim=-1)[2]))
        for block in teacher.blocks
    ]
    with torch.no_grad(), capture_attention(teacher) as captured:
        teacher(images)
    for hook in hooks:
        hook.remove()
    merged = []
    for layer in (1, 3):
        heads = values[layer].unflatten(-1, (8, -1)).transpose(1, 2)
        outputs = value_outputs(heads, teacher.blocks[layer].attention.project.weight.T)
        merged.append(squeeze_heads(captured.probs[layer], outputs, 2).probs)
    joined = SupervisedDataset(data, path / "cache")
    _, supervision = joined.collate([joined[index] for index in range(NUM_IMAGES)])
    with torch.no_grad(), capture_attention(student) as seen:
        student(images)
    live = shd_loss(merged, seen.logits)
    cached = shd_loss(supervision.decode(), seen.logits)
    assert float(cached) == pytest.approx(float(live), rel=0.02)
    for live_maps, cached_maps in zip(merged, supervision.decode(), strict=True):
        assert float(0.5 * (live_maps - cached_maps).abs().sum(-1).max()) < 0.01


def test_kd_is_zero_when_equal_and_scaled_by_temperature() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert float(kd_loss(logits, logits)) == pytest.approx(0.0, abs=1e-6)
    other = logits.flip(1)
    by_hand = F.kl_div((other / 3).log_softmax(-1), (logits / 3).softmax(-1), reduction="sum") * 9 / 5
    assert float(kd_loss(other, logits, 3.0)) == pytest.approx(float(by_hand), rel=1e-5)


@pytest.mark.parametrize(
    ("code", "student", "text"),
    [
        ("cache-mismatch", {"heads": 4}, "num_student_heads must be 2"),
        ("cache-mismatch", {"layers": 1}, "num_student_layers must be 2"),
        ("cache-mismatch", {"layers": 3}, "num_student_layers must be 2"),
        ("cache-mismatch", {"patch_size": 2}, "must see 5 positions"),
    ],
)
def test_a_student_that_does_not_fit_is_refused(path: Path, code: str, student: dict[str, int], text: str) -> None:
    model = make_model(**student)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(ShdError, match=text) as caught:
        train_student(model, load(path), TrainOptions(steps=3, beta=1.0), cache=CacheReader(path / "cache"))
    assert caught.value.code == code
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_data_that_do_not_fit_are_refused(path: Path) -> None:
    cache = CacheReader(path / "cache")
    arrays = make_arrays()
    with pytest.raises(ShdError, match="missing teacher_logits"):
        train_student(make_model(), ArrayDataset(arrays), TrainOptions(kd_weight=0.5))
    with pytest.raises(ShdError, match="needs a cache"):
        train_student(make_model(), ArrayDataset(arrays), TrainOptions(beta=1.0))
    arrays["image"] = arrays["image"] + 1
    with pytest.raises(ShdError) as caught:
        train_student(make_model(), ArrayDataset(arrays), TrainOptions(beta=1.0), cache=cache)
    assert caught.value.code == "sample-missing"
    with pytest.raises(ShdError, match="share one first axis"):
        ArrayDataset({"image": np.zeros((2, 8, 8)), "label": np.zeros(3)})
