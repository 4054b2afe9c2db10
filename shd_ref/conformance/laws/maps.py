"""Laws of the chapters MAP and TEMP: softmax, masks, softening, value outputs."""

from __future__ import annotations

import numpy as np

from shd_ref.conformance.laws.answers import check_answer
from shd_ref.conformance.laws.law import WIDE, Laws, Trial, as_array, exactly, require
from shd_ref.tolerances import row_sum_tolerance

LAWS = Laws()
_MASK = np.array([[True, False, True, True, False], [False, True, False, False, True], [False] * 5])


@LAWS.add("softmax-is-a-distribution", "softmax", "MAP-1")
def _rows_sum_to_one(trial: Trial) -> None:
    """Softmax is at least 0, sums to one over keys, and is exp(z) over its sum."""
    logits = trial.numbers(1, 2, 3, 4, 6)
    probs = as_array(check_answer(trial, "softmax", {"attn_logits": logits})["attn_probs"], "softmax")
    require((probs >= 0).all(), "softmax", "at least 0 everywhere", probs)
    trial.agree(probs.sum(-1), np.ones(logits.shape[:-1]), "probs", "the row sums of softmax", times=4)


@LAWS.add("softmax-masked-keys", "softmax", "MAP-2 MAP-7")
def _masked_keys(trial: Trial) -> None:
    """Masked keys get exactly 0, fully masked rows exactly zeros, and -inf means what attn_mask=False means."""
    logits = trial.numbers(2, 2, 2, 3, 5)
    with_infinity = trial.rounded(np.where(_MASK, logits, -np.inf))
    for inputs in ({"attn_logits": logits, "attn_mask": _MASK}, {"attn_logits": with_infinity}):
        check_answer(trial, "softmax", inputs)


@LAWS.add("softmax-mask-broadcasts", "softmax", "MAP-10")
def _mask_broadcasts(trial: Trial) -> None:
    """A mask of fewer or singleton axes stands for all positions."""
    logits = trial.numbers(3, 2, 2, 3, 5)
    padding = np.array([[True] * 5, [True, True, True, False, False]])[:, None, None, :]  # (B, 1, 1, S)
    for mask in (padding, np.broadcast_to(padding, logits.shape).copy()):
        check_answer(trial, "softmax", {"attn_logits": logits, "attn_mask": mask})


@LAWS.add("softmax-shift", "softmax", "MAP-1")
def _shift(trial: Trial) -> None:
    """A constant added to a row of logits changes nothing, and logits of any size give finite results."""
    logits = trial.numbers(4, 1, 2, 3, 6, low=-8, high=8, shift=0)
    for moved in (logits, logits + 48.0, logits - 48.0, logits * 4096.0):
        check_answer(trial, "softmax", {"attn_logits": trial.rounded(moved)})


@LAWS.add("softmax-temperature", "softmax", "TEMP-2")
def _temperature(trial: Trial) -> None:
    """The temperature divides the logits."""
    logits = trial.numbers(5, 1, 2, 3, 6)
    for temperature in temperatures(trial.subject.dtype):
        check_answer(trial, "softmax", {"attn_logits": logits, "temperature": temperature})


# As little beside 1 as each dtype tells from it and its tolerance shows, and far from it on either side.
_NEAR_ONE = {"float64": 2.0**-20, "float32": 2.0**-8, "float16": 2.0**-4, "bfloat16": 2.0**-3}


def temperatures(dtype: str) -> tuple[float, ...]:
    """Temperatures that may be mistaken for 1, for none or for infinity."""
    near = _NEAR_ONE[dtype]
    return 2.0, 0.5, 1.0 + near, 1.0 - near, 64.0, 1.0 / 16, 1024.0


@LAWS.add("soften-is-softmax", "soften", "TEMP-2 TEMP-7")
def _soften(trial: Trial) -> None:
    """Softened maps are softmax(log(A) / T); at T = 1 they are the maps as given."""
    probs = trial.probs(6, 1, 3, 4, 5)
    for temperature in temperatures(trial.subject.dtype):
        softened = check_answer(trial, "soften", {"attn_probs": probs, "temperature": temperature})["attn_probs"]
        exactly(as_array(softened, "soften")[probs == 0], 0.0, "the softened probability of a key without mass")
    exactly(trial.numbers_of("soften", attn_probs=probs, temperature=1.0), probs, "soften at temperature 1")


@LAWS.add("soften-rows", "soften", "TEMP-2 TEMP-6")
def _soften_rows(trial: Trial) -> None:
    """Fully masked rows stay zero, and a row with mass keeps it at any temperature."""
    probs = trial.probs(7, 1, 2, 4, 5, zero_rows=(1,))
    for temperature in (4.0, 1 / 256):
        softened = trial.numbers_of("soften", attn_probs=probs, temperature=temperature)
        exactly(softened[:, :, 1], 0.0, f"a fully masked row, softened at temperature {temperature:g},")
        sums = np.broadcast_to([1.0, 0.0, 1.0, 1.0], (1, 2, 4))
        what = f"the row sums of maps softened at temperature {temperature:g}"
        trial.agree(softened.sum(-1), sums, "probs", what, times=4)


@LAWS.add("soften-sinks", "soften", "TEMP-5 MAP-9")
def _soften_sinks(trial: Trial) -> None:
    """With row_sums='at_most_one' a row is softened as a distribution and keeps its own mass."""
    probs = trial.probs(8, 1, 2, 4, 5)
    sinks = trial.rounded(probs * np.array([1.0, 0.5, 0.25, 0.0])[:, None])
    check_answer(trial, "soften", {"attn_probs": probs, "temperature": 2.0})
    check_answer(trial, "soften", {"attn_probs": sinks, "temperature": 2.0, "row_sums": "at_most_one"})


@LAWS.add("soften-near-sums", "soften", "TEMP-2 TEMP-5 TEMP-7", ("float64",))
def _soften_near_sums(trial: Trial) -> None:
    """A row whose sum is off by less than ROW_SUM is divided by it, or keeps it where rows may have sinks."""
    off = 1.0 + 0.7 * row_sum_tolerance("float64") * np.array([1.0, -1.0, 0.5, 0.0])[:, None]
    probs = trial.probs(18, 1, 2, 4, 5) * off
    for temperature in (2.0, 0.5):
        for options in ({}, {"row_sums": "at_most_one"}):
            check_answer(trial, "soften", {"attn_probs": probs, "temperature": temperature, **options})
    exactly(trial.numbers_of("soften", attn_probs=probs, temperature=1.0), probs, "soften at temperature 1")


@LAWS.add("softmax-far-logits", "softmax", "MAP-1 MAP-2")
def _far_logits(trial: Trial) -> None:
    """Masked keys are left out, however large their logits are beside the others."""
    mask = np.arange(5) < 3
    for masked in (0.0, 24576.0):
        row = np.where(mask, [-24576.0, -24575.0, -24577.0, 0.0, 0.0], masked)
        logits = trial.rounded(np.broadcast_to(row, (2, 2, 3, 5)))
        for temperature in (1.0, 4.0):
            check_answer(trial, "softmax", {"attn_logits": logits, "attn_mask": mask, "temperature": temperature})


@LAWS.add("softmax-least-logits", "softmax", "MAP-1 MAP-2", WIDE)
def _least_logits(trial: Trial) -> None:
    """The least number that a dtype has is a logit like any other."""
    logits = np.full((2, 3, 5), np.finfo(trial.subject.dtype).min)
    logits[:, :, 1] = -np.inf
    check_answer(trial, "softmax", {"attn_logits": trial.rounded(logits)})


@LAWS.add("value-outputs-are-attention", "value_outputs", "MAP-6 MAP-11")
def _value_outputs(trial: Trial) -> None:
    """The sum of A_t X_t is attention with grouped queries: heads side by side, times the output projection."""
    values, projection = trial.numbers(9, 2, 2, 5, 3), trial.numbers(10, 12, 4)
    outputs = trial.numbers_of("value_outputs", values=values, output_projection=projection)
    probs = trial.probs(11, 2, 4, 3, 5).astype(np.float64)
    # A projection that does nothing gives the values, in an array of their own (NUM-9).
    one = values[:, :1].copy()
    kept = trial.numbers_of("value_outputs", values=one, output_projection=trial.rounded(np.eye(3)))
    trial.agree(kept, one, "probs", "value_outputs of the identity")
    heads = probs @ np.repeat(values.astype(np.float64), 2, axis=1)
    side_by_side = heads.transpose(0, 2, 1, 3).reshape(2, 3, 12) @ projection.astype(np.float64)
    require(outputs.shape == (2, 4, 5, 4), "the shape of value_outputs", "[2, 4, 5, 4]", str(list(outputs.shape)))
    what = "sum_t A_t X_t, against attention with grouped queries,"
    trial.agree((probs @ outputs).sum(1), side_by_side, "probs", what, times=16)


@LAWS.add("inputs-unchanged", "softmax soften squeeze_heads shd_loss", "MAP-8")
def _inputs_unchanged(trial: Trial) -> None:
    """No call changes its arguments."""
    # Every call is watched for changed arguments; this law makes calls in which a change is tempting.
    probs = trial.probs(12, 2, 4, 3, 5)
    outputs, logits = trial.numbers(13, 2, 4, 5, 3), trial.numbers(14, 2, 4, 3, 5)
    mask = np.array([[True, True, False], [True, False, False]])
    keys = np.ones((3, 5), dtype=np.bool_)
    keys[0, 1] = False
    masked = trial.rounded(np.where(keys, logits, -np.inf))
    trial.call("softmax", attn_logits=logits, attn_mask=keys, temperature=2.0)
    trial.call("soften", attn_probs=probs, temperature=2.0)
    trial.call("squeeze_heads", teacher_probs=probs, value_outputs=outputs, num_student_heads=2, query_mask=mask)
    target = np.full((3, 5), 0.25)
    target[0, 1] = target[1:, 4] = 0.0
    target = trial.rounded(np.broadcast_to(target, logits.shape))
    trial.call("shd_loss", supervision=target, student_logits=masked, loss_mask=mask, attn_mask=keys, temperature=2.0)


@LAWS.add("equal-calls-agree", "squeeze_heads", "NUM-2")
def _repeatable(trial: Trial) -> None:
    """Two equal calls agree, with any other call between them."""
    probs, outputs = trial.probs(15, 2, 5, 4, 6), trial.numbers(16, 2, 5, 6, 3)
    first, _, again = (
        trial.call("squeeze_heads", teacher_probs=maps, value_outputs=outputs, num_student_heads=2)
        for maps in (probs, trial.probs(17, 2, 5, 4, 6), probs)
    )
    for name, quantity in (("probs", "probs"), ("mixing", "alpha")):
        trial.agree(again[name], as_array(first[name], name), quantity, "the second of two equal calls")
