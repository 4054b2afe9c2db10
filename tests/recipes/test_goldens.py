"""What the public code of each recipe gives on fixed inputs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shd_ref.conformance import load_tolerances
from shd_torch import recipes
from shd_torch.recipes import Terms

TOLERANCES = load_tolerances()["recipes"]


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    if not (shared_data / "loss_goldens").is_dir():
        pytest.skip("values of the public codes not found: no folder loss_goldens in the shared data")
    return shared_data / "loss_goldens"


@pytest.fixture(scope="module")
def inputs(folder: Path) -> dict[str, Tensor]:
    with np.load(folder / "inputs.npz") as arrays:
        return {name: torch.from_numpy(np.asarray(arrays[name])) for name in arrays.files}


@pytest.fixture(scope="module")
def is_golden(folder: Path) -> Any:
    """Compare with the value whose name begins so; some were printed with few digits, or made in float32."""
    values: dict[str, float] = json.loads((folder / "values.json").read_text(encoding="utf-8"))

    def compare(answer: Tensor, name: str, *, rounded: bool = False) -> None:
        named = [value for key, value in values.items() if key.startswith(name)]
        bound = TOLERANCES["rounded" if rounded else "float64"]
        assert [float(answer.detach())] == pytest.approx(named, abs=bound), name

    return compare


IMAGE = tuple(f"image/{name}" for name in ("student_logits", "labels", "teacher_logits"))
SOFT = ("image/student_logits", "image/soft_labels", "image/teacher_logits")
DEIT = (*IMAGE[:2], "image/distillation_token_logits", IMAGE[2])
WORDS = tuple(f"minillm/pt_{name}" for name in ("student_logits", "labels", "teacher_logits"))
KD = "but cross_entropy"
CASES: list[tuple[str, tuple[str, ...], dict[str, float], dict[str, str]]] = [
    *(
        ("nkd", IMAGE, {"nontarget_weight": g, "temperature": t}, {KD: f"nkd hard label temp={t} gamma={g}"})
        for t, g in ((1.0, 1.0), (1.0, 1.5), (2.0, 1.5))
    ),
    ("nkd", SOFT, {}, {KD: "nkd soft label temp=1 gamma=1"}),
    *(("image_kd", IMAGE, {"temperature": t}, {KD: f"cls_KD kd temp={t} alpha=.5"}) for t in (1.0, 4.0)),
    *(("deit_soft", DEIT, {"temperature": t}, {"all": f"deit soft alpha=.5 tau={t}"}) for t in (1.0, 3.0)),
    ("deit_hard", DEIT, {}, {"all": "deit hard alpha=.5"}),
    (
        "language_kd",
        WORDS,
        {},
        {"cross_entropy": "minillm lm_loss", "kd": "minillm ds_loss", "all": "minillm pt_loss"},
    ),
]
"""Operation, inputs, options, and the golden of a term, of all with their weights, or of all but cross entropy."""


def part_of(terms: Terms, part: str) -> Tensor:
    if part in terms:
        return terms[part].value
    return Terms({name: term for name, term in terms.items() if part != KD or name != "cross_entropy"}).total


@pytest.mark.parametrize("case", CASES, ids=lambda case: next(iter(case[3].values())))
def test_values_of_the_public_codes(inputs: dict[str, Tensor], is_golden: Any, case: Any) -> None:
    operation, names, options, goldens = case
    terms = getattr(recipes, operation)(*(inputs[name] for name in names), **options)
    for part, golden in goldens.items():
        is_golden(part_of(terms, part), golden, rounded=operation == "language_kd")


def test_vitkd(inputs: dict[str, Tensor], is_golden: Any) -> None:
    names = {"align2": "mimic", "align": "project", "generation": "generate", "mask_token": "mask_token"}
    parameters = {}
    for key, value in inputs.items():
        if "/parameter/" in key:
            first, dot, rest = key.rpartition("/")[2].partition(".")
            parameters[names[first] + dot + rest] = value.flatten() if first == "mask_token" else value
    module = recipes.ViTKD(*parameters["project.weight"].shape[::-1]).double()
    module.load_state_dict(parameters)
    layers = [list(inputs[f"vitkd/{side}_first_two_layers"].swapaxes(0, 1)) for side in ("student", "teacher")]
    lasts = [inputs[f"vitkd/{side}_last_layer"] for side in ("student", "teacher")]
    terms = module(layers[0], lasts[0], layers[1], lasts[1], inputs["vitkd/noise"])
    is_golden(terms.total, "vitkd total")
    is_golden(Terms(mimic=terms["mimic"]).total, "vitkd mimicking part")


def test_babyllama(inputs: dict[str, Tensor], is_golden: Any) -> None:
    student, labels, *teachers = (
        inputs[f"babyllama/{name}"] for name in ("student_logits", "labels", "teacher_logits_1", "teacher_logits_2")
    )
    terms = recipes.babyllama(student, labels, teachers)
    is_golden(terms["cross_entropy"].value, "babyllama student CE")
    is_golden(terms["kd"].value, "babyllama kd term")
    is_golden(terms.total, "babyllama loss alpha=.5")


def test_minillm(inputs: dict[str, Tensor], is_golden: Any) -> None:
    query, response = inputs["minillm/query"], inputs["minillm/response"]
    start = query.shape[1] - 1
    # A row counts where its input token does.
    mask = (torch.cat((query, response), 1) != 0)[:, start:-1]
    old, new, teacher = (
        inputs[f"minillm/{name}_logits"][:, start:-1] for name in ("rollout_student", "student", "teacher")
    )
    rollout = recipes.minillm_rollout(old, teacher, response, mask)
    # What the original logs as the reward of a text: its discounted sum over its length.
    discounts = 0.95 ** torch.arange(4, dtype=rollout.rewards.dtype)
    is_golden((rollout.rewards @ discounts / mask.sum(1)).mean(), "minillm reward", rounded=True)
    is_golden(1 - mask.double().mean(), "share of pads in whitening")
    # And as its reverse KL: of each text the mean of p_T / p_S - 1 - log(p_T / p_S) at what was sampled.
    ratios = 0.5 * rollout.rewards
    is_golden(((ratios.expm1() - ratios).sum(1) / mask.sum(1)).mean(), "minillm rev_kl", rounded=True)
    whitened = {"unbiased": "minillm whitened advantage [0,0]", "biased": "the same under torch.dist"}
    for whitening, name in whitened.items():
        advantages = recipes.minillm_advantages(rollout.rewards, mask, whitening=whitening)
        is_golden(advantages[0, 0], name, rounded=True)
    # The values of the losses are those of one process, where the original's variance is unbiased.
    terms = recipes.minillm_policy(new, teacher, rollout, whitening="unbiased")
    is_golden(terms["policy"].value, "minillm pg_loss", rounded=True)
    is_golden(terms["reverse_kl"].value, "minillm reg_loss", rounded=True)
    is_golden(terms.total, "minillm rl_loss", rounded=True)


@pytest.mark.parametrize(("sample", "t"), [(0, 0), (1, 300), (2, 950)])
def test_diffusion(inputs: dict[str, Tensor], is_golden: Any, sample: int, t: int) -> None:
    """The original rounds its tables to float32."""
    output, x0, noise, steps = (
        inputs[f"diffusion/{name}"][sample : sample + 1] for name in ("model_output", "x0", "noise", "t")
    )
    assert steps.tolist() == [t]
    terms = recipes.diffusion(output, x0, noise, steps)
    plain = recipes.diffusion(output, x0, noise, steps, snr_clip=None)
    is_golden(terms["mse"].value / plain["mse"].value, f"mdt min-SNR-5 weight (eps) t={t}")
    is_golden(terms["mse"].value, f"mdt mse t={t}", rounded=True)
    is_golden(terms["bound"].value, f"mdt vb t={t}", rounded=True)
    is_golden(terms.total, f"mdt loss t={t}", rounded=True)
    if t == 300:  # of one step alone
        is_golden(recipes.noised(x0, noise, steps).mean(), f"mdt q_sample mean t={t}", rounded=True)


def test_betas(is_golden: Any) -> None:
    betas = recipes.linear_betas()
    for step in (0, 999):
        is_golden(betas[step], f"diffusion betas[{step}]")
