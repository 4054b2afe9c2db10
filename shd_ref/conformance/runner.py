"""Running cases and laws against an implementation, and naming the mistake that a failure looks like."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shd_ref.conformance import variant_indexers
from shd_ref.conformance.adapter import (
    OUTPUTS,
    Adapter,
    BrokenError,
    Call,
    Missing,
    RefusedError,
    Subject,
    as_adapter,
    take_output,
)
from shd_ref.conformance.chain import Pair, check_chain, check_effect
from shd_ref.conformance.compare import Difference, abbreviate, as_numbers, as_plain, compare_output
from shd_ref.conformance.laws import LAWS, Law, LawBrokenError, Trial
from shd_ref.conformance.report import Finding, KnownFailures, Report, Result, Status, describe
from shd_ref.conformance.specification import DTYPES, agreement, load_mistakes, vectors_folder
from shd_ref.conformance.variants import Choices, compute
from shd_ref.conformance.vectors import Case, decode_expected, load_cases

Item: TypeAlias = Case | Law

_FLAT = "near-degenerate"


class ConformanceError(AssertionError):
    """An implementation failed an item; the message is the whole report of it."""


def cases(only: str | Iterable[str] | None = None, *, vectors: str | Path | None = None) -> list[Item]:
    """Every vector case and every law, to be run one by one with ``check``.

    Args:
        only: ids or globs (``"solve_alpha/*"``, ``"law/*"``); all without it.
        vectors: a folder of vector files; default the specification's own.
    """
    patterns = [only] if isinstance(only, str) else list(only) if only is not None else ["*"]
    items: list[Item] = [*load_cases(vectors_folder() if vectors is None else vectors), *LAWS]
    return [item for item in items if any(fnmatchcase(item.id, pattern) for pattern in patterns)]


def check(item: Item, implementation: Any, dtype: str = "float64", *, seed: int = 0) -> None:
    """One item against one implementation, for your own tests.

    Args:
        item: one of ``cases()``.
        implementation: a module or object with the operations' functions, or an ``Adapter``.
        dtype: what the implementation computes in.
        seed: of the laws' inputs.

    Raises:
        ConformanceError: it failed; an ``AssertionError`` whose message says how.
        Missing: it lacks the operation, or the item does not run at this dtype; a ``unittest.SkipTest``.
    """
    if dtype not in item.dtypes:
        raise Missing(f"{item.id} does not run at {dtype}")
    result = run_item(item, as_adapter(implementation), dtype, seed)
    if result.status is Status.MISSING:
        raise Missing(result.note)
    if result.status is Status.FAILED:
        raise ConformanceError(describe(result, seed=seed))


def judge(
    implementation: Any,
    *,
    dtype: str = "float64",
    only: str | Iterable[str] | None = None,
    known: KnownFailures | None = None,
    vectors: str | Path | None = None,
    name: str | None = None,
    seed: int = 0,
) -> Report:
    """Every item that runs at this dtype, against one implementation.

    Args:
        implementation: a module or object with the operations' functions, or an ``Adapter``.
        dtype: what the implementation computes in.
        only: ids or globs.
        known: failures that the implementer has declared.
        vectors: a folder of vector files; default the specification's own.
        name: of the implementation in the report.
        seed: of the laws' inputs, from 0 on.

    Returns:
        The report; ``report.passed`` says whether nothing unexpected happened.
    """
    if dtype not in DTYPES:
        raise LookupError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    adapter, items = as_adapter(implementation), cases(only, vectors=vectors)
    with np.errstate(all="ignore"):  # NumPy's own warnings about its arithmetic are not the judge's to print
        results = [run_item(item, adapter, dtype, seed) for item in items if dtype in item.dtypes]
    called = name or getattr(implementation, "__name__", None) or type(implementation).__name__
    return Report.of(called, dtype, results, known or KnownFailures(), seed)


def run_item(item: Item, adapter: Adapter, dtype: str, seed: int = 0) -> Result:
    """One item; nothing that the implementation does is raised here."""
    subject = Subject(adapter, dtype)
    started = time.perf_counter()
    status, finding, note = Status.PASSED, None, ""
    try:
        finding = _run_case(item, subject) if isinstance(item, Case) else _run_law(item, Trial(subject, seed))
    except Missing as reason:
        status, note = Status.MISSING, str(reason)
    except RefusedError as refusal:
        finding = Finding(f"valid inputs were refused with {refusal}", "", "an answer", f"{refusal}")
    except BrokenError as problem:
        finding = Finding(str(problem), "", "an answer", "none", spec=(problem.spec_id,) if problem.spec_id else ())
    return Result(
        id=item.id,
        dtype=dtype,
        operations=item.operations,
        spec=item.spec if finding is None else tuple(dict.fromkeys((*item.spec, *finding.spec))),
        flags=item.flags,
        comment=item.comment,
        status=Status.FAILED if finding else status,
        seconds=time.perf_counter() - started,
        note=note,
        finding=finding,
        call=subject.calls[-1] if finding and subject.calls else None,
    )


def _run_case(case: Case, subject: Subject) -> Finding | None:
    inputs = case.make_inputs(subject.dtype)
    if case.codes:
        return _run_invalid(case, subject, inputs)
    answer = subject.run(case.operation, inputs)
    rules = dict(case.compare)
    outputs = {name: take_output(answer, name, case.outputs) for name in rules}
    if _FLAT in case.flags and case.operation == "squeeze_heads":
        record = {name: take_output(answer, name, case.outputs) for name in case.outputs}
        failure = check_chain(case.make_inputs(subject.dtype), record, subject.dtype, flat=True)
        if failure:
            return _find(case.operation, inputs, failure[0], record[failure[0]], failure[1], subject.dtype)
        rules = {name: rule for name, rule in rules.items() if rule["rule"] in ("exact", "plan")}
    for name, rule in rules.items():
        got, expected = outputs[name], case.expected[name]
        difference = compare_output(rule, expected, got, subject.dtype)
        if difference and rule["rule"] == "alpha" and _FLAT in case.flags and case.operation == "solve_alpha":
            difference = _check_flat_alpha(inputs, expected, got, subject.dtype, difference)
        if difference:
            return _find(case.operation, inputs, name, got, difference, subject.dtype)
    return None


def _check_flat_alpha(
    inputs: dict[str, Any], expected: Any, got: Any, dtype: str, difference: Difference
) -> Difference | None:
    """An ill-conditioned alpha by its effect; ``difference`` where it has none, being of another shape or kind."""
    reference, alpha = np.asarray(decode_expected(expected)), as_numbers(got)
    if alpha is None or alpha.shape != reference.shape:
        return difference
    pair = Pair.of_inputs(inputs)
    return check_effect(pair, reference.reshape(pair.best.shape), alpha.reshape(pair.best.shape), dtype)


def _run_invalid(case: Case, subject: Subject, inputs: dict[str, Any]) -> Finding | None:
    expected = f"an error with the code {' or '.join(case.codes)}"
    try:
        answer = subject.run(case.operation, inputs)
    except RefusedError as refusal:
        if refusal.code in case.codes:
            return None
        return Finding("invalid inputs were refused with another code", "", expected, str(refusal))
    except BrokenError as problem:
        return Finding(f"invalid inputs must be refused with a code: {problem}", "", expected, "none")
    return Finding("invalid inputs were accepted", "", expected, f"the answer {abbreviate(answer)}")


def _run_law(law: Law, trial: Trial) -> Finding | None:
    spec: tuple[str, ...] = ()
    subject = trial.subject
    try:
        law.statement(trial)
    except LawBrokenError as error:
        difference = error.difference
        spec = tuple(spec_id for spec_id in error.spec if spec_id in law.spec) or error.spec
    except (Missing, RefusedError, BrokenError):
        raise
    except Exception as error:  # An answer of another shape or kind than the law's arithmetic can use.
        difference = Difference(f"the answer cannot be used: {type(error).__name__}: {error}", "", "")
    else:
        return None
    looks_like: list[str] = []
    for call in subject.calls:
        looks_like += [sentence for sentence in recognise_call(call, subject.dtype) if sentence not in looks_like]
    return Finding(difference.problem, "", difference.expected, difference.got, tuple(looks_like), spec)


def _find(
    operation: str, inputs: dict[str, Any], output: str, got: Any, difference: Difference, dtype: str
) -> Finding:
    looks_like = recognise(operation, inputs, output, got, dtype)
    return Finding(difference.problem, output, difference.expected, difference.got, looks_like=tuple(looks_like))


# --- well-known mistakes --------------------------------------------------------------------------------------------


_ALPHA = ("solve_alpha", "squeeze_heads")
_SQUEEZE = ("squeeze_heads",)
_PLAN = ("merge_plan", "squeeze_heads")
_POOL = ("plan_groups", "squeeze_heads")
_SOFTMAX = ("softmax",)
_LOSS = ("shd_loss",)
_GRADIENT = ("shd_loss_gradient",)
_BOTH = _LOSS + _GRADIENT
_LAYERS = ("layer_map",)
INDEXERS = ("indexer_target", "indexer_loss", "indexer_loss_gradient")

MISTAKES: Mapping[str, tuple[tuple[str, ...], Choices]] = {
    "alpha-misprinted": (_ALPHA, Choices(n="printed")),
    "alpha-opposite-sign": (_ALPHA, Choices(n="opposite")),
    "alpha-unclipped": (_ALPHA, Choices(clip=False)),
    "alpha-swapped": (_ALPHA, Choices(weighs="q")),
    "alpha-other-numerator": (_ALPHA, Choices(numerator="w")),
    "alpha-padded-rows": (_ALPHA, Choices(rows_masked=False)),
    "alpha-solved-once": (_ALPHA, Choices(sample_shared=True)),
    "degenerate-zero": (_ALPHA, Choices(degenerate=0.0)),
    "degenerate-one": (_ALPHA, Choices(degenerate=1.0)),
    "degenerate-formula": (_ALPHA, Choices(degenerate=None)),
    "alpha-per-ignored": (_ALPHA, Choices(per="other")),
    "merged-outputs-mixed": (_SQUEEZE, Choices(merged_outputs="mixed")),
    "merged-outputs-mean": (_SQUEEZE, Choices(merged_outputs="mean")),
    "merged-outputs-first": (_SQUEEZE, Choices(merged_outputs="first")),
    "pool-in-place": (_POOL, Choices(pool="in-place")),
    "pool-untouched-first": (_POOL, Choices(pool="untouched-first")),
    "plan-overshoot": (_PLAN, Choices(plan="overshoot")),
    "plan-last-pairs": (_PLAN, Choices(plan="last")),
    "plan-halves": (_PLAN, Choices(plan="halves")),
    "hard-always-first": (_SQUEEZE, Choices(hard="always p")),
    "hard-always-second": (_SQUEEZE, Choices(hard="always q")),
    "softened-after": (_SQUEEZE, Choices(softened="after")),
    "solved-on-softened": (_SQUEEZE, Choices(solved_on="other")),
    "temperature-inverted": (("softmax", "soften"), Choices(temperature="multiplies")),
    "temperature-ignored": (("softmax", "soften", "squeeze_heads"), Choices(temperature="ignored", softened="never")),
    "sink-scaled-up": (("soften", "squeeze_heads", "shd_loss", "shd_loss_gradient"), Choices(mass_kept=False)),
    "attn-mask-inverted": (_SOFTMAX, Choices(mask_inverted=True)),
    "attn-mask-ignored": (_SOFTMAX, Choices(mask_used=False)),
    "masked-row-is-nan": (_SOFTMAX, Choices(masked_row=float("nan"))),
    "masked-row-is-uniform": (_SOFTMAX, Choices(masked_row=-1.0)),
    "value-heads-cycled": (("value_outputs",), Choices(value_heads="cycled")),
    "cross-entropy-called-kl": (_LOSS, Choices(divergence="cross-entropy")),
    "kl-reversed": (_LOSS, Choices(divergence="reverse_kl")),
    "loss-log2": (_LOSS, Choices(divergence="base 2")),
    "loss-is-mse": (_LOSS, Choices(divergence="mse")),
    "epsilon-1e-8": (_LOSS, Choices(log_constant=1e-8)),
    "mean-over-all-rows": (_BOTH, Choices(denominator="all rows")),
    "loss-padded-rows": (_BOTH, Choices(rows_masked=False)),
    "mean-per-sample": (_BOTH, Choices(denominator="sample")),
    "rows-summed": (_BOTH, Choices(denominator="none")),
    "batch-mean": (_BOTH, Choices(denominator="samples")),
    "mean-over-keys": (_BOTH, Choices(denominator="keys")),
    "loss-times-t-squared": (_BOTH, Choices(t_power=2)),
    "loss-times-t": (_BOTH, Choices(t_power=1)),
    "student-not-softened": (_BOTH, Choices(student_softened=False)),
    "reduction-ignored": (_BOTH, Choices(reduction="other")),
    "beta-ignored": (_BOTH, Choices(beta_used=False)),
    "gradient-sign": (_GRADIENT, Choices(sign=-1)),
    "gradient-without-temperature": (_GRADIENT, Choices(gradient_divided_by_t=False)),
    "layers-floor": (_LAYERS, Choices(rounding="floor")),
    "layers-ceiling": (_LAYERS, Choices(rounding="ceiling")),
    "layers-half-even": (_LAYERS, Choices(rounding="even")),
    "layers-zero-based": (_LAYERS, Choices(rounding="zero-based")),
    "layers-first": (_LAYERS, Choices(rounding="same")),
    **{
        f"indexer-{name}": (
            tuple(operation for operation in INDEXERS if name in variant_indexers.mistakes_of(operation)),
            Choices(indexer=name),
        )
        for name in variant_indexers.MISTAKES
    },
}
"""What an implementation with a mistake decides, and where it shows; ``specs/mistakes.json`` has the sentences."""


def recognise(operation: str, inputs: Mapping[str, Any], output: str, got: Any, dtype: str) -> list[str]:
    """Sentences of the mistakes that would give this output of a call; empty where none does."""
    with np.errstate(all="ignore"):
        right = _try(operation, inputs, output, Choices())
        if right is None or _same(right, got, output, dtype):
            return []
        sentences = []
        for name, (operations, choices) in MISTAKES.items():
            if operation not in operations:
                continue
            wrong = _try(operation, inputs, output, choices)
            if wrong is not None and _same(wrong, got, output, dtype) and not _same(wrong, right, output, dtype):
                sentences.append(load_mistakes()[name])
        return sentences


def recognise_call(call: Call, dtype: str) -> list[str]:
    """Sentences of the mistakes that would give any output of a recorded call."""
    names = OUTPUTS.get(call.operation, ())
    sentences: list[str] = []
    for name in names:
        try:
            got = take_output(call.answer, name, names)
        except BrokenError:
            continue
        sentences += [s for s in recognise(call.operation, call.inputs, name, got, dtype) if s not in sentences]
    return sentences


# What a difference is measured by, where an output is not probabilities.
_QUANTITIES = {
    "alpha": "alpha",
    "alphas": "alpha",
    "mixing": "alpha",
    "loss": "loss",
    "dz": "gradient",
    "dw": "gradient",
}


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
