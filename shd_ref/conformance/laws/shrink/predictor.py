"""Laws of chapter PRED of ``specs/shrink.md``."""

from __future__ import annotations

from typing import Any

import numpy as np

from shd_ref.conformance.laws.law import Array, Law, Trial, as_array, broken
from shd_ref.conformance.laws.shrink.heads import part_law

ALONE = ("float64",)


def _places(count: int) -> Array:
    """Different ratios of eighths, in general position."""
    numbers = np.arange(count) * 29 % 81
    return np.stack([numbers // 9, numbers % 9], axis=1) / 8.0


def _predictor(trial: Trial, degree: int, meaning: str = "retained") -> dict[str, Any]:
    count = (degree + 1) * (degree + 2) // 2
    return {"degree": degree, "coefficients": trial.numbers(6400 + degree, count), "meaning": meaning}


def _values(predictor: dict[str, Any], places: Array) -> Array:
    coefficients = as_array(predictor["coefficients"], "coefficients")
    degree, total = int(predictor["degree"]), np.zeros(len(places))
    at = 0
    for power in range(degree + 1):
        for j in range(power + 1):
            total = total + coefficients[at] * places[:, 0] ** (power - j) * places[:, 1] ** j
            at += 1
    return total


def _found_again(trial: Trial) -> None:
    for degree in (1, 2, 3, 4):
        truth, places = _predictor(trial, degree), _places(19)
        points = np.column_stack([places, _values(truth, places)])
        answer = trial.call("fit_predictor", points=points, degree=degree)
        trial.agree(
            answer["coefficients"], truth["coefficients"], "fit", f"a polynomial of degree {degree}", times=100
        )
        error = trial.numbers_of("cross_validate", points=points, degree=degree)
        trial.agree(error, 0.0, "fit", f"the error of degree {degree} on its own polynomial", times=100)
        if degree > 1:
            lower = trial.numbers_of("cross_validate", points=points, degree=degree - 1)
            if not lower > 1e-3:
                raise broken(
                    f"the error of degree {degree - 1}", "must show what it misses", "more than 0.001", lower
                )


def _meanings(trial: Trial) -> None:
    places = _places(11)
    for degree in (1, 2, 3, 4):
        truth = _predictor(trial, degree)
        other = trial.call("change_meaning", predictor=truth)
        trial.agree(_values(other, 1.0 - places), _values(truth, places), "fit", "the polynomial of 1 - r", times=10)
        back = trial.call("change_meaning", predictor=other)
        trial.agree(back["coefficients"], truth["coefficients"], "fit", "the change, twice", times=10)
        if (other["meaning"], back["meaning"]) != ("pruned", "retained"):
            raise broken("meaning", "must change", ("pruned", "retained"), (other["meaning"], back["meaning"]))
        for layers, budget in ((8, 5), (8, 11), (5, 7)):
            split = trial.call("best_split", predictor=truth, num_layers=layers, budget=budget)
            for predictor, count, meaning in (
                (truth, 2 * layers - budget, "pruned"),
                (other, budget, "retained"),
                (other, 2 * layers - budget, "pruned"),
            ):
                same = trial.call("best_split", predictor=predictor, num_layers=layers, budget=count, meaning=meaning)
                if (same["attention"], same["activation"]) != (split["attention"], split["activation"]):
                    raise broken("the best split", "must not depend on the meaning", split, same)


def _best(trial: Trial) -> None:
    for degree in (2, 3):
        truth = _predictor(trial, degree)
        for layers, budget in ((6, 0), (6, 4), (6, 9), (6, 12)):
            split = trial.call("best_split", predictor=truth, num_layers=layers, budget=budget)
            kept = int(split["attention"]), int(split["activation"])
            if sum(kept) != budget or not all(0 <= count <= layers for count in kept):
                raise broken("a split", "must lie on the budget line", f"{budget} of {2 * layers}", kept)
            own = _values(truth, np.array([kept]) / layers)
            trial.agree([split["quality"]], own, "fit", "the quality of the split")
            line = np.array([(a, budget - a) for a in range(layers + 1) if 0 <= budget - a <= layers]) / layers
            trial.at_most(_values(truth, line), own[0], "fit", "the qualities on the line")


def _noise(trial: Trial) -> None:
    places = _places(13)
    truth = {"degree": 2, "coefficients": np.array([0.0, 2.0, 1.75, -1.5, 0.25, -1.25])}
    points = np.column_stack([places, _values(truth, places)])
    given: dict[str, Any] = {"points": points, "num_layers": 8, "budget": 9}
    still = trial.call("study_noise", noise=np.zeros((3, 13)), **given)
    trial.agree([still["same"], still["one_layer"], still["more"]], [1.0, 0.0, 0.0], "fit", "shares without noise")
    trial.agree(still["std"], [0.0, 0.0], "fit", "the spread without noise")
    noise = trial.numbers(6420, 24, 13, low=-32, high=32, shift=4)
    study, turned = (trial.call("study_noise", noise=part, **given) for part in (noise, noise[::-1].copy()))
    for name in ("same", "one_layer", "more", "mean", "std"):
        trial.agree(turned[name], study[name], "fit", f"{name} of the trials in the other order")
    shares = sum(float(study[name]) for name in ("same", "one_layer", "more"))
    trial.agree(shares, 1.0, "fit", "the sum of the shares")
    trial.agree(np.sum(as_array(study["mean"], "mean")), 9 / 8, "fit", "the sum of the mean ratios")
    loud = trial.call("study_noise", noise=64.0 * np.sign(noise), limit=0.25, **given)
    clipped = trial.call("study_noise", noise=0.25 * np.sign(noise), **given)
    trial.agree(loud["mean"], clipped["mean"], "fit", "noise beyond the limit")


LAWS: tuple[Law, ...] = (
    part_law(
        "found-again",
        "fit_predictor cross_validate",
        "PRED-1 PRED-3 PRED-4",
        "A polynomial is found again from its values.",
        _found_again,
        ALONE,
    ),
    part_law(
        "meanings",
        "change_meaning best_split",
        "PRED-2 PRED-5 PRED-6",
        "Both meanings of ratios and budgets have the same splits.",
        _meanings,
        ALONE,
    ),
    part_law("best", "best_split", "PRED-5", "No split on the budget line is better.", _best, ALONE),
    part_law(
        "noise", "study_noise", "PRED-7", "Without noise nothing moves, and trials have no order.", _noise, ALONE
    ),
)
"""The laws of PRED."""
