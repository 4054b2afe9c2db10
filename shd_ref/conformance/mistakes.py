"""Well-known mistakes, each with the sentence that a report gives when a wrong output looks like it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shd_ref.conformance.adapter import OUTPUTS, BrokenError, Call, take_output
from shd_ref.conformance.compare import as_numbers, as_plain
from shd_ref.conformance.specification import agreement
from shd_ref.conformance.variants import Choices, compute


@dataclass(frozen=True)
class Mistake:
    """A mistake with its sentence, which completes "this equals what you get if ..."."""

    name: str
    operations: tuple[str, ...]
    sentence: str
    choices: Choices


_ALPHA = ("solve_alpha", "squeeze_heads")
_LOSS = ("shd_loss",)
_GRADIENT = ("shd_loss_gradient",)

MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        "printed-n",
        _ALPHA,
        "N is taken as the source misprints it, A_q X_p - A_p X_q, and not as (A_q - A_p) X_p (decision D-1)",
        Choices(n="printed"),
    ),
    Mistake("opposite-n", _ALPHA, "N has the wrong sign", Choices(n="opposite")),
    Mistake("unclipped", _ALPHA, "alpha is not clipped to [0, 1]", Choices(clip=False)),
    Mistake(
        "swapped-heads",
        _ALPHA,
        "alpha weighs head q and 1 - alpha weighs head p; it is the other way round",
        Choices(weighs="q"),
    ),
    Mistake(
        "other-numerator",
        _ALPHA,
        "the numerator uses w = (A_p - A_q) X_q in place of u = (A_p - A_q) X_p",
        Choices(numerator="w"),
    ),
    Mistake(
        "uncounted-rows",
        _ALPHA,
        "rows where query_mask is False enter the sums (padding counted in alpha)",
        Choices(rows_masked=False),
    ),
    Mistake(
        "shared-alpha",
        _ALPHA,
        "one alpha is solved for the whole batch instead of one a sample",
        Choices(sample_shared=True),
    ),
    Mistake("degenerate-zero", _ALPHA, "degenerate pairs get alpha 0 instead of 1/2", Choices(degenerate=0.0)),
    Mistake("degenerate-one", _ALPHA, "degenerate pairs get alpha 1 instead of 1/2", Choices(degenerate=1.0)),
    Mistake(
        "degenerate-formula",
        _ALPHA,
        "degenerate pairs are not recognised and rounding noise is divided by rounding noise (0/0 is NaN)",
        Choices(degenerate=None),
    ),
    Mistake("other-per", _ALPHA, "alpha_per map and row are confused or ignored", Choices(per="other")),
    Mistake(
        "merged-outputs-mixed",
        ("squeeze_heads",),
        "a merged head gets the value output a X_p + (1 - a) X_q; it must be the sum X_p + X_q (MIX-4)",
        Choices(merged_outputs="mixed"),
    ),
    Mistake(
        "merged-outputs-mean",
        ("squeeze_heads",),
        "a merged head gets the mean of the two value outputs; it must be their sum (MIX-4)",
        Choices(merged_outputs="mean"),
    ),
    Mistake(
        "merged-outputs-first",
        ("squeeze_heads",),
        "a merged head keeps only the first head's value output; it must be the sum of both (MIX-4)",
        Choices(merged_outputs="first"),
    ),
    Mistake(
        "in-place-pool",
        ("squeeze_heads", "plan_groups"),
        "a merged head takes the place of its first member; merged heads come first, then the untouched (PLAN-4)",
        Choices(pool="in-place"),
    ),
    Mistake(
        "untouched-first",
        ("squeeze_heads", "plan_groups"),
        "untouched heads come before the merged ones; the merged come first (PLAN-4)",
        Choices(pool="untouched-first"),
    ),
    Mistake(
        "literal-algorithm-1",
        ("merge_plan", "squeeze_heads"),
        "every pair of every round is merged as Algorithm 1 is printed, which overshoots (decision D-2)",
        Choices(plan="overshoot"),
    ),
    Mistake(
        "last-pairs",
        ("merge_plan", "squeeze_heads"),
        "a round that needs fewer pairs merges the last ones; it merges the first (PLAN-5)",
        Choices(plan="last"),
    ),
    Mistake(
        "halves-paired",
        ("merge_plan", "squeeze_heads"),
        "head i is merged with head i + m; pairs are adjacent (PLAN-5)",
        Choices(plan="halves"),
    ),
    Mistake(
        "hard-first",
        ("squeeze_heads",),
        "`hard` always keeps head p; it keeps the better of the two",
        Choices(hard="always p"),
    ),
    Mistake(
        "hard-second",
        ("squeeze_heads",),
        "`hard` always keeps head q; it keeps the better of the two",
        Choices(hard="always q"),
    ),
    Mistake(
        "softened-after",
        ("squeeze_heads",),
        "the mixed map is softened; each head is softened first, then mixed (TEMP-2)",
        Choices(softened="after"),
    ),
    Mistake("never-softened", ("squeeze_heads",), "the temperature is ignored", Choices(softened="never")),
    Mistake(
        "solved-on-other",
        ("squeeze_heads",),
        "C is solved on the softened maps where the maps as given were asked, or the reverse (TEMP-3)",
        Choices(solved_on="other"),
    ),
    Mistake(
        "temperature-multiplied",
        ("softmax", "soften"),
        "the temperature multiplies the logits; it divides them",
        Choices(temperature="multiplies"),
    ),
    Mistake(
        "temperature-ignored", ("softmax", "soften"), "the temperature is ignored", Choices(temperature="ignored")
    ),
    Mistake(
        "sinks-filled",
        ("soften", "squeeze_heads", "shd_loss", "shd_loss_gradient"),
        "rows with a sink are scaled up to one; they keep their own mass (TEMP-5, LOSS-11)",
        Choices(mass_kept=False),
    ),
    Mistake(
        "mask-inverted",
        ("softmax",),
        "attn_mask is read as True = masked; True means may attend (MAP-7)",
        Choices(mask_inverted=True),
    ),
    Mistake("mask-ignored", ("softmax",), "attn_mask is ignored", Choices(mask_used=False)),
    Mistake(
        "masked-row-nan",
        ("softmax",),
        "fully masked rows are NaN; they are exactly zero (MAP-2)",
        Choices(masked_row=float("nan")),
    ),
    Mistake(
        "masked-row-uniform",
        ("softmax",),
        "fully masked rows are uniform; they are exactly zero (MAP-2)",
        Choices(masked_row=-1.0),
    ),
    Mistake(
        "value-heads-cycled",
        ("value_outputs",),
        "query head i reads value head i mod H_kv; it reads i // (H_t / H_kv) (MAP-6)",
        Choices(value_heads="cycled"),
    ),
    Mistake(
        "cross-entropy",
        _LOSS,
        "the teacher's entropy is left out: this is the cross entropy, not KL (LOSS-1)",
        Choices(divergence="cross-entropy"),
    ),
    Mistake(
        "reverse-kl",
        _LOSS,
        "the arguments are in the other order: KL(student || teacher), not KL(teacher || student) (LOSS-1)",
        Choices(divergence="reverse_kl"),
    ),
    Mistake("base-2", _LOSS, "the logarithm is base 2; it is natural (LOSS-1)", Choices(divergence="base 2")),
    Mistake("squared-error", _LOSS, "it is the squared error of the maps, not KL", Choices(divergence="mse")),
    Mistake(
        "constant-in-log",
        _LOSS,
        "1e-8 is added inside the logarithm of the student's map; log Q comes from the logits (LOSS-12)",
        Choices(log_constant=1e-8),
    ),
    Mistake(
        "mean-over-all-rows",
        _LOSS + _GRADIENT,
        "the mean is over all rows, also those that do not count (padding, fully masked; LOSS-4)",
        Choices(denominator="all rows"),
    ),
    Mistake(
        "uncounted-rows-summed",
        _LOSS + _GRADIENT,
        "loss_mask is ignored: rows that do not count enter the loss (LOSS-4)",
        Choices(rows_masked=False),
    ),
    Mistake(
        "per-sample-mean",
        _LOSS + _GRADIENT,
        "the mean is taken per sample and then over samples; it is over the counted rows of the batch (LOSS-4, D-10)",
        Choices(denominator="sample"),
    ),
    Mistake("row-sum", _LOSS + _GRADIENT, "rows are summed, not averaged (LOSS-4)", Choices(denominator="none")),
    Mistake(
        "batch-mean",
        _LOSS + _GRADIENT,
        "rows are summed and divided by the batch size ('batchmean'); they are averaged (LOSS-4)",
        Choices(denominator="samples"),
    ),
    Mistake(
        "mean-over-keys",
        _LOSS + _GRADIENT,
        "the mean is over keys too; a row is the sum over its keys (LOSS-1)",
        Choices(denominator="keys"),
    ),
    Mistake(
        "t-squared",
        _LOSS + _GRADIENT,
        "the loss is multiplied by T^2; there is no such factor (TEMP-4, D-4)",
        Choices(t_power=2),
    ),
    Mistake(
        "t-once",
        _LOSS + _GRADIENT,
        "the loss is multiplied by T; there is no such factor (TEMP-4)",
        Choices(t_power=1),
    ),
    Mistake(
        "student-not-softened",
        _LOSS + _GRADIENT,
        "the student's logits are not divided by T (TEMP-4)",
        Choices(student_softened=False),
    ),
    Mistake(
        "other-reduction",
        _LOSS + _GRADIENT,
        "reductions sum and mean over layers and heads are confused or ignored (LOSS-5)",
        Choices(reduction="other"),
    ),
    Mistake("beta-ignored", _LOSS + _GRADIENT, "beta is ignored (LOSS-2)", Choices(beta_used=False)),
    Mistake(
        "negative-gradient",
        _GRADIENT,
        "the gradient has the wrong sign: it is A_student - A~, not A~ - A_student (LOSS-8)",
        Choices(sign=-1),
    ),
    Mistake(
        "gradient-without-t",
        _GRADIENT,
        "the gradient is not divided by T (LOSS-8)",
        Choices(gradient_divided_by_t=False),
    ),
    Mistake(
        "floored-layers",
        ("layer_map",),
        "s L_t / L_s is rounded down; it is rounded to nearest (LAYER-1)",
        Choices(rounding="floor"),
    ),
    Mistake(
        "raised-layers",
        ("layer_map",),
        "s L_t / L_s is rounded up; it is rounded to nearest (LAYER-1)",
        Choices(rounding="ceiling"),
    ),
    Mistake(
        "even-layers",
        ("layer_map",),
        "halves are rounded to the even number (Python's round); floor(x + 1/2) rounds them up (LAYER-1)",
        Choices(rounding="even"),
    ),
    Mistake(
        "zero-based-layers",
        ("layer_map",),
        "the formula is used with zero-based layers, so that the last layers do not meet (LAYER-1, LAYER-3)",
        Choices(rounding="zero-based"),
    ),
    Mistake("first-layers", ("layer_map",), "student layer s meets teacher layer s", Choices(rounding="same")),
)


def recognise(operation: str, inputs: Mapping[str, Any], output: str, got: Any, dtype: str) -> list[str]:
    """Sentences of the mistakes that would give this output; empty where none does.

    Args:
        operation: what was called.
        inputs: its arguments by name.
        output: the name of the output in question.
        got: what the implementation answered for it.
        dtype: whose tolerances say that two results are the same.
    """
    with np.errstate(all="ignore"):
        right = _try(operation, inputs, output, Choices())
        if right is None or _same(right, got, output, dtype):
            return []
        found = []
        for mistake in MISTAKES:
            if operation not in mistake.operations:
                continue
            wrong = _try(operation, inputs, output, mistake.choices)
            if wrong is not None and _same(wrong, got, output, dtype) and not _same(wrong, right, output, dtype):
                found.append(mistake.sentence)
        return found


def recognise_call(call: Call, dtype: str) -> list[str]:
    """Sentences of the mistakes that would give any output of a recorded call."""
    names = OUTPUTS.get(call.operation, ())
    found: list[str] = []
    for name in names:
        try:
            got = take_output(call.answer, name, names)
        except BrokenError:
            continue
        found += [s for s in recognise(call.operation, call.inputs, name, got, dtype) if s not in found]
    return found


# What a difference is measured by, where an output is not probabilities.
_QUANTITIES = {"alpha": "alpha", "alphas": "alpha", "mixing": "alpha", "loss": "loss", "dz": "gradient"}


def _try(operation: str, inputs: Mapping[str, Any], output: str, choices: Choices) -> Any:
    try:
        return compute(operation, inputs, choices).get(output)
    except (LookupError, ValueError, TypeError, ZeroDivisionError, OverflowError):
        return None  # inputs outside what this module knows: it has no opinion


def _same(left: Any, right: Any, output: str, dtype: str) -> bool:
    left, right = as_plain(left), as_plain(right)
    if isinstance(left, list) != isinstance(right, list):
        return False
    if output in ("plan", "groups", "pairs"):
        return bool(left == right)
    a, b = as_numbers(left), as_numbers(right)
    if a is None or b is None:  # ragged: one array a round or layer
        return (
            isinstance(left, list)
            and len(left) == len(right)
            and all(_same(x, y, output, dtype) for x, y in zip(left, right, strict=True))
        )
    if a.shape != b.shape:
        return False
    atol, rtol = agreement(dtype, _QUANTITIES.get(output, "probs"))
    return bool(np.allclose(a, b, atol=atol, rtol=rtol, equal_nan=True))
