"""Laws of the chapters MAP and TEMP: softmax, masks, softening, value outputs."""

from __future__ import annotations

import numpy as np

from shd_ref.conformance.chain import soften_maps
from shd_ref.conformance.laws.law import Trial, as_array, exactly, law, require
from shd_ref.tolerances import row_sum_tolerance

_MASK = np.array([[True, False, True, True, False], [False, True, False, False, True], [False] * 5])


def _rows_sum_to_one(trial: Trial) -> None:
    logits = trial.numbers(1, 2, 3, 4, 6)
    probs = trial.numbers_of("softmax", attn_logits=logits)
    require((probs >= 0).all(), "softmax", "at least 0 everywhere", probs)
    trial.agree(probs.sum(-1), np.ones(logits.shape[:-1]), "probs", "the row sums of softmax", times=4)
    exps = np.exp(logits.astype(np.float64))
    trial.agree(probs, exps / exps.sum(-1, keepdims=True), "probs", "softmax")


def _masked_keys(trial: Trial) -> None:
    logits = trial.numbers(2, 2, 2, 3, 5)
    probs = trial.numbers_of("softmax", attn_logits=logits, attn_mask=_MASK)
    mask = np.broadcast_to(_MASK, logits.shape)
    exactly(probs[~mask], 0.0, "the probability of a masked key")
    exactly(probs[:, :, 2], 0.0, "a fully masked row")
    trial.agree(probs[:, :, :2].sum(-1), np.ones((2, 2, 2)), "probs", "the sum of a row with allowed keys", times=4)
    with_infinity = trial.rounded(np.where(mask, logits, -np.inf))
    other = trial.numbers_of("softmax", attn_logits=with_infinity)
    exactly(other[~mask], 0.0, "the probability of a key with logit -inf")
    trial.agree(other, probs, "probs", "softmax of logits with -inf, against the same mask as attn_mask,")


def _mask_broadcasts(trial: Trial) -> None:
    logits = trial.numbers(3, 2, 2, 3, 5)
    padding = np.array([[True] * 5, [True, True, True, False, False]])[:, None, None, :]  # (B, 1, 1, S)
    probs = trial.numbers_of("softmax", attn_logits=logits, attn_mask=padding)
    full = trial.numbers_of("softmax", attn_logits=logits, attn_mask=np.broadcast_to(padding, logits.shape).copy())
    trial.agree(probs, full, "probs", "softmax with a mask (B, 1, 1, S), against the mask written out,")


def _shift(trial: Trial) -> None:
    logits = trial.numbers(4, 1, 2, 3, 6, low=-8, high=8, shift=0)
    probs = trial.numbers_of("softmax", attn_logits=logits)
    for shift in (48.0, -48.0):
        moved = trial.numbers_of("softmax", attn_logits=trial.rounded(logits + shift))
        trial.agree(moved, probs, "probs", f"softmax of logits moved by {shift:g}")
    huge = trial.numbers_of("softmax", attn_logits=trial.rounded(logits * 4096.0))
    largest = logits == logits.max(-1, keepdims=True)
    trial.agree(huge, largest / largest.sum(-1, keepdims=True), "probs", "softmax of logits as large as 32768")


def _temperature(trial: Trial) -> None:
    logits = trial.numbers(5, 1, 2, 3, 6)
    for temperature in temperatures(trial.subject.dtype):
        exps = np.exp((logits.astype(np.float64) - 3.0) / temperature)
        probs = trial.numbers_of("softmax", attn_logits=logits, temperature=temperature)
        expected = exps / exps.sum(-1, keepdims=True)
        trial.agree(probs, expected, "probs", f"softmax at temperature {temperature:g}")


# As little beside 1 as each dtype tells from it and its tolerance shows, and far from it on either side.
_NEAR_ONE = {"float64": 2.0**-20, "float32": 2.0**-8, "float16": 2.0**-4, "bfloat16": 2.0**-3}


def temperatures(dtype: str) -> tuple[float, ...]:
    """Temperatures that may be mistaken for 1, for none or for infinity."""
    near = _NEAR_ONE[dtype]
    return 2.0, 0.5, 1.0 + near, 1.0 - near, 64.0, 1.0 / 16, 1024.0


def _soften(trial: Trial) -> None:
    probs = trial.probs(6, 1, 3, 4, 5)
    for temperature in temperatures(trial.subject.dtype):
        softened = trial.numbers_of("soften", attn_probs=probs, temperature=temperature)
        expected = soften_maps(probs.astype(np.float64), temperature, "one")
        trial.agree(softened, expected, "probs", f"soften at temperature {temperature:g}")
        exactly(softened[probs == 0], 0.0, "the softened probability of a key without mass")
    exactly(trial.numbers_of("soften", attn_probs=probs, temperature=1.0), probs, "soften at temperature 1")


def _soften_rows(trial: Trial) -> None:
    probs = trial.probs(7, 1, 2, 4, 5, zero_rows=(1,))
    for temperature in (4.0, 1 / 256):
        softened = trial.numbers_of("soften", attn_probs=probs, temperature=temperature)
        exactly(softened[:, :, 1], 0.0, f"a fully masked row, softened at temperature {temperature:g},")
        sums = np.ones((1, 2, 4))
        sums[:, :, 1] = 0.0
        what = f"the row sums of maps softened at temperature {temperature:g}"
        trial.agree(softened.sum(-1), sums, "probs", what, times=4)


def _soften_sinks(trial: Trial) -> None:
    probs = trial.probs(8, 1, 2, 4, 5)
    shares = np.array([1.0, 0.5, 0.25, 0.0])[:, None]
    sinks = trial.rounded(probs * shares)
    full = trial.numbers_of("soften", attn_probs=probs, temperature=2.0)
    softened = trial.numbers_of("soften", attn_probs=sinks, temperature=2.0, row_sums="at_most_one")
    trial.agree(softened, full * shares, "probs", "a softened row with a sink, against its share of the full row,")


def _soften_near_sums(trial: Trial) -> None:
    probs = trial.probs(18, 1, 2, 4, 5)
    off = 1.0 + 0.7 * row_sum_tolerance("float64") * np.array([1.0, -1.0, 0.5, 0.0])[:, None]
    for temperature in (2.0, 0.5):
        expected = soften_maps(probs, temperature, "one")
        got = trial.numbers_of("soften", attn_probs=probs * off, temperature=temperature)
        what = f"at temperature {temperature:g} of rows whose sums are off by less than ROW_SUM"
        trial.agree(got, expected, "probs", f"soften {what}, which are divided by their sums,")
        got = trial.numbers_of("soften", attn_probs=probs * off, temperature=temperature, row_sums="at_most_one")
        trial.agree(got, expected * off, "probs", f"soften {what}, with a sink: they keep their sums,")
    exactly(
        trial.numbers_of("soften", attn_probs=probs * off, temperature=1.0), probs * off, "soften at temperature 1"
    )


def _far_logits(trial: Trial) -> None:
    # What is masked is left out, not made small: here it is far larger than what is allowed.
    allowed = np.array([-24576.0, -24575.0, -24577.0, 0.0, 0.0])
    for masked in (0.0, 24576.0):
        logits = np.where(np.arange(5) < 3, allowed, masked)
        far_logits = trial.rounded(np.broadcast_to(logits, (2, 2, 3, 5)))
        exps = np.where(np.arange(5) < 3, np.exp(far_logits[0, 0, 0].astype(np.float64) + 24576.0), 0.0)
        mask = np.arange(5) < 3
        for temperature in (1.0, 4.0):
            powers = exps ** (1 / temperature)
            got = trial.numbers_of("softmax", attn_logits=far_logits, attn_mask=mask, temperature=temperature)
            expected = np.broadcast_to(powers / powers.sum(), far_logits.shape)
            trial.agree(got, expected, "probs", f"softmax of logits far below a masked one of {masked:g}")


def _least_logits(trial: Trial) -> None:
    # The least number of a dtype is a number, and no other word for minus infinity.
    logits = np.full((2, 3, 5), np.finfo(trial.subject.dtype).min)
    logits[:, :, 1] = -np.inf
    least_logits = trial.rounded(logits)
    expected = np.where(np.isneginf(least_logits), 0.0, 0.25)
    trial.agree(
        trial.numbers_of("softmax", attn_logits=least_logits), expected, "probs", "softmax of the least numbers"
    )


def _value_outputs(trial: Trial) -> None:
    values, projection = trial.numbers(9, 2, 2, 5, 3), trial.numbers(10, 12, 4)
    outputs = trial.numbers_of("value_outputs", values=values, output_projection=projection)
    probs = trial.probs(11, 2, 4, 3, 5)
    # A projection that does nothing gives the values, in an array of their own (NUM-9).
    one = values[:, :1].copy()
    kept = trial.numbers_of("value_outputs", values=one, output_projection=trial.rounded(np.eye(3)))
    trial.agree(kept, one, "probs", "value_outputs of the identity")
    # Attention as it is usually computed: heads side by side, then one projection.
    heads = probs.astype(np.float64) @ np.repeat(values.astype(np.float64), 2, axis=1)
    side_by_side = heads.transpose(0, 2, 1, 3).reshape(2, 3, 12) @ projection.astype(np.float64)
    require(outputs.shape == (2, 4, 5, 4), "the shape of value_outputs", "[2, 4, 5, 4]", str(list(outputs.shape)))
    summed = (probs.astype(np.float64) @ outputs).sum(1)
    trial.agree(summed, side_by_side, "probs", "sum_t A_t X_t, against attention with grouped queries,", times=16)


def _inputs_unchanged(trial: Trial) -> None:
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


def _repeatable(trial: Trial) -> None:
    probs, outputs = trial.probs(15, 2, 5, 4, 6), trial.numbers(16, 2, 5, 6, 3)
    first, _, again = (
        trial.call("squeeze_heads", teacher_probs=maps, value_outputs=outputs, num_student_heads=2)
        for maps in (probs, trial.probs(17, 2, 5, 4, 6), probs)
    )
    trial.agree(again["probs"], as_array(first["probs"], "probs"), "probs", "the second of two equal calls")
    trial.agree(again["mixing"], as_array(first["mixing"], "mixing"), "alpha", "the second of two equal calls")


LAWS = (
    law("softmax-is-a-distribution", "softmax", "MAP-1",
        "Softmax is at least 0, sums to one over keys, and is exp(z) over its sum.", _rows_sum_to_one),
    law("softmax-masked-keys", "softmax", "MAP-2 MAP-7",
        "Masked keys get exactly 0, fully masked rows exactly zeros, and -inf means what attn_mask=False means.",
        _masked_keys),
    law("softmax-mask-broadcasts", "softmax", "MAP-10",
        "A mask of fewer or singleton axes stands for all positions.", _mask_broadcasts),
    law("softmax-shift", "softmax", "MAP-1",
        "A constant added to a row of logits changes nothing, and logits of any size give finite results.",
        _shift),
    law("softmax-temperature", "softmax", "TEMP-2", "The temperature divides the logits.", _temperature),
    law("soften-is-softmax", "soften", "TEMP-2 TEMP-7",
        "Softened maps are softmax(log(A) / T); at T = 1 they are the maps as given.", _soften),
    law("soften-rows", "soften", "TEMP-2 TEMP-6",
        "Fully masked rows stay zero, and a row with mass keeps it at any temperature.", _soften_rows),
    law("soften-sinks", "soften", "TEMP-5 MAP-9",
        "With row_sums='at_most_one' a row is softened as a distribution and keeps its own mass.", _soften_sinks),
    law("soften-near-sums", "soften", "TEMP-2 TEMP-5 TEMP-7",
        "A row whose sum is off by less than ROW_SUM is divided by it, or keeps it where rows may have sinks.",
        _soften_near_sums, dtypes=("float64",)),
    law("softmax-far-logits", "softmax", "MAP-1 MAP-2",
        "Masked keys are left out, however large their logits are beside the others.", _far_logits),
    law("softmax-least-logits", "softmax", "MAP-1 MAP-2",
        "The least number that a dtype has is a logit like any other.", _least_logits,
        dtypes=("float64", "float32")),
    law("value-outputs-are-attention", "value_outputs", "MAP-6 MAP-11",
        "The sum of A_t X_t is attention with grouped queries: heads side by side, times the output projection.",
        _value_outputs),
    law("inputs-unchanged", "softmax soften squeeze_heads shd_loss", "MAP-8", "No call changes its arguments.",
        _inputs_unchanged),
    law("equal-calls-agree", "squeeze_heads", "NUM-2",
        "Two equal calls agree, with any other call between them.", _repeatable),
)  # fmt: skip
