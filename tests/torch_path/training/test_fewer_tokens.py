"""Students with fewer tokens than their teacher, taught from caches whose maps are pooled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.binding.models import PlainBlock, sharpen
from support.binding.trainer_cases import make_model, make_trainer, trained
from support.exported_models import trace
from support.refusals import refusal

import shd_ref
import shd_torch.maps as shd
from shd_ref import patch_groups
from shd_ref.teacher import PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import OnlineTeacher, capture_attention, layer_kls
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
    return sharpen(transformers.ViTForImageClassification(config), ("query", "key")).eval()


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


class MergingViT(torch.nn.Module):
    """A student that pairs its most similar neighbouring tokens in its forward pass, as ToMe does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Linear(4, 16)
        self.blocks = torch.nn.ModuleList(PlainBlock(16, 2) for _ in range(2))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        patches = torch.nn.functional.unfold(pixel_values, 2, stride=2).mT
        hidden = self.blocks[0](self.embed(torch.nn.functional.pad(patches, (0, 0, 1, 0))))  # a class token in front
        pairs = hidden[:, 1:].unflatten(1, (-1, 2))
        alike = torch.nn.functional.cosine_similarity(*pairs.unbind(2), dim=-1)
        merges = torch.zeros_like(alike, dtype=torch.bool).scatter_(1, alike.topk(49, 1).indices, True)
        starts = torch.stack([torch.ones_like(merges), ~merges], 2).flatten(1)  # a token begins: with a merge once
        ids = torch.nn.functional.pad(starts.long().cumsum(1), (1, 0))
        groups = shd.id_groups(ids, 148)
        hidden = self.blocks[1](groups @ hidden / groups.sum(-1, keepdim=True))
        return {"loss": hidden.square().mean(), "token_groups": {1: ids}}


@pytest.mark.parametrize("form", ["maps", "factored"])
def test_tokens_that_a_student_merges_are_pooled_at_reading(teacher: Any, tmp_path: Path, form: str) -> None:
    """Groups per sample and layer; the loss is that of maps pooled by the reference."""
    path, samples = teacher
    options = {"codec": "float32"} if form == "maps" else {"form": form, "factored_codec": "float16"}
    precompute(path, images_of(stack(samples)), tmp_path / "c", PrecomputeOptions(num_student_heads=2, **options))
    data = SupervisedDataset(samples, tmp_path / "c", model_inputs=images_of)
    _, batch = data.collate_with(stack)([data[n] for n in range(COUNT)])
    student = MergingViT()
    with capture_attention(student, batch.layers) as captured, torch.no_grad():
        ids = student(**stack(samples))["token_groups"][1]
    assert len({tuple(row) for row in ids.tolist()}) > 1
    expected = 0.0
    for layer, maps in enumerate(batch.decode(197)):
        groups = None if layer == 0 else shd_ref.id_groups(ids.numpy())
        pooled = shd_ref.pool_tokens(maps.double().numpy(), groups, groups, row_sums="at_most_one").probs
        call = captured.layer(layer)
        logits = call.query @ call.key.mT / call.query.shape[-1] ** 0.5
        expected += shd_ref.shd_loss(pooled, logits.double().numpy())
    terms = {"train": data, "beta": 1.0, "collate": stack, "arguments": {"per_device_train_batch_size": COUNT}}
    trainer = trained(tmp_path / "out", **terms, model=MergingViT(), groups=lambda outputs: outputs["token_groups"])
    logged = [entry["shd_loss"] for entry in trainer.state.log_history if "shd_loss" in entry]
    assert logged[0] == pytest.approx(expected, rel=1e-3)
    with refusal("argument-value", "groups must be numbers below 148"):
        trained(
            tmp_path / "b", **terms, model=MergingViT(), groups=lambda outputs: {1: outputs["token_groups"][1] + 1}
        )


def test_a_live_teacher_with_smaller_patches_is_pooled(teacher: Any) -> None:
    """Fixed groups serve a live teacher, which sees the student's own inputs."""
    images = images_of(stack(teacher[1]))
    taught = OnlineTeacher(make_vit(4, 2, seed=1), 2, 2)(**images)
    student, weights = make_vit(2, 4, seed=2), torch.from_numpy(patch_groups((14, 14), (7, 7), extra=1))
    with capture_attention(student, range(2)) as captured, torch.no_grad():
        student(**images)
    counted = torch.rand(COUNT, 197, generator=torch.Generator().manual_seed(0)) < 0.9
    kls = layer_kls(captured, taught, groups=weights, loss_mask=counted)
    for layer, supervision in enumerate(taught.supervise()):
        maps = shd.pool_tokens(supervision.probs(), weights, weights, query_mask=counted).probs
        call = captured.layer(layer)
        right = shd.shd_loss(maps, call.query @ call.key.mT / call.query.shape[-1] ** 0.5)
        assert float(kls[layer]) == pytest.approx(float(right), rel=1e-4)


def test_what_a_shared_token_sees_ahead_is_dropped_when_asked_for() -> None:
    """A teacher token that reaches into the next one of a causal student gives it mass there."""
    ids = torch.arange(3, 15)[None]
    taught, student = OnlineTeacher(make_model(4, seed=1), 2, 2)(ids), make_model(2, seed=2)
    shared = torch.eye(12) + 0.5 * torch.eye(12).roll(1, 1).tril(1)
    with capture_attention(student, range(2)) as captured, torch.no_grad():
        student(ids)
    with refusal("support-mismatch"):
        layer_kls(captured, taught, groups=shared)
    assert all(kl > 0 for kl in layer_kls(captured, taught, groups=shared, support="intersect").values())
