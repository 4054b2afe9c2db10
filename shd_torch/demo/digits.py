"""Scikit-learn's handwritten digits, split once: 1,257 images to train, 540 to test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IMAGE_SIZE = 8
NUM_CLASSES = 10


@dataclass(frozen=True)
class Digits:
    """Images ``(N, 1, 8, 8)`` float32 in [0, 1] and labels ``(N,)`` int64."""

    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]


def load_split(seed: int = 0) -> Digits:
    """30% of the images, stratified by class, are kept for testing: no model trains on them."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data: Any = load_digits()
    images = (data.images / 16.0).astype(np.float32)[:, None]
    labels = data.target.astype(np.int64)
    parts = train_test_split(images, labels, test_size=0.3, stratify=labels, random_state=seed)
    train_images, test_images, train_labels, test_labels = parts
    return Digits(train_images, train_labels, test_images, test_labels)


def choose_labelled(labels: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Indices of ``count`` training images, as many of each class as possible, drawn with the seed."""
    if count >= len(labels):
        return np.arange(len(labels))
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(len(labels))
    rank = np.zeros(len(labels), dtype=np.int64)  # how many of its class come before an image in the shuffle
    for digit in range(NUM_CLASSES):
        members = shuffled[labels[shuffled] == digit]
        rank[members] = np.arange(len(members))
    order = sorted(shuffled, key=lambda index: rank[index])
    return np.sort(np.asarray(order[:count], dtype=np.int64))
