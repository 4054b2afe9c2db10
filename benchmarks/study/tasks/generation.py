"""Image generation: a small diffusion transformer on digits, judged by Frechet distance (the source's Table 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.study.arms import ALONE, Arm
from benchmarks.study.denoiser import Denoiser, squeeze_denoiser
from benchmarks.study.digits import load_digits, load_small_digits
from benchmarks.study.keeping import keep_trained, kept_place
from benchmarks.study.rivals import Rival, make_rival
from benchmarks.study.training import Course, Teach, train
from shd_ref.layers import layer_map
from shd_torch.recipes import SHD, Terms, diffusion, draw_diffusion, linear_betas, noised

STEPS = 1000
Forward = Callable[[Mapping[str, Tensor]], Any]


class Generation:
    """See the module; teacher and classifier are trained here, once a folder."""

    def __init__(self, folder: Path, settings: dict[str, Any], device: str = "cpu") -> None:
        self.settings, self.device = settings, device
        if settings["data"] == "mnist":
            images, labels = load_digits(folder)
            images = F.avg_pool2d(images, 2)
        else:
            images, labels = load_small_digits()
        images, labels = images.to(device), labels.to(device)
        self.images, self.size = 2 * images - 1, images.shape[-1]
        sizes = [settings["pool"], settings["judged"], settings["judged"]]
        self.train_images, valid, test = self.images.split([*sizes, len(images) - sum(sizes)])[:3]
        torch.manual_seed(0)
        self.classifier = keep_trained(
            kept_place(folder, "generation-classifier", settings, "data", "pool", "classifier_steps"),
            nn.Sequential(
                nn.Conv2d(1, 16, 3, 2, 1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, 2, 1),
                nn.ReLU(),
                nn.Flatten(),
                nn.LazyLinear(32),
                nn.ReLU(),
                nn.Linear(32, 10),
            ).to(device),
            lambda model, index: F.cross_entropy(model(self.train_images[index]), labels[index]),
            size=settings["pool"],
            steps=settings["classifier_steps"],
            rate=3e-3,
            example=self.images[:2],
        )
        self.moments = {name: self._moments(part) for name, part in (("valid", valid), ("test", test))}
        given = settings["teacher"]
        torch.manual_seed(0)
        self.teacher: Any = keep_trained(
            kept_place(folder, "generation-teacher", settings, "data", "pool", "teacher"),
            Denoiser(self.size, given["width"], given["heads"], given["layers"]).to(device),
            self._alone,
            size=settings["pool"],
            steps=given["steps"],
            rate=given["rate"],
        )

    def _alone(self, model: nn.Module, index: Tensor) -> Tensor:
        """The loss of a denoiser without a teacher."""
        x0 = self.train_images[index]
        t, noise = torch.randint(STEPS, (len(x0),), device=self.device), torch.randn_like(x0)
        return diffusion(model(noised(x0, noise, t), t), x0, noise, t, check=False).total

    def train(self, arm: Arm, seed: int) -> dict[str, Any]:
        """One student; a seed draws weights, order, steps and noise, and what is sampled in the end."""
        options = arm.options
        torch.manual_seed(seed)
        student = self._make_student(options)
        last: dict[str, Tensor] = {}
        seen = 0

        def batch(index: Tensor) -> dict[str, Tensor]:
            nonlocal seen
            seen += 1
            x0 = self.train_images[index]
            draw = draw_diffusion([seed * 10**9 + seen * 1000 + n for n in range(len(x0))], x0.shape[1:])
            t, noise = draw.t.to(self.device), draw.noise.to(self.device)
            last.update(x0=x0, noise=noise, t=t, x_t=noised(x0, noise, t, check=False))
            return {"x_t": last["x_t"], "t": last["t"]}

        def base(output: Tensor, _: Tensor, shd: SHD | None) -> Terms:
            taught = None
            if options["base"] == "kd":
                with torch.no_grad():
                    taught = self.teacher(last["x_t"], last["t"])
            given = output, last["x0"], last["noise"], last["t"]
            return diffusion(*given, teacher_output=taught, shd=shd, check=False)

        def evaluate(forward: Forward) -> dict[str, float]:
            made = self._moments(self._sample(forward, seed))
            return {f"{name}_distance": frechet_distance(made, own) for name, own in self.moments.items()}

        rivals, data = self._rivals(arm, student), (self.train_images, self.classifier, self.teacher)
        course = Course(student, len(self.train_images), batch, base, evaluate, rivals, data=data)
        return train(
            course,
            beta=options["beta"],
            steps=self.settings["steps"],
            batch=self.settings["batch"],
            rate=self.settings["rate"] * (1.0 if options["start"] == "random" else self.settings["start_rate"]),
            seed=seed,
        )

    def _make_student(self, options: Mapping[str, Any]) -> Denoiser:
        sizes = self.settings["student"]
        if options["start"] == "random":
            return Denoiser(self.size, sizes["width"], options["heads"], sizes["layers"]).to(self.device)
        layers = [layer for _, layer in layer_map(len(self.teacher.blocks), sizes["layers"])]
        x0 = self.train_images[:64]
        t, noise = torch.arange(len(x0), device=self.device) * STEPS // len(x0), torch.randn_like(x0)
        student = squeeze_denoiser(self.teacher, options["heads"], layers, noised(x0, noise, t), t, options["plan"])
        if student.width != sizes["width"]:
            raise ValueError(f"a squeezed denoiser has its teacher's width of {student.width}; got {sizes['width']}")
        return student

    def _rivals(self, arm: Arm, student: Any) -> list[tuple[Rival, Teach]]:
        """Noise differs at every step, so that a teacher teaches live."""
        if arm.method == ALONE:
            return []
        example = {"x_t": torch.randn(16, 1, self.size, self.size), "t": torch.arange(16) * 60}
        example = {name: value.to(self.device) for name, value in example.items()}
        rival = make_rival(arm.method, self.teacher, student, example, plan=arm.options["plan"])
        return [(rival, lambda _, inputs: rival.teach(**inputs))]

    @torch.no_grad()
    def _sample(self, forward: Forward, seed: int) -> Tensor:
        """DDIM without noise, at equal distances of the schedule."""
        kept = (1 - linear_betas(STEPS)).cumprod(0).float()
        draw = torch.Generator().manual_seed(1000 + seed)
        x = torch.randn(self.settings["samples"], 1, self.size, self.size, generator=draw).to(self.device)
        places = list(range(STEPS - 1, -1, -(STEPS // self.settings["sample_steps"])))
        for place, after in zip(places, [*places[1:], None], strict=True):
            t = torch.full((len(x),), place, device=self.device)
            epsilon = torch.cat(
                [forward({"x_t": a, "t": b}) for a, b in zip(x.split(128), t.split(128), strict=True)]
            )
            start = ((x - (1 - kept[place]).sqrt() * epsilon) / kept[place].sqrt()).clamp(-1, 1)
            x = start if after is None else kept[after].sqrt() * start + (1 - kept[after]).sqrt() * epsilon
        return x

    @torch.no_grad()
    def _moments(self, images: Tensor) -> tuple[Any, Any]:
        """Mean and covariance of the classifier's last hidden features."""
        features = self.classifier[:-1](images).double().cpu().numpy()
        return features.mean(0), np.cov(features, rowvar=False)


def frechet_distance(one: tuple[Any, Any], other: tuple[Any, Any]) -> float:
    """``|m - n|^2 + tr(S + T - 2 (S T)^(1/2))`` of two normal distributions."""
    (m, s), (n, t) = one, other
    # The eigenvalues of a product of two covariances are real and at least 0.
    root = np.sqrt(np.linalg.eigvals(s @ t).real.clip(min=0.0)).sum()
    return float(((m - n) ** 2).sum() + np.trace(s + t) - 2 * root)
