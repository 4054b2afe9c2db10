"""``KdTerm(exact=True)``: a cache of last states teaches as the whole logits of a live teacher do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.binding.trainer_cases import CLOSE, assert_same, live, make_samples, pad, trained, weights
from support.refusals import refusal

from shd_ref.teacher.options import LAST
from shd_torch import ExactTargets, KdTerm, SupervisedDataset, TeacherHead, kd_loss

ALONE = {"form": "none", "num_student_heads": 0, "codec": "sqrt8-row"}
EXACT = {**ALONE, "hidden": (LAST,), "hidden_codec": "float32"}


@pytest.mark.parametrize(
    "options",
    [
        {"divergence": "jsd", "rows": "next_labels"},
        {"temperature": 2.0, "divergence": "reverse_kl", "vocab_size": 30},
    ],
    ids=["jsd", "reverse"],
)
def test_it_is_the_live_teachers_logits(options: dict[str, Any], cached: Callable[..., Path], tmp_path: Path) -> None:
    joined = SupervisedDataset(make_samples(), cached(**EXACT))
    arguments = {"max_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    free = trained(tmp_path, train=joined, arguments=arguments, kd=KdTerm(0.5, exact=True, **options))
    kd = KdTerm(0.5, exact=True, **options)
    taught = trained(tmp_path, train=make_samples(), teacher=live(), arguments=arguments, kd=kd)
    for first, second in zip(free.state.log_history[:-1], taught.state.log_history[:-1], strict=True):
        assert first["kd_loss"] == pytest.approx(second["kd_loss"], rel=1e-5)
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    assert_same(weights(free), weights(taught), **CLOSE)


def test_a_loop_of_ones_own_takes_states_and_head(cached: Callable[..., Path]) -> None:
    """Packed into one buffer beside attention and top-k logits, padded rows left out."""
    folder = cached(hidden=(1, LAST), hidden_codec="float16", logits="topk", logits_top=30, logits_bits=16)
    joined = SupervisedDataset(make_samples(), folder)
    batch = joined.collate_with(pad)([joined[index] for index in (1, 4, 0)])[1]
    states, mask = batch.last_states(13), batch.query_mask(13)
    assert states is not None
    assert states.shape == (3, 13, 16)
    assert batch.last_states(12).abs().sum(-1)[~batch.query_mask(12)].sum() == 0
    logits = torch.randn(3, 13, 30, generator=torch.Generator().manual_seed(0))
    losses = [
        kd_loss(targets, logits, loss_mask=mask).item()
        for targets in (ExactTargets(states, TeacherHead.read(folder)), batch.targets(13))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_cache_without_last_states_is_refused(cached: Callable[..., Path], tmp_path: Path) -> None:
    joined = SupervisedDataset(make_samples(), cached(**ALONE, logits="topk", logits_top=8))
    with refusal("cache-mismatch", "--hidden last"):
        trained(tmp_path, train=joined, kd=KdTerm(exact=True))
    with refusal("argument-value", "exact targets"):
        TeacherHead.read(joined.cache)
    with refusal("cache-mismatch", "--logits"):
        trained(tmp_path, train=SupervisedDataset(make_samples(), cached(**EXACT)), kd=KdTerm())
