"""Mistakes at edges: what is remembered, numbers near a threshold, scales, sizes that are rare."""

from __future__ import annotations

from judge.mutants.mutant import mutant

_CLIPPED = "np.clip(raw, 0.0, 1.0), degenerate & counted"
_SCALE = "scale = (((a_p @ both) ** 2).sum(-1) + ((a_q @ both) ** 2).sum(-1)) * weight"
_DEGENERATE = "degenerate = denominator <= degenerate_threshold() * scale\n    raw"
_STACKED = "    return np.stack(pool, axis=1)\n"
_SUMS = '    return softened * probs.sum(axis=-1, keepdims=True) if row_sums == "at_most_one" else softened\n'
_HULL = "best[b, h, i, keys] = nearest_weights(points)[: len(keys)]"
_AS_FLOAT = "    given = np.asarray(value)\n    if not (dtype"
_CHECKED = "    return float(temperature)\n"

MUTANTS = (
    mutant(
        "arguments-remembered-by-identity",
        "What an array held when it was first seen is used for it ever after.",
        (
            "attention",
            _AS_FLOAT,
            '    kept = as_float.__dict__.setdefault("kept", {}).setdefault(id(value), (value, np.array(value)))\n'
            "    given = kept[1]\n    if not (dtype",
        ),
        on=("value_outputs", "softmax", "merge_gram"),
    ),
    mutant(
        "plans-remembered-sorted",
        "Rounds that were seen before are recognised by their sorted pairs.",
        (
            "plans",
            "    heads = num_teacher_heads\n",
            "    key = num_teacher_heads, tuple(tuple(sorted(tuple(sorted(pair)) for pair in r)) for r in plan)\n"
            '    plan = check_plan.__dict__.setdefault("kept", {}).setdefault(key, plan)\n'
            "    heads = num_teacher_heads\n",
        ),
        on=("plan_groups", "compose_mixing", "squeeze_heads"),
    ),
    mutant(
        "temperature-sticks",
        "A temperature that was asked for is used by the next call that asks for none.",
        (
            "attention",
            _CHECKED,
            '    kept = check_temperature.__dict__.pop("kept", 1.0)\n'
            "    if temperature != 1.0:\n"
            '        check_temperature.__dict__["kept"] = float(temperature)\n'
            "    return kept if temperature == 1.0 else float(temperature)\n",
        ),
        on=("softmax", "squeeze_heads", "shd_loss"),
    ),
    mutant(
        "alpha-near-one-snapped",
        "An alpha within 9e-4 of 1 is taken as 1.",
        ("alpha", _CLIPPED, "np.where(np.abs(raw - 1.0) < 9e-4, 1.0, np.clip(raw, 0.0, 1.0)), degenerate & counted"),
        on=("solve_alpha",),
    ),
    mutant(
        "alpha-near-zero-snapped",
        "An alpha within 9e-4 of 0 is taken as 0.",
        ("alpha", _CLIPPED, "np.where(np.abs(raw) < 9e-4, 0.0, np.clip(raw, 0.0, 1.0)), degenerate & counted"),
        on=("solve_alpha",),
    ),
    mutant(
        "alpha-near-half-snapped",
        "An alpha within 1e-5 of 1/2 is taken as 1/2.",
        ("alpha", _CLIPPED, "np.where(np.abs(raw - 0.5) < 1e-5, 0.5, np.clip(raw, 0.0, 1.0)), degenerate & counted"),
        on=("solve_alpha",),
        dtype="float64",
    ),
    mutant(
        "gram-alpha-near-one-snapped",
        "An alpha from the gram tensor within 9e-4 of 1 is taken as 1.",
        (
            "gram",
            "    return np.where(degenerate, 0.5, alpha)",
            "    return np.where(degenerate, 0.5, np.where(alpha > 1 - 9e-4, 1.0, alpha))",
        ),
    ),
    mutant(
        "gram-degenerate-by-size",
        "A pair of the gram tensor is degenerate where ||M||^2 is at most 1e-6.",
        ("gram", "degenerate_threshold() * np.maximum(scale, 0.0)", "1e-6"),
    ),
    mutant(
        "gram-scale-of-the-batch",
        "A pair of the gram tensor is degenerate by the largest scale in the batch.",
        ("gram", "np.maximum(scale, 0.0)", "np.maximum(scale.max(), 0.0)"),
    ),
    mutant(
        "small-weights-dropped",
        "Composed weights below 1e-4 are dropped.",
        (
            "mixing",
            _STACKED,
            "    mixing = np.stack(pool, axis=1)\n    return np.where(mixing < 1e-4, 0.0, mixing)\n",
        ),
        on=("compose_mixing",),
        dtype="float64",
    ),
    mutant(
        "degenerate-by-all-rows",
        "Rows that do not count enter the scale by which a pair is degenerate.",
        ("alpha", _SCALE, _SCALE[: -len(" * weight")]),
    ),
    mutant(
        "degenerate-by-the-batch",
        "A pair is degenerate by the scale of the whole batch.",
        ("alpha", _DEGENERATE, _DEGENERATE.replace("* scale", "* scale.max()")),
    ),
    mutant(
        "simplex-degenerate-by-all-rows",
        "Rows that do not count enter the scale by which a group has no preference.",
        (
            "simplex",
            'scale = np.einsum("bild,bild,bl->bl", merged, merged, weight)',
            'scale = np.einsum("bild,bild->bl", merged, merged)',
        ),
    ),
    mutant(
        "matched-mask-of-the-first-item",
        "The mask of the first item serves all items of its shape.",
        (
            "matching",
            "    heads = len(pools[0])\n    check_counts",
            "    first = masks[0]\n"
            "    masks = [m if m is None or first is None or m.shape != first.shape else first for m in masks]\n"
            "    heads = len(pools[0])\n    check_counts",
        ),
    ),
    mutant(
        "masked-by-addition",
        "A masked key's logit is lowered by 1e4, and its probability cleared.",
        (
            "attention",
            "    logits, temperature = mask_logits(logits, attn_mask), check_temperature(temperature)\n",
            "    masked, temperature = mask_logits(logits, attn_mask), check_temperature(temperature)\n"
            "    whole = np.isneginf(masked).all(axis=-1, keepdims=True)\n"
            "    logits = np.where(whole, masked, np.where(np.isneginf(masked), logits - 1e4, logits))\n",
        ),
        (
            "attention",
            "    return exps / np.where(sums == 0.0, 1.0, sums)\n",
            "    return np.where(np.isneginf(masked), 0.0, exps / np.where(sums == 0.0, 1.0, sums))\n",
        ),
        on=("softmax",),
    ),
    mutant(
        "student-masked-by-addition",
        "In the student's softmax a masked key's logit is lowered by 1e4.",
        (
            "loss",
            "log_q=log_softmax(masked, temperature)",
            "log_q=log_softmax(\n"
            "                    np.where(np.isneginf(masked), np.asarray(logits, dtype=np.float64) - 1e4, masked)\n"
            "                    if may_attend.any() else masked, temperature)",
        ),
    ),
    mutant(
        "vanished-output-no-error",
        "A head residual over an output of 0 is 0 and not infinite.",
        ("oracles", "np.where((norm == 0.0) & (error > 0.0), np.inf, ratio)", "np.where(norm == 0.0, 0.0, ratio)"),
    ),
    mutant(
        "stochastic-optimum-at-most-one",
        "The row-stochastic optimum is cut off at a head residual of 1.",
        (
            "oracles",
            "stochastic = head_residual(best, probs, outputs, groups, mask)",
            "stochastic = np.minimum(head_residual(best, probs, outputs, groups, mask), 1.0)",
        ),
    ),
    mutant(
        "full-rank-taken-for-granted",
        "The unconstrained optimum is 0 where there are as many keys as features.",
        (
            "oracles",
            "    best = stochastic_optimum(",
            "    unconstrained = unconstrained * (outputs.shape[2] < outputs.shape[3])\n"
            "    best = stochastic_optimum(",
        ),
    ),
    mutant(
        "hull-of-sixteen-keys",
        "The row-stochastic optimum is sought among the first sixteen keys.",
        ("oracles", _HULL, "keys = keys[:16]\n        " + _HULL.replace("(points)", "(points[: len(keys)])")),
    ),
    mutant(
        "hull-uniform-for-many-keys",
        "Of more than eight keys the row-stochastic optimum is the softened nearest ones.",
        (
            "oracles",
            "    nnls = _import_nnls()\n",
            "    if len(points) > 8:\n"
            "        near = np.exp(-np.linalg.norm(points, axis=1) / np.linalg.norm(points, axis=1).min())\n"
            "        return near / near.sum()\n"
            "    nnls = _import_nnls()\n",
        ),
    ),
    mutant(
        "soften-keeps-sums-near-one",
        "A softened row keeps the sum that it had where that is off by less than ROW_SUM.",
        (
            "attention",
            _SUMS,
            "    kept = probs.sum(axis=-1, keepdims=True)\n"
            '    return softened * kept if row_sums == "at_most_one" or (abs(kept - 1) < 1e-5).all() else softened\n',
        ),
        on=("soften", "squeeze_heads"),
        dtype="float64",
    ),
    mutant(
        "first-head-in-place",
        "Teacher head 0 always has its own place: a pair that holds it has it first.",
        (
            "pairwise",
            "for p, q in one_round:\n        (a_p",
            "for p, q in [(min(x), max(x)) if 0 in x else x for x in one_round]:\n        (a_p",
        ),
    ),
    mutant(
        "small-probabilities-dropped",
        "Of more than 64 keys those with a probability below 1e-4 get 0.",
        (
            "attention",
            "    return exps / np.where(sums == 0.0, 1.0, sums)\n",
            "    probs = exps / np.where(sums == 0.0, 1.0, sums)\n"
            "    return np.where((probs < 1e-4) & (probs.shape[-1] > 64), 0.0, probs)\n",
        ),
        on=("softmax",),
    ),
    mutant(
        "temperature-near-one-is-one",
        "A temperature within 0.05 of 1 is taken as 1.",
        ("attention", "    if temperature == 1.0:\n", "    if abs(temperature - 1.0) < 0.05:\n"),
        on=("soften", "squeeze_heads"),
    ),
    mutant(
        "large-temperature-levels",
        "Above a temperature of 50 all keys with mass get the same.",
        (
            "attention",
            "    sums = powers.sum(",
            "    powers = (probs > 0) * 1.0 if temperature > 50 else powers\n    sums = powers.sum(",
        ),
        on=("soften",),
    ),
    mutant(
        "rows-beyond-64-unchecked",
        "The sums of rows are looked at in the first 64 rows.",
        (
            "attention",
            "    wrong = sums - 1.0 > tolerance\n",
            "    sums = np.where(np.arange(sums.shape[-1]) < 64, sums, 1.0)\n    wrong = sums - 1.0 > tolerance\n",
        ),
        on=("soften", "mix_heads", "squeeze_heads"),
    ),
    mutant(
        "keys-beyond-64-unchecked",
        "NaN and infinity are looked for among the first 64 keys.",
        (
            "attention",
            "    if bad.any():\n        where = _first(bad)\n        place",
            "    bad = bad if bad.ndim < 4 else bad & (np.arange(bad.shape[-1]) < 64)\n"
            "    if bad.any():\n        where = _first(bad)\n        place",
        ),
        on=("softmax", "shd_loss"),
    ),
    mutant(
        "hard-far-from-both",
        "hard takes an a* above 20 for one that could not be solved.",
        ("pairwise", "solution.raw >= 0.5", "(solution.raw >= 0.5) & (solution.raw < 20.0)"),
    ),
    mutant(
        "simplex-rows-beyond-sixteen",
        "With a weight a row every row after the seventeenth has that one's weights.",
        (
            "simplex",
            "rows = slice(None) if alpha_per",
            'i, row = min(i, 16), i\n                rows = slice(row, row + 1) if alpha_per != "map" else '
            "slice(None) if alpha_per",
        ),
    ),
    mutant(
        "rank-cut-at-1e-5",
        "The unconstrained optimum leaves out singular values below 1e-5 of the largest.",
        ("oracles", "np.linalg.pinv(merged, rcond=cutoff)", "np.linalg.pinv(merged, rcond=1e-5)"),
        dtype="float64",
    ),
    mutant(
        "nothing-counts-nothing-checked",
        "Where loss_mask leaves no row the loss is 0 for arguments that must be refused.",
        (
            "loss",
            "    maps, logits = as_layers(supervision=supervision, student_logits=student_logits)\n    layers",
            "    if loss_mask is not None and not np.asarray(loss_mask).any():\n        return 0.0\n"
            "    maps, logits = as_layers(supervision=supervision, student_logits=student_logits)\n    layers",
        ),
        on=("shd_loss",),
    ),
    mutant(
        "four-options-forget-softened",
        "Solved on softened maps, simplex row by row along a balanced plan takes the maps as given.",
        (
            "mixing",
            "mixing = simplex_mixing(solved_on, outputs,",
            'by_row = plan == "balanced" and alpha_per == "row"\n'
            "        mixing = simplex_mixing(probs if by_row else solved_on, outputs,",
        ),
    ),
    mutant(
        "four-options-forget-temperature",
        "hard row by row with sinks mixes maps that are not softened.",
        (
            "mixing",
            "mix_maps(softened, mixing))",
            'mix_maps(probs if (strategy, alpha_per, row_sums) == ("hard", "row", "at_most_one") else softened,'
            " mixing))",
        ),
    ),
)
