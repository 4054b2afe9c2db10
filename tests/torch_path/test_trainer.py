"""SHDTrainer: the base class's training with the term beside it, from a cache and from a live teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="SHDTrainer needs the extra 'hf'")
pytest.importorskip("accelerate", reason="transformers' trainer needs accelerate")
pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
pytest.importorskip("onnxscript", reason="export needs onnxscript")

from shd_ref.teacher.precompute import precompute  # noqa: E402
from shd_ref.teacher.run import PrecomputeOptions, RunOptions  # noqa: E402
from shd_torch import (  # noqa: E402
    BetaSchedule,
    LossBalancer,
    OnlineTeacher,
    ShdError,
    SupervisedDataset,
    attention_kl,
    capture_attention,
    export_teacher,
)
from shd_torch.trainer import SHDTrainer, SupervisedCollator  # noqa: E402

LENGTHS = (12, 7, 9, 12, 3, 12, 5, 8)


def make_model(heads: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                value *= 20  # maps that are not nearly uniform
    return model


def make_samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in LENGTHS:
        ids = torch.randint(3, 30, (length,), generator=generator)
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    return samples


def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence([s[name] for s in samples], batch_first=True, padding_value=value)
        for name, value in fill.items()
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer")
    arrays = {name: value.numpy() for name, value in pad(make_samples()).items() if name != "labels"}
    example = {name: torch.from_numpy(value[:2]) for name, value in arrays.items()}
    teacher = make_model(4, seed=1).eval()
    teacher.set_attn_implementation("eager")
    export_teacher(teacher, example, folder / "teacher.onnx")
    options = PrecomputeOptions(num_student_heads=2, codec="float32")
    precompute(folder / "teacher.onnx", arrays, folder / "cache", options, RunOptions(num_threads=1))
    return folder / "cache"


def make_trainer(out: Path, *, train: Any, **given: Any) -> SHDTrainer:
    arguments = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **given.pop("arguments", {}),
    }
    return SHDTrainer(
        model=given.pop("model", None) or make_model(2, seed=2),
        args=transformers.TrainingArguments(**arguments),
        train_dataset=train,
        data_collator=pad,
        **given,
    )


def weights(trainer: SHDTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


@pytest.mark.slow
def test_a_step_is_what_the_formula_says(cache: Path, tmp_path: Path) -> None:
    joined = SupervisedDataset(make_samples(), cache)
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
def test_accumulated_micro_batches_are_the_batch(cache: Path, tmp_path: Path) -> None:
    joined = SupervisedDataset(make_samples(), cache)
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
def test_a_live_teacher_supervises_as_its_cache_does(cache: Path, tmp_path: Path) -> None:
    cached = make_trainer(tmp_path, train=SupervisedDataset(make_samples(), cache), beta=0.5)
    teacher = OnlineTeacher(make_model(4, seed=1), 2, 2)
    live = make_trainer(tmp_path, train=make_samples(), teacher=teacher, beta=0.5)
    cached.train()
    live.train()
    for one, other in zip(cached.state.log_history[:2], live.state.log_history[:2], strict=True):
        for key in ("loss", "base_loss", "shd_loss", "clipped_alphas"):
            assert one[key] == pytest.approx(other[key], rel=1e-3), key
    both = make_trainer(
        tmp_path, train=SupervisedDataset(make_samples(), cache), teacher=teacher, beta=0.5, temperature=1.0
    )
    both.train()  # the mean of two equal terms
    assert both.state.log_history[0]["shd_loss"] == pytest.approx(cached.state.log_history[0]["shd_loss"], rel=1e-3)


@pytest.mark.slow
def test_evaluation_checkpoints_and_resuming(cache: Path, tmp_path: Path) -> None:
    joined = SupervisedDataset(make_samples(), cache)
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
def test_balancer_and_backends(cache: Path, tmp_path: Path) -> None:
    joined = SupervisedDataset(make_samples(), cache)
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


def test_what_is_refused(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ShdError, match="OnlineTeacher; got neither") as neither:
        make_trainer(tmp_path, train=make_samples(), beta=0.1)
    assert neither.value.code == "argument-value"
    joined = SupervisedDataset(make_samples(), cache)
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
    counts = collate([joined[0], joined[1]])["alpha_counts"]
    assert counts[1] == np.prod(joined[0][1].alphas.shape) * 2
