"""The recipes: gradients, masks, dtypes, refusals; their values are those of the goldens."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import shd_torch.kd
from shd_ref.conformance import load_tolerances
from shd_torch import recipes

RNG = np.random.default_rng(7)
B, L, V, N, D = 3, 4, 6, 6, 5


def normal(*shape: int) -> NDArray[np.float64]:
    return 2 * RNG.standard_normal(shape)


IMAGES = {name: normal(B, V) for name in ("student", "token", "teacher")}
HARD = np.array([0, 5, 2])
SOFT = RNG.dirichlet(np.ones(V), B)
TEXT = {name: normal(B, L, V) for name in ("student", "teacher", "other", "before")}
WORDS = np.array([[1, 2, -100, 4], [-100, 0, 5, 3], [2, 2, 2, -100]])
MASK = np.array([[True, True, False, True], [True, True, True, True], [True, False, False, False]])
TOKENS = RNG.integers(0, V, (B, L))
PICTURES = {"x0": np.clip(normal(B, 2, 3, 3), -1, 1), "noise": normal(B, 2, 3, 3), "t": np.array([0, 40, 999])}

Case = tuple[str, list[Any], dict[str, Any]]
TOPK = "top-k of the teacher"
CASES: dict[str, Case] = {
    "cross_entropy": ("cross_entropy", [TEXT["student"], WORDS], {}),
    "cross_entropy shifted": ("cross_entropy", [TEXT["student"], WORDS], {"shift": True}),
    "cross_entropy soft": ("cross_entropy", [IMAGES["student"], SOFT], {}),
    "language_kd": ("language_kd", [TEXT["student"], WORDS, TEXT["teacher"]], {"kd_weight": 0.3, "temperature": 1.5}),
    "language_kd shifted": ("language_kd", [TEXT["student"], WORDS, TEXT["teacher"]], {"shift": True}),
    "language_kd of a record": ("language_kd", [TEXT["student"], WORDS, TOPK], {"shift": True}),
    "image_kd": ("image_kd", [IMAGES["student"], HARD, IMAGES["teacher"]], {"kd_weight": 0.2}),
    "image_kd soft": ("image_kd", [IMAGES["student"], SOFT, IMAGES["teacher"]], {"temperature": 2.0}),
    "nkd": ("nkd", [IMAGES["student"], HARD, IMAGES["teacher"]], {"nontarget_weight": 1.5, "temperature": 2.0}),
    "nkd soft": ("nkd", [IMAGES["student"], SOFT, IMAGES["teacher"]], {}),
    "deit_soft": ("deit_soft", [IMAGES["student"], HARD, IMAGES["token"], IMAGES["teacher"]], {"temperature": 3.0}),
    "deit_hard": ("deit_hard", [IMAGES["student"], SOFT, IMAGES["token"], IMAGES["teacher"]], {"kd_weight": 0.1}),
    "gkd": ("gkd", [TEXT["student"], WORDS, TEXT["teacher"]], {"mixing": 0.3, "shift": True}),
    "gkd forward": ("gkd", [TEXT["student"], WORDS, TEXT["teacher"]], {"mixing": 0.0}),
    "gkd of a record": ("gkd", [TEXT["student"], WORDS, TOPK], {}),
    "babyllama": ("babyllama", [TEXT["student"], WORDS, [TEXT["teacher"], TEXT["other"]]], {"kd_weight": 0.7}),
    "diffusion": ("diffusion", [normal(B, 2, 3, 3), *PICTURES.values()], {"teacher_output": normal(B, 4, 3, 3)}),
    "diffusion range": (
        "diffusion",
        [normal(B, 4, 3, 3) / 2, *PICTURES.values()],
        {"teacher_output": normal(B, 2, 3, 3), "kd_weight": 0.4, "bound_weight": 0.6, "snr_clip": 2.0},
    ),
    "diffusion plain": ("diffusion", [normal(B, 4, 3, 3) / 2, *PICTURES.values()], {"snr_clip": None}),
}
for whitening in ("biased", "unbiased", "none"):
    CASES[f"minillm_policy {whitening}"] = (
        "minillm_policy",
        [TEXT["student"], TEXT["teacher"], "rollout"],
        {"clip": 0.4, "discount": 0.8, "whitening": whitening, "reverse_kl_weight": 0.7},
    )


def give(value: Any) -> Any:
    if isinstance(value, list):
        return [give(item) for item in value]
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def make(case: str) -> Case:
    """The recipe, its arguments and its keywords."""
    operation, arguments, keywords = CASES[case]
    made = []
    for argument in arguments:
        if isinstance(argument, str) and argument == TOPK:
            made.append(shd_torch.kd.kd_targets_topk(give(TEXT["teacher"]), 3))
        elif isinstance(argument, str):
            texts = [give(TEXT[name]) for name in ("before", "teacher")]
            made.append(recipes.minillm_rollout(*texts, give(TOKENS), give(MASK), mix=0.3))
        else:
            made.append(give(argument))
    return operation, made, {name: give(value) for name, value in keywords.items()}


def ours(case: str, student: Tensor, **more: Any) -> Any:
    operation, arguments, keywords = make(case)
    return getattr(recipes, operation)(student, *arguments[1:], **keywords, **more)


gradcheck = partial(torch.autograd.gradcheck, fast_mode=True)  # by random directions, a tenth of the time


@pytest.mark.parametrize("case", [case for case in CASES if "range" not in case and "plain" not in case])
def test_gradients_are_finite_differences(case: str) -> None:
    operation, arguments, keywords = make(case)
    places = (0, 2) if operation.startswith("deit") else (0,)  # the distillation token is the student's, too

    def total(*tensors: Tensor) -> Tensor:
        moved = dict(enumerate(arguments)) | dict(zip(places, tensors, strict=True))
        return getattr(recipes, operation)(*moved.values(), **keywords).total

    assert gradcheck(total, tuple(arguments[place].clone().requires_grad_() for place in places))


@pytest.mark.parametrize("case", ["diffusion range", "diffusion plain"])
def test_the_bound_teaches_the_range_alone(case: str) -> None:
    """Of the bound finite differences say what the range gets; epsilon gets nothing of it, and all of the others."""
    output = give(CASES[case][1][0])

    def with_range(span: Tensor) -> Tensor:
        return ours(case, torch.cat((output[:, :2], span), 1)).total

    assert gradcheck(with_range, (output[:, 2:].clone().requires_grad_(),))
    student = output.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(ours(case, student)["bound"].value, student)
    assert (gradient[:, :2] == 0).all()
    assert (gradient[:, 2:] != 0).any()

    def without_bound(epsilon: Tensor) -> Tensor:
        terms = ours(case, torch.cat((epsilon, output[:, 2:]), 1))
        del terms["bound"]
        return terms.total

    assert gradcheck(without_bound, (output[:, :2].clone().requires_grad_(),))


def test_vitkd_has_the_gradients_of_finite_differences() -> None:
    torch.manual_seed(0)
    module = recipes.ViTKD(D, 4, removed=0.4).double()
    torch.nn.init.normal_(module.mask_token)
    sides = [normal(B, N, size) for size in (D, D, D, 4, 4, 4)]
    noise = np.array([[3, 1, 2, 1, 9, 1], [0, 0, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0]]) / 10
    actual = module([*give(sides[:2])], give(sides[2]), [*give(sides[3:5])], give(sides[5]), give(noise), grid=(2, 3))

    def loss(*tensors: Tensor) -> Tensor:
        teachers = give(sides[3:5]), give(sides[5])
        terms = module([*tensors[:2]], tensors[2], *teachers, give(noise), grid=(2, 3))
        return 1e5 * terms.total  # the weights are small

    assert gradcheck(loss, tuple(tensor.requires_grad_() for tensor in give(sides[:3])))
    actual.total.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    drawn = module(give(sides[:2]), give(sides[2]), give(sides[3:5]), give(sides[5]), grid=(2, 3))
    assert drawn["mimic"].value == actual["mimic"].value
    assert drawn["generate"].value != actual["generate"].value


@pytest.mark.parametrize("case", ["language_kd shifted", "gkd", "cross_entropy", "minillm_policy biased"])
def test_rows_that_do_not_count_reach_nothing(case: str) -> None:
    """With ``check=False`` even NaN in them: values and gradients are those of any other number there."""
    counted = MASK if "minillm" in case else WORDS != -100
    if CASES[case][2].get("shift"):
        counted = np.concatenate((counted[:, 1:], np.zeros((B, 1), dtype=bool)), axis=1)
    good = give(CASES[case][1][0]).clone().requires_grad_()
    bad = good.detach().masked_fill(~give(counted)[..., None], torch.nan).requires_grad_()
    terms = [ours(case, z, check=False).total for z in (good, bad)]
    gradients = [torch.autograd.grad(each, z)[0] for each, z in zip(terms, (good, bad), strict=True)]
    assert terms[0] == terms[1]
    torch.testing.assert_close(gradients[0], gradients[1], atol=0.0, rtol=0.0)
    assert (gradients[1][~give(counted)] == 0).all()
    assert (gradients[1][give(counted)] != 0).any()


def test_no_row_that_counts_is_zero_and_attached() -> None:
    student = give(TEXT["student"]).clone().requires_grad_()
    labels = torch.full((B, L), -100)
    teacher, none = give(TEXT["teacher"]), torch.zeros((B, L), dtype=torch.bool)
    rollout = recipes.minillm_rollout(give(TEXT["before"]), teacher, give(TOKENS), none)
    for terms in (
        recipes.cross_entropy(student, labels),
        recipes.language_kd(student, labels, teacher),
        recipes.gkd(student, labels, teacher),
        recipes.minillm_policy(student, teacher, rollout),
    ):
        (gradient,) = torch.autograd.grad(terms.total, student)
        assert terms.total == 0
        assert (gradient == 0).all()


def test_no_gradient_reaches_a_teacher() -> None:
    for case in CASES:
        operation, arguments, keywords = make(case)
        arguments[0] = arguments[0].clone().requires_grad_()
        places = {"nkd": 2, "deit_hard": 3, "minillm_policy": 1}
        if operation in places:
            arguments[places[operation]].requires_grad_()
        if "teacher_output" in keywords:
            keywords["teacher_output"].requires_grad_()
        getattr(recipes, operation)(*arguments, **keywords).total.backward()
        for argument in [*arguments[1:], *keywords.values()]:
            assert not isinstance(argument, Tensor) or argument.grad is None, case


@pytest.mark.parametrize("case", CASES)
def test_half_precision_is_for_storage(case: str) -> None:
    """bfloat16 arguments give the loss of those numbers, under autocast as well; gradients have their dtype."""
    half = give(CASES[case][1][0]).bfloat16()
    bound = load_tolerances()["agreement"]["float32"]["loss"]
    student = half.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        actual = ours(case, student).total
    actual.backward()
    assert student.grad.dtype == torch.bfloat16
    exact = ours(case, half.double()).total
    scale = sum(abs(term.weight * term.value.item()) for term in ours(case, half.double()).values())
    assert actual.item() == pytest.approx(exact.item(), abs=bound["rtol"] * scale + bound["atol"])
