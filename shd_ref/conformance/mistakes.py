"""Well-known mistakes, each with the sentence that a report gives when a wrong output looks like it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shd_ref.conformance.adapter import OUTPUTS, BrokenError, Call, take_output
from shd_ref.conformance.compare import as_numbers, as_plain
from shd_ref.conformance.specification import agreement, load_mistakes
from shd_ref.conformance.variants import Choices, compute


@dataclass(frozen=True)
class Mistake:
    """What an implementation with a mistake decides; its sentence is in ``specs/mistakes.json`` under its name."""

    name: str
    operations: tuple[str, ...]
    choices: Choices

    @property
    def sentence(self) -> str:
        """It completes "this equals what you get if ..."."""
        return load_mistakes()[self.name]


_ALPHA = ("solve_alpha", "squeeze_heads")
_SQUEEZE = ("squeeze_heads",)
_PLAN = ("merge_plan", "squeeze_heads")
_POOL = ("plan_groups", "squeeze_heads")
_SOFTMAX = ("softmax",)
_LOSS = ("shd_loss",)
_GRADIENT = ("shd_loss_gradient",)
_BOTH = _LOSS + _GRADIENT
_LAYERS = ("layer_map",)

MISTAKES: tuple[Mistake, ...] = (
    Mistake("alpha-misprinted", _ALPHA, Choices(n="printed")),
    Mistake("alpha-opposite-sign", _ALPHA, Choices(n="opposite")),
    Mistake("alpha-unclipped", _ALPHA, Choices(clip=False)),
    Mistake("alpha-swapped", _ALPHA, Choices(weighs="q")),
    Mistake("alpha-other-numerator", _ALPHA, Choices(numerator="w")),
    Mistake("alpha-padded-rows", _ALPHA, Choices(rows_masked=False)),
    Mistake("alpha-solved-once", _ALPHA, Choices(sample_shared=True)),
    Mistake("degenerate-zero", _ALPHA, Choices(degenerate=0.0)),
    Mistake("degenerate-one", _ALPHA, Choices(degenerate=1.0)),
    Mistake("degenerate-formula", _ALPHA, Choices(degenerate=None)),
    Mistake("alpha-per-ignored", _ALPHA, Choices(per="other")),
    Mistake("merged-outputs-mixed", _SQUEEZE, Choices(merged_outputs="mixed")),
    Mistake("merged-outputs-mean", _SQUEEZE, Choices(merged_outputs="mean")),
    Mistake("merged-outputs-first", _SQUEEZE, Choices(merged_outputs="first")),
    Mistake("pool-in-place", _POOL, Choices(pool="in-place")),
    Mistake("pool-untouched-first", _POOL, Choices(pool="untouched-first")),
    Mistake("plan-overshoot", _PLAN, Choices(plan="overshoot")),
    Mistake("plan-last-pairs", _PLAN, Choices(plan="last")),
    Mistake("plan-halves", _PLAN, Choices(plan="halves")),
    Mistake("hard-always-first", _SQUEEZE, Choices(hard="always p")),
    Mistake("hard-always-second", _SQUEEZE, Choices(hard="always q")),
    Mistake("softened-after", _SQUEEZE, Choices(softened="after")),
    Mistake("solved-on-softened", _SQUEEZE, Choices(solved_on="other")),
    Mistake("temperature-inverted", ("softmax", "soften"), Choices(temperature="multiplies")),
    Mistake(
        "temperature-ignored",
        ("softmax", "soften", "squeeze_heads"),
        Choices(temperature="ignored", softened="never"),
    ),
    Mistake("sink-scaled-up", ("soften", "squeeze_heads", "shd_loss", "shd_loss_gradient"), Choices(mass_kept=False)),
    Mistake("attn-mask-inverted", _SOFTMAX, Choices(mask_inverted=True)),
    Mistake("attn-mask-ignored", _SOFTMAX, Choices(mask_used=False)),
    Mistake("masked-row-is-nan", _SOFTMAX, Choices(masked_row=float("nan"))),
    Mistake("masked-row-is-uniform", _SOFTMAX, Choices(masked_row=-1.0)),
    Mistake("value-heads-cycled", ("value_outputs",), Choices(value_heads="cycled")),
    Mistake("cross-entropy-called-kl", _LOSS, Choices(divergence="cross-entropy")),
    Mistake("kl-reversed", _LOSS, Choices(divergence="reverse_kl")),
    Mistake("loss-log2", _LOSS, Choices(divergence="base 2")),
    Mistake("loss-is-mse", _LOSS, Choices(divergence="mse")),
    Mistake("epsilon-1e-8", _LOSS, Choices(log_constant=1e-8)),
    Mistake("mean-over-all-rows", _BOTH, Choices(denominator="all rows")),
    Mistake("loss-padded-rows", _BOTH, Choices(rows_masked=False)),
    Mistake("mean-per-sample", _BOTH, Choices(denominator="sample")),
    Mistake("rows-summed", _BOTH, Choices(denominator="none")),
    Mistake("batch-mean", _BOTH, Choices(denominator="samples")),
    Mistake("mean-over-keys", _BOTH, Choices(denominator="keys")),
    Mistake("loss-times-t-squared", _BOTH, Choices(t_power=2)),
    Mistake("loss-times-t", _BOTH, Choices(t_power=1)),
    Mistake("student-not-softened", _BOTH, Choices(student_softened=False)),
    Mistake("reduction-ignored", _BOTH, Choices(reduction="other")),
    Mistake("beta-ignored", _BOTH, Choices(beta_used=False)),
    Mistake("gradient-sign", _GRADIENT, Choices(sign=-1)),
    Mistake("gradient-without-temperature", _GRADIENT, Choices(gradient_divided_by_t=False)),
    Mistake("layers-floor", _LAYERS, Choices(rounding="floor")),
    Mistake("layers-ceiling", _LAYERS, Choices(rounding="ceiling")),
    Mistake("layers-half-even", _LAYERS, Choices(rounding="even")),
    Mistake("layers-zero-based", _LAYERS, Choices(rounding="zero-based")),
    Mistake("layers-first", _LAYERS, Choices(rounding="same")),
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
