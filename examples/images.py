"""Augmented images: a smaller ViT is distilled, and every cached map belongs to exactly the crop used in training.

    python make_data.py images              # or bring vit/, images.npy (N, 3, H, W), labels.npy, and test files
    shd-torch export vit --out vit.onnx
    shd-torch shrink vit --heads 3 --layers 2 --data images.npy --out small_vit
    python images.py precompute
    python images.py train

Pixels come from your image processor. The rule: an augmentation is a pure function of the sample and an integer seed.
`precompute` assigns a seed to every view of an image, runs the teacher on the augmented images, and stores the seeds
with the maps. In training `SupervisedDataset` calls the same function with the stored seed and compares the hash of
its result with the teacher's: an augmentation that depends on anything else raises an error instead of a silent
mismatch. It prints about

    accuracy: teacher 97-99%, student 82-84% before and 99% after training
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from shd_ref.teacher.options import PrecomputeOptions
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.sources import IndexedSource, Row
from shd_torch import KdTerm, SHDTrainer, SupervisedDataset, load_student


def main() -> None:
    """Precompute, or train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("precompute", "train"))
    parser.add_argument("--views", type=int, default=2, help="augmented views of each image")
    parser.add_argument("--epochs", type=float, default=2)
    given = parser.parse_args()
    if given.step == "precompute":
        run_teacher(given.views)
    else:
        train(given.views, given.epochs)


def augment(sample: dict[str, Any], seed: int) -> dict[str, Any]:
    """A shifted, dimmed and noisy view. Every random choice comes from the seed."""
    rng = np.random.default_rng(seed)
    shift = rng.integers(-2, 3, 2)
    pixels = np.roll(sample["pixel_values"], shift, axis=(1, 2)) * rng.uniform(0.8, 1.2)
    pixels = pixels + rng.normal(0, 0.1, pixels.shape)
    return {**sample, "pixel_values": pixels.astype(np.float32)}
    # With torchvision: with torch.random.fork_rng(devices=[]): torch.manual_seed(seed); pixels = transform(pixels)


class Images(torch.utils.data.Dataset[dict[str, Any]]):
    """Images with labels, repeated `views` times, so that every augmented view is a sample."""

    def __init__(self, prefix: str = "", views: int = 1) -> None:
        self.pixels = np.load(f"{prefix}images.npy", mmap_mode="r")
        self.labels = np.load(f"{prefix}labels.npy")
        self.views = views

    def __len__(self) -> int:
        return self.views * len(self.pixels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = index % len(self.pixels)
        return {"pixel_values": np.array(self.pixels[image]), "labels": self.labels[image]}


class Views(IndexedSource):
    """The teacher's inputs: augmented images, generated one by one, and their seeds. No copy is stored on disk."""

    name, columns = "augmented images", ("pixel_values", "seed")

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def row(self, index: int, columns: Sequence[str]) -> Row:
        """One view; its number is its seed."""
        made: Row = {"seed": np.asarray(index)}
        if "pixel_values" in columns:
            made["pixel_values"] = augment(self.images[index], seed=index)["pixel_values"]
        return {name: made[name] for name in columns}


def run_teacher(views: int) -> None:
    """As `shd precompute --student small_vit --seed-column seed --logits float16`, from Python."""
    from shd_ref.shrink.student import read_student

    student = read_student("small_vit")
    options = PrecomputeOptions(
        num_student_heads=student.num_heads,
        num_student_layers=student.num_layers,
        layer_pairs=student.layer_pairs,
        plans=student.plans,
        seed_column="seed",
        logits="float16",
    )
    summary = precompute("vit.onnx", Views(Images(views=views)), "vit_cache", options)
    print(f"{summary.samples} views, {summary.coded_bytes / 1e6:.1f} MB")


def train(views: int, epochs: float) -> None:
    """Train and compare; evaluation uses the original images."""
    arguments = transformers.TrainingArguments(
        "trained_vit",
        num_train_epochs=epochs,
        learning_rate=5e-4,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
    )
    trainer = SHDTrainer(
        model=load_student("small_vit"),
        args=arguments,
        train_dataset=SupervisedDataset(Images(views=views), "vit_cache", augment=augment),
        eval_dataset=Images("test_"),
        compute_metrics=accuracy,
        beta=0.02,
        kd=KdTerm(temperature=2.0),
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = trainer.evaluate()["eval_accuracy"]
    trainer.save_model("trained_vit")
    teacher = transformers.AutoModelForImageClassification.from_pretrained("vit")
    best = transformers.Trainer(teacher, arguments, compute_metrics=accuracy).evaluate(Images("test_"))
    print(
        f"accuracy: teacher {best['eval_accuracy']:.1%}, student {before:.1%} before and {after:.1%} after training"
    )


def accuracy(predicted: transformers.EvalPrediction) -> dict[str, float]:
    """Share of samples whose largest logit is the label's."""
    return {"accuracy": float(np.mean(predicted.predictions.argmax(-1) == predicted.label_ids))}


if __name__ == "__main__":
    main()
