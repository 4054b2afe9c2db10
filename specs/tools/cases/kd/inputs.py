"""Inputs that the losses on logits share, and what all of them refuse."""

from __future__ import annotations

from typing import Any

import oracle_kd as oracle
from book import Given, array, mask, numbers, special
from exact import flatten, map_numbers, shape_of, unflatten

Case = tuple[str, str, str, dict[str, Any]]
TEACHER = array([[[3, 1, 0, -1, 0.5], [0, 2, -2, 1, 4]], [[1, 1.5, 2, 2.5, -3], [-1, 0, 3, 0.25, 1]]])
STUDENT = array([[[1, 2, 0, -1, 1], [2, 1, 0.5, -2, 1]], [[0, -1, 2, 0.25, 1], [3, 0, -1, 1, 0.5]]])
LARGE_TEACHER, LARGE_STUDENT = numbers([2, 3, 40], 3001, -24, 24, 2), numbers([2, 3, 40], 3002, -16, 16, 2)
SOME = mask([[1, 0], [1, 1]])
DIVERGENCES = ("kl", "reverse_kl", "jsd", "cross_entropy")


def topk(logits: Given, k: int, temperature: float = 1, **changes: Any) -> dict[str, Any]:
    """A record of top-k targets, its numbers in float64 whatever the dtype under judgement."""
    made = oracle.kd_targets_topk(logits.value, k, temperature=_exact(temperature))
    return {
        "ids": array(made["ids"], "int64"),
        "log_probs": array(map_numbers(_float, made["log_probs"]), "float64"),
        "log_tail": array(map_numbers(_float, made["log_tail"]), "float64"),
        "temperature": temperature,
        "vocab_size": made["vocab_size"],
        **changes,
    }


def sampled(logits: Given, uniforms: Given, temperature: float = 1, **options: Any) -> dict[str, Any]:
    """A record of sampled targets, the same way."""
    made = oracle.kd_targets_sampled(logits.value, uniforms.value, temperature=_exact(temperature), **options)
    return {
        "ids": array(made["ids"], "int64"),
        "weights": array(map_numbers(_float, made["weights"]), "float64"),
        "entropy": array(map_numbers(_float, made["entropy"]), "float64"),
        "temperature": temperature,
        "vocab_size": made["vocab_size"],
    }


def _exact(number: float) -> Any:
    return array([number]).value[0]


def _float(number: Any) -> Any:
    return "-inf" if number == oracle.NOTHING else float(number)


UNIFORMS = array([[[0.0625, 0.5, 0.9375], [0.25, 0.8125, 0.375]], [[0.6875, 0.125, 0.3125], [0.75, 0.4375, 0.1875]]])
DRAWN = sampled(TEACHER, UNIFORMS, keep=1)


def shared_cases() -> list[Case]:
    """What the loss and its gradient share: name, comment, ids, inputs."""
    cases: list[Case] = []

    def add(name: str, comment: str, spec: str, targets: Any, student: Any = STUDENT, **options: Any) -> None:
        cases.append((name, comment, spec, {"targets": targets, "student_logits": student, **options}))

    for divergence in DIVERGENCES:
        slug, option = divergence.replace("_", "-"), {"divergence": divergence}
        add(f"{slug}", "whole rows, mean over four of them", "KD-3 KD-16 KD-17", TEACHER, **option)
        add(f"{slug}-large", "forty classes", "KD-17", LARGE_TEACHER, LARGE_STUDENT, **option)
        add(
            f"{slug}-mask",
            "the mean is over the rows that count",
            "KD-2 KD-3 KD-17",
            TEACHER,
            loss_mask=SOME,
            **option,
        )
        add(
            f"{slug}-temperature",
            "both sides are divided by T, the loss times T^2",
            "KD-5 KD-17",
            TEACHER,
            temperature=2,
            **option,
        )
        add(f"{slug}-topk", "two classes and the tail", "KD-16 KD-17", topk(TEACHER, 2), **option)
        add(
            f"{slug}-topk-temperature",
            "a record brings its temperature",
            "KD-5 KD-6 KD-17",
            topk(TEACHER, 3, 2),
            **option,
        )
        add(f"{slug}-topk-whole", "all classes: no tail", "KD-16 KD-17", topk(TEACHER, 5), **option)
        add(
            f"{slug}-topk-mask",
            "rows of a record that do not count",
            "KD-2 KD-17",
            topk(TEACHER, 1),
            loss_mask=SOME,
            **option,
        )
    for mixing in (0, 0.25, 0.75, 1):
        spec = "KD-18" if mixing in (0, 1) else "KD-17 KD-18"
        for name, targets in (("", TEACHER), ("-topk", topk(TEACHER, 2))):
            add(f"jsd-mixing-{mixing}{name}", "R = m P + (1 - m) Q", spec, targets, divergence="jsd", mixing=mixing)
    for divergence in ("kl", "cross_entropy"):
        slug, option = divergence.replace("_", "-"), {"divergence": divergence}
        add(f"{slug}-sampled", "weighted log-probabilities of draws", "KD-19", DRAWN, **option)
        add(f"{slug}-sampled-mask", "draws, rows that count", "KD-2 KD-19", DRAWN, loss_mask=SOME, **option)
        cold = sampled(TEACHER, UNIFORMS, 0.5, keep=2, power=_exact(0.5))
        add(f"{slug}-sampled-temperature", "weights that do not sum to one", "KD-5 KD-6 KD-19", cold, **option)
    for name, targets in (("", TEACHER), ("-topk", topk(TEACHER, 2, 2)), ("-sampled", sampled(TEACHER, UNIFORMS, 2))):
        add(f"no-t-squared{name}", "t_squared=False: no factor", "KD-5", targets, temperature=2, t_squared=False)
    add("reduction-sum", "the sum over rows that count", "KD-3", TEACHER, reduction="sum", loss_mask=SOME)
    add(
        "reduction-batch-mean",
        "that sum over B, the size of the first axis",
        "KD-3",
        TEACHER,
        reduction="batch_mean",
        loss_mask=SOME,
    )
    add(
        "classifier",
        "one leading axis",
        "KD-1 KD-3",
        numbers([3, 6], 3003, -8, 8, 2),
        numbers([3, 6], 3004, -8, 8, 2),
    )
    add(
        "four-axes",
        "three leading axes",
        "KD-1 KD-3",
        numbers([2, 1, 2, 3], 3005, -8, 8, 2),
        numbers([2, 1, 2, 3], 3006, -8, 8, 2),
    )
    add(
        "jsd-no-tail",
        "a log_tail of -inf: a term that is 0",
        "KD-11 KD-17",
        RENORMALISED,
        ONE_STUDENT,
        divergence="jsd",
    )
    add(
        "kl-no-tail",
        "renormalised targets: the student's tail still weighs in Q",
        "KD-11 KD-17",
        RENORMALISED,
        ONE_STUDENT,
    )
    padded = array([[[3, 1, 0, -20, -32]], [[0, 2, -2, -20, -24]]])
    wide = array([[[1, 2, 0, 4, 1]], [[2, 1, 0.5, -2, 8]]])
    add("padded", "what is padding is cut on both sides", "KD-7", padded, wide, vocab_size=3)
    three = array([[[3, 1, 0]], [[0, 2, -2]]])
    add("padded-topk", "a record of three classes against logits of five", "KD-7", topk(three, 2), wide, vocab_size=3)
    heavy = array([[[3, 1, 0, -20, -32]], [[0, 2, -2, 8, 8]]])
    add(
        "padded-uncounted",
        "mass is asked for in rows that count alone",
        "KD-7",
        heavy,
        wide,
        vocab_size=3,
        loss_mask=mask([[1], [0]]),
    )
    far = array([[[0, -200, -400]]])
    near = array([[[0, 0, 1]]])
    add("tiny-student", "probabilities of exp(-200) have a logarithm", "KD-16 KD-17", near, far)
    add(
        "tiny-teacher",
        "exp(-200) of the teacher under the reverse KL",
        "KD-9 KD-17",
        far,
        near,
        divergence="reverse_kl",
    )
    add(
        "tiny-tail",
        "a tail of the student of exp(-200): its logarithm comes from its own logits",
        "KD-16",
        topk(near, 1),
        array([[[-100, -100, 100]]]),
    )
    add(
        "huge-logits",
        "logits of 1024 and more",
        "KD-16",
        array([[[1024, 1020, -1024]]]),
        array([[[2048, 2032, 2040]]]),
    )
    add("equal", "equal rows", "KD-17", STUDENT, STUDENT)
    return cases


RENORMALISED = {
    "ids": array([[[0, 2]]], "int64"),
    "log_probs": array([[[-0.6931471805599453, -0.6931471805599453]]], "float64"),
    "log_tail": array([["-inf"]], "float64"),
    "temperature": 1,
    "vocab_size": 4,
}
ONE_STUDENT = array([[[1, 2, 0, -1]]])


Refusal = tuple[str, str, str, str, dict[str, Any]]
"""Name, comment, sentences, error code, and the inputs that differ."""


def refusals() -> list[Refusal]:
    """What every loss on logits refuses: name, comment, ids, code, what is changed."""
    value, shape, dtype, finite, distribution = (
        "argument-value",
        "argument-shape",
        "argument-dtype",
        "not-finite",
        "not-a-distribution",
    )
    good = topk(TEACHER, 2)

    def but(record: dict[str, Any], **changes: Any) -> dict[str, Any]:
        return {"targets": {**record, **changes}}

    def replaced(given: Given, number: Any, kind: str = "float64") -> Given:
        entries = [float(x) if kind != "int64" else int(x) for x in flatten(given.value)]
        return array(unflatten([number, *entries[1:]], shape_of(given.value)), kind)

    cases: list[Refusal] = [
        ("bad-divergence", "js is called jsd here", "KD-17", value, {"divergence": "js"}),
        ("bad-reduction", "another reduction", "KD-3", value, {"reduction": "batchmean"}),
        ("bad-mixing", "above 1", "KD-18", value, {"mixing": 1.5}),
        (
            "bad-mixing-unused",
            "below 0, though kl makes no use of it",
            "KD-18",
            value,
            {"mixing": -0.25, "divergence": "kl"},
        ),
        ("mixing-nan", "not a number", "KD-18", value, {"mixing": special("nan")}),
        ("bad-t-squared", "neither True nor False", "KD-5", value, {"t_squared": 2}),
        ("temperature-zero", "T = 0", "KD-5", value, {"temperature": 0}),
        ("temperature-inf", "an infinite T", "KD-5", value, {"temperature": special("inf")}),
        ("temperature-of-another", "targets at 1, loss at 2", "KD-6", value, {**but(good), "temperature": 2}),
        ("temperature-of-other-draws", "draws at 1, loss at 2", "KD-6", value, {"targets": DRAWN, "temperature": 2}),
        ("mask-of-integers", "an integer mask", "MAP-7 KD-2", dtype, {"loss_mask": array([[1, 0], [1, 1]], "int64")}),
        ("mask-of-another-shape", "a mask for other rows", "MAP-7 KD-2", shape, {"loss_mask": mask([1, 0])}),
        (
            "targets-nan",
            "NaN in the teacher's logits",
            "KD-1",
            finite,
            {"targets": replaced(TEACHER, "nan", "float")},
        ),
        (
            "targets-minus-inf",
            "-inf in the teacher's logits",
            "KD-1",
            finite,
            {"targets": replaced(TEACHER, "-inf", "float")},
        ),
        ("targets-of-other-rows", "one row fewer", "KD-7", shape, {"targets": numbers([2, 1, 5], 3010, -8, 8, 2)}),
        (
            "vocabularies-differ",
            "six classes against five",
            "KD-7",
            shape,
            {"targets": numbers([2, 2, 6], 3011, -8, 8, 2)},
        ),
        ("record-of-another-vocabulary", "a record of six classes", "KD-7", shape, but(good, vocab_size=6)),
        (
            "record-of-other-rows",
            "ids of one row",
            "KD-7",
            shape,
            {"targets": topk(numbers([1, 2, 5], 3015, -90, 90, 4), 2)},
        ),
        (
            "log-probs-of-another-shape",
            "k of the ids and of log_probs differ",
            "KD-7",
            shape,
            but(good, log_probs=topk(TEACHER, 3)["log_probs"]),
        ),
        ("cut-with-mass", "the classes cut have a third of the mass", "KD-7", value, {"vocab_size": 4}),
        ("vocab-size-zero", "no class", "KD-7", value, {"vocab_size": 0}),
        ("vocab-size-too-large", "more than there are", "KD-7", shape, {"vocab_size": 6}),
        ("vocab-size-not-the-records", "cut to four, targets of five", "KD-7", shape, {**but(good), "vocab_size": 4}),
        (
            "ids-twice",
            "one id twice in a row",
            "KD-10",
            value,
            but(good, ids=array([[[1, 1], [1, 4]], [[2, 3], [2, 4]]], "int64")),
        ),
        ("ids-negative", "an id of -1", "KD-10", value, but(good, ids=replaced(good["ids"], -1, "int64"))),
        ("ids-beyond", "an id of V", "KD-10", value, but(good, ids=replaced(good["ids"], 5, "int64"))),
        (
            "ids-real",
            "ids that are not integers",
            "KD-10",
            dtype,
            but(good, ids=array([[[0, 1], [1, 4]], [[2, 3], [2, 4]]])),
        ),
        ("log-probs-nan", "NaN", "KD-10", finite, but(good, log_probs=replaced(good["log_probs"], "nan"))),
        (
            "log-probs-minus-inf",
            "a class of the head without mass",
            "KD-10",
            finite,
            but(good, log_probs=replaced(good["log_probs"], "-inf")),
        ),
        ("log-tail-nan", "NaN", "KD-10", finite, but(good, log_tail=replaced(good["log_tail"], "nan"))),
        (
            "not-one",
            "a row that sums to more than one",
            "KD-10",
            distribution,
            but(good, log_tail=replaced(good["log_tail"], -0.5)),
        ),
        (
            "tail-of-nothing",
            "all classes, and a tail",
            "KD-10",
            distribution,
            but(topk(TEACHER, 5), log_tail=array([[-12, -12], [-12, -12]], "float64")),
        ),
        (
            "reverse-kl-no-tail",
            "infinite",
            "KD-20",
            "support-mismatch",
            {"targets": RENORMALISED, "student_logits": ONE_STUDENT, "divergence": "reverse_kl"},
        ),
        (
            "jsd-one-no-tail",
            "jsd with a mixing of 1 is the reverse KL",
            "KD-20 KD-18",
            "support-mismatch",
            {"targets": RENORMALISED, "student_logits": ONE_STUDENT, "divergence": "jsd", "mixing": 1},
        ),
        ("reverse-kl-sampled", "biased", "KD-19", value, {"targets": DRAWN, "divergence": "reverse_kl"}),
        ("jsd-sampled", "biased", "KD-19", value, {"targets": DRAWN, "divergence": "jsd"}),
        (
            "weights-negative",
            "a weight below 0",
            "KD-14",
            distribution,
            but(DRAWN, weights=replaced(DRAWN["weights"], -0.5)),
        ),
        ("weights-nan", "NaN", "KD-14", finite, but(DRAWN, weights=replaced(DRAWN["weights"], "nan"))),
        (
            "entropy-negative",
            "an entropy below 0",
            "KD-14",
            value,
            but(DRAWN, entropy=replaced(DRAWN["entropy"], -1)),
        ),
        (
            "entropy-inf",
            "an infinite entropy",
            "KD-14",
            finite,
            but(DRAWN, entropy=replaced(DRAWN["entropy"], "inf")),
        ),
        ("draws-beyond", "an id of V", "KD-14 KD-10", value, but(DRAWN, ids=replaced(DRAWN["ids"], 5, "int64"))),
    ]
    return cases


STUDENT_REFUSALS: tuple[tuple[str, str, str, str, dict[str, Any], Any], ...] = (
    (
        "student-nan",
        "NaN in a row that does not count",
        "KD-1",
        "not-finite",
        {"loss_mask": mask([[0, 1], [1, 1]])},
        "nan",
    ),
    ("student-minus-inf", "-inf is no logit of a class", "KD-1", "not-finite", {}, "-inf"),
)
