"""Laws in which every two values of two options of an operation meet: mistakes like to sit where options do.

Each law asks for the rows of a covering array and finds what is right by itself; ``specs/pairs.md`` has the options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from shd_ref.conformance.chain import Pair, check_alpha, check_chain, soften_maps
from shd_ref.conformance.compare import Difference, as_plain
from shd_ref.conformance.laws.bounds import check_diagnosis
from shd_ref.conformance.laws.covering import Row, cover, each, words
from shd_ref.conformance.laws.law import Array, Law, LawBrokenError, Trial, exactly
from shd_ref.conformance.laws.plans import check_matched
from shd_ref.conformance.variants import compute

_WIDE = ("float64", "float32")
PER = ("map", "row")
SINKS = ("one", "at_most_one")
SAMPLES = {"1": 1, "2 to 4": 3, "more": 6}
SHAPES = {"L < S": (3, 5), "L = S": (4, 4), "L > S": (5, 3)}
LARGE = {"L < S": (6, 19), "L = S": (18, 18), "L > S": (19, 7)}
# Short enough for bfloat16, and numbers that no half precision holds.
TEMPERATURES = {
    ("one", "short"): 1.0, ("whole", "short"): 3.0, ("above", "short"): 1.25, ("below", "short"): 0.75,
    ("one", "full"): 1.0, ("whole", "full"): 2.0, ("above", "full"): 1.4145508, ("below", "full"): 0.7071075,
}  # fmt: skip
# Teacher and student heads for a number of rounds, and what is left.
COUNTS = {
    ("0", "all"): (3, 3),
    ("1", "one"): (2, 1), ("1", "several, evenly"): (4, 2), ("1", "several, unevenly"): (5, 3),
    ("2", "one"): (3, 1), ("2", "several, evenly"): (6, 2), ("2", "several, unevenly"): (5, 2),
    ("3", "one"): (5, 1), ("3", "several, evenly"): (10, 2), ("3", "several, unevenly"): (11, 2),
    ("4 or more", "one"): (9, 1), ("4 or more", "several, evenly"): (18, 2),
    ("4 or more", "several, unevenly"): (17, 2),
}  # fmt: skip
ROUNDS = ("0", "1", "2", "3", "4 or more")
LEFT = ("all", "one", "several, evenly", "several, unevenly")
MASKS = ("none", "some rows", "an empty sample")
# Explicit rounds for the counts above: pairs out of order, from everywhere in the pool.
EXPLICIT: dict[tuple[int, int], list[list[list[int]]]] = {
    (3, 3): [],
    (2, 1): [[[1, 0]]],
    (4, 2): [[[3, 1], [0, 2]]],
    (5, 3): [[[4, 2], [1, 3]]],
    (3, 1): [[[2, 0]], [[1, 0]]],
    (6, 2): [[[5, 1], [0, 3]], [[2, 0], [3, 1]]],
    (5, 2): [[[3, 0], [4, 1]], [[2, 1]]],
    (5, 1): [[[2, 4]], [[3, 0], [1, 2]], [[1, 0]]],
    (10, 2): [[[9, 0], [3, 5], [8, 1], [2, 4]], [[5, 2], [1, 4]], [[3, 0], [2, 1]]],
    (11, 2): [[[10, 0], [3, 5], [8, 1], [2, 4], [9, 6]], [[5, 2], [1, 4]], [[3, 0], [2, 1]]],
    (9, 1): [[[8, 3], [0, 5]], [[6, 0], [2, 4], [1, 3]], [[3, 1]], [[2, 0]], [[1, 0]]],
    (18, 2): [
        [[17, 0], [3, 5], [8, 1], [2, 4], [9, 6], [16, 7]],
        [[11, 4], [0, 9], [7, 2], [5, 1]],
        [[3, 7], [6, 0]],
        [[5, 2], [1, 4]],
        [[3, 1], [0, 2]],
    ],
    (17, 2): [
        [[16, 0], [3, 5], [8, 1], [2, 4], [9, 6], [15, 7]],
        [[10, 4], [0, 9], [7, 2]],
        [[3, 7], [6, 0]],
        [[5, 2], [1, 4]],
        [[3, 1], [0, 2]],
    ],
}


def _heads(row: Row) -> bool:
    """The empty plan leaves all heads, and no other does."""
    empty, whole = row.get("rounds"), row.get("heads left")
    return None in (empty, whole) or (empty == "0") == (whole == "all")


def _shape(row: Row) -> tuple[int, int, int]:
    rows, keys = (LARGE if row.get("size") == "large" else SHAPES)[row["shape"]]
    return SAMPLES[row["samples"]], rows, keys


def _maps(trial: Trial, seed: int, row: Row, *shape: int) -> Array:
    """Maps with the numbers, sums and zero rows that a row of options asks for."""
    zero = (1,) if row.get("zero rows") == "some" else ()
    sinks = row.get("row_sums") == "at_most_one"
    # Rounded to half precision, the sums of rows would be off by more than float32's ROW_SUM.
    wide = trial.subject.dtype in _WIDE
    full, small = wide and row.get("numbers") == "full", wide and row.get("small mass") == "some"
    maps = trial.shares(seed, *shape, zero_rows=zero) if full else trial.probs(seed, *shape, zero_rows=zero)
    if small:
        maps = trial.with_small_mass(maps)
    if sinks:
        # Another share of its mass in every row, so that heads differ in it too.
        count = np.arange(maps[..., 0].size).reshape(maps.shape[:-1])
        maps = trial.rounded(maps * np.array([1.0, 0.5, 0.25, 0.75])[count % 7 % 4][..., None])
    return maps


def _numbers(trial: Trial, seed: int, row: Row, *shape: int) -> Array:
    return trial.quotients(seed, *shape) if row.get("numbers") == "full" else trial.numbers(seed, *shape)


def row_mask(kind: str, batch: int, rows: int) -> Array | None:
    """A mask ``(B, L)``, another in every sample; of an empty sample the last."""
    if kind == "none":
        return None
    counts: Array = (np.arange(batch)[:, None] * 2 + np.arange(rows)[None, :]) % 3 != 0
    counts[:, -1] = True
    if kind == "an empty sample":
        counts[-1] = False
    return counts


def _options(row: Row, defaults: Mapping[str, str]) -> dict[str, str]:
    """The arguments of a row that are words, those with the default left out every other time."""
    return {name: row[name] for name, value in defaults.items() if row[name] != value}


def _broken(row: Row, difference: Difference, name: str = "") -> LawBrokenError:
    what = f"{name}: {difference.problem}; with {', '.join(words(row))}" if name else difference.problem
    return LawBrokenError(Difference(what, difference.expected, difference.got))


def _say(row: Row) -> str:
    return f"with {', '.join(words(row))}"


# --- MAP and TEMP ------------------------------------------------------------------------------------------------

_AXES = {"2": (), "3": (3,), "4": (2, 3), "5 or more": (2, 1, 3)}


@cache
def _softmax_rows() -> list[Row]:
    def allowed(row: Row) -> bool:
        if row.get("axes") in ("2", "3") and row.get("attn_mask") == "(B, 1, 1, S)":
            return False
        return not (row.get("axes") == "2" and row.get("attn_mask") == "(L, S)")

    return cover(
        {
            "axes": tuple(_AXES),
            "attn_mask": ("none", "full", "(L, S)", "(B, 1, 1, S)", "other"),
            "-inf": ("none", "some"),
            "temperature": ("one", "whole", "above", "below"),
            "size": ("small", "large"),
            "numbers": ("short", "full"),
        },
        allowed,
    )


def _softmax(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        seed = 2001 + 7 * number
        shape = (*_AXES[row["axes"]], *((19, 23) if row["size"] == "large" else (3, 5)))
        logits = _numbers(trial, seed, row, *shape)
        if row["-inf"] == "some":
            drawn = trial.numbers(seed + 1, *shape, low=0, high=3, shift=0)
            logits = np.where(drawn == 0, -np.inf, logits).astype(logits.dtype)
        inputs: dict[str, Any] = {"attn_logits": logits}
        mask = None
        if row["attn_mask"] != "none":
            of = {
                "full": shape,
                "(L, S)": shape[-2:],
                "(B, 1, 1, S)": (shape[-4] if len(shape) > 3 else 1, 1, 1, shape[-1]),
                "other": (shape[-2], 1) if number % 2 else (shape[-1],),
            }[row["attn_mask"]]
            mask = trial.numbers(seed + 2, *of, low=0, high=3, shift=0) > 0
            inputs["attn_mask"] = mask
        temperature = TEMPERATURES[row["temperature"], row["numbers"]]
        if temperature != 1.0 or number % 2:
            inputs["temperature"] = temperature
        wide = logits.astype(np.float64) / temperature
        if mask is not None:
            wide = np.where(mask, wide, -np.inf)
        peak = wide.max(-1, keepdims=True)
        exps = np.exp(wide - np.where(np.isneginf(peak), 0.0, peak))
        total = exps.sum(-1, keepdims=True)
        wanted = exps / np.where(total > 0, total, 1.0)
        got = trial.numbers_of("softmax", **inputs)
        trial.agree(got, wanted, "probs", f"softmax {_say(row)}")
        exactly(got[np.isneginf(wide)], 0.0, f"the masked keys of softmax {_say(row)}")

    each(_softmax_rows(), check)


@cache
def _soften_rows() -> list[Row]:
    return cover(
        {
            "axes": tuple(_AXES),
            "row_sums": SINKS,
            "temperature": ("one", "whole", "above", "below"),
            "zero rows": ("none", "some"),
            "small mass": ("none", "some"),
            "size": ("small", "large"),
            "numbers": ("short", "full"),
        }
    )


def _soften(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        shape = (*_AXES[row["axes"]], *((19, 23) if row["size"] == "large" else (4, 5)))
        maps = _maps(trial, 2501 + 7 * number, row, *shape)
        temperature = TEMPERATURES[row["temperature"], row["numbers"]]
        options = _options(row, {"row_sums": "one"})
        got = trial.numbers_of("soften", attn_probs=maps, temperature=temperature, **options)
        wanted = soften_maps(maps.astype(np.float64), temperature, row["row_sums"])
        trial.agree(got, wanted, "probs", f"soften {_say(row)}")

    each(_soften_rows(), check)


_GROUPED = {"own": (3, 3), "two": (6, 3), "three": (6, 2), "one for all": (4, 1)}


@cache
def _value_rows() -> list[Row]:
    return cover(
        {
            "grouped": tuple(_GROUPED),
            "samples": tuple(SAMPLES),
            "widths": ("different", "S = d_v = D"),
            "size": ("small", "large"),
            "numbers": ("short", "full"),
        }
    )


def _values(trial: Trial, seed: int, row: Row, keys: int | None = None) -> tuple[Array, Array, Array]:
    """Values, output projection, and the value outputs that they have."""
    heads, kv = _GROUPED[row["grouped"]]
    size = 19 if row.get("size") == "large" else 3
    keys = keys or (size if row["widths"] != "different" else size + 2)
    width, out = (keys, keys) if row["widths"] != "different" else (2 if keys != 2 else 3, size + 1)
    values = _numbers(trial, seed, row, SAMPLES[row["samples"]], kv, keys, width)
    projection = _numbers(trial, seed + 1, row, heads * width, out)
    read = np.repeat(values.astype(np.float64), heads // kv, axis=1)
    wanted = np.einsum("bhsv,hvd->bhsd", read, projection.astype(np.float64).reshape(heads, width, out))
    return values, projection, wanted


def _value_outputs(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        values, projection, wanted = _values(trial, 2701 + 7 * number, row)
        got = trial.numbers_of("value_outputs", values=values, output_projection=projection)
        size = np.abs(wanted).max()
        trial.agree(got / size, wanted / size, "probs", f"value_outputs over their largest entry, {_say(row)}")

    each(_value_rows(), check)


# --- PLAN --------------------------------------------------------------------------------------------------------


def _plans(trial: Trial) -> None:
    rows = cover({"kind": ("progressive", "balanced", "explicit"), "rounds": ROUNDS, "heads left": LEFT}, _heads)

    def check(number: int, row: Row) -> None:
        heads, students = COUNTS[row["rounds"], row["heads left"]]
        kind = EXPLICIT[heads, students] if row["kind"] == "explicit" else row["kind"]
        counts: dict[str, Any] = {"num_teacher_heads": heads, "num_student_heads": students}
        wanted = compute("merge_plan", {**counts, "kind": kind})["plan"]
        given = {} if kind == "progressive" and number % 2 else {"kind": kind}
        exactly(trial.call("merge_plan", **counts, **given)["plan"], wanted, f"the plan {_say(row)}")

    each(rows, check)


# Rounds with every order of pairs, by the number of rounds and of heads left.
def _ordered(plan: list[list[list[int]]], order: str) -> list[list[list[int]]]:
    if order == "as the pool":
        return [sorted(sorted(pair) for pair in one_round) for one_round in plan]
    if order == "pairs swapped":
        return [[sorted(pair, reverse=True) for pair in one_round] for one_round in plan]
    return [sorted((sorted(pair) for pair in one_round), reverse=True) for one_round in plan]


_ORDERS = ("as the pool", "pairs swapped", "rounds shuffled")


def _ordered_rows(**options: Sequence[str]) -> list[Row]:
    def allowed(row: Row) -> bool:
        shuffled = row.get("order") == "rounds shuffled"
        alone = row.get("rounds") == "1" and row.get("heads left") == "one"
        few = row.get("rounds") == "2" and row.get("heads left") == "one"
        if row.get("rounds") == "0" and row.get("order", "as the pool") != "as the pool":
            return False
        if row.get("heads left") == "all" and row.get("order", "as the pool") != "as the pool":
            return False
        return _heads(row) and not (shuffled and (alone or few))

    return cover({"order": _ORDERS, **options}, allowed)


def _groups(trial: Trial) -> None:
    def check(_: int, row: Row) -> None:
        heads, students = COUNTS[row["rounds"], row["heads left"]]
        plan = _ordered(EXPLICIT[heads, students], row["order"])
        wanted = compute("plan_groups", {"plan": plan, "num_teacher_heads": heads})["groups"]
        got = trial.call("plan_groups", plan=plan, num_teacher_heads=heads)["groups"]
        exactly(got, wanted, f"the groups {_say(row)}")

    each(_ordered_rows(rounds=ROUNDS, **{"heads left": LEFT}), check)


@cache
def _matched_rows() -> list[Row]:
    def allowed(row: Row) -> bool:
        deep = row.get("rounds") == "4 or more" and row.get("heads left", "one") != "one"
        return _heads(row) and not deep  # of 17 heads and more there are too many sets of pairs to compare

    return cover(
        {
            "by": ("residual", "similarity"),
            "alpha_per": PER,
            "row_sums": SINKS,
            "query_mask": MASKS,
            "rounds": ROUNDS,
            "heads left": LEFT,
            "items": ("1", "several"),
            "samples": tuple(SAMPLES),
            "zero rows": ("none", "some"),
            "numbers": ("short", "full"),
        },
        allowed,
    )


_MATCHED = {**COUNTS, ("3", "several, unevenly"): (9, 2)}


def _matched(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        heads, students = _MATCHED[row["rounds"], row["heads left"]]
        batch, seed = SAMPLES[row["samples"]], 3001 + 11 * number
        calibration = []
        for item in range(1 if row["items"] == "1" else 3):
            rows, keys = ((3, 5), (4, 4), (5, 3))[item]
            maps = _maps(trial, seed + item, row, batch, heads, rows, keys)
            outputs = _numbers(trial, seed + 5 + item, row, batch, heads, keys, 3)
            mask = row_mask(row["query_mask"], batch, rows)
            calibration.append((maps, outputs) if mask is None else (maps, outputs, mask))
        options = _options(row, {"by": "residual", "alpha_per": "map", "row_sums": "one"})
        answer = trial.call("matched_plan", calibration=calibration, num_student_heads=students, **options)
        check_matched(trial, as_plain(answer["plan"]), calibration, students, row["by"], row["alpha_per"])

    each(_matched_rows(), check)


# --- ALPHA and GRAM ----------------------------------------------------------------------------------------------


@cache
def _alpha_rows() -> list[Row]:
    return cover(
        {
            "rule": ("least_squares", "as_printed"),
            "alpha_per": PER,
            "row_sums": SINKS,
            "query_mask": MASKS,
            "zero rows": ("none", "some"),
            "samples": tuple(SAMPLES),
            "shape": tuple(SHAPES),
            "size": ("small", "large"),
            "numbers": ("short", "full"),
        }
    )


def _alphas(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        seed = 3501 + 11 * number
        batch, rows, keys = _shape(row)
        maps = _maps(trial, seed, row, batch, 2, rows, keys)
        outputs = _numbers(trial, seed + 1, row, batch, 2, keys, 21 if row["size"] == "large" else 4)
        mask = row_mask(row["query_mask"], batch, rows)
        inputs: dict[str, Any] = {
            "probs_p": maps[:, 0].copy(),
            "probs_q": maps[:, 1].copy(),
            "value_outputs_p": outputs[:, 0].copy(),
            "value_outputs_q": outputs[:, 1].copy(),
            **_options(row, {"rule": "least_squares", "alpha_per": "map", "row_sums": "one"}),
        }
        if mask is not None:
            inputs["query_mask"] = mask
        a, x = maps.astype(np.float64), outputs.astype(np.float64)
        right = Pair.of(
            a[:, 0],
            a[:, 1],
            x[:, 0],
            x[:, 1],
            mask,
            per_row=row["alpha_per"] == "row",
            printed=row["rule"] == "as_printed",
        )
        alpha = trial.numbers_of("solve_alpha", **inputs)
        exactly(list(alpha.shape), [batch] if row["alpha_per"] == "map" else [batch, rows], "the shape of alpha")
        difference = check_alpha(right, alpha.reshape(right.best.shape), trial.subject.dtype, flat=False)
        if difference:
            raise _broken(row, difference, "alpha")

    each(_alpha_rows(), check)


@cache
def _gram_rows() -> list[Row]:
    return cover(
        {
            "grouped": tuple(_GROUPED),
            "alpha_per": PER,
            "row_sums": SINKS,
            "query_mask": MASKS,
            "zero rows": ("none", "some"),
            "samples": tuple(SAMPLES),
            "shape": tuple(SHAPES),
            "widths": ("different", "S = d_v = D"),
            "numbers": ("short", "full"),
        }
    )


def _gram_of(maps: Array, outputs: Array, mask: Array | None, per: str) -> Array:
    products = np.einsum("bils,bjsd->bijld", maps.astype(np.float64), outputs)
    weight = np.ones((len(maps), maps.shape[2])) if mask is None else mask.astype(np.float64)
    terms = "bijld,bmnld,bl->bijmn" + ("l" if per == "row" else "")
    gram: Array = np.einsum(terms, products, products, weight)
    return gram


def _gram_tensor(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        seed = 4001 + 11 * number
        batch, rows, keys = _shape(row)
        values, projection, outputs = _values(trial, seed, row, keys)
        maps = _maps(trial, seed + 2, row, batch, outputs.shape[1], rows, keys)
        mask = row_mask(row["query_mask"], batch, rows)
        options: dict[str, Any] = {} if mask is None else {"query_mask": mask}
        options |= _options(row, {"alpha_per": "map", "row_sums": "one"})
        got = trial.numbers_of(
            "gram_tensor", teacher_probs=maps, values=values, output_projection=projection, **options
        )
        wanted = _gram_of(maps, outputs, mask, row["alpha_per"])
        # Its entries are squared outputs, of every sample relative to the largest.
        size = np.abs(wanted).reshape(batch, -1).max(-1).reshape(batch, *(1 for _ in wanted.shape[1:]))
        size = np.where(size > 0, size, 1.0)
        trial.agree(got / size, wanted / size, "probs", f"the gram tensor over its largest entry, {_say(row)}")

    each(_gram_rows(), check)


_POOLS = {"2": 2, "3": 3, "more": 6}


@cache
def _pool_rows() -> list[Row]:
    def allowed(row: Row) -> bool:
        return not (row.get("heads of the pool") == "2" and "not" in row.get("positions", ""))

    return cover(
        {
            "alpha_per": PER,
            "heads of the pool": tuple(_POOLS),
            "positions": ("p < q, the last", "p > q, the last", "p < q, not the last", "p > q, not the last"),
            "samples": tuple(SAMPLES),
            "numbers": ("short", "full"),
        },
        allowed,
    )


def _pool(trial: Trial, seed: int, row: Row) -> tuple[Array, Array, list[tuple[int, int]]]:
    """A gram tensor with the maps and outputs that it is of, and every two positions that a row asks for."""
    heads, batch = _POOLS[row["heads of the pool"]], SAMPLES[row["samples"]]
    # Halves and small integers, so that bfloat16 holds their products too.
    maps = trial.probs(seed, batch, heads, 2, 4, bits=1)
    outputs = trial.numbers(seed + 1, batch, heads, 4, 2, low=-3, high=3, shift=0)
    if row["numbers"] == "full":
        maps, outputs = trial.shares(seed, batch, heads, 3, 4), trial.quotients(seed + 1, batch, heads, 4, 3)
    order, last = row["positions"].split(", ")
    pairs = [
        (p, q)
        for p in range(heads)
        for q in range(heads)
        if p != q and (p < q) == (order == "p < q") and (heads - 1 in (p, q)) == (last == "the last")
    ]
    return maps.astype(np.float64), outputs.astype(np.float64), pairs


def _gram_alphas(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        maps, outputs, pairs = _pool(trial, 4501 + 11 * number, row)
        gram = trial.rounded(_gram_of(maps, outputs, None, row["alpha_per"]))
        for p, q in pairs:
            right = Pair.of(
                maps[:, p], maps[:, q], outputs[:, p], outputs[:, q], None, per_row=row["alpha_per"] == "row"
            )
            alpha = trial.numbers_of("solve_alpha_from_gram", gram=gram, p=p, q=q)
            wanted = right.clipped if row["alpha_per"] == "row" else right.clipped[:, 0]
            trial.agree(alpha, wanted, "alpha", f"alpha of heads {p} and {q} from the gram tensor, {_say(row)}")

    each(_pool_rows(), check)


def _merged_grams(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        seed = 5001 + 11 * number
        maps, outputs, pairs = _pool(trial, seed, row)
        gram = trial.rounded(_gram_of(maps, outputs, None, row["alpha_per"]))
        shape = (len(maps), maps.shape[2]) if row["alpha_per"] == "row" else (len(maps),)
        for p, q in pairs:
            alpha = trial.numbers(seed + 3, *shape, low=0, high=16, shift=4)
            if row["numbers"] == "full":
                alpha = trial.rounded(np.abs(trial.quotients(seed + 3, *shape)) / 3.5)
            got = trial.numbers_of("merge_gram", gram=gram, p=p, q=q, alpha=alpha)
            wanted = _merge_gram(gram.astype(np.float64), p, q, alpha.astype(np.float64))
            size = np.abs(wanted).max()
            what = f"the gram tensor after merging {p} and {q}, over its largest entry, {_say(row)}"
            trial.agree(got / size, wanted / size, "probs", what)

    each(_pool_rows(), check)


def _merge_gram(gram: Array, p: int, q: int, alpha: Array) -> Array:
    """GRAM-4 as one linear map for maps and one for value outputs."""
    heads = gram.shape[1]
    rest = np.eye(heads)[[h for h in range(heads) if h not in (p, q)]]
    by_row = alpha if alpha.ndim == 2 else alpha[:, None]  # (B, L or 1)
    mix = np.zeros((*by_row.shape, heads - 1, heads))
    mix[..., 1:, :] = rest
    mix[..., 0, p], mix[..., 0, q] = by_row, 1 - by_row
    add = np.concatenate(([np.eye(heads)[p] + np.eye(heads)[q]], rest))
    wide = gram if gram.ndim == 6 else gram[..., None]
    merged: Array = np.einsum("blIi,Jj,blKk,Nn,bijknl->bIJKNl", mix, add, mix, add, wide, optimize=True)
    return merged if gram.ndim == 6 else merged[..., 0]


# --- MIX and ORACLE ----------------------------------------------------------------------------------------------


def _composed(trial: Trial) -> None:
    rows = _ordered_rows(
        alpha_per=PER,
        rounds=ROUNDS[1:],
        **{"heads left": LEFT[1:], "samples": tuple(SAMPLES), "numbers": ("short", "full")},
    )

    def check(number: int, row: Row) -> None:
        heads, students = COUNTS[row["rounds"], row["heads left"]]
        plan = _ordered(EXPLICIT[heads, students], row["order"])
        batch, by_row = SAMPLES[row["samples"]], (4,) if row["alpha_per"] == "row" else ()
        alphas = []
        for place, one_round in enumerate(plan):
            seed, shape = 5501 + 17 * number + place, (batch, len(one_round), *by_row)
            short = trial.numbers(seed, *shape, low=0, high=16, shift=4)
            full = trial.rounded(np.abs(trial.quotients(seed, *shape)) / 3.5)
            alphas.append(full if row["numbers"] == "full" else short)
        got = trial.numbers_of("compose_mixing", alphas=alphas, plan=plan, num_teacher_heads=heads)
        pool = [np.eye(heads)[t] for t in range(heads)]
        vectors: list[Any] = [np.broadcast_to(c, (batch, *by_row, heads)) for c in pool]
        for one_round, weights in zip(plan, alphas, strict=True):
            a = weights.astype(np.float64)[..., None]
            used = {head for pair in one_round for head in pair}
            merged = [a[:, n] * vectors[p] + (1 - a[:, n]) * vectors[q] for n, (p, q) in enumerate(one_round)]
            vectors = merged + [c for position, c in enumerate(vectors) if position not in used]
        wanted = np.stack(vectors, axis=1)  # (B, H_s, H_t) or (B, H_s, L, H_t)
        wanted = np.swapaxes(wanted, 2, 3) if by_row else wanted
        trial.agree(got, wanted, "alpha", f"compose_mixing {_say(row)}")

    each(rows, check)


@cache
def _mix_rows() -> list[Row]:
    return cover(
        {
            "alpha_per": PER,
            "student heads": ("one", "fewer", "as many"),
            "zero rows": ("none", "some"),
            "samples": tuple(SAMPLES),
            "shape": tuple(SHAPES),
            "size": ("small", "large"),
            "numbers": ("short", "full"),
        }
    )


def _mixed(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        seed = 6001 + 11 * number
        batch, rows, keys = _shape(row)
        heads = rows if number % 2 else 3  # H_t = L as well: C has two axes that could be swapped
        students = {"one": 1, "fewer": heads - 1, "as many": heads}[row["student heads"]]
        maps = _maps(trial, seed, row, batch, heads, rows, keys)
        weights = _maps(trial, seed + 1, {"numbers": row["numbers"]}, batch, students, rows, heads)
        by_row = row["alpha_per"] == "row"
        mixing = np.ascontiguousarray(np.swapaxes(weights, 2, 3) if by_row else weights[:, :, 0])
        got = trial.numbers_of("mix_heads", teacher_probs=maps, mixing=mixing)
        wide = mixing.astype(np.float64)[..., None] if by_row else mixing.astype(np.float64)[..., None, None]
        wanted = (wide * maps.astype(np.float64)[:, None]).sum(2)
        trial.agree(got, wanted, "probs", f"mix_heads {_say(row)}")

    each(_mix_rows(), check)


@cache
def _squeeze_rows() -> list[Row]:
    def allowed(row: Row) -> bool:
        # The best weights of a group are found by trying its faces: explicit rounds leave groups that are small.
        deep = row.get("rounds") == "4 or more" and row.get("heads left", "one") != "one"
        return _heads(row) and not (row.get("strategy") == "simplex" and deep and row.get("plan") == "progressive")

    return cover(
        {
            "strategy": ("shd", "constant", "hard", "mean", "simplex"),
            "plan": ("progressive", "balanced", "explicit"),
            "alpha_per": PER,
            "alpha_rule": ("least_squares", "as_printed"),
            "alpha_from": ("teacher", "softened"),
            "row_sums": SINKS,
            "temperature": ("one", "whole", "above", "below"),
            "query_mask": MASKS,
            "rounds": ROUNDS,
            "heads left": LEFT,
            "zero rows": ("none", "some"),
            "samples": tuple(SAMPLES),
            "shape": tuple(SHAPES),
            "size": ("small", "large"),
            "numbers": ("short", "full"),
        },
        allowed,
    )


_SQUEEZE_DEFAULTS = {
    "strategy": "shd", "alpha_per": "map", "alpha_rule": "least_squares", "alpha_from": "teacher", "row_sums": "one",
}  # fmt: skip


def _squeezed(strategy: str) -> Callable[[Trial], None]:
    def law(trial: Trial) -> None:
        def check(number: int, row: Row) -> None:
            seed = 6501 + 13 * number
            heads, students = COUNTS[row["rounds"], row["heads left"]]
            batch, rows, keys = _shape(row)
            kind: Any = EXPLICIT[heads, students] if row["plan"] == "explicit" else row["plan"]
            temperature = TEMPERATURES[row["temperature"], row["numbers"]]
            mask = row_mask(row["query_mask"], batch, rows)
            inputs: dict[str, Any] = {
                "teacher_probs": _maps(trial, seed, row, batch, heads, rows, keys),
                "value_outputs": _numbers(
                    trial, seed + 1, row, batch, heads, keys, 21 if row["size"] == "large" else 4
                ),
                "num_student_heads": students,
                **_options(row, _SQUEEZE_DEFAULTS),
                **({"temperature": temperature} if temperature != 1.0 else {}),
                **({"plan": kind} if kind != "progressive" or number % 2 else {}),
                **({"query_mask": mask} if mask is not None else {}),
            }
            got = trial.call("squeeze_heads", **inputs)
            counts = {"num_teacher_heads": heads, "num_student_heads": students, "kind": kind}
            exactly(got["plan"], compute("merge_plan", counts)["plan"], f"the plan {_say(row)}")
            found = check_chain(inputs, got, trial.subject.dtype)
            if found:
                raise _broken(row, found[1], found[0])

        numbered = [(number, row) for number, row in enumerate(_squeeze_rows()) if row["strategy"] == strategy]
        each([row for _, row in numbered], lambda place, row: check(numbered[place][0], row))

    return law


@cache
def _diagnosis_rows() -> list[Row]:
    return cover(
        {
            "plan": ("progressive", "balanced", "explicit"),
            "strategies": ("not given", "one", "several"),
            "alpha_per": PER,
            "row_sums": SINKS,
            "query_mask": MASKS,
            "rounds": ROUNDS,
            "heads left": LEFT,
            "zero rows": ("none", "some"),
            "samples": tuple(SAMPLES),
            "shape": tuple(SHAPES),
            "numbers": ("short", "full"),
        },
        _heads,
    )


def _diagnosed(trial: Trial) -> None:
    def check(number: int, row: Row) -> None:
        seed = 7501 + 13 * number
        heads, students = COUNTS[row["rounds"], row["heads left"]]
        batch, rows, keys = _shape(row)
        kind: Any = EXPLICIT[heads, students] if row["plan"] == "explicit" else row["plan"]
        mask = row_mask(row["query_mask"], batch, rows)
        names = {"not given": None, "one": ["hard"], "several": ["mean", "shd", "constant"]}[row["strategies"]]
        check_diagnosis(
            trial,
            {
                "teacher_probs": _maps(trial, seed, row, batch, heads, rows, keys),
                "value_outputs": _numbers(trial, seed + 1, row, batch, heads, keys, 6),
                "num_student_heads": students,
                **_options(row, {"alpha_per": "map", "row_sums": "one"}),
                **({"plan": kind} if kind != "progressive" or number % 2 else {}),
                **({"strategies": names} if names else {}),
                **({"query_mask": mask} if mask is not None else {}),
            },
            _say(row),
        )

    each(_diagnosis_rows(), check)


_Statement = Callable[[Trial], None]


def _law(
    operation: str, spec: str, statement: _Statement, *, name: str = "", dtypes: Sequence[str] | None = None
) -> Law:
    comment = f"Any two options of {operation} do together what each does alone."
    extra = {"dtypes": tuple(dtypes)} if dtypes else {}
    operations = (operation, "squeeze_heads") if operation == "diagnose" else (operation,)
    called = name or operation.replace("_", "-")
    return Law(f"law/pairs-{called}", operations, tuple(spec.split()), comment, statement, **extra)


_CHAIN = "NUM-6 MIX-4 MIX-8 MIX-11 MIX-12 MIX-13 MIX-16 MIX-17 ALPHA-9 TEMP-3 TEMP-5 "
LAWS = (
    _law("softmax", "MAP-1 MAP-2 MAP-10 TEMP-2", _softmax),
    _law("soften", "TEMP-2 TEMP-5 TEMP-6 TEMP-7 MAP-9", _soften),
    _law("value_outputs", "MAP-6 MAP-11", _value_outputs),
    _law("merge_plan", "PLAN-1 PLAN-3 PLAN-5 PLAN-7 PLAN-8", _plans),
    _law("plan_groups", "PLAN-4 PLAN-6", _groups),
    _law("matched_plan", "PLAN-9 PLAN-10 PLAN-11 PLAN-12 PLAN-13", _matched, dtypes=_WIDE),
    _law("solve_alpha", "ALPHA-2 ALPHA-4 ALPHA-7 ALPHA-9 MIX-17", _alphas, dtypes=_WIDE),
    _law("gram_tensor", "GRAM-1 GRAM-6 MAP-6", _gram_tensor),
    _law("solve_alpha_from_gram", "GRAM-2 GRAM-5 GRAM-6", _gram_alphas, dtypes=_WIDE),
    _law("merge_gram", "GRAM-4 GRAM-6", _merged_grams),
    _law("compose_mixing", "MIX-13 PLAN-4", _composed),
    _law("mix_heads", "MIX-3 MIX-18", _mixed),
    *(
        _law("squeeze_heads", _CHAIN + spec, _squeezed(strategy), name=f"squeeze-{strategy}", dtypes=_WIDE)
        for strategy, spec in (
            ("shd", "ALPHA-4 MIX-9"),
            ("constant", "MIX-5 MIX-9"),
            ("hard", "MIX-5 MIX-9 MIX-14"),
            ("mean", "MIX-6"),
            ("simplex", "MIX-7 MIX-14 MIX-15"),
        )
    ),
    _law("diagnose", "ORACLE-1 ORACLE-2 ORACLE-3 ORACLE-5 ORACLE-6 MIX-8", _diagnosed, dtypes=_WIDE),
)
