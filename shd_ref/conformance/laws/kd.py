"""Laws on distillation of logits and hidden states (``specs/kd.md``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance.laws.law import Array, Law, Trial, broken

_DIVERGENCES = ("kl", "reverse_kl", "jsd", "cross_entropy")
_MASK = np.array([[True, False, True], [True, True, True]])
_WIDE = ("float64", "float32")


def _sides(trial: Trial, seed: int, *shape: int) -> tuple[Array, Array]:
    """Logits of a teacher and of a student, no two of a row alike on the teacher's side."""
    shape = shape or (2, 3, 6)
    order = np.argsort(trial.numbers(seed, *shape) + np.linspace(0, 0.01, shape[-1]), axis=-1)
    return trial.rounded(order.argsort(axis=-1) * 0.75 - 2), trial.numbers(seed + 1, *shape)


def _uniforms(trial: Trial, seed: int, count: int, rows: tuple[int, ...] = (2, 3)) -> Array:
    return trial.rounded(trial.numbers(seed, *rows, count, low=0, high=63, shift=6) + 2.0**-8)


def _record(trial: Trial, operation: str, **inputs: Any) -> dict[str, Any]:
    """A record as an implementation gave it, numbers as float64 arrays and ids as integers."""
    answer = trial.call(operation, **inputs)
    return {
        name: np.asarray(value, dtype=np.int64 if name == "ids" else np.float64)
        if name in ("ids", "log_probs", "log_tail", "weights", "entropy")
        else (int(value) if name == "vocab_size" else float(value))
        for name, value in answer.items()
    }


def _loss(trial: Trial, targets: Any, student: Array, **options: Any) -> NDArray[np.float64]:
    return trial.numbers_of("kd_loss", targets=targets, student_logits=student, **options)


def _shift(trial: Trial) -> None:
    teacher, student = _sides(trial, 4001)
    topk = _record(trial, "kd_targets_topk", teacher_logits=teacher, k=3)
    for targets in (teacher, topk):
        for divergence in _DIVERGENCES:
            wanted = _loss(trial, targets, student, divergence=divergence)
            got = _loss(trial, targets, trial.rounded(student + 4.0), divergence=divergence)
            trial.agree(got, wanted, "loss", f"{divergence} of student logits that are all 4 higher", times=2)
    moved = _loss(trial, trial.rounded(teacher - 8.0), student)
    trial.agree(moved, _loss(trial, teacher, student), "loss", "kl of teacher logits that are all 8 lower", times=2)


def _permuted(trial: Trial) -> None:
    teacher, student = _sides(trial, 4011)
    order = np.array([4, 2, 5, 0, 3, 1])
    for divergence in _DIVERGENCES:
        wanted = _loss(trial, teacher, student, divergence=divergence)
        got = _loss(trial, teacher[..., order], student[..., order], divergence=divergence)
        trial.agree(got, wanted, "loss", f"{divergence} after the vocabulary was reordered", times=2)
    # The same with a record, whose ids follow.
    topk = _record(trial, "kd_targets_topk", teacher_logits=teacher, k=2)
    place = np.argsort(order)
    got = _loss(trial, {**topk, "ids": place[topk["ids"]]}, student[..., order])
    trial.agree(got, _loss(trial, topk, student), "loss", "kl of top-k targets, reordered", times=2)


def _whole(trial: Trial) -> None:
    teacher, student = _sides(trial, 4021)
    for temperature in (1.0, 2.0):
        topk = _record(trial, "kd_targets_topk", teacher_logits=teacher, k=6, temperature=temperature)
        for divergence in _DIVERGENCES:
            wanted = _loss(trial, teacher, student, divergence=divergence, temperature=temperature)
            got = _loss(trial, topk, student, divergence=divergence)
            trial.agree(got, wanted, "loss", f"{divergence} of all classes as a record", times=2)


def _tail(trial: Trial) -> None:
    teacher, student = _sides(trial, 4031)
    topk = _record(trial, "kd_targets_topk", teacher_logits=teacher, k=2)
    sums = np.exp(topk["log_probs"]).sum(-1) + np.exp(topk["log_tail"])
    trial.agree(sums, np.ones((2, 3)), "probs", "the masses of a row", times=4)
    if (np.diff(topk["ids"], axis=-1) <= 0).any():
        raise broken("ids", "must ascend", np.sort(topk["ids"], -1), topk["ids"])
    trial.at_most(_loss(trial, topk, student), _loss(trial, teacher, student), "loss", "kl with a tail (KD-21)")
    # Where the student has the teacher's proportions in the tail nothing is lost.
    own = np.zeros_like(teacher)
    np.put_along_axis(own, topk["ids"], trial.numbers(4033, 2, 3, 2), -1)
    alike = trial.rounded(teacher + own)
    trial.agree(
        _loss(trial, topk, alike), _loss(trial, teacher, alike), "loss", "kl with the teacher's tail", times=4
    )


def _split(trial: Trial) -> None:
    teacher, student = _sides(trial, 4041)
    topk = _record(trial, "kd_targets_topk", teacher_logits=teacher, k=3)

    def part(targets: Any, rows: list[int]) -> Any:
        if not isinstance(targets, dict):
            return targets[rows]
        return {name: value[rows] if isinstance(value, np.ndarray) else value for name, value in targets.items()}

    for name, targets in (("logits", teacher), ("top-k targets", topk)):
        for reduction, divisor in (("sum", 1.0), ("mean", 2.0), ("batch_mean", 2.0)):
            parts = [_loss(trial, part(targets, [i]), student[[i]], reduction=reduction) for i in (0, 1)]
            got = _loss(trial, targets, student, reduction=reduction)
            trial.agree(
                got, sum(parts) / divisor, "loss", f"{reduction} over a batch of {name} in two parts", times=2
            )


def _temperature(trial: Trial) -> None:
    teacher, student = _sides(trial, 4051)
    half = trial.rounded(teacher / 2), trial.rounded(student / 2)
    for divergence in _DIVERGENCES:
        bare = _loss(trial, *half, divergence=divergence)
        got = _loss(trial, teacher, student, divergence=divergence, temperature=2.0)
        trial.agree(got, 4 * bare, "loss", f"{divergence} at T = 2 against halved logits", times=4)
        got = _loss(trial, teacher, student, divergence=divergence, temperature=2.0, t_squared=False)
        trial.agree(got, bare, "loss", f"{divergence} at T = 2 without T^2", times=4)
    # A record remembers.
    topk = _record(trial, "kd_targets_topk", teacher_logits=teacher, k=2, temperature=2.0)
    told = _loss(trial, topk, student, temperature=2.0)
    trial.agree(_loss(trial, topk, student), told, "loss", "kl at the record's own temperature")


def _slope(trial: Trial) -> None:
    teacher, student = _sides(trial, 4061)
    direction = trial.numbers(4063, 2, 3, 6)
    topk = _record(trial, "kd_targets_topk", teacher_logits=teacher, k=3, temperature=2.0)
    drawn = _record(
        trial,
        "kd_targets_sampled",
        teacher_logits=teacher,
        uniforms=_uniforms(trial, 4064, 4),
        keep=1,
        temperature=2.0,
    )
    step = 2.0**-12
    for name, targets in (("logits", teacher), ("top-k targets", topk), ("sampled targets", drawn)):
        for divergence in _DIVERGENCES if targets is not drawn else ("kl", "cross_entropy"):
            options = {"divergence": divergence, "mixing": 0.25, "temperature": 2.0, "loss_mask": _MASK}
            ends = [_loss(trial, targets, student + sign * step * direction, **options) for sign in (1, -1)]
            dz = trial.numbers_of("kd_loss_gradient", targets=targets, student_logits=student, **options)
            # What a central difference leaves out is a third derivative times step^2.
            distance = abs(float((ends[0] - ends[1]) / (2 * step) - (dz * direction).sum()))
            if distance > 1e-5:
                raise broken(
                    f"dz of {divergence} with {name}", f"is off the loss's slope by {distance:.3g}", ends, dz
                )


def _uncounted(trial: Trial) -> None:
    teacher, student = _sides(trial, 4071)
    others, elsewhere = _sides(trial, 4073)
    mixed = [np.where(_MASK[..., None], a, b) for a, b in ((teacher, others), (student, elsewhere))]
    for divergence in _DIVERGENCES:
        options: dict[str, Any] = {"divergence": divergence, "loss_mask": _MASK}
        wanted = _loss(trial, teacher, student, **options)
        trial.agree(
            _loss(trial, mixed[0], mixed[1], **options), wanted, "loss", f"{divergence} with other uncounted rows"
        )
        dz = trial.numbers_of("kd_loss_gradient", targets=teacher, student_logits=student, **options)
        if (dz[~_MASK] != 0.0).any():
            raise broken("dz", "must be exactly 0 on rows that do not count", 0 * dz, dz)
        trial.agree(dz.sum(-1), np.zeros((2, 3)), "gradient", f"the sum over classes of dz of {divergence}", times=4)


def _unbiased(trial: Trial) -> None:
    """Every start of three evenly spaced draws, one after another: their mean is the teacher's row."""
    starts = 64
    teacher, _ = _sides(trial, 4081, 1, 1, 6)
    offsets = (np.arange(starts) + 0.5) / starts
    uniforms = trial.rounded(((np.arange(4) + offsets[:, None]) / 4)[:, None])
    many = {"teacher_logits": np.repeat(teacher, starts, 0), "uniforms": uniforms}
    probs = np.exp(teacher[0, 0].astype(np.float64))
    probs /= probs.sum()
    for keep, power in ((0, 1.0), (2, 1.0), (1, 0.0)):
        drawn = _record(trial, "kd_targets_sampled", **many, keep=keep, power=power)
        mean = np.bincount(drawn["ids"].reshape(-1), drawn["weights"].reshape(-1), minlength=6) / starts
        # A grid of 64 starts is off by less than one of its cells, and by the weight of a draw.
        cell = float(drawn["weights"][..., keep:].max()) / starts * 2
        if np.abs(mean - probs).max() > cell:
            raise broken(f"mean weights, keep={keep}, power={power}", "must be the teacher's row", probs, mean)
        trial.agree(
            drawn["entropy"], np.full((starts, 1), -(probs * np.log(probs)).sum()), "loss", "entropy", times=2
        )


def _linear(trial: Trial) -> None:
    teacher, _ = _sides(trial, 4091)
    hidden, weight = (
        trial.numbers(seed, *shape, low=-8, high=8) for seed, shape in ((4093, (2, 3, 4)), (4094, (6, 4)))
    )
    bias = trial.numbers(4095, 6, low=-8, high=8)
    logits = hidden.astype(np.float64) @ weight.T.astype(np.float64) + bias
    topk = _record(trial, "kd_targets_topk", teacher_logits=teacher, k=3)
    head = {"hidden": hidden, "weight": weight, "bias": bias, "loss_mask": _MASK}
    for targets in (teacher, topk):
        fused = trial.numbers_of("linear_kd_loss", targets=targets, **head)
        trial.agree(fused, _loss(trial, targets, logits, loss_mask=_MASK), "loss", "the fused loss", times=2)
        dz = trial.numbers_of("kd_loss_gradient", targets=targets, student_logits=logits, loss_mask=_MASK)
        wanted = {
            "dhidden": dz @ weight,
            "dweight": np.einsum("blv,bld->vd", dz, hidden),
            "dbias": dz.sum((0, 1)),
        }
        answer = trial.call("linear_kd_loss_gradient", targets=targets, **head)
        for name, right in wanted.items():
            trial.agree(answer[name], right, "gradient", name, times=8)


def _mirrored(trial: Trial) -> None:
    teacher, student = _sides(trial, 4101)
    pairs: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("kl and reverse_kl", {"divergence": "kl"}, {"divergence": "reverse_kl"}),
        ("jsd", {"divergence": "jsd", "mixing": 0.25}, {"divergence": "jsd", "mixing": 0.75}),
    )
    for name, one, other in pairs:
        trial.agree(
            _loss(trial, teacher, student, **one),
            _loss(trial, student, teacher, **other),
            "loss",
            f"{name} with the sides exchanged",
            times=2,
        )
    for mixing, divergence in ((0, "kl"), (1, "reverse_kl")):
        trial.agree(
            _loss(trial, teacher, student, divergence="jsd", mixing=mixing),
            _loss(trial, teacher, student, divergence=divergence),
            "loss",
            f"jsd at a mixing of {mixing} is {divergence}",
        )
    trial.at_most(
        _loss(trial, teacher, student, divergence="jsd"), np.log(2.0), "loss", "jsd, which is at most log 2"
    )


def _means(trial: Trial) -> None:
    teacher, student = _sides(trial, 4111)
    for of in ("logits", "probs"):
        alone = trial.numbers_of("mean_logits", logits=[teacher], of=of, temperature=2.0)
        probs, wanted = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (alone / 2, teacher / 2.0))
        trial.agree(probs, wanted, "probs", f"softmax of the mean of one teacher ({of})", times=4)
        both = trial.numbers_of("mean_logits", logits=[teacher, student], of=of)
        turned = trial.numbers_of("mean_logits", logits=[student, teacher], of=of)
        trial.agree(turned, both, "loss", f"the mean of two teachers in the other order ({of})", times=2)
        double = trial.numbers_of("mean_logits", logits=[teacher, student], of=of, weights=[3, 3])
        trial.agree(double, both, "loss", f"the mean with weights of 3 each ({of})", times=2)


def _hidden(trial: Trial) -> None:
    student, teacher = (trial.numbers(seed, 2, 3, 5) for seed in (4121, 4122))
    pair = {"student_hidden": student, "teacher_hidden": teacher}

    def loss(**options: Any) -> NDArray[np.float64]:
        return trial.numbers_of("hidden_loss", **{**pair, **options})

    cosine = loss(distance="cosine")
    trial.agree(loss(distance="normalized_mse"), 2 * cosine, "loss", "normalized_mse against twice cosine", times=4)
    scaled = loss(distance="cosine", student_hidden=trial.rounded(4.0 * student))
    trial.agree(scaled, cosine, "loss", "cosine of a student four times as long", times=2)
    trial.agree(loss(teacher_hidden=student), 0.0, "loss", "mse of a student that is the teacher")
    doubled = loss(student_hidden=trial.rounded(2.0 * student), teacher_hidden=trial.rounded(2.0 * teacher))
    trial.agree(doubled, 4 * loss(), "loss", "mse of both sides doubled", times=2)
    layers = {"student_hidden": [student, student], "teacher_hidden": [teacher, student]}
    for distance in ("mse", "cosine", "normalized_mse"):
        trial.agree(
            loss(**layers, distance=distance),
            loss(distance=distance),
            "loss",
            f"{distance} with an equal layer",
            times=2,
        )
        parts = [
            trial.numbers_of(
                "hidden_loss", student_hidden=student[[i]], teacher_hidden=teacher[[i]], distance=distance
            )
            for i in (0, 1)
        ]
        trial.agree(loss(distance=distance), sum(parts) / 2, "loss", f"{distance} of a batch in two parts", times=2)


def _hidden_slope(trial: Trial) -> None:
    student, teacher, direction = (trial.numbers(seed, 2, 3, 5) for seed in (4131, 4132, 4133))
    step = 2.0**-12
    for distance in ("mse", "cosine", "normalized_mse"):
        options = {"teacher_hidden": teacher, "distance": distance, "loss_mask": _MASK}
        ends = [
            trial.numbers_of("hidden_loss", student_hidden=student + sign * step * direction, **options)
            for sign in (1, -1)
        ]
        ds = trial.numbers_of("hidden_loss_gradient", student_hidden=student, **options)
        distance_off = abs(float((ends[0] - ends[1]) / (2 * step) - (ds * direction).sum()))
        if distance_off > 1e-5 or (ds[~_MASK] != 0.0).any():
            raise broken(f"dstudent of {distance}", f"is off the loss's slope by {distance_off:.3g}", ends, ds)


def _law(
    name: str,
    operations: str,
    spec: str,
    comment: str,
    statement: Callable[[Trial], None],
    dtypes: tuple[str, ...] = _WIDE,
) -> Law:
    return Law(f"law/kd-{name}", tuple(operations.split()), tuple(spec.split()), comment, statement, dtypes)


LAWS: tuple[Law, ...] = (
    _law(
        "shift",
        "kd_loss kd_targets_topk",
        "KD-9 KD-16",
        "A constant added to a row of logits changes nothing.",
        _shift,
    ),
    _law(
        "permutation",
        "kd_loss kd_targets_topk",
        "KD-16 KD-17",
        "The order of the vocabulary does not matter.",
        _permuted,
    ),
    _law(
        "whole", "kd_loss kd_targets_topk", "KD-9 KD-16 KD-17", "With k = V top-k targets are the whole rows.", _whole
    ),
    _law(
        "tail",
        "kd_loss kd_targets_topk",
        "KD-8 KD-9 KD-21",
        "A row's masses sum to one, and merging a tail never adds.",
        _tail,
    ),
    _law("split", "kd_loss kd_targets_topk", "KD-3 NUM-3", "A batch is the sum or mean of its parts.", _split),
    _law(
        "temperature", "kd_loss kd_targets_topk", "KD-5 KD-6", "T divides logits, and T^2 multiplies.", _temperature
    ),
    _law(
        "slope",
        "kd_loss kd_loss_gradient kd_targets_topk kd_targets_sampled",
        "KD-22 KD-23",
        "The gradient is the slope of your own loss.",
        _slope,
        ("float64",),
    ),
    _law(
        "uncounted",
        "kd_loss kd_loss_gradient",
        "KD-2 KD-4 KD-22",
        "Rows that do not count are not read; dz sums to 0.",
        _uncounted,
    ),
    _law(
        "unbiased",
        "kd_targets_sampled",
        "KD-12 KD-13",
        "The weights of draws are the teacher's row in the mean.",
        _unbiased,
    ),
    _law(
        "linear",
        "kd_loss kd_loss_gradient linear_kd_loss linear_kd_loss_gradient kd_targets_topk",
        "KD-25",
        "The fused loss is the loss on the head's logits.",
        _linear,
    ),
    _law(
        "mirror",
        "kd_loss",
        "KD-17 KD-18",
        "Exchanging the sides exchanges kl and reverse_kl, m and 1 - m.",
        _mirrored,
    ),
    _law(
        "means",
        "mean_logits",
        "KD-15",
        "The mean of one teacher is that teacher, in any order and scale of weights.",
        _means,
    ),
    _law("hidden", "hidden_loss", "HID-2 HID-3 HID-4", "Scales, equal layers and parts of a batch.", _hidden),
    _law(
        "hidden-slope",
        "hidden_loss hidden_loss_gradient",
        "HID-6",
        "The gradient is the slope of your own loss.",
        _hidden_slope,
        ("float64",),
    ),
)
