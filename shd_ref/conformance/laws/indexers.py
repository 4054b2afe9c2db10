"""Laws of chapter IDX: pairs of options of an indexer's loss, and what it has in common with a student's loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shd_ref.conformance.compare import compare_close
from shd_ref.conformance.laws.answers import check_answer
from shd_ref.conformance.laws.law import Array, Laws, Trial, as_array, broken, exactly
from shd_ref.conformance.laws.pair_rows import Calls, Covering, Row, covering, present, row_mask
from shd_ref.conformance.specification import agreement

LAWS = Laws()
_SOME: Sequence[str] = ("none", "some")
_SPEC = "IDX-4 IDX-5 IDX-6 IDX-7 IDX-8 IDX-9"
_VALUES: dict[str, Sequence[str]] = {
    "groups": ("one", "several"),
    "block_size": ("one", "several"),
    "layers": ("one array", "several"),
    "outside": _SOME,
    "attn_mask": ("none", "(L, S)", "other"),
    "segments": _SOME,
    "samples": ("1", "2 to 4"),
    "relu": ("True", "False"),
    "weights": _SOME,
    "top_k": ("none", "few", "all"),
    "restriction": ("renormalised", "mask_first", "unnormalised", "student_all"),
    "reduction": ("sum", "rows", "samples"),
    "loss_mask": ("none", "some rows", "an empty sample"),
}
_TARGET = "groups, block_size, layers, outside, attn_mask, segments, samples, numbers"
_LOSS = f"{_TARGET}, relu, weights, top_k, restriction, reduction, loss_mask"
_LENGTH, _HEADS, _SCORERS, _WIDTH = 6, 4, 4, 2


def _taught(trial: Trial, seed: int, row: Row) -> dict[str, Any]:
    """The teacher's side of a call."""
    batch, layers = {"1": 1, "2 to 4": 3}[row["samples"]], 1 if row["layers"] == "one array" else 2

    def drawn(at: int, *shape: int) -> Array:
        return trial.quotients(seed + at, *shape) if row["numbers"] == "full" else trial.numbers(seed + at, *shape)

    queries = [drawn(n, batch, _HEADS, _LENGTH, _WIDTH) for n in range(layers)]
    keys = [drawn(5 + n, batch, _HEADS // 2, _LENGTH, _WIDTH) for n in range(layers)]
    outside = [drawn(10 + n, batch, _HEADS, _LENGTH) for n in range(layers)]
    causal = np.tril(np.ones((_LENGTH, _LENGTH), bool), 1)
    there = np.arange(_LENGTH) != np.arange(batch)[:, None, None, None]
    masks = {"none": None, "(L, S)": causal, "other": there & causal}
    packed = np.minimum(np.arange(_LENGTH)[None] // (2 + np.arange(batch)[:, None]), 1)
    lists: tuple[Any, ...] = (queries, keys, outside)
    lists = lists if row["layers"] == "several" else (queries[0], keys[0], outside[0])
    return {
        "teacher_queries": lists[0],
        "teacher_keys": lists[1],
        "teacher_scale": 0.5,
        **present(
            groups=2 if row["groups"] == "several" else None,
            block_size=4 if row["block_size"] == "several" else None,
            outside=lists[2] if row["outside"] == "some" else None,
            attn_mask=masks[row["attn_mask"]],
            segments=packed if row["segments"] == "some" else None,
        ),
    }


def _asked(trial: Trial, number: int, row: Row) -> Calls:
    taught = _taught(trial, 9801 + 31 * number, row)
    batch = 1 if row["samples"] == "1" else 3
    blocks = 2 if row["block_size"] == "several" else _LENGTH

    def drawn(at: int, *shape: int) -> Array:
        seed = 9821 + 31 * number + at
        return trial.quotients(seed, *shape) if row["numbers"] == "full" else trial.numbers(seed, *shape)

    top_k = {"none": None, "few": 1 if blocks == 2 else 2, "all": blocks}[row["top_k"]]
    yield {
        "queries": drawn(0, batch, _SCORERS, _LENGTH, _WIDTH),
        "keys": drawn(1, batch, 1 + number % 2, blocks, _WIDTH),
        "scale": 0.5,
        **taught,
        **present(
            weights=drawn(2, batch, _SCORERS, _LENGTH) if row["weights"] == "some" else None,
            relu=False if row["relu"] == "False" else None,
            top_k=top_k,
            restriction=row["restriction"],
            reduction=row["reduction"],
            loss_mask=row_mask(row["loss_mask"], batch, _LENGTH),
        ),
    }


@covering("indexer_target", _TARGET, values=_VALUES)
def _targets(trial: Trial, number: int, row: Row) -> Calls:
    yield _taught(trial, 9901 + 31 * number, row)


def _has_rows(row: Row) -> bool:
    """Whether a row can count: a single empty sample has none."""
    return (row.get("samples"), row.get("loss_mask")) != ("1", "an empty sample")


_LOSSES: list[Covering] = [
    covering(operation, _LOSS, _has_rows, values=_VALUES)(_asked)
    for operation in ("indexer_loss", "indexer_loss_gradient")
]
LAWS.append(_targets.law(_SPEC))
LAWS.extend(found.law(f"{_SPEC} IDX-1 IDX-2 IDX-10 IDX-11 IDX-12 IDX-13 IDX-14") for found in _LOSSES)


def _plain(trial: Trial, seed: int, numbers: str = "short") -> dict[str, Any]:
    row = {**{name: values[0] for name, values in _VALUES.items()}, "numbers": numbers, "samples": "2 to 4"}
    return next(_asked(trial, seed, {**row, "weights": "some", "loss_mask": "none"}))


@LAWS.add("indexer-slope", "indexer_loss indexer_loss_gradient", "IDX-14 IDX-2 IDX-11", ("float64",))
def _slope(trial: Trial) -> None:
    """The gradient is the slope of the implementation's own loss, also where the selection is held."""
    inputs = {
        name: value[:1] if isinstance(value, np.ndarray) else value
        for name, value in _plain(trial, 2, "full").items()
    }
    step = 2.0**-16
    for options in ({}, {"top_k": 2}, {"top_k": 2, "restriction": "unnormalised", "groups": 2, "relu": False}):
        answer = trial.call("indexer_loss_gradient", **{**inputs, **options})
        for name, output in (("queries", "dq"), ("keys", "dk"), ("weights", "dw")):
            slopes = np.zeros(inputs[name].shape)
            for index in np.ndindex(*slopes.shape):
                ends = []
                for sign in (1.0, -1.0):
                    moved = inputs[name].copy()
                    moved[index] += sign * step
                    ends.append(float(trial.numbers_of("indexer_loss", **{**inputs, **options, name: moved})))
                slopes[index] = (ends[0] - ends[1]) / (2 * step)
            got = as_array(answer[output], output)
            difference = compare_close(slopes, got, *(4 * x for x in agreement("float32", "gradient")))
            if difference:
                raise broken(
                    f"{output} with {options}, against differences of the loss,", difference.problem, slopes, got
                )


@LAWS.add("indexer-is-a-student", "indexer_target indexer_loss shd_loss", "IDX-6 IDX-12 LOSS-1")
def _student(trial: Trial) -> None:
    """Without ReLU and weights a scorer of one head is a student of one head, taught by the target."""
    inputs = _plain(trial, 4)
    taught = {name: inputs[name] for name in ("teacher_queries", "teacher_keys", "teacher_scale")}
    queries, keys = inputs["queries"][:, :1], inputs["keys"][:, :1]
    loss = trial.numbers_of(
        "indexer_loss", queries=queries, keys=keys, scale=0.5, relu=False, reduction="rows", **taught
    )
    target = trial.numbers_of("indexer_target", **taught)
    logits = 0.5 * queries.astype(np.float64) @ keys.astype(np.float64).swapaxes(-1, -2)
    log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    divergence = (target * (np.log(np.where(target > 0, target, 1.0)) - log_q)).sum(-1).mean()
    trial.agree(loss, divergence, "loss", "the loss", times=8)
    if trial.subject.dtype in ("float16", "bfloat16"):
        return  # rows of rounded maps do not sum to 1, and rounded logits are those of another student
    rounded = {"supervision": trial.rounded(target), "student_logits": trial.rounded(logits)}
    trial.agree(loss, trial.numbers_of("shd_loss", **rounded), "loss", "the loss of a student", times=8)


@LAWS.add("indexer-packed", "indexer_loss", "IDX-5 IDX-13")
def _packed(trial: Trial) -> None:
    """Packed samples cost what they cost one by one, under every reduction."""
    inputs = _plain(trial, 6)
    arrays = ("queries", "keys", "weights", "teacher_queries", "teacher_keys")
    apart = [
        {**inputs, **{name: inputs[name][:1, :, part] for name in arrays}} for part in (slice(0, 4), slice(4, 6))
    ]
    together = {**inputs, **{name: inputs[name][:1] for name in arrays}, "segments": np.array([[7] * 4 + [2] * 2])}
    parts = [float(trial.numbers_of("indexer_loss", **part)) for part in apart]
    for reduction, divisor in (("sum", 1), ("rows", 6), ("samples", 2)):
        got = trial.numbers_of("indexer_loss", **{**together, "reduction": reduction})
        trial.agree(got, sum(parts) / divisor, "loss", f"the packed loss with {reduction}", times=16)


@LAWS.add("indexer-empty", "indexer_loss indexer_loss_gradient", "IDX-12 IDX-13 IDX-14")
def _empty(trial: Trial) -> None:
    """Rows without a key, or outside of the mask, contribute exactly nothing."""
    inputs = _plain(trial, 8)
    nothing = np.zeros((1, 1, _LENGTH, _LENGTH), bool)
    for change in ({"loss_mask": np.zeros((3, _LENGTH), bool)}, {"attn_mask": nothing}):
        for top_k in (None, 2):
            for reduction in ("sum", "rows", "samples"):
                arguments = {**inputs, **change, "reduction": reduction, "top_k": top_k}
                exactly(trial.numbers_of("indexer_loss", **arguments), 0.0, "the loss of no row")
                for name, gradient in trial.call("indexer_loss_gradient", **arguments).items():
                    exactly(gradient, np.zeros(1), f"{name} of no row")
    one = np.arange(_LENGTH) == 2
    arguments = {**inputs, "loss_mask": np.broadcast_to(one, (3, _LENGTH))}
    for name in ("dq", "dw"):
        gradient = as_array(trial.call("indexer_loss_gradient", **arguments)[name], name)
        exactly(gradient[:, :, ~one], 0.0, f"{name} of rows that do not count")
    check_answer(trial, "indexer_loss", arguments)
