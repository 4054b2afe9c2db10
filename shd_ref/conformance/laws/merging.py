"""Laws of the chapters MIX and ORACLE: merged maps, strategies, and the best that any could do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.chain import check_chain, soften_maps
from shd_ref.conformance.compare import Difference, as_plain
from shd_ref.conformance.laws.alphas import near_ends
from shd_ref.conformance.laws.formulas import check_diagnosis, ratio_of
from shd_ref.conformance.laws.law import Law, LawBrokenError, Trial, as_array, exactly, law
from shd_ref.conformance.laws.maps import temperatures
from shd_ref.conformance.variants import compute

_MASK = np.array([[True, True, True, True, False], [True, False, True, True, True], [True] * 5])


# The sentences about each output, for the report of one that is wrong.
_LINKS = {
    "plan": ("PLAN-5", "PLAN-7", "MIX-9"),
    "alphas": ("ALPHA-2", "ALPHA-3", "MIX-4", "MIX-5", "MIX-11"),
    "mixing": ("MIX-6", "MIX-12", "MIX-13"),
    "probs": ("MIX-3", "TEMP-2", "TEMP-3", "TEMP-5"),
    "residual": ("MIX-8",),
    "num_clipped": ("MIX-9", "ALPHA-5"),
    "num_degenerate": ("MIX-9", "ALPHA-6"),
}


def _squeeze(trial: Trial, seed: int, *, heads: int = 5, rows: int = 5, keys: int = 6, **options: Any) -> None:
    """One call of squeeze_heads, judged link by link; ``sinks`` and ``zero_rows`` shape the maps."""
    zero_rows, sinks = options.pop("zero_rows", ()), options.pop("sinks", False)
    maps = trial.probs(seed, 3, heads, rows, keys, zero_rows=zero_rows)
    if sinks:
        shares = np.array([1.0, 0.5, 0.75, 0.25, 0.0])[:, None] * np.array([1.0, 0.5, 0.25, 1.0, 0.5])[:, None, None]
        maps = trial.rounded(maps * shares)
        options["row_sums"] = "at_most_one"
    options.setdefault("num_student_heads", 2)
    inputs = {"teacher_probs": maps, "value_outputs": trial.numbers(seed + 1, 3, heads, keys, 4), **options}
    got = trial.call("squeeze_heads", **inputs)
    counts = {"num_teacher_heads": heads, "num_student_heads": options["num_student_heads"]}
    rounds = compute("merge_plan", {**counts, "kind": options.get("plan", "progressive")})["plan"]
    exactly(got["plan"], rounds, "the plan of the result")
    failure = check_chain(inputs, got, trial.subject.dtype)
    if failure:
        name, difference = failure
        named = Difference(f"{name}: {difference.problem}", difference.expected, difference.got)
        raise LawBrokenError(named, _LINKS[name])
    probs = as_array(got["probs"], "probs")
    if zero_rows:
        exactly(probs[:, :, list(zero_rows)], 0.0, "a fully masked row after the merge")


def _identity(trial: Trial) -> None:
    maps, outputs = trial.probs(201, 2, 4, 3, 5), trial.numbers(202, 2, 4, 5, 3)
    for strategy in ("shd", "constant", "hard"):
        got = trial.call(
            "squeeze_heads", teacher_probs=maps, value_outputs=outputs, num_student_heads=4, strategy=strategy
        )
        exactly(got["probs"], maps, f"the maps of {strategy}, as many as before,")
        exactly(got["mixing"], np.broadcast_to(np.eye(4), (2, 4, 4)).copy(), f"the mixing of {strategy}")
        exactly(got["plan"], [], "the plan")
        trial.agree(got["residual"], np.zeros(2), "residual", "the residual")


def _equal_heads(trial: Trial) -> None:
    maps, outputs = trial.probs(205, 2, 1, 3, 5), trial.numbers(206, 2, 2, 5, 3)
    both = np.concatenate([maps, maps], axis=1)
    for strategy in ("shd", "constant", "hard", "mean"):
        for per in ("map", "row"):
            got = trial.call(
                "squeeze_heads",
                teacher_probs=both,
                value_outputs=outputs,
                num_student_heads=1,
                strategy=strategy,
                alpha_per=per,
            )
            trial.agree(got["probs"], maps, "probs", f"two equal heads merged by {strategy}, alpha per {per},")
            trial.agree(got["residual"], np.zeros(2), "residual", "the residual of merging equal heads")
            if strategy == "shd":
                exactly(as_array(got["alphas"][0], "alphas"), 0.5, "the alphas of equal heads")
                exactly(got["num_degenerate"], 2 if per == "map" else 6, f"the degenerate alphas, per {per}")
                exactly(got["num_clipped"], 0, "the clipped alphas")


def _batch(trial: Trial) -> None:
    inputs = {"teacher_probs": trial.probs(209, 3, 5, 5, 6), "value_outputs": trial.numbers(210, 3, 5, 6, 4)}
    for options in ({}, {"alpha_per": "row"}, {"strategy": "hard"}):
        together = trial.call("squeeze_heads", **inputs, query_mask=_MASK, num_student_heads=2, **options)
        for sample in range(3):
            one = slice(sample, sample + 1)
            alone = trial.call(
                "squeeze_heads",
                **{name: array[one] for name, array in inputs.items()},
                query_mask=_MASK[one],
                num_student_heads=2,
                **options,
            )
            for name, quantity in (("mixing", "alpha"), ("probs", "probs"), ("residual", "residual")):
                whole = as_array(together[name], name)[one]
                trial.agree(
                    alone[name], whole, quantity, f"{name} of sample {sample} alone, with {options or 'defaults'},"
                )


def _squeeze_uncounted(trial: Trial) -> None:
    maps, outputs = trial.probs(213, 3, 4, 5, 6), trial.numbers(214, 3, 4, 6, 4)
    changed = np.where(_MASK[:, None, :, None], maps, trial.probs(215, 3, 4, 5, 6))
    for per in ("map", "row"):
        before, after = (
            trial.call(
                "squeeze_heads",
                teacher_probs=probs,
                value_outputs=outputs,
                num_student_heads=2,
                query_mask=_MASK,
                alpha_per=per,
            )
            for probs in (maps, changed)
        )
        counted = np.broadcast_to(_MASK[:, None, :], (3, 2, 5))
        first, second = as_array(before["probs"], "probs"), as_array(after["probs"], "probs")
        trial.agree(second[counted], first[counted], "probs", "maps after changes in rows that do not count")
        trial.agree(
            after["residual"], as_array(before["residual"], "residual"), "residual", "the residual after them"
        )


def _two_heads(trial: Trial) -> None:
    inputs = {"teacher_probs": trial.probs(221, 3, 2, 5, 6), "value_outputs": trial.numbers(222, 3, 2, 6, 4)}
    for per in ("map", "row"):
        results = {
            strategy: trial.call("squeeze_heads", **inputs, num_student_heads=1, strategy=strategy, alpha_per=per)
            for strategy in ("shd", "constant", "hard")
        }
        shd = results["shd"]
        for name in ("constant", "hard"):
            bound = as_array(results[name]["residual"], "residual")
            trial.at_most(shd["residual"], bound, "residual", f"the residual of shd, against {name},")


def _plan_names(trial: Trial) -> None:
    inputs = {"teacher_probs": trial.probs(225, 2, 5, 3, 6), "value_outputs": trial.numbers(226, 2, 5, 6, 4)}
    plan = trial.call("merge_plan", num_teacher_heads=5, num_student_heads=2)["plan"]
    default = trial.call("squeeze_heads", **inputs, num_student_heads=2)
    exactly(default["plan"], as_plain(plan), "the plan that squeeze_heads ran by default")
    explicit = trial.call("squeeze_heads", **inputs, num_student_heads=2, plan=plan)
    trial.agree(
        explicit["probs"], as_array(default["probs"], "probs"), "probs", "maps by the same plan, given as rounds,"
    )


def _composition(trial: Trial) -> None:
    inputs = {"teacher_probs": trial.probs(229, 2, 5, 3, 6), "value_outputs": trial.numbers(230, 2, 5, 6, 4)}
    for per in ("map", "row"):
        got = trial.call("squeeze_heads", **inputs, num_student_heads=2, alpha_per=per)
        alphas = [trial.rounded(as_array(one_round, "alphas")) for one_round in got["alphas"]]
        plan = as_plain(got["plan"])
        mixing = trial.numbers_of("compose_mixing", alphas=alphas, plan=plan, num_teacher_heads=5)
        trial.agree(
            mixing, as_array(got["mixing"], "mixing"), "alpha", "compose_mixing of the result's alphas", times=2
        )
        trial.agree(
            mixing.sum(2), np.ones_like(mixing.sum(2)), "alpha", "the sums of mixing over the teacher's heads"
        )


def _mixes(trial: Trial) -> None:
    maps = trial.probs(233, 2, 4, 3, 6)
    weights = trial.probs(234, 2, 2, 4)
    mixed = trial.numbers_of("mix_heads", teacher_probs=maps, mixing=weights)
    A, C = maps.astype(np.float64), weights.astype(np.float64)
    trial.agree(mixed, (C[:, :, :, None, None] * A[:, None]).sum(2), "probs", "mix_heads")
    by_row = np.ascontiguousarray(trial.probs(235, 2, 2, 3, 4).transpose(0, 1, 3, 2))  # (B, H_s, H_t, L)
    mixed = trial.numbers_of("mix_heads", teacher_probs=maps, mixing=by_row)
    expected = (by_row.astype(np.float64)[..., None] * A[:, None]).sum(2)
    trial.agree(mixed, expected, "probs", "mix_heads with a weight per row")


def _oracles(trial: Trial) -> None:
    inputs = {"teacher_probs": trial.probs(251, 2, 4, 4, 5), "value_outputs": trial.numbers(252, 2, 4, 5, 2)}
    strategies = ["shd", "constant", "hard"]
    got = trial.call("diagnose", **inputs, num_student_heads=2, strategies=strategies)
    unconstrained, stochastic = (as_array(got[name], name) for name in ("unconstrained", "stochastic"))
    trial.at_most(unconstrained, stochastic, "residual", "the unconstrained optimum, against the row-stochastic one,")
    exactly(sorted(got["strategies"]), sorted(strategies), "the strategies that were asked for")
    for name in strategies:
        report = got["strategies"][name]
        field = report.get if isinstance(report, Mapping) else partial(getattr, report)
        head = as_array(field("head_residual"), "head_residual")
        trial.at_most(stochastic, head, "residual", f"the row-stochastic optimum, against {name},")
        squeezed = trial.call("squeeze_heads", **inputs, num_student_heads=2, strategy=name)
        expected = as_array(squeezed["residual"], "residual")
        trial.agree(field("residual"), expected, "residual", f"the residual of {name}, against squeeze_heads,")
        ratio = np.asarray(field("over_stochastic"), dtype=np.float64)
        expected = ratio_of(head**2, stochastic**2)
        factor = np.where(np.isinf(expected), 1.0, stochastic)
        trial.agree(ratio * factor, expected * factor, "residual", f"over_stochastic of {name} times the optimum")


def _odd_outputs(trial: Trial) -> None:
    # Of two heads of two keys: outputs that vanish, outputs that every map exceeds, and keys that read one direction.
    maps = np.array([[[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], [[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]])
    first = [
        [[0.0, 0.0], [1.0, 0.5], [-1.0, -0.5]],
        [[1.0, 0.0], [8.0, 2.0], [8.0, -2.0]],
        [[1.0, 2.0], [0.5, -1.0], [-2.0, 1.0]],
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
    ]
    second = [
        [[1.0, 1.0], [0.0, 0.0], [-1.0, -1.0]],
        [[8.0, 2.0], [1.0, 0.0], [8.0, -2.0]],
        [[0.0, -1.0], [0.0, 1.5], [3.0, 0.0]],
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]],
    ]
    outputs = np.stack([first, second], axis=1)  # (B, 2, S, D)
    # The third sample's keys nearly read one direction, and no key reads the third feature, which its heads gave.
    outputs[2, 1, 1, 1] += 2.0**-17 if trial.subject.dtype == "float64" else 2.0**-6
    unread = np.array([[0.5, 0.0, -0.5], [-0.5, 0.0, 0.5]])[..., None]
    outputs = trial.rounded(np.concatenate([outputs, unread * np.array([0, 0, 1, 0])[:, None, None, None]], axis=-1))
    whole = {
        "teacher_probs": trial.rounded(np.broadcast_to(maps, (4, 2, 2, 3))),
        "value_outputs": outputs,
        "query_mask": np.array([[True, False], [True, True], [True, True], [True, True]]),
    }
    more = {  # the same beside a pair that is as others are
        **whole,
        "teacher_probs": np.concatenate([whole["teacher_probs"], trial.probs(257, 4, 2, 2, 3)], axis=1),
        "value_outputs": np.concatenate([outputs, trial.numbers(258, 4, 2, 3, 3)], axis=1),
    }
    for inputs, students in ((whole, 1), (more, 2)):
        for options in ({}, {"row_sums": "at_most_one"}):
            call = {**inputs, "num_student_heads": students, "strategies": ["shd", "constant", "mean"], **options}
            check_diagnosis(trial, call, f"of odd outputs, to {students} heads")


def _deep(trial: Trial) -> None:
    # Every round halves, or takes a 32nd of, what the rounds before left of a head.
    for share in (0.5, 2.0**-5, 1.0 - 2.0**-5):
        plan = [[[1, 0]], *([[0, head]] for head in (6, 5, 4, 3, 2, 1))]
        alphas = [trial.rounded(np.full((2, 1), share)) for _ in plan]
        got = trial.numbers_of("compose_mixing", alphas=alphas, plan=plan, num_teacher_heads=8)
        left = np.array([1 - share, share, *(0.0 for _ in range(6))])
        for head in (7, 6, 5, 4, 3, 2):
            left = share * left
            left[head] += 1 - share
        trial.agree(got, np.broadcast_to(left, (2, 1, 8)), "alpha", f"compose_mixing of seven rounds, each {share:g}")


def _near_ends(trial: Trial) -> None:
    pair = near_ends(trial)
    inputs = {
        "teacher_probs": np.stack([pair["probs_p"], pair["probs_q"]], axis=1),
        "value_outputs": np.stack([pair["value_outputs_p"], pair["value_outputs_q"]], axis=1),
        "num_student_heads": 1,
    }
    for strategy in ("shd", "hard"):
        for per in ("map", "row"):
            call = {**inputs, "strategy": strategy, "alpha_per": per}
            failure = check_chain(call, trial.call("squeeze_heads", **call), trial.subject.dtype)
            if failure:
                problem = f"{failure[0]} of {strategy}, alpha per {per}: {failure[1].problem}"
                raise LawBrokenError(Difference(problem, failure[1].expected, failure[1].got), _LINKS[failure[0]])


def _temperatures(trial: Trial) -> None:
    inputs = {"teacher_probs": trial.probs(259, 2, 3, 3, 5), "value_outputs": trial.numbers(260, 2, 3, 5, 3)}
    for temperature in temperatures(trial.subject.dtype):
        for source in ("teacher", "softened"):
            options = {"temperature": temperature, "alpha_from": source}
            call = {**inputs, "num_student_heads": 2, **options}
            failure = check_chain(call, trial.call("squeeze_heads", **call), trial.subject.dtype)
            if failure:
                problem = f"{failure[0]} at temperature {temperature:g}, solved on {source}: {failure[1].problem}"
                raise LawBrokenError(Difference(problem, failure[1].expected, failure[1].got), _LINKS[failure[0]])


def _softened_first(trial: Trial) -> None:
    maps, outputs = trial.probs(255, 1, 4, 3, 6), trial.numbers(256, 1, 4, 6, 4)
    warm = trial.call(
        "squeeze_heads", teacher_probs=maps, value_outputs=outputs, num_student_heads=2, temperature=4.0
    )
    plain = trial.call("squeeze_heads", teacher_probs=maps, value_outputs=outputs, num_student_heads=2)
    cold = as_array(plain["mixing"], "mixing")
    trial.agree(warm["mixing"], cold, "alpha", "the mixing at temperature 4, against that at temperature 1,")
    softened = soften_maps(maps.astype(np.float64), 4.0, "one")
    expected = (cold[:, :, :, None, None] * softened[:, None]).sum(2)
    trial.agree(warm["probs"], expected, "probs", "the maps at temperature 4: softened, then mixed,", times=2)


_Statement = Callable[[Trial], None]


def _squeeze_law(name: str, spec: tuple[str, ...], comment: str, seed: int, **options: Any) -> Law:
    statement: _Statement = partial(_squeeze, seed=seed, **options)
    return law(f"squeeze-{name}", "squeeze_heads", spec, comment, statement)


_CHAIN = ("NUM-6", "NUM-7", "MIX-4", "MIX-9", "MIX-11", "MIX-13", "ALPHA-5")

LAWS = (
    _squeeze_law("shd", _CHAIN, "Every output of shd follows from the inputs and the outputs before it.", 301),
    _squeeze_law("shd-per-row", (*_CHAIN, "ALPHA-9", "MIX-12"), "The same with one alpha per row.", 305,
        alpha_per="row"),
    _squeeze_law("balanced", (*_CHAIN, "PLAN-8"), "The same along the balanced plan.", 309, plan="balanced"),
    _squeeze_law("explicit-plan", (*_CHAIN, "PLAN-4", "PLAN-7", "MIX-16"), "The same along explicit rounds.", 313,
        plan=[[[4, 1], [0, 2]], [[2, 0]]]),
    _squeeze_law("one-head", _CHAIN, "The same down to one head, over three rounds.", 317, num_student_heads=1),
    _squeeze_law("masked", (*_CHAIN, "ALPHA-7", "MIX-8"), "The same with rows that do not count.", 321,
        query_mask=_MASK),
    _squeeze_law("masked-per-row", (*_CHAIN, "ALPHA-7", "ALPHA-9", "MIX-14"),
        "The same per row with rows that do not count.", 325, query_mask=_MASK, alpha_per="row"),
    _squeeze_law("fully-masked-rows", (*_CHAIN, "MAP-2"), "Rows without mass stay zero.", 329, zero_rows=(1, 3)),
    _squeeze_law("rectangular", (*_CHAIN, "MAP-4"), "The same with more queries than keys.", 333, keys=3,
        num_student_heads=3),
    _squeeze_law("temperature", (*_CHAIN, "TEMP-2", "TEMP-3", "MIX-8"), "The same at temperature 2.", 337,
        temperature=2.0),
    _squeeze_law("alpha-from-softened", (*_CHAIN, "TEMP-3", "MIX-8"),
        "The same with alphas solved on the softened maps.", 341, temperature=2.0, alpha_from="softened"),
    _squeeze_law("as-printed", (*_CHAIN, "ALPHA-4"), "The same by the misprinted rule.", 345,
        alpha_rule="as_printed"),
    _squeeze_law("constant", (*_CHAIN, "MIX-5"), "constant takes 1/2 everywhere.", 349, strategy="constant"),
    _squeeze_law("constant-per-row", (*_CHAIN, "MIX-5", "MIX-12"), "The same per row.", 353, strategy="constant",
        alpha_per="row"),
    _squeeze_law("hard", (*_CHAIN, "MIX-5"), "hard takes the better of the two heads.", 357, strategy="hard"),
    _squeeze_law("hard-per-row", (*_CHAIN, "MIX-5", "MIX-12", "MIX-14"),
        "The same per row, 1 where a row does not count.", 361, strategy="hard", alpha_per="row", query_mask=_MASK),
    _squeeze_law("mean", ("NUM-6", "MIX-6", "MIX-11"), "mean mixes all heads alike.", 365, strategy="mean"),
    _squeeze_law("mean-per-row", ("NUM-6", "MIX-6", "MIX-12"), "The same per row.", 369, strategy="mean",
        alpha_per="row"),
    _squeeze_law("sinks", (*_CHAIN, "MAP-9", "MIX-17", "TEMP-5"),
        "Maps whose rows sum to less than one are used as they are.", 381, sinks=True, temperature=2.0),
    law("squeeze-near-ends", "squeeze_heads", (*_CHAIN, "MIX-5"),
        "Alphas that are nearly 0, 1/2 or 1, or far from all of them, are taken for nothing else.", _near_ends,
        dtypes=("float64", "float32")),
    law("squeeze-temperatures", "squeeze_heads", (*_CHAIN, "TEMP-2", "TEMP-3"),
        "A temperature near 1 is not 1, and one far from it neither hardens nor levels maps.", _temperatures,
        dtypes=("float64", "float32")),
    law("squeeze-identity", "squeeze_heads", "PLAN-3 MIX-4",
        "As many student heads as teacher heads is the identity.", _identity),
    law("squeeze-equal-heads", "squeeze_heads", "ALPHA-6 MIX-9 MIX-14",
        "Equal heads merge to themselves, and count as degenerate.", _equal_heads),
    law("squeeze-batch", "squeeze_heads", "MIX-10 NUM-3", "A sample has the same results alone as in a batch.",
        _batch),
    law("squeeze-uncounted-rows", "squeeze_heads", "ALPHA-7 MIX-8",
        "What stands in rows that do not count changes neither the other rows nor the residual.",
        _squeeze_uncounted),
    law("two-heads", "squeeze_heads", "MIX-5", "For two heads neither constant nor hard does better than shd.",
        _two_heads),
    law("squeeze-runs-its-plan", "merge_plan squeeze_heads", "MIX-16 MIX-9",
        "Without a plan squeeze_heads runs the progressive one, and reports it.", _plan_names),
    law("compose-mixing", "squeeze_heads compose_mixing", "MIX-13 MIX-3",
        "The mixing matrix is the composition of the alphas.", _composition),
    law("compose-deep", "compose_mixing", "MIX-13 PLAN-4",
        "The weights of seven rounds multiply, however small they become.", _deep),
    law("mix-heads", "mix_heads", "MIX-3", "Merged maps are the weighted sums of the maps.", _mixes),
    law("softened-before-mixing", "squeeze_heads", "TEMP-2 TEMP-3",
        "C is solved at temperature 1 and mixes maps that were softened head by head.", _softened_first),
    law("oracles-bound", "diagnose squeeze_heads", "ORACLE-1 ORACLE-2 ORACLE-3 ORACLE-4 ORACLE-5",
        "No strategy beats the row-stochastic optimum, and that not the unconstrained one.", _oracles),
    law("oracles-of-odd-outputs", "diagnose squeeze_heads", "ORACLE-1 ORACLE-2 ORACLE-3 ORACLE-6 MIX-8",
        "Outputs that vanish, that no map comes near, or that lie in fewer directions than there are features.",
        _odd_outputs, dtypes=("float64", "float32")),
)  # fmt: skip
