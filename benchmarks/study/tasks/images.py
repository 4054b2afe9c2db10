"""Image classification: digits, a vision transformer of 6 heads as teacher, students of 3 (the source's Table 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.study.arms import ALONE, Arm
from benchmarks.study.digits import SIZE, fit_linear, load_digits, load_small_digits
from benchmarks.study.keeping import keep_trained, kept_place
from benchmarks.study.memory import Remembered
from benchmarks.study.pictures import draw_maps
from benchmarks.study.rivals import Rival, make_rival
from benchmarks.study.starts import start_student
from benchmarks.study.training import Course, train
from shd_torch import capture_attention
from shd_torch.recipes import SHD, Terms, ViTKD, cross_entropy, image_kd, nkd

Forward = Callable[[Mapping[str, Tensor]], Any]
MARKS = (0, 50, 100, 200, 300, 400, 600, 1000, 2000)


class Images:
    """See the module; the teacher is trained here, once a folder.

    With the setting ``draw`` this number draws the split and the teacher too.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], device: str = "cpu") -> None:
        self.settings, self.device, self.folder = settings, device, folder
        if settings["data"] == "mnist":
            self.size, (images, labels) = SIZE, load_digits(folder)
        else:
            self.size, (images, labels) = 8, load_small_digits()
        draw = settings.get("draw")
        if draw is not None:
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(draw))
            images, labels = images[order], labels[order]
        sizes = [settings["pool"], settings["valid"], settings["test"]]
        parts = [part.to(device).split([*sizes, len(images) - sum(sizes)])[:3] for part in (images, labels)]
        self.train_images, self.valid_images, self.test_images = parts[0]
        self.train_labels, self.valid_labels, self.test_labels = parts[1]
        self.teacher = self._load_teacher(folder)
        with torch.no_grad():
            self.teacher_accuracy = _measure(lambda i: self.teacher(**i), self.test_images, self.test_labels)[
                "accuracy"
            ]
        self._kept: tuple[str, Any] = ("", None)

    def make_model(self, width: int, heads: int, layers: int) -> Any:
        """DINOv2's architecture: LayerScale, class token, patches."""
        from transformers import Dinov2Config, Dinov2ForImageClassification

        config = Dinov2Config(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            mlp_ratio=2,
            image_size=self.size,
            patch_size=self.settings["patch"],
            num_channels=1,
            num_labels=10,
            layerscale_value=0.1,
        )
        return Dinov2ForImageClassification(config).to(self.device)

    def _load_teacher(self, folder: Path) -> Any:
        given, draw = self.settings["teacher"], self.settings.get("draw")
        torch.manual_seed(draw or 0)
        name = "images-teacher" if draw is None else f"images-teacher-{draw}"
        return keep_trained(
            kept_place(folder, name, self.settings, "data", "pool", "patch", "teacher"),
            self.make_model(given["width"], given["heads"], given["layers"]),
            lambda model, index: F.cross_entropy(
                model(pixel_values=self.train_images[index]).logits, self.train_labels[index], label_smoothing=0.1
            ),
            size=len(self.train_images),
            steps=given["steps"],
            rate=given["rate"],
            seed=draw or 0,
        )

    def train(self, arm: Arm, seed: int) -> dict[str, Any]:
        """One student on the first ``labels`` images of the pool: a seed draws weights and order."""
        labelled = self.train_images[: arm.options["labels"]], self.train_labels[: arm.options["labels"]]
        return {
            **self._train(self.course(arm, seed), arm, seed),
            "teacher_accuracy": self.teacher_accuracy,
            "linear_accuracy": fit_linear(*labelled, self.test_images, self.test_labels),
        }

    def draw_maps(self, arms: Mapping[str, Arm], path: Path) -> None:
        """Where the class token looks on an image of the test set: teacher, merged maps, and students of seed 0."""
        one = {"pixel_values": self.test_images[:1]}
        rows = []
        for title, arm in arms.items():
            course = self.course(arm, 0)
            if not rows:
                rival = make_rival("shd", self.teacher, course.student, one)
                outputs, layer = rival.teach(**one), rival.pairs[-1][1]
                rows = [
                    ("teacher", outputs.calls[layer].compute_logits().softmax(-1)),
                    ("merged", outputs.attention.supervise()[-1].probs()),
                ]
            self._train(course, arm, 0)
            with torch.no_grad(), capture_attention(course.student.eval()) as captured:
                course.student(**one)
            rows.append((title, captured.probs[-1]))
        side = self.size // self.settings["patch"]
        grids = [(title, maps[0, :, 0, 1:].unflatten(-1, (side, side)).cpu().numpy()) for title, maps in rows]
        draw_maps(self.test_images[0, 0].cpu().numpy(), grids, path)

    def _train(self, course: Course, arm: Arm, seed: int) -> dict[str, Any]:
        settings = self.settings
        sizes = {"steps": settings["steps"], "batch": settings["batch"], "rate": settings["rate"]}
        return train(course, beta=arm.options["beta"], seed=seed, marks=MARKS, **sizes)

    def course(self, arm: Arm, seed: int) -> Course:
        """What the student is taught with; the base loss ``unlabelled`` is KD alone, without labels."""
        options = arm.options
        inputs = {"pixel_values": self.train_images[: options["labels"]]}
        labels = self.train_labels[: options["labels"]]
        student = self._make_student(arm, seed)
        torch.manual_seed(seed)
        rivals = self._rivals(arm, student, inputs)
        base, parts = self._base(options["base"], inputs, labels, student, options.get("kd_temperature", 4.0))

        def evaluate(forward: Forward) -> dict[str, float]:
            found = {}
            for name in ("valid", "test"):
                figures = _measure(forward, getattr(self, f"{name}_images"), getattr(self, f"{name}_labels"))
                found |= {f"{name}_{figure}": value for figure, value in figures.items()}
            return found

        def batch(index: Tensor) -> dict[str, Tensor]:
            return {"pixel_values": inputs["pixel_values"][index]}

        judged = (self.valid_images, self.valid_labels, self.test_images, self.test_labels)
        data = (*inputs.values(), labels, *judged, self.teacher)
        return Course(student, len(labels), batch, base, evaluate, rivals, parts, data=data)

    def _make_student(self, arm: Arm, seed: int) -> Any:
        sizes, options = self.settings["student"], arm.options

        def make_own() -> Any:
            torch.manual_seed(seed)
            model = self.make_model(sizes["width"], options["heads"], sizes["layers"])
            return self._pretrain(model, options["labels"], seed) if options["start"] == "pretrained" else model

        calibration = {"pixel_values": self.train_images[: options["labels"]][:64]}
        student = start_student(
            options["start"],
            self.teacher,
            calibration,
            make_own,
            hidden=sizes["width"],
            heads=options["heads"],
            layers=sizes["layers"],
        )
        if not options["layer_scale"]:
            for block in student.dinov2.encoder.layer:
                block.layer_scale1, block.layer_scale2 = nn.Identity(), nn.Identity()
        return student

    def _pretrain(self, model: Any, labels: int, seed: int) -> Any:
        """The student trained on as many other labelled images, without the teacher; kept for its seed."""
        other = slice(labels, 2 * labels)
        images, digits, given = self.train_images[other], self.train_labels[other], self.settings["pretraining"]
        depends = ("data", "pool", "patch", "student", "pretraining")
        return keep_trained(
            kept_place(self.folder, f"images-pretrained-{labels}-{seed}", self.settings, *depends),
            model,
            lambda student, index: F.cross_entropy(student(pixel_values=images[index]).logits, digits[index]),
            size=len(digits),
            seed=seed,
            **given,
        ).requires_grad_(True)

    def _rivals(self, arm: Arm, student: Any, inputs: Mapping[str, Tensor]) -> list[tuple[Rival, Remembered]]:
        options = arm.options
        if options["method"] == ALONE:
            return []
        example = {name: value[:64] for name, value in inputs.items()}
        rival = make_rival(
            options["method"],
            self.teacher,
            student,
            example,
            plan=options["plan"],
            alpha_per=options["alpha_per"],
            temperature=options["temperature"],
        )
        key = str([options[name] for name in ("method", "plan", "alpha_per", "temperature", "labels", "heads")])
        if self._kept[0] != key:  # arms of one teaching follow each other
            self._kept = ("", None)
            self._kept = (key, Remembered(rival, inputs))
        return [(rival, self._kept[1])]

    def _base(
        self, name: str, inputs: Mapping[str, Tensor], labels: Tensor, student: Any, temperature: float
    ) -> tuple[Callable[[Any, Tensor, SHD | None], Terms], list[nn.Module]]:
        with torch.no_grad():
            seen = [
                self.teacher(pixel_values=part, output_hidden_states=True)
                for part in inputs["pixel_values"].split(64)
            ]
            targets = torch.cat([each.logits for each in seen])
        if name == "ce":
            return lambda output, index, shd: cross_entropy(output.logits, labels[index], shd=shd), []
        if name in ("kd", "unlabelled"):
            kd = partial(image_kd, kd_weight=0.5 if name == "kd" else 1.0, temperature=temperature)
            return lambda output, index, shd: kd(output.logits, labels[index], targets[index], shd=shd), []
        features = [torch.cat([each.hidden_states[layer][:, 1:] for each in seen]) for layer in (1, 2)]
        norm = self.teacher.dinov2.layernorm
        last = torch.cat([norm(each.hidden_states[-1])[:, 1:] for each in seen])
        vitkd = ViTKD(student.config.hidden_size, self.teacher.config.hidden_size).to(self.device)

        def both(output: Any, index: Tensor, shd: SHD | None) -> Terms:
            own = output.hidden_states
            terms = vitkd(
                [own[1][:, 1:], own[2][:, 1:]],
                student.dinov2.layernorm(own[-1])[:, 1:],
                [feature[index] for feature in features],
                last[index],
            )
            return nkd(output.logits, labels[index], targets[index], shd=shd) + terms

        student.config.output_hidden_states = True
        return both, [vitkd]


def _measure(forward: Forward, images: Tensor, labels: Tensor) -> dict[str, float]:
    right, loss = 0, 0.0
    for part, wanted in zip(images.split(250), labels.split(250), strict=True):
        with torch.no_grad():
            logits = forward({"pixel_values": part}).logits
        right += int((logits.argmax(-1) == wanted).sum())
        loss += float(F.cross_entropy(logits, wanted, reduction="sum"))
    return {"accuracy": right / len(labels), "loss": loss / len(labels)}
