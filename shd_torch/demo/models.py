"""The demo's data and teacher: scikit-learn's digits, and a small vision transformer trained on every label."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

IMAGE_SIZE = 8
NUM_CLASSES = 10
PATCH_SIZE = 2
TEACHER_HEADS = 8
TEACHER_LAYERS = 4
TEACHER_WIDTH = 64


class Digits(NamedTuple):
    """Images ``(N, 1, 8, 8)`` float32 in [0, 1] and labels ``(N,)`` int64."""

    train_images: NDArray[np.float32]
    test_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_labels: NDArray[np.int64]


def load_split() -> Digits:
    """30% of the images, stratified by class, are kept for testing: no model trains on them."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data: Any = load_digits()
    images = (data.images / 16.0).astype(np.float32)[:, None]
    labels = data.target.astype(np.int64)
    return Digits(*train_test_split(images, labels, test_size=0.3, stratify=labels, random_state=0))


def choose_labelled(labels: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Indices of ``count`` training images, as many of each class as possible, drawn with the seed."""
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    rank = np.zeros(len(labels), dtype=np.int64)  # how many of its class come before an image in the shuffle
    for digit in range(NUM_CLASSES):
        members = shuffled[labels[shuffled] == digit]
        rank[members] = np.arange(len(members))
    return np.sort(shuffled[np.argsort(rank[shuffled], kind="stable")][:count])


def fit_linear(digits: Digits, count: int, seed: int) -> float:
    """Test accuracy of logistic regression on the pixels of the images whose labels a student of this seed sees."""
    from sklearn.linear_model import LogisticRegression

    chosen = choose_labelled(digits.train_labels, count, seed)
    model = LogisticRegression(max_iter=2000)
    model.fit(digits.train_images[chosen].reshape(count, -1), digits.train_labels[chosen])
    return float(model.score(digits.test_images.reshape(len(digits.test_images), -1), digits.test_labels))


def make_teacher() -> Any:
    """Untrained: 8 heads of 8 entries, 4 layers, 17 positions (the class token and 16 patches)."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        num_channels=1,
        hidden_size=TEACHER_WIDTH,
        intermediate_size=2 * TEACHER_WIDTH,
        num_hidden_layers=TEACHER_LAYERS,
        num_attention_heads=TEACHER_HEADS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = NUM_CLASSES
    return ViTForImageClassification(config)


def train_teacher(digits: Digits, *, epochs: int, on_epoch: Callable[[int, int], None]) -> Any:
    """A good teacher: all training labels, label smoothing, one-cycle schedule; seeded."""
    teacher = make_teacher()
    images, labels = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    batch_size, rate = 64, 2e-3
    steps = len(images) // batch_size
    optimizer = torch.optim.AdamW(teacher.parameters(), rate, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, epochs * steps)
    generator = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=generator)[: steps * batch_size]
        for chosen in torch.split(order, batch_size):
            loss = F.cross_entropy(teacher(images[chosen]).logits, labels[chosen], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it without a type
            optimizer.step()
            schedule.step()
        on_epoch(epoch + 1, epochs)
    return teacher.eval()


@torch.no_grad()
def measure_accuracy(model: Any, images: NDArray[Any], labels: NDArray[Any]) -> float:
    """Share of images whose largest logit is their label."""
    predicted = model.eval()(torch.from_numpy(images)).logits.argmax(-1)
    return float((predicted == torch.from_numpy(labels)).float().mean())
