"""SHDTrainer: the base class's training with the term beside it, from a cache and from a live teacher."""

from pathlib import Path

import numpy as np
from support.binding.trainer_cases import make_model, make_samples, make_trainer, pad
from support.refusals import refusal

from shd_torch import SupervisedDataset
from shd_torch.training.batch import SupervisedCollator


def test_what_is_refused(trainer_cache: Path, tmp_path: Path) -> None:
    with refusal("argument-value", "OnlineTeacher; got neither"):
        make_trainer(tmp_path, train=make_samples(), beta=0.1)
    joined = SupervisedDataset(make_samples(), trainer_cache)
    with refusal("cache-mismatch", "num_student_heads must be 2"):
        make_trainer(tmp_path, train=joined, model=make_model(4, seed=2), beta=0.1)
    with refusal("argument-value", "temperature must be 1, which the maps were softened with.*--temperature 2"):
        make_trainer(tmp_path, train=joined, beta=0.5, kl={"temperature": 2.0}).train()
    collate = SupervisedCollator(pad, joined.cache.manifest, joined.layers)
    assert set(collate([make_samples()[0]])) == {"input_ids", "attention_mask", "labels"}
    left = SupervisedCollator(
        lambda samples: {name: value.flip(1) for name, value in pad(samples).items()},
        joined.cache.manifest,
        joined.layers,
    )
    with refusal("inputs-invalid", "padding_side to 'right'"):
        left([joined[0], joined[1]])
    counts = collate([joined[0], joined[1]])["tallies"]["attention"]
    assert counts[1] == np.prod(joined[0][1].parts["alphas"].shape) * 2
