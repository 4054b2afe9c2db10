"""SHDTrainer with a recipe in the place of the student's own loss: its formula, and where options meet."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.binding.trainer_cases import live, make_model, make_samples, make_trainer, pad, trained, weights
from support.exported_models import trace
from support.refusals import refusal

from shd_ref.teacher import PrecomputeOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_torch import KdTerm, OnlineTeacher, ShdError, SupervisedDataset, capture_attention, recipes
from shd_torch.recipes import SHD
from shd_torch.training import Recipe

WHOLE = {"max_steps": 1, "per_device_train_batch_size": 8, "train_sampling_strategy": "sequential"}
PARTS = WHOLE | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
TEXTS: dict[str, Any] = {
    "cross_entropy": "cross_entropy",
    "language_kd": Recipe("language_kd", kd_weight=0.7, temperature=2.0),
    "gkd": Recipe("gkd", mixing=0.3),
    "babyllama": "babyllama",
}
IMAGES = ("nkd", "deit_soft")


def texts(*, full: bool = False) -> list[dict[str, torch.Tensor]]:
    """Samples with a prompt that no label counts; of one length where the recipe counts padding."""
    samples = make_samples()
    if full:
        samples = [sample for sample in samples if len(sample["input_ids"]) == 12]
    for number, sample in enumerate(samples):
        sample["labels"] = sample["labels"].clone()
        sample["labels"][: number % 4 + 1] = -100
    return samples


def assert_same(one: Any, other: Any, rel: float = 1e-4) -> None:
    for first, second in zip(one.state.log_history[:-1], other.state.log_history[:-1], strict=True):
        keys = {key for key in second if key.endswith(("loss", "weight")) or key == "beta"}
        assert keys == {key for key in first if key.endswith(("loss", "weight")) or key == "beta"}
        for key in keys:
            assert first[key] == pytest.approx(second[key], rel=rel, abs=1e-7), key
    for name, value in weights(other).items():
        torch.testing.assert_close(weights(one)[name], value, rtol=rel, atol=20 * rel * 1e-3, msg=name)


@pytest.mark.parametrize("name", TEXTS)
def test_a_recipe_of_text_cached_live_and_in_parts(name: str, cached: Any, tmp_path: Path) -> None:
    """Cached as live, accumulated as whole, and the live one as the formula."""
    full = name == "babyllama"
    arguments = [dict(each) for each in (WHOLE, PARTS)]
    if full:
        arguments = [WHOLE | {"per_device_train_batch_size": 3}, PARTS | {"per_device_train_batch_size": 1}]
        arguments[1]["gradient_accumulation_steps"] = 3
    samples, settings = texts(full=full), {"recipe": TEXTS[name], "beta": 0.3}
    joined = SupervisedDataset(samples, cached(logits="float16"))
    whole = trained(tmp_path, train=samples, teacher=live(), arguments=arguments[0], **settings)
    assert_same(trained(tmp_path, train=samples, teacher=live(), arguments=arguments[1], **settings), whole)
    assert_same(trained(tmp_path, train=joined, arguments=arguments[1], **settings), whole, rel=2e-3)

    student, batch = make_model(2, seed=2), pad(samples)
    seen = {key: value for key, value in batch.items() if key != "labels"}
    taught = live()(**seen)
    with capture_attention(student, layers=taught.layers) as captured:
        logits = student(**seen).logits
    shd = SHD(captured, taught, 0.3, loss_mask=batch["attention_mask"].bool())
    teachers = {"cross_entropy": [], "babyllama": [[taught.output.logits]]}.get(name, [taught.output.logits])
    options = TEXTS[name].options if isinstance(TEXTS[name], Recipe) else {}
    terms = getattr(recipes, name)(logits, batch["labels"], *teachers, shift=True, shd=shd, **options)
    logged = whole.state.log_history[0]
    assert logged["loss"] == pytest.approx(terms.total.item(), rel=1e-4)
    for term in set(terms) - {"shd"}:
        assert logged[f"{term}_loss"] == pytest.approx(terms[term].value.item(), rel=1e-4)
        assert logged[f"{term}_weight"] == pytest.approx(terms[term].weight)
    assert logged["base_loss"] == pytest.approx((terms.total - 0.3 * terms["shd"].value).item(), rel=1e-4)


class Classifier(torch.nn.Module):
    """A ViT with the two heads of DeiT; or with one."""

    def __init__(self, heads: int, seed: int, *, tokens: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": heads}
        config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=5, **sizes)
        self.config = config
        self.vit = transformers.ViTModel(config, add_pooling_layer=False)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(16, 5) for _ in range(2))
        self.tokens = tokens

    def forward(self, pixel_values: torch.Tensor) -> Any:
        state = self.vit(pixel_values=pixel_values).last_hidden_state
        one, two = self.heads[0](state[:, 0]), self.heads[1](state[:, 1])
        return (
            {"logits": (one + two) / 2, "cls_logits": one, "distillation_logits": two}
            if self.tokens
            else transformers.modeling_outputs.ImageClassifierOutput(logits=one)
        )


def picture_samples() -> list[dict[str, torch.Tensor]]:
    source = torch.Generator().manual_seed(0)
    return [
        {"pixel_values": torch.randn(1, 8, 8, generator=source), "labels": torch.tensor(number % 5)}
        for number in range(8)
    ]


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of a classifier's attention and logits."""
    pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
    folder, seen = tmp_path_factory.mktemp("pictures"), collate(picture_samples())["pixel_values"]
    trace(Classifier(4, 1, tokens=False), {"pixel_values": seen[:2]}, folder / "teacher.onnx")
    options = PrecomputeOptions(num_student_heads=2, codec="float32", logits="float16")
    precompute(folder / "teacher.onnx", {"pixel_values": seen.numpy()}, folder / "cache", options)
    return folder / "cache"


@pytest.mark.parametrize("name", IMAGES)
def test_a_recipe_of_images_cached_live_and_in_parts(name: str, pictures: Path, tmp_path: Path) -> None:
    """A classifier's logits have no axis of positions, in a cache either."""
    samples = picture_samples()
    whole, cached = (
        trained(
            tmp_path,
            train=train,
            model=Classifier(2, 2, tokens=True),
            collate=collate,
            teacher=OnlineTeacher(Classifier(4, 1, tokens=False), 2, 1) if train is samples else None,
            recipe=name,
            beta=0.1,
            arguments=arguments | {"remove_unused_columns": False},
        )
        for train, arguments in ((samples, WHOLE), (SupervisedDataset(samples, pictures), PARTS))
    )
    assert_same(cached, whole, rel=2e-3)
    student, batch = Classifier(2, 2, tokens=True), collate(samples)
    output = student(batch["pixel_values"])
    with torch.no_grad():
        taught = Classifier(4, 1, tokens=False)(batch["pixel_values"])["logits"]
    logits = [output["cls_logits"], batch["labels"], output["distillation_logits"], taught]
    if not name.startswith("deit"):
        logits = [output["logits"], batch["labels"], taught]
    expected = getattr(recipes, name)(*logits).total.item()
    assert whole.state.log_history[0]["base_loss"] == pytest.approx(expected, rel=1e-4)


def test_several_teachers_and_none(tmp_path: Path) -> None:
    samples = texts(full=True)
    two = trained(tmp_path, train=samples, teacher=[live(1), live(5)], recipe="babyllama", arguments=WHOLE)
    batch = pad(samples)
    with torch.no_grad():
        logits = [make_model(4, seed=seed).eval()(input_ids=batch["input_ids"]).logits for seed in (1, 5)]
        own = make_model(2, seed=2)(input_ids=batch["input_ids"]).logits
    expected = recipes.babyllama(own, batch["labels"], logits)
    logged = two.state.log_history[0]
    assert logged["kd_loss"] == pytest.approx(expected["kd"].value.item(), rel=1e-4)
    assert "shd_loss" not in logged
    alone = trained(tmp_path, train=samples, recipe="cross_entropy", arguments=WHOLE).state.log_history[0]
    assert alone["loss"] == pytest.approx(logged["cross_entropy_loss"], rel=1e-5)
    evaluated = make_trainer(tmp_path, train=samples, recipe="cross_entropy", eval_dataset=samples).evaluate()
    assert evaluated["eval_loss"] == pytest.approx(logged["cross_entropy_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Recipe("kd"), "recipe must be one of cross_entropy, "),
        (lambda: Recipe("minillm_policy"), "others need a loop"),
        (lambda: Recipe("gkd", temperature=2.0), "options of recipe gkd must be of mixing, vocab_size; got temp"),
        (lambda: Recipe("nkd", shift=True), "got shift"),
    ],
)
def test_what_a_recipe_refuses(make: Callable[[], Recipe], words: str) -> None:
    with refusal("argument-value", words):
        make()


def test_what_the_trainer_refuses(cached: Any, tmp_path: Path) -> None:
    def refusal(train: Any, **arguments: Any) -> ShdError:
        with pytest.raises(ShdError) as caught:
            make_trainer(tmp_path, train=train, **({"arguments": WHOLE} | arguments)).train()
        return caught.value

    top = {"logits": "topk", "logits_top": 8, "logits_temperature": 2.0, "logits_bits": 16}
    attention, some, all_ = (
        SupervisedDataset(make_samples(), cached(**options)) for options in ({}, top, {"logits": "float16"})
    )
    unlabelled = [{"input_ids": sample["input_ids"]} for sample in texts(full=True)]
    for error, code, words in (
        (refusal(some, recipe="babyllama"), "argument-value", "has topk ones, a part of the classes"),
        (refusal(some, recipe="gkd"), "argument-value", "temperature 2 of"),
        (refusal(attention, recipe="language_kd"), "cache-mismatch", "recipe must have logits in"),
        (refusal(all_, recipe="babyllama"), "argument-value", "must be full where a cache teaches"),
        (refusal(all_, recipe="gkd", teacher=live()), "argument-value", "must have one teacher"),
        (refusal(all_, recipe="gkd", kd=KdTerm()), "argument-value", "kd must be left out where recipe='gkd'"),
        (refusal(make_samples(), recipe="gkd"), "argument-value", "train_dataset must be"),
        (refusal(unlabelled, recipe="gkd", teacher=live(), collate=collate), "argument-value", "must hold labels"),
        (refusal(texts(full=True), recipe="deit_soft", teacher=live()), "argument-value", "returns cls_logits and"),
    ):
        assert error.code == code, error
        assert words in str(error)
