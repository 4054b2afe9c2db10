"""Running cases and laws against an implementation, one at a time or all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from shd_ref.conformance.adapter import Adapter, BrokenError, Missing, RefusedError, Subject, as_adapter, take_output
from shd_ref.conformance.chain import Pair, check_chain, check_effect
from shd_ref.conformance.compare import Difference, abbreviate, as_numbers, compare_output
from shd_ref.conformance.laws import LAWS, Law, LawBrokenError, Trial
from shd_ref.conformance.mistakes import recognise, recognise_call
from shd_ref.conformance.report import Finding, KnownFailures, Report, Result, Status, describe
from shd_ref.conformance.specification import DTYPES, vectors_folder
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
    adapter = as_adapter(implementation)
    results = list(_run_all(cases(only, vectors=vectors), adapter, dtype, seed))
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


def _run_all(items: Iterable[Item], adapter: Adapter, dtype: str, seed: int) -> Iterator[Result]:
    # NumPy's own warnings about an implementation's arithmetic are not the judge's to print.
    with np.errstate(all="ignore"):
        for item in items:
            if dtype in item.dtypes:
                yield run_item(item, adapter, dtype, seed)


def _run_case(case: Case, subject: Subject) -> Finding | None:
    inputs = case.make_inputs(subject.dtype)
    if case.codes:
        return _run_invalid(case, subject, inputs)
    answer = subject.run(case.operation, inputs)
    rules = dict(case.compare)
    outputs = {name: take_output(answer, name, case.outputs) for name in rules}
    if _FLAT in case.flags and case.operation == "squeeze_heads":
        record = {name: take_output(answer, name, case.outputs) for name in case.outputs}
        found = check_chain(case.make_inputs(subject.dtype), record, subject.dtype, flat=True)
        if found:
            return _find(case.operation, inputs, found[0], record[found[0]], found[1], subject.dtype)
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
    p, q, x, y = (
        np.asarray(inputs[name], dtype=np.float64)
        for name in ("probs_p", "probs_q", "value_outputs_p", "value_outputs_q")
    )
    wanted, alpha = np.asarray(decode_expected(expected)), as_numbers(got)
    if alpha is None or alpha.shape != wanted.shape:
        return difference
    pair = Pair.of(
        p,
        q,
        x,
        y,
        inputs.get("query_mask"),
        per_row=inputs.get("alpha_per", "map") == "row",
        printed=inputs.get("rule", "least_squares") == "as_printed",
    )
    return check_effect(pair, wanted.reshape(pair.best.shape), alpha.reshape(pair.best.shape), dtype)


def _run_invalid(case: Case, subject: Subject, inputs: dict[str, Any]) -> Finding | None:
    wanted = f"an error with the code {' or '.join(case.codes)}"
    try:
        answer = subject.run(case.operation, inputs)
    except RefusedError as refusal:
        if refusal.code in case.codes:
            return None
        return Finding("invalid inputs were refused with another code", "", wanted, str(refusal))
    except BrokenError as problem:
        return Finding(f"invalid inputs must be refused with a code: {problem}", "", wanted, "none")
    return Finding("invalid inputs were accepted", "", wanted, f"the answer {abbreviate(answer)}")


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
