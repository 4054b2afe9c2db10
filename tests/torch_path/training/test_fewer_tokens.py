"""Students with fewer tokens than their teacher, taught from caches whose maps are pooled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.binding.trainer_cases import make_trainer, trained
from support.exported_models import trace
from support.refusals import refusal
from support.students import precompute

import shd_torch.maps as shd
from shd_ref import patch_groups
from shd_ref.teacher import PrecomputeOptions, RunOptions
from shd_torch.capture import capture_attention
from shd_torch.data import SupervisedDataset

transformers = pytest.importorskip("transformers")
SIZE, COUNT = 28, 8


def make_vit(heads: int, patch: int, seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "image_size": SIZE,
        "num_channels": 1,
    }
    config = transformers.ViTConfig(**sizes, num_attention_heads=heads, patch_size=patch, num_labels=3)
    model = transformers.ViTForImageClassification(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value *= 20 if "query" in name or "key" in name else 1  # maps that are not nearly uniform
    return model.eval()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """A ViT of 14 x 14 patches and a class token, and images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(COUNT, 1, SIZE, SIZE, generator=generator)
    path = tmp_path_factory.mktemp("vit") / "teacher.onnx"
    trace(make_vit(4, 2, seed=1), {"pixel_values": images[:2]}, path)
    return path, [{"pixel_values": image, "labels": torch.tensor(n % 3)} for n, image in enumerate(images)]


def stack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def images_of(sample: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"pixel_values": sample["pixel_values"]}


def cached(teacher: tuple[Path, Any], folder: Path, groups: str | None, codec: str = "float32") -> SupervisedDataset:
    path, samples = teacher
    options = PrecomputeOptions(num_student_heads=2, codec=codec, groups=groups)
    precompute(path, images_of(stack(samples)), folder, options, RunOptions(batch_size=4))
    return SupervisedDataset(samples, folder, model_inputs=images_of)


def test_patches_twice_as_large_are_taught_from_a_cache(teacher: Any, tmp_path: Path) -> None:
    """14 x 14 patches teach 7 x 7: the loss that the trainer logs is that of maps pooled by hand."""
    whole = cached(teacher, tmp_path / "whole", None)
    pooled = cached(teacher, tmp_path / "pooled", "patches:14x14:7x7:1")
    groups = torch.from_numpy(patch_groups((14, 14), (7, 7), extra=1))
    samples = teacher[1]
    (_, large), (_, small) = (data.collate_with(stack)([data[n] for n in range(COUNT)]) for data in (whole, pooled))
    assert small.buffer.numel() * 15 < large.buffer.numel() < small.buffer.numel() * 16
    student = make_vit(2, 4, seed=2)
    with capture_attention(student, small.layers) as captured, torch.no_grad():
        student(**images_of(stack(samples)))
    expected = 0.0
    for layer, (maps, few) in enumerate(zip(large.decode(), small.decode(), strict=True)):
        by_hand = shd.pool_tokens(maps, groups, groups, row_sums="at_most_one").probs
        torch.testing.assert_close(few, by_hand, rtol=0, atol=4e-5)
        call = captured.layer(layer)
        logits = call.query @ call.key.mT / call.query.shape[-1] ** 0.5
        expected += float(shd.shd_loss(by_hand, logits, row_sums="at_most_one"))
    trainer = trained(
        tmp_path / "out",
        train=pooled,
        model=make_vit(2, 4, seed=2),
        beta=100.0,
        collate=stack,
        arguments={"per_device_train_batch_size": COUNT, "max_steps": 4},
    )
    logged = [entry["shd_loss"] for entry in trainer.state.log_history if "shd_loss" in entry]
    assert logged[0] == pytest.approx(expected, rel=1e-3)
    assert logged[-1] < logged[0]


def test_a_student_with_other_tokens_is_refused(teacher: Any, tmp_path: Path) -> None:
    data = cached(teacher, tmp_path / "cache", "patches:14x14:7x7:1", "sqrt8-row")
    with refusal("cache-mismatch", r"must have the 50 tokens of groups .*; got 197"):
        make_trainer(tmp_path / "out", train=data, model=make_vit(2, 2, seed=2), beta=1.0, collate=stack).train()
