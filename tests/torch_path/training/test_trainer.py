"""SHDTrainer: the base class's training with the term beside it, from a cache and from a live teacher."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="SHDTrainer needs the extra 'hf'")
pytest.importorskip("accelerate", reason="transformers' trainer needs accelerate")
pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
pytest.importorskip("onnxscript", reason="export needs onnxscript")

from support.binding.trainer_cases import (
    LENGTHS,
    make_model,
    make_samples,
    make_trainer,
    pad,
    weights,
)

from shd_torch import (
    BetaSchedule,
    LossBalancer,
    OnlineTeacher,
    ShdError,
    SupervisedDataset,
    attention_kl,
    capture_attention,
)
from shd_torch.training.collator import SupervisedCollator


def test_samples_that_change_after_joining_stop_the_training(trainer_cache: Path, tmp_path: Path) -> None:
    samples = make_samples()
    trainer = make_trainer(tmp_path, train=SupervisedDataset(samples, trainer_cache), beta=0.3)
    samples.reverse()
    with pytest.raises(ShdError, match="its record") as caught:
        trainer.train()
    assert caught.value.code == "inputs-invalid"


@pytest.mark.slow
def test_a_step_is_what_the_formula_says(trainer_cache: Path, tmp_path: Path) -> None:
    joined = SupervisedDataset(make_samples(), trainer_cache)
    trainer = make_trainer(
        tmp_path, train=joined, beta=0.3, arguments={"max_steps": 1, "per_device_train_batch_size": 8}
    )
    student = make_model(2, seed=2)
    batch = pad(make_samples())
    with capture_attention(student) as captured:
        base = student(**batch).loss
    maps = trainer.data_collator([joined[i] for i in range(8)])["supervision"].decode()
    calls = captured.calls
    terms = [attention_kl(c.query, c.key, m, **c.mask_keywords) for c, m in zip(calls, maps, strict=True)]
    loss = base + 0.3 * torch.stack(terms).sum()
    loss.backward()
    trainer.train()
    after = weights(trainer)
    for name, value in student.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(after[name], value.detach() - 0.01 * value.grad, rtol=1e-4, atol=1e-6, msg=name)
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert logged["base_loss"] == pytest.approx(base.item(), rel=1e-5)
    assert logged["shd_loss"] == pytest.approx(sum(term.item() for term in terms), rel=1e-4)
    for layer, term in enumerate(terms):
        assert logged[f"shd_loss_layer_{layer}"] == pytest.approx(term.item(), rel=1e-4)
    assert logged["beta"] == pytest.approx(0.3)
    assert 0 <= logged["clipped_alphas"] <= 1
    assert logged["wait_seconds"] > 0


@pytest.mark.slow
def test_accumulated_micro_batches_are_the_batch(trainer_cache: Path, tmp_path: Path) -> None:
    joined = SupervisedDataset(make_samples(), trainer_cache)
    whole = make_trainer(tmp_path, train=joined, beta=0.3, arguments={"per_device_train_batch_size": 8})
    parts = make_trainer(
        tmp_path,
        train=joined,
        beta=0.3,
        arguments={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    )
    whole.train()
    parts.train()
    for name, value in weights(parts).items():
        torch.testing.assert_close(value, weights(whole)[name], rtol=1e-4, atol=1e-6, msg=name)
    for one, other in zip(whole.state.log_history[:2], parts.state.log_history[:2], strict=True):
        for key in ("loss", "base_loss", "shd_loss", "shd_loss_layer_1", "clipped_alphas"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key


@pytest.mark.slow
def test_a_live_teacher_supervises_as_its_cache_does(trainer_cache: Path, tmp_path: Path) -> None:
    cached = make_trainer(tmp_path, train=SupervisedDataset(make_samples(), trainer_cache), beta=0.5)
    teacher = OnlineTeacher(make_model(4, seed=1), 2, 2)
    live = make_trainer(tmp_path, train=make_samples(), teacher=teacher, beta=0.5)
    cached.train()
    live.train()
    for one, other in zip(cached.state.log_history[:2], live.state.log_history[:2], strict=True):
        for key in ("loss", "base_loss", "shd_loss", "clipped_alphas"):
            assert one[key] == pytest.approx(other[key], rel=1e-3), key
    both = make_trainer(
        tmp_path, train=SupervisedDataset(make_samples(), trainer_cache), teacher=teacher, beta=0.5, temperature=1.0
    )
    both.train()  # the mean of two equal terms
    assert both.state.log_history[0]["shd_loss"] == pytest.approx(cached.state.log_history[0]["shd_loss"], rel=1e-3)


@pytest.mark.slow
def test_evaluation_checkpoints_and_resuming(trainer_cache: Path, tmp_path: Path) -> None:
    joined = SupervisedDataset(make_samples(), trainer_cache)
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    trainer = make_trainer(
        tmp_path / "a", train=joined, eval_dataset=joined, beta=BetaSchedule(0.4, "linear"), arguments=arguments
    )
    trainer.train()
    betas = [log["beta"] for log in trainer.state.log_history if "beta" in log]
    assert betas == pytest.approx([0.4, 0.3, 0.2, 0.1])
    evaluated = trainer.evaluate()
    with torch.no_grad():
        sums = [float(trainer.model.eval()(**pad(make_samples()[i : i + 8])).loss) for i in (0,)]
    assert evaluated["eval_loss"] == pytest.approx(sums[0], rel=1e-4)  # the base loss alone
    assert len(trainer.predict(joined).predictions) == len(LENGTHS)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "a" / "checkpoint-2" / "model.safetensors")
    assert set(saved) == set(make_model(2, seed=2).state_dict())  # the student and nothing else
    again = make_trainer(tmp_path / "b", train=joined, beta=BetaSchedule(0.4, "linear"), arguments=arguments)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    for name, value in weights(again).items():
        torch.testing.assert_close(value, weights(trainer)[name], msg=name)
    for key in ("base_loss", "shd_loss", "beta", "clipped_alphas"):
        logged = [[log[key] for log in each.state.log_history if key in log] for each in (again, trainer)]
        assert logged[0] == pytest.approx(logged[1]), key


@pytest.mark.slow
def test_balancer_and_backends(trainer_cache: Path, tmp_path: Path) -> None:
    joined = SupervisedDataset(make_samples(), trainer_cache)
    balanced = make_trainer(tmp_path, train=joined, beta=0.5, balancer=LossBalancer(1.0), arguments={"max_steps": 1})
    balanced.train()
    log = balanced.state.log_history[0]
    assert log["loss"] == pytest.approx(1.5 * log["base_loss"], rel=1e-4)
    runs = []
    for backend in ("dense", "sdpa"):
        trainer = make_trainer(tmp_path, train=joined, beta=0.5, kl={"backend": backend})
        trainer.train()
        runs.append(weights(trainer))
    for name, value in runs[0].items():
        torch.testing.assert_close(value, runs[1][name], rtol=1e-4, atol=1e-6, msg=name)


def test_what_is_refused(trainer_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ShdError, match="OnlineTeacher; got neither") as neither:
        make_trainer(tmp_path, train=make_samples(), beta=0.1)
    assert neither.value.code == "argument-value"
    joined = SupervisedDataset(make_samples(), trainer_cache)
    with pytest.raises(ShdError, match="num_student_heads must be 2") as heads:
        make_trainer(tmp_path, train=joined, model=make_model(4, seed=2), beta=0.1)
    assert heads.value.code == "cache-mismatch"
    collate = SupervisedCollator(pad, joined.cache.manifest, joined.layers)
    assert set(collate([make_samples()[0]])) == {"input_ids", "attention_mask", "labels"}
    left = SupervisedCollator(
        lambda samples: {name: value.flip(1) for name, value in pad(samples).items()},
        joined.cache.manifest,
        joined.layers,
    )
    with pytest.raises(ShdError, match="padding_side to 'right'") as padded:
        left([joined[0], joined[1]])
    assert padded.value.code == "inputs-invalid"
    counts = collate([joined[0], joined[1]])["tallies"]["attention"]
    assert counts[1] == np.prod(joined[0][1].parts["alphas"].shape) * 2
