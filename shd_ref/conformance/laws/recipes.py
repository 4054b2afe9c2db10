"""Laws on the losses that SHD is combined with (``specs/recipes.md``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from shd_ref.conformance.laws.law import Array, Law, Trial, as_array, broken

_HARD = np.array([0, 4, 2])
_WORDS = np.array([[1, -100, 5], [-100, 2, 3]])
_MASK = np.array([[True, False, True], [True, True, False]])


def _value(trial: Trial, operation: str, name: str, **inputs: Any) -> Array:
    """The value of one term."""
    answer = trial.subject.run(operation, inputs)
    term = answer[name] if isinstance(answer, dict) else getattr(answer, name)
    return as_array(term["value"] if isinstance(term, dict) else term.value, name)


def _images(trial: Trial, seed: int) -> tuple[Array, Array, Array]:
    return tuple(trial.numbers(seed + place, 3, 5) for place in range(3))  # type: ignore[return-value]


def _certain_labels(trial: Trial) -> None:
    student, token, teacher = _images(trial, 6001)
    soft = trial.rounded(np.eye(5)[_HARD])
    calls: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("cross_entropy", "cross_entropy", {}),
        ("image_kd", "cross_entropy", {"targets": teacher}),
        ("nkd", "nontarget", {"teacher_logits": teacher}),
        ("nkd", "target", {"teacher_logits": teacher}),
        ("deit_soft", "cross_entropy", {"distillation_logits": token, "targets": teacher}),
        ("deit_hard", "cross_entropy", {"distillation_logits": token, "teacher_logits": teacher}),
    )
    for operation, name, more in calls:
        found, wanted = (
            _value(trial, operation, name, student_logits=student, labels=labels, **more) for labels in (soft, _HARD)
        )
        trial.agree(found, wanted, "loss", f"{name} of {operation} with soft labels that are certain", times=2)


def _equal_sides(trial: Trial) -> None:
    logits = trial.numbers(6011, 2, 3, 6)
    text: dict[str, Any] = {"student_logits": logits, "labels": _WORDS}
    zero = _value(trial, "gkd", "jsd", **text, targets=logits)
    trial.agree(zero, 0.0, "loss", "gkd of a student that is its teacher")
    trial.agree(
        _value(trial, "babyllama", "kd", **text, teacher_logits=[logits, logits]),
        0.0,
        "loss",
        "babyllama of a student that is both teachers",
        times=8,
    )
    rollout = trial.call(
        "minillm_rollout", student_logits=logits, teacher_logits=logits, tokens=np.abs(_WORDS) % 6, mask=_MASK
    )
    trial.agree(rollout["rewards"], np.zeros((2, 3)), "loss", "rewards of a student that is its teacher", times=4)
    trial.agree(rollout["weights"], np.ones((2, 3)), "loss", "weights of a student that is its teacher", times=4)


def _shifted_logits(trial: Trial) -> None:
    """A number that is added to all logits of a row changes no probability."""
    student, _, teacher = _images(trial, 6021)
    more = trial.numbers(6024, 3, 1, low=-16, high=16, shift=1)
    for operation, name, keyword in (("image_kd", "kd", "targets"), ("nkd", "nontarget", "teacher_logits")):
        wanted, found = (
            _value(trial, operation, name, student_logits=z, labels=_HARD, **{keyword: u})
            for z, u in ((student, teacher), (trial.rounded(student + more), trial.rounded(teacher - more)))
        )
        trial.agree(found, wanted, "loss", f"{name} of {operation} with other constants", times=4)


def _uncounted(trial: Trial) -> None:
    student, teacher, others = (trial.numbers(seed, 2, 3, 6) for seed in (6031, 6032, 6033))
    counted = (_WORDS != -100)[..., None]
    mixed = [np.where(counted, side, others) for side in (student, teacher)]
    for operation, name in (("language_kd", "cross_entropy"), ("language_kd", "kd"), ("gkd", "jsd")):
        wanted, found = (
            _value(trial, operation, name, student_logits=z, labels=_WORDS, targets=u)
            for z, u in ((student, teacher), mixed)
        )
        trial.agree(found, wanted, "loss", f"{name} of {operation} with other uncounted rows")


def _whitened(trial: Trial) -> None:
    rewards = trial.numbers(6041, 2, 3) * _MASK
    for whitening, ddof in (("biased", 0), ("unbiased", 1)):
        found = trial.numbers_of("minillm_advantages", rewards=rewards, mask=_MASK, whitening=whitening)
        trial.agree(found.mean(), 0.0, "loss", f"the mean of {whitening} advantages", times=8)
        spread = found.var(ddof=ddof)
        if abs(spread - 1) > 1e-2:
            raise broken(f"the {whitening} variance of advantages", "must be 1", 1.0, spread)


def _same_noise(trial: Trial) -> None:
    noise, x0 = trial.numbers(6051, 2, 1, 2, 2), trial.numbers(6052, 2, 1, 2, 2, low=-8, high=8)
    draw: dict[str, Any] = {"x0": x0, "noise": noise, "t": np.array([3, 700])}
    trial.agree(
        _value(trial, "diffusion", "mse", student_output=noise, **draw), 0.0, "loss", "mse of the noise itself"
    )
    zero = _value(trial, "diffusion", "kd", student_output=x0, teacher_output=x0, **draw)
    trial.agree(zero, 0.0, "loss", "kd of a student that is its teacher")


LAWS: tuple[Law, ...] = (
    Law(
        "law/recipes-certain-labels",
        ("cross_entropy", "image_kd", "nkd", "deit_soft", "deit_hard"),
        ("REC-5", "REC-7", "REC-10"),
        "soft labels that are certain say what hard labels say",
        _certain_labels,
    ),
    Law(
        "law/recipes-equal-sides",
        ("gkd", "babyllama", "minillm_rollout"),
        ("REC-14", "REC-15", "REC-22", "REC-23"),
        "a student that is its teacher has nothing to learn from it",
        _equal_sides,
    ),
    Law(
        "law/recipes-shifted-logits",
        ("image_kd", "nkd"),
        ("REC-9", "REC-11"),
        "a number added to all logits of a row changes nothing",
        _shifted_logits,
    ),
    Law(
        "law/recipes-uncounted",
        ("language_kd", "gkd"),
        ("REC-4", "REC-7", "REC-8", "REC-14"),
        "rows that do not count change nothing",
        _uncounted,
    ),
    Law(
        "law/recipes-whitened",
        ("minillm_advantages",),
        ("REC-25",),
        "advantages have the mean 0 and the variance 1",
        _whitened,
    ),
    Law(
        "law/recipes-same-noise",
        ("diffusion",),
        ("REC-30", "REC-33"),
        "a student that says the noise, or what its teacher says, has no loss",
        _same_noise,
    ),
)
