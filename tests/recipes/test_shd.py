"""Recipes with the attention term, and what each term is worth in the loss and the gradient."""

import math

import pytest
import torch
from support.binding.trainer_cases import make_model, make_samples, pad

import shd_torch.recipes as recipes
from shd_torch import OnlineTeacher, ShdError, capture_attention, layer_kls
from shd_torch.recipes import SHD, Term, Terms, scale_report


class Step:
    """A forward pass of a student and of a live teacher on one batch of padded text."""

    def __init__(self) -> None:
        self.student = make_model(2, seed=2)
        self.batch = pad(make_samples())
        seen = {name: value for name, value in self.batch.items() if name != "labels"}
        self.taught = OnlineTeacher(make_model(4, seed=1), num_student_heads=2, layer_map=2)(**seen)
        with capture_attention(self.student, layers=self.taught.layers) as self.captured:
            self.logits = self.student(**seen).logits
        self.teacher_logits = self.taught.output.logits
        self.mask = self.batch["attention_mask"].bool()

    def shd(self, beta: float = 0.02) -> SHD:
        return SHD(self.captured, self.taught, beta, loss_mask=self.mask)

    def kd(self, beta: float = 0.02) -> Terms:
        return recipes.language_kd(
            self.logits, self.batch["labels"], self.teacher_logits, shift=True, shd=self.shd(beta)
        )


@pytest.fixture(scope="module")
def step() -> Step:
    return Step()


def test_shd_is_one_more_term(step: Step) -> None:
    layers = layer_kls(step.captured, step.taught, loss_mask=step.mask)
    terms = step.kd()
    assert list(terms) == ["cross_entropy", "kd", "shd"]
    assert terms["shd"].weight == 0.02
    assert terms["shd"].value.item() == pytest.approx(sum(term.item() for term in layers.values()))
    alone = recipes.language_kd(step.logits, step.batch["labels"], step.teacher_logits, shift=True)
    assert terms.total.item() == pytest.approx((alone.total + 0.02 * terms["shd"].value).item())
    output = step.student(**step.batch)
    assert terms["cross_entropy"].value.item() == pytest.approx(output.loss.item(), rel=1e-5)


def test_every_recipe_of_text_takes_it(step: Step) -> None:
    labels, teacher, shd = step.batch["labels"], step.teacher_logits, step.shd()
    text = step.logits[:, 3:-1]
    tokens, mask = step.batch["input_ids"][:, 4:], step.mask[:, 3:-1]
    rollout = recipes.minillm_rollout(text.detach(), teacher[:, 3:-1], tokens, mask)
    made = {
        "cross_entropy": recipes.cross_entropy(step.logits, labels, shift=True, shd=shd),
        "gkd": recipes.gkd(step.logits, labels, teacher, shift=True, shd=shd),
        "babyllama": recipes.babyllama(step.logits, labels, [teacher, step.logits.detach()], shd=shd),
        "minillm": recipes.minillm_policy(text, teacher[:, 3:-1], rollout, shd=shd),
    }
    for name, terms in made.items():
        assert list(terms)[-1] == "shd", name
        gradients = torch.autograd.grad(
            terms.total, list(step.student.parameters()), retain_graph=True, allow_unused=True
        )
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients), name


def test_terms_add_and_scale(step: Step) -> None:
    one, two = torch.tensor(2.0), torch.tensor(5.0)
    first, second = Terms(kd=Term(one, 0.5)), Terms(kd=Term(two, 1.0))
    both = first + second.scaled(3.0, prefix="pretraining_")
    assert {name: term.weight for name, term in both.items()} == {"kd": 0.5, "pretraining_kd": 3.0}
    assert both.total == 16
    with pytest.raises(ShdError, match="got kd in both"):
        first + second
    for beta in (-0.1, math.nan, "0.1"):
        with pytest.raises(ShdError, match="must be a finite number of at least 0"):
            SHD(step.captured, step.taught, beta)  # type: ignore[arg-type]


def test_a_report_of_terms_that_are_known() -> None:
    """Gradients (3, 4) and 0.5 (0, 8): norms 5 and 4, an angle whose cosine is .8."""
    x = torch.zeros(2, requires_grad=True)
    idle = torch.zeros(3, requires_grad=True)
    terms = Terms(
        base=Term(x @ torch.tensor([3.0, 4.0]) - 6, 1.0), shd=Term(x[1] * 8 + 4, 0.5), still=Term(torch.ones(()), 2.0)
    )
    report = scale_report(terms, [x, idle, torch.zeros(1)])
    base, shd, still = report.terms.values()
    assert (base.value, base.gradient_norm, shd.gradient_norm, still.gradient_norm) == (-6, 5, 4, 0)
    assert [each.loss_share for each in report.terms.values()] == pytest.approx([0.6, 0.2, 0.2])
    assert [each.gradient_share for each in report.terms.values()] == pytest.approx([5 / 9, 4 / 9, 0])
    assert (base.cosine, shd.cosine) == pytest.approx((0.8, 0.8))
    assert math.isnan(still.cosine)
    assert report.weight_for(0.1) == pytest.approx(0.1 * 5 / 8)
    assert report.weight_for(1.0, "base") == pytest.approx(4 / 5)
    assert x.grad is None
    with pytest.raises(ShdError, match="got still, whose gradient is 0"):
        report.weight_for(0.1, "still")
    with pytest.raises(ShdError, match="term must be one of base, shd, still; got 'kd'"):
        report.weight_for(0.1, "kd")
    with pytest.raises(ShdError, match="parameters must hold some"):
        scale_report(terms, [torch.zeros(1)])


def test_beta_is_chosen_without_a_guess(step: Step) -> None:
    """From a first look with beta 0 to the beta at which SHD pulls a quarter as hard as all else."""
    student = step.student
    beta = scale_report(step.kd(beta=0.0), student.parameters()).weight_for(0.25)
    again, terms = scale_report(step.kd(beta=beta), student.parameters()), step.kd(beta=beta)
    student.zero_grad()
    (terms.total - terms["shd"].weight * terms["shd"].value).backward(retain_graph=True)
    gradients = [parameter.grad for parameter in student.parameters() if parameter.grad is not None]
    rest = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt().item()
    assert again.terms["shd"].gradient_norm == pytest.approx(0.25 * rest, rel=1e-4)
    student.zero_grad()
    lines = str(again).splitlines()
    assert lines[0].split() == ["term", "value", "weight", "of", "loss", "gradient", "of", "grad.", "cosine"]
    assert [line.split()[0] for line in lines[1:]] == ["cross_entropy", "kd", "shd"]
    assert len({len(line) for line in lines}) == 1
