"""SHDTrainer with terms on logits and hidden states: what each adds, and where options meet."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.binding.trainer_cases import (
    CLOSE,
    assert_same,
    live,
    make_model,
    make_samples,
    make_trainer,
    pad,
    trained,
    weights,
)
from support.refusals import refusal

from shd_torch import BetaSchedule, OnlineTeacher, ShdError, capture_attention, hidden_loss, kd_loss, layer_kls
from shd_torch.kd import ExactTargets, TeacherHead, kd_targets_topk
from shd_torch.training import HiddenTerm, KdTerm

WHOLE = {"max_steps": 1, "per_device_train_batch_size": 8}


def stepped(student: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {name: value.detach() - 0.01 * value.grad for name, value in student.named_parameters()}


def test_a_step_is_what_the_formula_says(tmp_path: Path) -> None:
    """All three terms together; the rows of KD are those whose next label counts."""
    kd = KdTerm(0.7, temperature=2.0, rows="next_labels")
    hidden = HiddenTerm([(1, 1), (2, 2)], weight=BetaSchedule(0.3), distance="cosine")
    teacher = live(hidden_layers=[1, 2])
    trainer = trained(
        tmp_path, train=make_samples(), teacher=teacher, beta=0.4, kd=kd, hidden=hidden, arguments=WHOLE
    )
    student, batch = make_model(2, seed=2), pad(make_samples())
    seen = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        output = make_model(4, seed=1).eval()(**seen, output_hidden_states=True)
    mask = batch["attention_mask"].bool()
    with capture_attention(student) as captured:
        own = student(**batch, output_hidden_states=True)
    kls = layer_kls(captured, live()(**seen), loss_mask=mask)
    counted = torch.zeros_like(mask)
    counted[:, :-1] = batch["labels"][:, 1:] != -100
    on_logits = kd_loss(output.logits, own.logits, temperature=2.0, loss_mask=counted)
    on_states = {
        k: hidden_loss(own.hidden_states[k], output.hidden_states[k], distance="cosine", loss_mask=mask)
        for k in (1, 2)
    }
    shd, states = torch.stack(list(kls.values())).sum(), on_states[1] + on_states[2]
    loss = own.loss + 0.4 * shd + 0.7 * on_logits + 0.3 * states
    assert_same(weights(trainer), stepped(student, loss), **CLOSE)
    logged = trainer.state.log_history[0]
    expected = {"loss": loss, "base_loss": own.loss, "shd_loss": shd, "kd_loss": on_logits, "hidden_loss": states}
    expected |= {f"hidden_loss_layer_{layer}": value for layer, value in on_states.items()}
    expected |= {"beta": 0.4, "kd_weight": 0.7, "hidden_weight": 0.3}
    for name, value in expected.items():
        assert logged[name] == pytest.approx(float(torch.as_tensor(value).detach()), rel=1e-4), name


@pytest.mark.slow
def test_two_teachers_are_averaged(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path, train=make_samples(), teacher=[live(1), live(5)], kd=KdTerm(temperature=1.5), arguments=WHOLE
    )
    student, batch = make_model(2, seed=2), pad(make_samples())
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        logits = [make_model(4, seed=seed).eval()(**batch).logits for seed in (1, 5)]
    own = student(**batch)
    terms = [kd_loss(each, own.logits, temperature=1.5, loss_mask=mask) for each in logits]
    assert_same(weights(trainer), stepped(student, own.loss + torch.stack(terms).mean()), **CLOSE)
    logged = trainer.state.log_history[0]
    assert not {"shd_loss", "beta", "clipped_alphas"} & set(logged)  # no term on attention was asked for


def test_a_live_teacher_lets_go_of_what_it_has_read() -> None:
    seen = {name: value for name, value in pad(make_samples()).items() if name != "labels"}
    taught = live(hidden_layers=[2, 0])(**seen)
    assert taught.output.hidden_states is None
    assert list(taught.hidden_states()) == [0, 2]
    assert taught.targets() is taught.output.logits  # no copy


@pytest.mark.slow
def test_projectors_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    """A student of another width gets a linear layer a pair; its model file holds the student alone."""
    wide = make_model(4, seed=1, width=24)
    arguments = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}

    def make(folder: str, **options: Any) -> Any:
        return make_trainer(
            tmp_path / folder,
            **options,
            train=make_samples(),
            teacher=OnlineTeacher(wide, 2, 2, hidden_layers=[1, 2]),
            hidden=HiddenTerm([(1, 1), (2, 2)]),
            arguments=arguments,
        )

    trainer = make("a")
    before = {name: value.detach().clone() for name, value in trainer.projectors.named_parameters()}
    assert before["by_number.1.weight"].shape == (24, 16)
    trainer.train()
    for name, value in trainer.projectors.named_parameters():
        assert not torch.equal(value, before[name])
    folder = tmp_path / "a" / "checkpoint-2"
    assert set(load_file(folder / "model.safetensors")) == set(make_model(2, seed=2).state_dict())
    again = make("b")
    for name, value in again.projectors.named_parameters():
        assert torch.equal(value, before[name])  # made by the seed alone
    again.train(resume_from_checkpoint=str(folder))
    assert_same(weights(again), weights(trainer), **CLOSE)
    assert_same(again.projectors.state_dict(), trainer.projectors.state_dict(), **CLOSE)
    student = make_model(2, seed=2)
    mine = make("c", model=student, optimizers=(torch.optim.SGD(student.parameters(), 0.01), None))
    start = {name: value.detach().clone() for name, value in mine.projectors.named_parameters()}
    mine.train()  # an optimizer of the user's own trains them too
    assert not any(torch.equal(value, start[name]) for name, value in mine.projectors.named_parameters())
    (folder / "hidden_projectors.safetensors").unlink()
    with pytest.raises(ShdError, match="must hold the projectors"):
        make("d").train(resume_from_checkpoint=str(folder))


def test_what_is_refused(tmp_path: Path) -> None:
    def refusal(**arguments: Any) -> ShdError:
        arguments = {"train": make_samples(), "teacher": live(), "arguments": WHOLE} | arguments
        with pytest.raises(ShdError) as caught:
            make_trainer(tmp_path, **arguments).train()
        return caught.value

    assert "must have a term" in str(refusal())
    assert "hidden_layers=(1,)" in str(refusal(hidden=HiddenTerm([(2, 1)])))
    unlabelled = [{k: v for k, v in sample.items() if k != "labels"} for sample in make_samples()]
    without = refusal(
        train=unlabelled,
        kd=KdTerm(rows="labels"),
        collate=lambda samples: {
            k: v for k, v in pad([s | {"labels": s["input_ids"]} for s in samples]).items() if k != "labels"
        },
    )
    assert "must hold labels (B, L) where they say which rows count; got none" in str(without)
    for make in (
        lambda: KdTerm(weight=-1.0),
        lambda: KdTerm(divergence="l2"),
        lambda: KdTerm(rows="tokens"),
        lambda: HiddenTerm([]),
        lambda: HiddenTerm([(1, 1), (1, 2)]),
    ):
        with pytest.raises(ShdError):
            make()


def test_a_padded_vocabulary_names_what_cuts_it() -> None:
    """Students of 40 classes, where the teacher has 36: 4 are padding, as of embeddings of a rounded size."""
    generator = torch.Generator().manual_seed(0)
    states, weight = torch.randn(2, 3, 8, generator=generator), torch.randn(36, 8, generator=generator)
    student, teacher = torch.randn(2, 3, 40, generator=generator), states @ weight.T
    record = kd_targets_topk(teacher, 5)
    for targets in (teacher, record, ExactTargets(states, TeacherHead(weight))):
        with refusal("argument-shape", r"KdTerm\(vocab_size=36\)"):
            kd_loss(targets, student)
        cut = kd_loss(targets, student, vocab_size=36)
        assert cut == kd_loss(targets, student[..., :36])
    with refusal("argument-shape", "precompute with --vocab-size 30"):
        kd_loss(record, student[..., :30])


def test_a_second_training_logs_means_over_its_own_steps(tmp_path: Path) -> None:
    arguments = {"logging_steps": 2, "learning_rate": 0.0}
    trainer = make_trainer(tmp_path, train=make_samples(), teacher=live(), kd=KdTerm(), arguments=arguments)
    logged = []
    for _ in range(2):
        trainer.train()
        logged += [log["kd_loss"] for log in trainer.state.log_history if "kd_loss" in log]
    assert logged[1] == pytest.approx(logged[0], rel=1e-4)  # nothing is learned, and all samples are seen
