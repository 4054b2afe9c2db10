"""SHDTrainer with what the base class offers: autocast, compilation, checkpointing, adapters, streams, resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.binding.trainer_cases import (
    CLOSE,
    assert_same,
    make_model,
    make_samples,
    make_trainer,
    pad,
    trained,
    weights,
)
from support.refusals import refusal

from shd_torch import (
    BetaSchedule,
    HiddenTerm,
    OnlineTeacher,
    ShdError,
    SupervisedDataset,
    SupervisedStream,
    capture_attention,
    layer_kls,
)
from shd_torch.training import trainer


def test_bf16_is_autocast_of_the_formula(trainer_cache: Path, tmp_path: Path) -> None:
    joined = SupervisedDataset(make_samples(), trainer_cache)
    arguments = {
        "bf16": True,
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "train_sampling_strategy": "sequential",  # another order would round sums in bfloat16 another way
    }
    trainer = make_trainer(tmp_path, train=joined, beta=0.5, arguments=arguments)
    taught = trainer.data_collator([joined[index] for index in range(len(joined))])["supervision"]
    trainer.train()
    student, batch = make_model(2, seed=2), pad(make_samples())
    with capture_attention(student) as captured, torch.autocast("cpu", torch.bfloat16):
        outputs = student(**batch)
    assert outputs.logits.dtype == torch.bfloat16
    terms = layer_kls(captured, taught, loss_mask=batch["attention_mask"].bool())
    (outputs.loss + 0.5 * torch.stack(list(terms.values())).sum()).backward()
    stepped = {name: value.detach() - 0.01 * value.grad for name, value in student.named_parameters()}
    assert all(value.dtype == torch.float32 for value in weights(trainer).values())
    assert_same(weights(trainer), stepped, **CLOSE)
    assert trainer.state.log_history[0]["shd_loss"] == pytest.approx(
        sum(term.item() for term in terms.values()), rel=1e-4
    )


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's own
def test_of_an_adapted_student_the_adapter_learns_and_is_saved(trainer_cache: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="adapters")
    joined = SupervisedDataset(make_samples(), trainer_cache)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    frozen = make_model(2, seed=2)
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def train(out: Path, resumed: Path | None) -> Any:
        torch.manual_seed(5)
        adapted = peft.get_peft_model(make_model(2, seed=2), config)
        trainer = make_trainer(out, train=joined, model=adapted, beta=0.5, arguments=arguments)
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
        return trainer

    trainer = train(tmp_path / "a", None)
    state = trainer.model.base_model.model.state_dict()
    for name, value in frozen.state_dict().items():
        assert torch.equal(state[name if name in state else name.replace(".weight", ".base_layer.weight")], value), (
            name
        )
    checkpoint = tmp_path / "a" / "checkpoint-2"
    assert not (checkpoint / "model.safetensors").exists()
    saved, last = (load_file(tmp_path / "a" / f"checkpoint-{n}" / "adapter_model.safetensors") for n in (2, 4))
    assert {name.split(".lora_")[1][0] for name in saved} == {"A", "B"}
    assert all(not torch.equal(saved[name], last[name]) for name in saved)
    assert_same(weights(train(tmp_path / "b", checkpoint)), weights(trainer))


@pytest.mark.parametrize("data", ["joined", "stream"])
def test_resuming_in_mid_epoch_changes_nothing(data: str, trainer_cache: Path, tmp_path: Path) -> None:
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "optim": "adamw_torch"}  # 4 an epoch
    arguments |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}

    def train(out: Path, resumed: Path | None) -> Any:
        train = (SupervisedDataset if data == "joined" else SupervisedStream)(make_samples(), trainer_cache)
        trainer = make_trainer(out, train=train, beta=lambda progress: 0.6 * (1 - progress), arguments=arguments)
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
        return trainer

    whole = train(tmp_path / "a", None)
    resumed = train(tmp_path / "b", tmp_path / "a" / "checkpoint-3")
    assert_same(weights(resumed), weights(whole))
    for key in ("loss", "base_loss", "shd_loss", "beta", "clipped_alphas"):
        logged = [[log[key] for log in each.state.log_history if key in log] for each in (whole, resumed)]
        assert len(logged[0]) == 6
        assert logged[0] == logged[1], key


def test_a_term_that_ends_early_costs_nothing_then_and_changes_nothing(trainer_cache: Path, tmp_path: Path) -> None:
    """As a weight of 0 from there on, which is still measured."""

    def train(out: Path, beta: Any) -> Any:
        dataset = SupervisedDataset(make_samples(), trainer_cache)
        trainer = make_trainer(out, train=dataset, beta=beta, arguments={"max_steps": 6})
        trainer.train()
        return trainer

    early = train(tmp_path / "a", BetaSchedule(0.6, until=0.5))
    zeroed = train(tmp_path / "b", lambda progress: 0.6 if progress < 0.5 else 0.0)
    assert_same(weights(early), weights(zeroed))
    steps = [[log["step"] for log in each.state.log_history if "shd_loss" in log] for each in (early, zeroed)]
    assert steps == [[1, 2, 3], [1, 2, 3, 4, 5, 6]]


class KilledError(Exception):
    pass


def test_a_checkpoint_that_was_killed_is_passed_over(
    trainer_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}

    def make(out: str) -> Any:
        dataset = SupervisedDataset(make_samples(), trainer_cache)
        return make_trainer(tmp_path / out, train=dataset, beta=0.5, arguments=arguments)

    usual = transformers.TrainerState.save_to_json

    def save_half(state: transformers.TrainerState, path: str) -> None:
        usual(state, path)
        if state.global_step == 4:
            expected = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"}
            assert expected <= {file.name for file in Path(path).parent.iterdir()}  # all others come before
            Path(path).write_text(Path(path).read_text()[:-20])
            raise KilledError

    whole = make("a")
    whole.train()
    with monkeypatch.context() as patched:
        patched.setattr(transformers.TrainerState, "save_to_json", save_half)
        with pytest.raises(KilledError):
            make("b").train()
    assert trainer.last_checkpoint(tmp_path / "b") == tmp_path / "b" / "checkpoint-2"
    again = make("b")
    again.train(resume_from_checkpoint=True)
    assert_same(weights(again), weights(whole))


def test_samples_are_grouped_by_length(trainer_cache: Path, tmp_path: Path) -> None:
    joined = SupervisedDataset(make_samples(), trainer_cache)
    arguments = {"train_sampling_strategy": "group_by_length", "max_steps": 2}
    trainer = trained(tmp_path, train=joined, eval_dataset=joined, beta=0.5, arguments=arguments)
    assert "shd_loss" in trainer.state.log_history[0]
    with torch.no_grad():  # the student's own loss alone
        own = float(trainer.model.eval()(**pad(make_samples())).loss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(own, rel=1e-4)
    lengths = [len(joined.sample(index)["input_ids"]) for index in trainer._get_train_sampler()]
    assert lengths[:4] == sorted(lengths[:4], reverse=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_trains_as_the_same_data_in_that_order(workers: int, trainer_cache: Path, tmp_path: Path) -> None:
    arguments = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "dataloader_num_workers": workers,
    }
    samples = make_samples()
    # Two workers read every other sample each, and give whole batches in turn.
    order = samples if workers == 0 else samples[::2] + samples[1::2]
    joined = trained(
        tmp_path,
        train=SupervisedDataset(order, trainer_cache),
        beta=0.5,
        arguments=arguments | {"dataloader_num_workers": 0},
    )
    stream = trained(tmp_path, train=SupervisedStream(samples, trainer_cache), beta=0.5, arguments=arguments)
    assert_same(weights(stream), weights(joined))
    assert stream.state.log_history[2]["shd_loss"] == joined.state.log_history[2]["shd_loss"]


def test_what_a_stream_cannot_do_is_refused(trainer_cache: Path, tmp_path: Path) -> None:
    stream = SupervisedStream(make_samples(), trainer_cache)
    trainer = make_trainer(tmp_path, train=stream, eval_dataset=stream, beta=0.5)
    for evaluate in (trainer.evaluate, lambda: trainer.predict(stream)):
        with refusal("argument-value", "got a SupervisedStream"):
            evaluate()


def without_labels(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = pad([sample | {"labels": sample["input_ids"]} for sample in samples])
    return {name: value for name, value in batch.items() if name != "labels"}


def headless(heads: int, seed: int) -> Any:
    """A base model, which returns no loss and no logits."""
    return make_model(heads, seed).model


WHOLE = {"max_steps": 1, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
PARTS = {"max_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize("collate", [pad, without_labels])
def test_terms_alone_are_a_loss(tmp_path: Path, collate: Any) -> None:
    """Of a student without a head, also where its batches have labels; and its evaluation is their sum."""
    teacher = OnlineTeacher(headless(4, 1), 2, 2, hidden_layers=(2,))
    terms: dict[str, Any] = {"beta": 0.3, "hidden": HiddenTerm([(2, 2)], weight=0.5), "teacher": teacher}
    runs = {}
    for name, arguments in (("whole", WHOLE), ("parts", PARTS)):
        trainer = make_trainer(
            tmp_path,
            train=make_samples(),
            model=headless(2, 2),
            collate=collate,
            eval_dataset=make_samples(),
            arguments=arguments | {"remove_unused_columns": collate is without_labels},
            **terms,
        )
        before = trainer.evaluate()["eval_loss"] if name == "whole" else None
        trainer.train()
        logged = trainer.state.log_history[-2]
        expected = 0.3 * logged["shd_loss"] + 0.5 * logged["hidden_loss"]
        assert logged["loss"] == pytest.approx(expected, rel=1e-4)
        assert "base_loss" not in logged
        assert before is None or before == pytest.approx(expected, rel=1e-4)
        runs[name] = weights(trainer)
    assert_same(runs["parts"], runs["whole"], **CLOSE)


def test_what_a_student_without_a_head_cannot_do(trainer_cache: Path, tmp_path: Path) -> None:
    joined, plain = SupervisedDataset(make_samples(), trainer_cache), make_samples()
    arguments: dict[str, Any] = {"train": joined, "beta": 0.3, "eval_dataset": plain, "collate": without_labels}
    message = "eval_dataset must be a SupervisedDataset, or teacher an OnlineTeacher, as a LlamaModel returns no loss"
    with pytest.raises(ShdError, match=message):
        make_trainer(tmp_path, model=headless(2, 2), arguments={"eval_strategy": "steps"}, **arguments)
    trainer = make_trainer(tmp_path, model=headless(2, 2), **arguments)
    with pytest.raises(ShdError, match=message):
        trainer.evaluate()
    trainer = make_trainer(tmp_path, model=headless(2, 2), compute_metrics=lambda _: {"of": 1.0}, **arguments)
    assert "eval_loss" not in trainer.evaluate()
    arguments["beta"] = BetaSchedule(0.3, until=0.5)
    trainer = make_trainer(tmp_path, model=headless(2, 2), **arguments)
    with pytest.raises(ShdError, match="beta must last to the end of training, as a LlamaModel has no other loss"):
        trainer.train()
