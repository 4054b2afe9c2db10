"""Laws of the chapters MIX and ORACLE: merged maps, strategies, and the best that any could do."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from shd_ref.conformance.compare import as_plain
from shd_ref.conformance.laws.alphas import near_ends
from shd_ref.conformance.laws.answers import check_answer, field_of, ratio_of
from shd_ref.conformance.laws.law import WIDE, Law, Laws, Trial, as_array, exactly, law
from shd_ref.conformance.laws.maps import temperatures
from shd_ref.conformance.variants import soften_maps

LAWS = Laws()
_MASK = np.array([[True, True, True, True, False], [True, False, True, True, True], [True] * 5])


def _teacher(trial: Trial, seed: int, batch: int, heads: int, rows: int, keys: int, width: int) -> dict[str, Any]:
    maps, outputs = trial.probs(seed, batch, heads, rows, keys), trial.numbers(seed + 1, batch, heads, keys, width)
    return {"teacher_probs": maps, "value_outputs": outputs}


def _squeeze(trial: Trial, seed: int, keys: int = 6, zero_rows: tuple[int, ...] = (), **options: Any) -> None:
    """One call of squeeze_heads, judged link by link; maps have sinks where their rows may."""
    inputs = {**_teacher(trial, seed, 3, 5, 5, keys, 4), "num_student_heads": 2, **options}
    if zero_rows:
        inputs["teacher_probs"] = trial.probs(seed, 3, 5, 5, keys, zero_rows=zero_rows)
    if "row_sums" in options:
        shares = np.array([1.0, 0.5, 0.75, 0.25, 0.0])[:, None] * np.array([1.0, 0.5, 0.25, 1.0, 0.5])[:, None, None]
        inputs["teacher_probs"] = trial.rounded(inputs["teacher_probs"] * shares)
    probs = as_array(check_answer(trial, "squeeze_heads", inputs)["probs"], "probs")
    exactly(probs[:, :, list(zero_rows)], 0.0, "a fully masked row after the merge")


def _squeeze_law(name: str, spec: str, comment: str, seed: int, **options: Any) -> Law:
    return law(f"squeeze-{name}", "squeeze_heads", spec, comment, partial(_squeeze, seed=seed, **options))


_CHAIN = "NUM-6 NUM-7 MIX-4 MIX-9 MIX-11 MIX-13 ALPHA-5 "

LAWS += (
    _squeeze_law("shd", _CHAIN, "Every output of shd follows from the inputs and the outputs before it.", 301),
    _squeeze_law("shd-per-row", _CHAIN + "ALPHA-9 MIX-12", "The same with one alpha per row.", 305,
        alpha_per="row"),
    _squeeze_law("balanced", _CHAIN + "PLAN-8", "The same along the balanced plan.", 309, plan="balanced"),
    _squeeze_law("explicit-plan", _CHAIN + "PLAN-4 PLAN-7 MIX-16", "The same along explicit rounds.", 313,
        plan=[[[4, 1], [0, 2]], [[2, 0]]]),
    _squeeze_law("one-head", _CHAIN, "The same down to one head, over three rounds.", 317, num_student_heads=1),
    _squeeze_law("masked", _CHAIN + "ALPHA-7 MIX-8", "The same with rows that do not count.", 321,
        query_mask=_MASK),
    _squeeze_law("masked-per-row", _CHAIN + "ALPHA-7 ALPHA-9 MIX-14",
        "The same per row with rows that do not count.", 325, query_mask=_MASK, alpha_per="row"),
    _squeeze_law("fully-masked-rows", _CHAIN + "MAP-2", "Rows without mass stay zero.", 329, zero_rows=(1, 3)),
    _squeeze_law("rectangular", _CHAIN + "MAP-4", "The same with more queries than keys.", 333, keys=3,
        num_student_heads=3),
    _squeeze_law("temperature", _CHAIN + "TEMP-2 TEMP-3 MIX-8", "The same at temperature 2.", 337,
        temperature=2.0),
    _squeeze_law("alpha-from-softened", _CHAIN + "TEMP-3 MIX-8",
        "The same with alphas solved on the softened maps.", 341, temperature=2.0, alpha_from="softened"),
    _squeeze_law("as-printed", _CHAIN + "ALPHA-4", "The same by the misprinted rule.", 345,
        alpha_rule="as_printed"),
    _squeeze_law("constant", _CHAIN + "MIX-5", "constant takes 1/2 everywhere.", 349, strategy="constant"),
    _squeeze_law("constant-per-row", _CHAIN + "MIX-5 MIX-12", "The same per row.", 353, strategy="constant",
        alpha_per="row"),
    _squeeze_law("hard", _CHAIN + "MIX-5", "hard takes the better of the two heads.", 357, strategy="hard"),
    _squeeze_law("hard-per-row", _CHAIN + "MIX-5 MIX-12 MIX-14",
        "The same per row, 1 where a row does not count.", 361, strategy="hard", alpha_per="row", query_mask=_MASK),
    _squeeze_law("mean", "NUM-6 MIX-6 MIX-11", "mean mixes all heads alike.", 365, strategy="mean"),
    _squeeze_law("mean-per-row", "NUM-6 MIX-6 MIX-12", "The same per row.", 369, strategy="mean",
        alpha_per="row"),
    _squeeze_law("sinks", _CHAIN + "MAP-9 MIX-17 TEMP-5",
        "Maps whose rows sum to less than one are used as they are.", 381, row_sums="at_most_one", temperature=2.0),
)  # fmt: skip


@LAWS.add("squeeze-near-ends", "squeeze_heads", _CHAIN + "MIX-5", WIDE)
def _near_ends(trial: Trial) -> None:
    """Alphas that are nearly 0, 1/2 or 1, or far from all of them, are taken for nothing else."""
    p, q, x, y = near_ends(trial).values()
    inputs = {"teacher_probs": np.stack([p, q], axis=1), "value_outputs": np.stack([x, y], axis=1)}
    for strategy in ("shd", "hard"):
        for per in ("map", "row"):
            options = {"num_student_heads": 1, "strategy": strategy, "alpha_per": per}
            check_answer(trial, "squeeze_heads", {**inputs, **options})


@LAWS.add("squeeze-temperatures", "squeeze_heads", _CHAIN + "TEMP-2 TEMP-3", WIDE)
def _temperatures(trial: Trial) -> None:
    """A temperature near 1 is not 1, and one far from it neither hardens nor levels maps."""
    inputs = {**_teacher(trial, 259, 2, 3, 3, 5, 3), "num_student_heads": 2}
    for temperature in temperatures(trial.subject.dtype):
        for source in ("teacher", "softened"):
            check_answer(trial, "squeeze_heads", {**inputs, "temperature": temperature, "alpha_from": source})


@LAWS.add("squeeze-identity", "squeeze_heads", "PLAN-3 MIX-4")
def _identity(trial: Trial) -> None:
    """As many student heads as teacher heads is the identity."""
    inputs = _teacher(trial, 201, 2, 4, 3, 5, 3)
    for strategy in ("shd", "constant", "hard"):
        got = trial.call("squeeze_heads", **inputs, num_student_heads=4, strategy=strategy)
        exactly(got["probs"], inputs["teacher_probs"], f"the maps of {strategy}, as many as before,")
        exactly(got["mixing"], np.broadcast_to(np.eye(4), (2, 4, 4)).copy(), f"the mixing of {strategy}")
        exactly(got["plan"], [], "the plan")
        trial.agree(got["residual"], np.zeros(2), "residual", "the residual")


@LAWS.add("squeeze-equal-heads", "squeeze_heads", "ALPHA-6 MIX-9 MIX-14")
def _equal_heads(trial: Trial) -> None:
    """Equal heads merge to themselves, and count as degenerate."""
    maps, outputs = trial.probs(205, 2, 1, 3, 5), trial.numbers(206, 2, 2, 5, 3)
    inputs = {"teacher_probs": np.concatenate([maps, maps], axis=1), "value_outputs": outputs, "num_student_heads": 1}
    for strategy in ("shd", "constant", "hard", "mean"):
        for per in ("map", "row"):
            got = trial.call("squeeze_heads", **inputs, strategy=strategy, alpha_per=per)
            trial.agree(got["probs"], maps, "probs", f"two equal heads merged by {strategy}, alpha per {per},")
            trial.agree(got["residual"], np.zeros(2), "residual", "the residual of merging equal heads")
            if strategy == "shd":
                exactly(as_array(got["alphas"][0], "alphas"), 0.5, "the alphas of equal heads")
                exactly(got["num_degenerate"], 2 if per == "map" else 6, f"the degenerate alphas, per {per}")
                exactly(got["num_clipped"], 0, "the clipped alphas")


@LAWS.add("squeeze-batch", "squeeze_heads", "MIX-10 NUM-3")
def _batch(trial: Trial) -> None:
    """A sample has the same results alone as in a batch."""
    inputs = {**_teacher(trial, 209, 3, 5, 5, 6, 4), "query_mask": _MASK}
    for options in ({}, {"alpha_per": "row"}, {"strategy": "hard"}):
        together = trial.call("squeeze_heads", **inputs, num_student_heads=2, **options)
        for sample in range(3):
            one = slice(sample, sample + 1)
            arrays = {name: array[one] for name, array in inputs.items()}
            alone = trial.call("squeeze_heads", **arrays, num_student_heads=2, **options)
            for name, quantity in (("mixing", "alpha"), ("probs", "probs"), ("residual", "residual")):
                what = f"{name} of sample {sample} alone, with {options or 'defaults'},"
                trial.agree(alone[name], as_array(together[name], name)[one], quantity, what)


@LAWS.add("squeeze-uncounted-rows", "squeeze_heads", "ALPHA-7 MIX-8")
def _uncounted(trial: Trial) -> None:
    """What stands in rows that do not count changes neither the other rows nor the residual."""
    inputs = {**_teacher(trial, 213, 3, 4, 5, 6, 4), "num_student_heads": 2, "query_mask": _MASK}
    changed = np.where(_MASK[:, None, :, None], inputs["teacher_probs"], trial.probs(215, 3, 4, 5, 6))
    counted = np.broadcast_to(_MASK[:, None, :], (3, 2, 5))
    for per in ("map", "row"):
        before = trial.call("squeeze_heads", **inputs, alpha_per=per)
        after = trial.call("squeeze_heads", **{**inputs, "teacher_probs": changed}, alpha_per=per)
        first, second = (as_array(answer["probs"], "probs")[counted] for answer in (before, after))
        trial.agree(second, first, "probs", "maps after changes in rows that do not count")
        residual = as_array(before["residual"], "residual")
        trial.agree(after["residual"], residual, "residual", "the residual after them")


@LAWS.add("two-heads", "squeeze_heads", "MIX-5")
def _two_heads(trial: Trial) -> None:
    """For two heads neither constant nor hard does better than shd."""
    inputs = {**_teacher(trial, 221, 3, 2, 5, 6, 4), "num_student_heads": 1}
    for per in ("map", "row"):
        shd, *others = (
            as_array(trial.call("squeeze_heads", **inputs, strategy=name, alpha_per=per)["residual"], "residual")
            for name in ("shd", "constant", "hard")
        )
        for bound in others:
            trial.at_most(shd, bound, "residual", "the residual of shd, against constant and hard,")


@LAWS.add("squeeze-runs-its-plan", "merge_plan squeeze_heads", "MIX-16 MIX-9")
def _plan_names(trial: Trial) -> None:
    """Without a plan squeeze_heads runs the progressive one, and reports it."""
    inputs = {**_teacher(trial, 225, 2, 5, 3, 6, 4), "num_student_heads": 2}
    plan = trial.call("merge_plan", num_teacher_heads=5, num_student_heads=2)["plan"]
    default = trial.call("squeeze_heads", **inputs)
    exactly(default["plan"], as_plain(plan), "the plan that squeeze_heads ran by default")
    explicit = trial.call("squeeze_heads", **inputs, plan=plan)
    maps = as_array(default["probs"], "probs")
    trial.agree(explicit["probs"], maps, "probs", "maps by the same plan, given as rounds,")


@LAWS.add("compose-mixing", "squeeze_heads compose_mixing", "MIX-13 MIX-3")
def _composition(trial: Trial) -> None:
    """The mixing matrix is the composition of the alphas."""
    inputs = {**_teacher(trial, 229, 2, 5, 3, 6, 4), "num_student_heads": 2}
    for per in ("map", "row"):
        got = trial.call("squeeze_heads", **inputs, alpha_per=per)
        alphas = [trial.rounded(as_array(one_round, "alphas")) for one_round in got["alphas"]]
        plan, whole = as_plain(got["plan"]), as_array(got["mixing"], "mixing")
        mixing = trial.numbers_of("compose_mixing", alphas=alphas, plan=plan, num_teacher_heads=5)
        trial.agree(mixing, whole, "alpha", "compose_mixing of the result's alphas", times=2)
        sums = mixing.sum(2)
        trial.agree(sums, np.ones_like(sums), "alpha", "the sums of mixing over the teacher's heads")


@LAWS.add("compose-deep", "compose_mixing", "MIX-13 PLAN-4")
def _deep(trial: Trial) -> None:
    """The weights of seven rounds multiply, however small they become."""
    # Every round halves, or takes a 32nd of, what the rounds before left of a head.
    for share in (0.5, 2.0**-5, 1.0 - 2.0**-5):
        plan = [[[1, 0]], *([[0, head]] for head in (6, 5, 4, 3, 2, 1))]
        alphas = [trial.rounded(np.full((2, 1), share)) for _ in plan]
        check_answer(trial, "compose_mixing", {"alphas": alphas, "plan": plan, "num_teacher_heads": 8})


@LAWS.add("mix-heads", "mix_heads", "MIX-3")
def _mixes(trial: Trial) -> None:
    """Merged maps are the weighted sums of the maps."""
    maps = trial.probs(233, 2, 4, 3, 6)
    by_row = np.ascontiguousarray(trial.probs(235, 2, 2, 3, 4).transpose(0, 1, 3, 2))  # (B, H_s, H_t, L)
    for mixing in (trial.probs(234, 2, 2, 4), by_row):
        check_answer(trial, "mix_heads", {"teacher_probs": maps, "mixing": mixing})


@LAWS.add("softened-before-mixing", "squeeze_heads", "TEMP-2 TEMP-3")
def _softened_first(trial: Trial) -> None:
    """C is solved at temperature 1 and mixes maps that were softened head by head."""
    inputs = {**_teacher(trial, 255, 1, 4, 3, 6, 4), "num_student_heads": 2}
    warm = trial.call("squeeze_heads", **inputs, temperature=4.0)
    cold = as_array(trial.call("squeeze_heads", **inputs)["mixing"], "mixing")
    trial.agree(warm["mixing"], cold, "alpha", "the mixing at temperature 4, against that at temperature 1,")
    softened = soften_maps(inputs["teacher_probs"].astype(np.float64), 4.0, "one")
    expected = (cold[:, :, :, None, None] * softened[:, None]).sum(2)
    trial.agree(warm["probs"], expected, "probs", "the maps at temperature 4: softened, then mixed,", times=2)


@LAWS.add("oracles-bound", "diagnose squeeze_heads", "ORACLE-1 ORACLE-2 ORACLE-3 ORACLE-4 ORACLE-5")
def _oracles(trial: Trial) -> None:
    """No strategy beats the row-stochastic optimum, and that not the unconstrained one."""
    inputs = {**_teacher(trial, 251, 2, 4, 4, 5, 2), "num_student_heads": 2}
    strategies = ["shd", "constant", "hard"]
    got = trial.call("diagnose", **inputs, strategies=strategies)
    unconstrained, stochastic = (as_array(got[name], name) for name in ("unconstrained", "stochastic"))
    trial.at_most(unconstrained, stochastic, "residual", "the unconstrained optimum, against the row-stochastic one,")
    exactly(sorted(got["strategies"]), sorted(strategies), "the strategies that were asked for")
    for name in strategies:
        field = field_of(got["strategies"][name])
        head = as_array(field("head_residual"), "head_residual")
        trial.at_most(stochastic, head, "residual", f"the row-stochastic optimum, against {name},")
        squeezed = trial.call("squeeze_heads", **inputs, strategy=name)
        residual = as_array(squeezed["residual"], "residual")
        trial.agree(field("residual"), residual, "residual", f"the residual of {name}, against squeeze_heads,")
        ratio = np.asarray(field("over_stochastic"), dtype=np.float64)
        expected = ratio_of(head**2, stochastic**2)
        factor = np.where(np.isinf(expected), 1.0, stochastic)
        trial.agree(ratio * factor, expected * factor, "residual", f"over_stochastic of {name} times the optimum")


@LAWS.add("oracles-of-odd-outputs", "diagnose squeeze_heads", "ORACLE-1 ORACLE-2 ORACLE-3 ORACLE-6 MIX-8", WIDE)
def _odd_outputs(trial: Trial) -> None:
    """Outputs that vanish, that no map comes near, or that lie in fewer directions than there are features."""
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
            check_answer(trial, "diagnose", call, f"of odd outputs, to {students} heads")
