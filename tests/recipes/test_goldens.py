"""What the public code of each recipe gives on fixed inputs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import shd_torch.recipes
from shd_ref.conformance import load_tolerances

Array = NDArray[Any]
TOLERANCES = load_tolerances()["recipes"]
NAMES = {"align2": "mimic", "align": "project", "generation": "generate", "mask_token": "mask_token"}


@pytest.fixture(scope="module")
def inputs(shared_data: Path) -> dict[str, Array]:
    with np.load(folder(shared_data) / "inputs.npz") as found:
        return dict(found)


@pytest.fixture(scope="module")
def values(shared_data: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((folder(shared_data) / "values.json").read_text(encoding="utf-8"))
    return found


def folder(shared_data: Path) -> Path:
    if not (shared_data / "loss_goldens").is_dir():
        pytest.skip("values of the public codes not found: no folder loss_goldens in the shared data")
    return shared_data / "loss_goldens"


class Recipes:
    """The recipes on NumPy arrays; terms come as ``{name: (value, weight)}`` of numbers."""

    def __call__(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        terms = getattr(shd_torch.recipes, operation)(
            *map(give, arguments), **{name: give(value) for name, value in keywords.items()}
        )
        return {name: (float(t.value), t.weight) for name, t in terms.items()} if isinstance(terms, dict) else terms

    def vitkd(self, parameters: dict[str, Array], *arguments: Any) -> Any:
        """The projector with these parameters."""
        dims = (parameters["project.weight"].shape[1], parameters["project.weight"].shape[0])
        module = shd_torch.recipes.ViTKD(*dims).double()
        module.load_state_dict(
            {
                name: give(value).flatten() if name == "mask_token" else give(value)
                for name, value in parameters.items()
            }
        )
        terms = module(*map(give, arguments))
        return {name: (term.value.item(), term.weight) for name, term in terms.items()}


def give(value: Any) -> Any:
    if isinstance(value, list):
        return [give(item) for item in value]
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


@pytest.fixture
def recipes() -> Recipes:
    return Recipes()


@pytest.fixture
def is_golden(values: dict[str, float]) -> Callable[..., None]:
    """Compare with the value whose name begins so."""

    def compare(found: Any, name: str, *, rounded: bool = False) -> None:
        (wanted,) = (value for key, value in values.items() if key.startswith(name))
        assert float(found) == pytest.approx(wanted, abs=TOLERANCES["rounded" if rounded else "float64"]), name

    return compare


def loss(terms: dict[str, tuple[float, float]], *, without: str = "") -> float:
    return sum(value * weight for name, (value, weight) in terms.items() if name != without)


IMAGE = tuple(f"image/{name}" for name in ("student_logits", "labels", "teacher_logits"))
SOFT = ("image/student_logits", "image/soft_labels", "image/teacher_logits")
DEIT = (*IMAGE[:2], "image/distillation_token_logits", IMAGE[2])
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
        tuple(f"minillm/pt_{name}" for name in ("student_logits", "labels", "teacher_logits")),
        {},
        {"cross_entropy": "minillm lm_loss", "kd": "minillm ds_loss", "all": "minillm pt_loss"},
    ),
]
"""Operation, inputs, options, and the golden of a term, of all with their weights, or of all but cross entropy."""
WEIGHTS = {"nkd": 1.0, "image_kd": 0.5}  # of cross entropy


@pytest.mark.parametrize("case", CASES, ids=lambda case: next(iter(case[3].values())))
def test_values_of_the_public_codes(recipes: Recipes, inputs: Any, is_golden: Any, case: Any) -> None:
    operation, names, options, goldens = case
    terms = recipes(operation, *(inputs[name] for name in names), **options)
    for part, golden in goldens.items():
        found = terms[part][0] if part in terms else loss(terms, without="cross_entropy" if part == KD else "")
        is_golden(found, golden, rounded=operation == "language_kd")
    assert terms["cross_entropy"][1] == WEIGHTS.get(operation, terms["cross_entropy"][1])


def test_vitkd(recipes: Recipes, inputs: Any, is_golden: Any) -> None:
    parameters = {}
    for key, value in inputs.items():
        if "/parameter/" in key:
            first, dot, rest = key.rpartition("/")[2].partition(".")
            parameters[NAMES[first] + dot + rest] = value
    layers = [[*inputs[f"vitkd/{side}_first_two_layers"].swapaxes(0, 1)] for side in ("student", "teacher")]
    lasts = [inputs[f"vitkd/{side}_last_layer"] for side in ("student", "teacher")]
    terms = recipes.vitkd(parameters, layers[0], lasts[0], layers[1], lasts[1], inputs["vitkd/noise"])
    is_golden(loss(terms), "vitkd total")
    is_golden(loss(terms, without="generate"), "vitkd mimicking part")


def test_babyllama(recipes: Recipes, inputs: Any, is_golden: Any) -> None:
    given = {name: inputs[f"babyllama/{name}"] for name in ("student_logits", "labels")}
    terms = recipes("babyllama", *given.values(), [inputs[f"babyllama/teacher_logits_{i}"] for i in (1, 2)])
    is_golden(terms["cross_entropy"][0], "babyllama student CE")
    is_golden(terms["kd"][0], "babyllama kd term")
    is_golden(loss(terms), "babyllama loss alpha=.5")


def test_minillm(recipes: Recipes, inputs: Any, is_golden: Any) -> None:
    query, response = inputs["minillm/query"], inputs["minillm/response"]
    start = query.shape[1] - 1
    # A row counts where its input token does.
    mask = (np.concatenate((query, response), axis=1) != 0)[:, start:-1]
    old, new, teacher = (
        inputs[f"minillm/{name}_logits"][:, start:-1] for name in ("rollout_student", "student", "teacher")
    )
    rollout = recipes("minillm_rollout", old, teacher, response, mask)
    rewards = np.asarray(rollout.rewards)
    # What the original logs as the reward of a text: its discounted sum over its length.
    is_golden(np.mean(rewards @ 0.95 ** np.arange(4) / mask.sum(1)), "minillm reward", rounded=True)
    is_golden(1 - mask.mean(), "share of pads in whitening")
    # And as its reverse KL: of each text the mean of p_T / p_S - 1 - log(p_T / p_S) at what was sampled.
    ratios = 0.5 * rewards
    is_golden(np.mean((np.exp(ratios) - 1 - ratios).sum(1) / mask.sum(1)), "minillm rev_kl", rounded=True)
    for whitening, name in (
        ("unbiased", "minillm whitened advantage [0,0]"),
        ("biased", "the same under torch.dist"),
    ):
        advantages = recipes("minillm_advantages", rewards, mask, whitening=whitening)
        is_golden(advantages[0, 0], name, rounded=True)
    # The values of the losses are those of one process, where the original's variance is unbiased.
    terms = recipes("minillm_policy", new, teacher, rollout, whitening="unbiased")
    is_golden(terms["policy"][0], "minillm pg_loss", rounded=True)
    is_golden(terms["reverse_kl"][0], "minillm reg_loss", rounded=True)
    is_golden(loss(terms), "minillm rl_loss", rounded=True)


@pytest.mark.parametrize(("sample", "t"), [(0, 0), (1, 300), (2, 950)])
def test_diffusion(
    recipes: Recipes, inputs: Any, values: dict[str, float], is_golden: Any, sample: int, t: int
) -> None:
    """The original rounds its tables to float32."""
    output, x0, noise, steps = (
        inputs[f"diffusion/{name}"][sample : sample + 1] for name in ("model_output", "x0", "noise", "t")
    )
    assert steps.tolist() == [t]
    terms = recipes("diffusion", output, x0, noise, steps)
    plain = recipes("diffusion", output, x0, noise, steps, snr_clip=None)
    is_golden(terms["mse"][0] / plain["mse"][0], f"mdt min-SNR-5 weight (eps) t={t}")
    is_golden(terms["mse"][0], f"mdt mse t={t}")
    made = {"mse": terms["mse"][0], "vb": terms["bound"][0], "loss": loss(terms)}
    made["q_sample mean"] = float(recipes("noised", x0, noise, steps).mean())
    for name, value in made.items():
        if f"mdt {name} t={t}" in values:  # that of q_sample is of one step
            is_golden(value, f"mdt {name} t={t}", rounded=True)


def test_betas(recipes: Recipes, is_golden: Any) -> None:
    betas = recipes("linear_betas")
    for step in (0, 999):
        is_golden(betas[step], f"diffusion betas[{step}]")
