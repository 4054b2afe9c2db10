"""Laws of chapter HEAD of ``specs/shrink.md``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shd_ref.conformance.laws.law import Array, Law, Trial, as_array, broken, exactly
from shd_ref.conformance.laws.shrink.layers import (
    WIDTH,
    draw_inputs,
    draw_layer,
    draw_merge,
    moments_of,
    run_layer,
)
from shd_ref.conformance.products import make_product

WIDE = ("float64", "float32")
_FORMS = ("logit_forms", "value_forms", "constant")
_ALONG = ((0, 2), (3, 1), (4, 5, 6), (7,))
_ACROSS = ((0, 5), (1,), (4, 3), (2,))
_DIFFERENCES = ((1, 0, 0), (-1, 0, 1), (-1, 1, 0), (1, 1, 1))
_CAUSAL = np.tri(7, dtype=np.bool_)


def _exact_queries(trial: Trial) -> None:
    rotary = {"frequencies": np.array([1.0, 0.25])}
    for number, biases in enumerate(("", "qkv", "qkvo")):
        weights = draw_layer(trial, 6010 + 10 * number, 8, 2, biases)
        merge = draw_merge(trial, _ALONG)
        student = trial.call("mix_queries", weights=weights, merge=merge)
        for turn in (None, rotary, {**rotary, "layout": "adjacent"}, {"frequencies": np.array([0.5])}):
            for batch, mask in ((1, None), (3, _CAUSAL)):
                x = draw_inputs(trial, 6005 + batch, batch, 7)
                got = run_layer(x, student, mask=mask, rotary=turn)
                wanted = run_layer(x, weights, merge=merge, mask=mask, rotary=turn)
                trial.agree(got, wanted, "factor", f"outputs with biases {biases or 'none'}")


def _exact_side_by_side(trial: Trial) -> None:
    for number, (biases, kv_heads, head_dim) in enumerate((("", 6, 8), ("qkv", 6, 13), ("qkvo", 3, 8))):
        weights = draw_layer(trial, 6050 + 10 * number, 6, kv_heads, biases)
        merge = draw_merge(trial, _ACROSS)
        student = trial.call("concatenate_heads", weights=weights, merge=merge, head_dim=head_dim)
        for batch, mask in ((1, None), (3, _CAUSAL)):
            x = draw_inputs(trial, 6045 + batch, batch, 7)
            trial.agree(
                run_layer(x, student, mask=mask),
                run_layer(x, weights, merge=merge, mask=mask),
                "factor",
                f"outputs with biases {biases or 'none'}",
            )


def _whole_rank(trial: Trial) -> None:
    x = draw_inputs(trial, 6080, 4, 6)
    moment, centred = map(trial.rounded, moments_of(x))
    for number, biases in enumerate(("", "qkv", "qkvo")):
        weights, merge = draw_layer(trial, 6081 + 10 * number, 4, 4, biases, 2), draw_merge(trial, ((0, 3), (1, 2)))
        student = trial.call(
            "low_rank_heads",
            weights=weights,
            merge=merge,
            num_kv_heads=2,
            head_dim=WIDTH,
            moment=moment,
            key_moment=centred,
        )
        other = draw_inputs(trial, 6079, 2, 7)
        trial.agree(run_layer(other, student), run_layer(other, weights, merge=merge), "factor", "outputs")


def _same_student(trial: Trial) -> None:
    """Heads of a teacher in another order inside their key heads, and groups that name them in another order."""
    weights, merge = draw_layer(trial, 6110, 8, 2, "qkvo", 2), draw_merge(trial, _ALONG)
    order = [2, 0, 3, 1, 7, 4, 6, 5]  # inside the key heads
    place = {head: number for number, head in enumerate(order)}
    other = {**weights, **{name: weights[name][order] for name in ("query", "output", "query_bias")}}
    moved = {
        "mixing": merge["mixing"][:, order],
        "groups": [[place[head] for head in reversed(group)] for group in merge["groups"]],
    }
    moment, centred = map(trial.rounded, moments_of(draw_inputs(trial, 6111, 4, 6)))
    for operation, options in (
        ("mix_queries", {}),
        ("concatenate_heads", {"head_dim": 6}),
        ("low_rank_heads", {"num_kv_heads": 4, "head_dim": 3, "moment": moment, "key_moment": centred}),
    ):
        first = trial.call(operation, weights=weights, merge=merge, **options)
        second = trial.call(operation, weights=other, merge=moved, **options)
        for name in _FORMS:
            trial.agree(
                make_product(name, second, {}),
                make_product(name, first, {}),
                "factor",
                f"{name} of {operation}",
                times=2,
            )


def _identity(trial: Trial) -> None:
    weights = draw_layer(trial, 6120, 4, 2, "qkvo")
    merge = {"mixing": trial.rounded(np.eye(4)), "groups": [[0], [1], [2], [3]]}
    student = trial.call("mix_queries", weights=weights, merge=merge)
    for name, given in weights.items():
        trial.agree(student[name], given, "product", f"{name} of heads that stay alone")
    answer = trial.call("pooled_mixing", gram=_gram(trial, 4), plan=[])
    trial.agree(answer["mixing"], np.eye(4), "alpha", "C of no round")


def _best_rank(trial: Trial) -> None:
    """No other right factor does better, each with the left factors that suit it best."""
    x = draw_inputs(trial, 6130, 6, 6)
    moment, centred = moments_of(x)
    weights, merge = draw_layer(trial, 6131, 4, 2, "q", 4), draw_merge(trial, ((0, 3), (1, 2)))
    given = {"moment": trial.rounded(moment), "key_moment": trial.rounded(centred)}
    student = trial.call("low_rank_heads", weights=weights, merge=merge, num_kv_heads=1, head_dim=2, **given)
    found = as_array(make_product("logit_forms", student, {}), "logit forms")
    query = np.concatenate([weights["query"], weights["query_bias"][:, None]], axis=1).astype(np.float64)
    key = weights["key"].astype(np.float64)[[0, 0, 1, 1]]
    whole = np.einsum("ht,tik,tjk->hij", merge["mixing"], query, key) / 2  # the scale of four entries

    def error(forms: Array) -> float:
        gap = forms - whole
        return float(np.einsum("hij,ik,hkl,lj->", gap, moment, gap, centred))

    least = error(found)
    for seed in range(6140, 6152):
        right = trial.numbers(seed, WIDTH, 2).astype(np.float64)
        left = whole @ centred @ right @ np.linalg.inv(right.T @ centred @ right)
        trial.at_most(least, error(left @ right.T), "factor", "error of the cut against that of another")
    # Near the answer as well: its own right factor, a little off.
    own = np.linalg.svd(found.reshape(-1, WIDTH), full_matrices=False)[2][:2].T
    for seed in range(6152, 6160):
        right = own + trial.numbers(seed, WIDTH, 2).astype(np.float64) / 256
        left = whole @ centred @ right @ np.linalg.inv(right.T @ centred @ right)
        trial.at_most(least, error(left @ right.T), "factor", "error of the cut against that beside it")
    sizes = np.linalg.svd(found.reshape(-1, WIDTH), compute_uv=False)
    trial.agree(sizes[2:], np.zeros(WIDTH - 2), "factor", "what the forms hold beyond their rank", times=10)


def _equal_heads(trial: Trial) -> None:
    """A merge of heads that are equal is that head, at its own length."""
    one = draw_layer(trial, 6170, 2, 2, "qkvo", 3)
    twice = {name: part if name == "output_bias" else np.repeat(part, 2, axis=0) for name, part in one.items()}
    merge = draw_merge(trial, ((0, 1), (2, 3)))
    x = draw_inputs(trial, 6171, 6, 6)
    moment, centred = map(trial.rounded, moments_of(x))
    rotary = {"frequencies": np.array([0.5])}
    for turn in (None, rotary):
        student = trial.call(
            "low_rank_heads",
            weights=twice,
            merge=merge,
            num_kv_heads=2,
            head_dim=3,
            moment=moment,
            key_moment=centred,
            **({} if turn is None else {"rotary": turn}),
        )
        got, wanted = run_layer(x, student, rotary=turn), run_layer(x, twice, rotary=turn)
        trial.agree(got, wanted, "factor", "outputs of equal heads", times=4)


def _gram(trial: Trial, heads: int, samples: int = 3, seed: int = 6180) -> Array:
    """A gram tensor summed over samples."""
    probs = trial.probs(seed, samples, heads, 4, 5).astype(np.float64)
    outputs = trial.numbers(seed + 1, samples, heads, 5, 3, low=-8, high=8).astype(np.float64)
    products = np.einsum("bils,bjsd->bijld", probs, outputs)
    return trial.rounded(np.einsum("bijld,bkmld->ijkm", products, products))


def _pooled(trial: Trial) -> None:
    gram = _gram(trial, 6)
    plan = [[[4, 1], [2, 3]], [[0, 2]]]
    answer = trial.call("pooled_mixing", gram=gram, plan=plan)
    mixing = as_array(answer["mixing"], "mixing")
    trial.agree(mixing.sum(axis=1), np.ones(3), "alpha", "the sum of a row of C", times=2)
    twice = trial.call("pooled_mixing", gram=trial.rounded(2.0 * gram), plan=plan)
    trial.agree(twice["mixing"], mixing, "alpha", "C of every sample twice", times=2)
    exactly(answer["groups"], [[4, 1, 0], [2, 3], [5]], "groups")
    parts = [_gram(trial, 2, 1, seed) for seed in (6182, 6184)]
    alone = [as_array(trial.call("pooled_mixing", gram=part, plan=[[[0, 1]]])["mixing"], "mixing") for part in parts]
    sizes = [_merged_size(part) for part in parts]
    both = trial.call("pooled_mixing", gram=trial.rounded(parts[0] + parts[1]), plan=[[[0, 1]]])
    mean = (sizes[0] * alone[0] + sizes[1] * alone[1]) / (sizes[0] + sizes[1])
    trial.agree(both["mixing"], mean, "alpha", "C of two samples, against the mean weighted with ||M||^2", times=2)


def _merged_size(gram: Array) -> float:
    """``||M||^2`` of the pair 0 and 1, with M the difference of their maps over both value outputs."""
    g = gram.astype(np.float64)
    return float(sum(s * g[i, j, k, m] for s, i, k in _DIFFERENCES for j in (0, 1) for m in (0, 1)))


def _inside(trial: Trial) -> None:
    gram = _gram(trial, 8, seed=6190)
    for students, kv_heads in ((4, 2), (2, 2), (4, 4), (6, 2)):
        (plan,) = trial.call("grouped_plan", gram=gram, num_student_heads=students, num_kv_heads=kv_heads).values()
        answer = trial.call("pooled_mixing", gram=gram, plan=[list(map(list, pairs)) for pairs in plan])
        homes = [{int(head) * kv_heads // 8 for head in group} for group in answer["groups"]]
        wanted = [{kv} for kv in range(kv_heads) for _ in range(students // kv_heads)]
        if sorted(homes, key=min) != wanted:
            raise broken("groups", "must each lie in one key head, equally many for each", wanted, homes)


def part_law(
    name: str,
    operations: str,
    spec: str,
    comment: str,
    statement: Callable[[Trial], None],
    dtypes: tuple[str, ...] = WIDE,
) -> Law:
    """A law of this part, with its operations and sentences separated by blanks."""
    return Law(f"law/shrink-{name}", tuple(operations.split()), tuple(spec.split()), comment, statement, dtypes)


LAWS: tuple[Law, ...] = (
    part_law(
        "exact-queries",
        "mix_queries",
        "HEAD-2 HEAD-7 HEAD-8",
        "Heads of one key head equal the merged attention, at any length, mask and rotation.",
        _exact_queries,
    ),
    part_law(
        "exact-side-by-side",
        "concatenate_heads",
        "HEAD-2 HEAD-9 HEAD-10",
        "Heads side by side equal the merged attention.",
        _exact_side_by_side,
    ),
    part_law(
        "whole-rank",
        "low_rank_heads",
        "HEAD-11 HEAD-12 HEAD-13",
        "A rank as large as the stream loses nothing.",
        _whole_rank,
    ),
    part_law(
        "order",
        "mix_queries concatenate_heads low_rank_heads",
        "HEAD-1 HEAD-7 HEAD-9 HEAD-11",
        "Another order of the teacher's heads, and of a group's, gives the same student.",
        _same_student,
    ),
    part_law(
        "identity", "mix_queries pooled_mixing", "HEAD-3 HEAD-7", "Heads that stay alone stay as they are.", _identity
    ),
    part_law(
        "best-rank", "low_rank_heads", "HEAD-11 HEAD-13", "No other factors of that rank do better.", _best_rank
    ),
    part_law(
        "equal-heads",
        "low_rank_heads",
        "HEAD-11 HEAD-12 HEAD-15",
        "Equal heads merge to themselves, with and without rotary positions.",
        _equal_heads,
    ),
    part_law(
        "pooled",
        "pooled_mixing",
        "HEAD-3",
        "C is convex, does not count samples, and is their weighted mean.",
        _pooled,
    ),
    part_law("inside", "grouped_plan pooled_mixing", "HEAD-4 HEAD-5", "No group crosses a key head.", _inside),
)
"""The laws of HEAD."""
