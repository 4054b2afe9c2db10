"""Mistakes in the weight of a pair, in plans, and in the gram form."""

from __future__ import annotations

from judge.mutants.mutant import mutant

_N = 'n = (a_q - a_p) @ x_p if rule == "least_squares" else a_q @ x_p - a_p @ x_q'
_SUMS = "        numerator, denominator, scale = (t.sum(-1) for t in (numerator, denominator, scale))\n"
_RAW = "raw = np.where(degenerate, 0.5, numerator / np.where(degenerate, 1.0, denominator))"
_CLIPPED = "np.clip(raw, 0.0, 1.0)"
_WEIGHT = "weight = np.ones(m.shape[:2]) if query_mask is None else query_mask.astype(np.float64)"
_DEGENERATE = "degenerate = denominator <= degenerate_threshold() * scale\n    raw"
_M = "m = (a_p - a_q) @ both"
_PAIRS = "num_pairs = min(heads // 2, heads - num_student_heads)"
_ROUND = "tuple((2 * i, 2 * i + 1) for i in range(num_pairs))"
_MERGED_FIRST = (
    (
        "plans",
        "    return merged + [head for position, head in enumerate(pool) if position not in used]\n\n\ndef _prog",
    ),
    ("pairwise", "    return merged + [head for position, head in enumerate(pool) if position not in used], sol"),
    ("mixing", "        pool = merged + [head for position, head in enumerate(pool) if position not in used]\n"),
)


def _in_place(text: str) -> str:
    """The merged heads at the places of their first members."""
    firsts = "{pair[0]: number for number, pair in enumerate(one_round)}"
    kept = "enumerate(pool) if i in firsts or i not in used"
    order = f"[merged[firsts[i]] if i in firsts else head for firsts in [{firsts}] for i, head in {kept}]"
    old = "merged + [head for position, head in enumerate(pool) if position not in used]"
    return text.replace(old, order)


def _untouched_first(text: str) -> str:
    old, rest = "merged + [", "[head for position, head in enumerate(pool) if position not in used]"
    return text.replace(old + rest[1:], rest + " + merged")


MUTANTS = (
    mutant(
        "misprinted-alpha",
        "N is A_q X_p - A_p X_q, as the source misprints it.",
        ("alpha", _N, "n = a_q @ x_p - a_p @ x_q"),
        hint="N is taken as the source misprints it",
    ),
    mutant(
        "rule-ignored",
        "The rule as_printed gives the least squares alpha.",
        ("alpha", _N, "n = (a_q - a_p) @ x_p"),
    ),
    mutant(
        "opposite-sign", "N has the wrong sign.", ("alpha", _N, "n = (a_p - a_q) @ x_p"), hint="N has the wrong sign"
    ),
    mutant(
        "unclipped",
        "Alpha is not clipped.",
        ("alpha", _CLIPPED, "raw"),
        hint="alpha is not clipped",
    ),
    mutant(
        "clipped-inside",
        "Alpha is clipped to [0.01, 0.99], to keep both heads alive.",
        ("alpha", _CLIPPED, "np.clip(raw, 0.01, 0.99)"),
    ),
    mutant("squashed", "A sigmoid keeps alpha between 0 and 1.", ("alpha", _CLIPPED, "1 / (1 + np.exp(-raw))")),
    mutant(
        "swapped-heads",
        "Alpha is the weight of head q.",
        ("alpha", _CLIPPED, "1.0 - np.clip(raw, 0.0, 1.0)"),
        hint="alpha weighs head q",
    ),
    mutant(
        "other-numerator",
        "The numerator has w in place of u: the value outputs of q.",
        ("alpha", _N, "n = (a_q - a_p) @ x_q"),
        hint="the numerator uses w",
    ),
    mutant(
        "first-outputs-alone",
        "The merged head is read with X_p and not with X_p + X_q.",
        ("alpha", "both = x_p + x_q", "both = x_p"),
    ),
    mutant(
        "mean-of-outputs",
        "The merged head is read with the mean of X_p and X_q.",
        ("alpha", "both = x_p + x_q", "both = (x_p + x_q) / 2"),
    ),
    mutant(
        "outputs-ignored",
        "Alpha is solved on the maps alone.",
        ("alpha", _M, "m = (a_p - a_q) @ np.ones_like(both).cumsum(axis=1)"),
    ),
    mutant(
        "alpha-of-norms",
        "Alpha is the share of head p in the norms of the two attention outputs.",
        (
            "alpha",
            f"    {_DEGENERATE}",
            "    numerator, other = (((a @ x) ** 2).sum(-1) * weight for a, x in ((a_p, x_p), (a_q, x_q)))\n"
            '    numerator, other = (t.sum(-1) if alpha_per == "map" else t for t in (numerator, other))\n'
            f"    denominator = numerator + other\n    {_DEGENERATE}",
        ),
    ),
    mutant(
        "uncounted-rows-in-alpha",
        "Padded rows enter the sums of alpha.",
        ("alpha", _WEIGHT, "weight = np.ones(m.shape[:2])"),
        hint="rows where query_mask is False enter the sums",
    ),
    mutant(
        "mask-inverted-in-alpha",
        "Only the padded rows enter the sums of alpha.",
        ("alpha", "else query_mask.astype(np.float64)\n    numerator", "else 1.0 - query_mask\n    numerator"),
    ),
    mutant(
        "mask-in-numerator-alone",
        "Padded rows enter the denominator of alpha.",
        ("alpha", "denominator = (m * m).sum(-1) * weight", "denominator = (m * m).sum(-1)"),
    ),
    mutant(
        "batch-shared-alpha",
        "One alpha is solved for the whole batch.",
        (
            "alpha",
            f"    {_DEGENERATE}",
            "    numerator, denominator, scale = (\n"
            "        np.broadcast_to(t.sum(0), t.shape) for t in (numerator, denominator, scale)\n"
            f"    )\n    {_DEGENERATE}",
        ),
        hint="one alpha is solved for the whole batch",
    ),
    mutant(
        "head-shared-alpha",
        "Every pair of a round gets the alpha of its first pair.",
        (
            "pairwise",
            "        alpha = solution.clipped.reshape",
            "        solution = solutions[0] if solutions else solution\n        alpha = solution.clipped.reshape",
        ),
    ),
    mutant(
        "round-shared-alpha",
        "Every round after the first uses the alphas of the first.",
        (
            "mixing",
            "            solutions.append(solved)\n",
            "            solutions.append([*solutions[0], *solved][: len(solved)] if solutions else solved)\n",
        ),
    ),
    mutant(
        "alpha-mean-of-rows",
        "The alpha of a map is the mean of the alphas of its rows.",
        (
            "alpha",
            f"    {_DEGENERATE}",
            '    if alpha_per == "map":\n'
            '        rows = solve_pair(a_p, a_q, x_p, x_q, query_mask=query_mask, rule=rule, alpha_per="row")\n'
            "        shares = weight / np.maximum(weight.sum(-1, keepdims=True), 1.0)\n"
            "        denominator, numerator = np.ones(len(m)), (rows.raw * shares).sum(-1)\n"
            f"    {_DEGENERATE}",
        ),
    ),
    mutant(
        "row-alphas-averaged",
        'With alpha_per="row" every row gets the mean alpha of its map.',
        (
            "alpha",
            f"    {_RAW}",
            f'    {_RAW}\n    if alpha_per == "row":\n'
            "        raw = np.broadcast_to(raw.mean(-1, keepdims=True), raw.shape)",
        ),
    ),
    mutant(
        "alpha-per-ignored",
        'alpha_per="row" gives the alpha of the map to every row.',
        (
            "alpha",
            "        counted = weight > 0\n",
            "        counted = weight > 0\n"
            "        numerator, denominator, scale = (\n"
            "            np.broadcast_to(t.sum(-1, keepdims=True), t.shape) for t in (numerator, denominator, "
            "scale)\n"
            "        )\n",
        ),
        hint="alpha_per map and row are confused",
    ),
    mutant(
        "uncounted-row-alpha-zero",
        "A row that does not count gets alpha 0.",
        ("alpha", f"    {_RAW}", f'    {_RAW}\n    raw = raw if alpha_per == "map" else np.where(counted, raw, 0.0)'),
    ),
    mutant(
        "degenerate-zero",
        "A degenerate pair gets alpha 0.",
        ("alpha", _RAW, _RAW.replace("0.5", "0.0")),
        hint="degenerate pairs get alpha 0",
    ),
    mutant(
        "degenerate-one",
        "A degenerate pair keeps head p.",
        ("alpha", _RAW, _RAW.replace("0.5", "1.0")),
        hint="degenerate pairs get alpha 1",
    ),
    mutant(
        "degenerate-nan",
        "A degenerate pair is zero divided by zero.",
        ("alpha", _RAW, "raw = numerator / denominator"),
        hint="degenerate pairs are not recognised",
    ),
    mutant(
        "degenerate-by-size",
        "A pair is degenerate where ||M||^2 is below 1e-6, without regard to the size of the value outputs.",
        ("alpha", "denominator <= degenerate_threshold() * scale\n    raw", "denominator <= 1e-6\n    raw"),
    ),
    mutant(
        "degenerate-loosely",
        "A pair is degenerate from a share of 1e-3 on.",
        ("alpha", "denominator <= degenerate_threshold() * scale\n    raw", "denominator <= 1e-3 * scale\n    raw"),
    ),
    mutant(
        "degenerate-rows-uncounted",
        'With alpha_per="row" rows that do not count are counted as degenerate.',
        ("alpha", "degenerate & counted, counted)", "degenerate, counted)"),
    ),
    mutant(
        "constant-in-denominator",
        "1e-3 is added to ||M||^2, against division by zero.",
        ("alpha", _RAW, "raw = numerator / (denominator + 1e-3)"),
    ),
    mutant(
        "alpha-in-float16",
        "The sums of alpha over rows are accumulated in float16.",
        ("alpha", _SUMS, _SUMS.replace("t.sum(-1)", "t.astype(np.float16).cumsum(-1, dtype=np.float16)[..., -1]")),
    ),
    mutant(
        "alpha-rounded",
        "Alpha is kept in eight bits.",
        ("alpha", _CLIPPED, "np.round(np.clip(raw, 0.0, 1.0) * 255) / 255"),
    ),
    mutant(
        "sinks-filled-in-alpha",
        "Rows with a sink are scaled up to one before alpha is solved.",
        (
            "alpha",
            "    both = x_p + x_q\n    m",
            "    a_p, a_q = (a / np.where(a.any(-1), a.sum(-1), 1.0)[..., None] for a in (a_p, a_q))\n"
            "    both = x_p + x_q\n    m",
        ),
    ),
    mutant(
        "value-bias-removed",
        "The mean over keys is taken out of the value outputs before alpha is solved.",
        (
            "alpha",
            "    both = x_p + x_q\n    m",
            "    x_p, x_q = (x - x.mean(axis=1, keepdims=True) for x in (x_p, x_q))\n    both = x_p + x_q\n    m",
        ),
    ),
    mutant(
        "alpha-shapes-unchecked",
        "Value outputs of fewer keys are accepted as long as NumPy can multiply.",
        (
            "alpha",
            "    if x_p.shape != x_q.shape or x_p.shape[:2] != (batch, keys):",
            "    if x_p.shape[1] != keys or x_q.shape[1] != keys:",
        ),
    ),
    mutant(
        "literal-algorithm-1",
        "Every round merges all of its pairs, as Algorithm 1 is printed.",
        ("plans", _PAIRS, "num_pairs = heads // 2"),
        hint="every pair of every round is merged as Algorithm 1 is printed",
    ),
    mutant(
        "halves-paired",
        "Head i is merged with head i + m.",
        ("plans", _ROUND, "tuple((i, num_pairs + i) for i in range(num_pairs))"),
        hint="head i is merged with head i + m",
    ),
    mutant(
        "last-pairs",
        "A round that needs fewer pairs merges the last ones.",
        ("plans", _ROUND, "tuple((heads - 2 * i - 2, heads - 2 * i - 1) for i in reversed(range(num_pairs)))"),
        hint="a round that needs fewer pairs merges the last ones",
    ),
    mutant(
        "ends-paired",
        "The first head is merged with the last, the second with the last but one.",
        ("plans", _ROUND, "tuple((i, heads - 1 - i) for i in range(num_pairs))"),
    ),
    mutant(
        "one-pair-a-round",
        "A round merges a single pair.",
        ("plans", _PAIRS, "num_pairs = 1"),
    ),
    mutant(
        "untouched-first",
        "Heads that were not used come before the merged ones.",
        *((chapter, old, _untouched_first(old)) for chapter, old in _MERGED_FIRST),
        on=("plan_groups", "squeeze_heads", "compose_mixing", "merge_plan"),
        hint="untouched heads come before the merged ones",
    ),
    mutant(
        "merged-in-place",
        "A merged head takes the place of its first member.",
        *((chapter, old, _in_place(old)) for chapter, old in _MERGED_FIRST),
        on=("plan_groups", "squeeze_heads", "compose_mixing", "merge_plan"),
        hint="a merged head takes the place of its first member",
    ),
    mutant(
        "balanced-larger-last",
        "The kind balanced puts the larger groups last.",
        ("plans", "(small + (group < num_large))", "(small + (group >= num_student_heads - num_large))"),
    ),
    mutant(
        "balanced-strided",
        "The kind balanced puts head i into group i mod H_s.",
        (
            "plans",
            "        group for group in range(num_student_heads) for _ in range(small + (group < num_large))\n",
            "        head % num_student_heads for head in range(small * num_student_heads + num_large)\n",
        ),
    ),
    mutant(
        "balanced-is-progressive",
        "The kind balanced gives the progressive plan.",
        ("plans", "return _balanced(num_teacher_heads", "return _progressive(num_teacher_heads"),
    ),
    mutant(
        "groups-sorted",
        "The teacher heads of a group are listed in rising order.",
        ("plans", "merged = [pool[p] + pool[q] for", "merged = [tuple(sorted(pool[p] + pool[q])) for"),
    ),
    mutant(
        "identity-refused",
        "Equal head counts are refused.",
        (
            "plans",
            "    if num_student_heads > num_teacher_heads:",
            "    if num_student_heads >= num_teacher_heads:",
        ),
    ),
    mutant(
        "heads-clipped",
        "More student heads than teacher heads are cut to the teacher's without a word.",
        (
            "plans",
            "    check_counts(num_teacher_heads, num_student_heads)\n    if isinstance",
            "    num_student_heads = min(num_student_heads, num_teacher_heads)\n"
            "    check_counts(num_teacher_heads, num_student_heads)\n    if isinstance",
        ),
    ),
    mutant(
        "wrong-heads-code",
        "Too many student heads are refused as argument-value.",
        ("plans", '            "heads-exceed",\n', '            "argument-value",\n'),
    ),
    mutant(
        "plan-unchecked",
        "Explicit rounds are run without a check.",
        (
            "plans",
            "    return check_plan(kind, num_teacher_heads, num_student_heads)",
            "    return tuple(tuple((int(p), int(q)) for p, q in one_round) for one_round in kind)",
        ),
    ),
    mutant(
        "plan-end-unchecked",
        "Explicit rounds may leave another number of heads.",
        ("plans", "    if num_student_heads is not None and heads != num_student_heads:", "    if False:"),
    ),
    mutant(
        "gram-value-heads-interleaved",
        "The gram tensor reads value head i mod H_kv.",
        (
            "gram",
            "v = np.repeat(v, shape[1] // v.shape[1], axis=1)",
            "v = np.tile(v, (1, shape[1] // v.shape[1], 1, 1))",
        ),
    ),
    mutant(
        "gram-mask-ignored",
        "Padded rows enter the gram tensor.",
        (
            "gram",
            "weight = np.ones(shape[::2]) if mask is None else mask.astype(np.float64)",
            "weight = np.ones(shape[::2])",
        ),
    ),
    mutant(
        "gram-projection-left-out",
        "The gram tensor is of the head outputs before the output projection.",
        (
            "gram",
            'constants = np.einsum("jvd,lwd->jlvw", w, w)',
            'constants = np.einsum("jl,vw->jlvw", np.ones((len(w), len(w))), np.eye(w.shape[1]))',
        ),
    ),
    mutant(
        "gram-constant-transposed",
        "W_j W_l^T is read transposed.",
        ("gram", '"bijnv,jlvw->bijlnw"', '"bijnv,jlwv->bijlnw"'),
    ),
    mutant(
        "gram-cross-term-once",
        "The cross term of ||M||^2 is taken once.",
        ("gram", "denominator = pp + 2 * pq + qq", "denominator = pp + pq + qq"),
    ),
    mutant(
        "gram-swapped",
        "Alpha from the gram tensor is the weight of q.",
        ("gram", "(pp + pq) / np.where", "(qq + pq) / np.where"),
    ),
    mutant(
        "gram-unclipped",
        "Alpha from the gram tensor is not clipped.",
        (
            "gram",
            "np.clip((pp + pq) / np.where(degenerate, 1.0, denominator), 0.0, 1.0)",
            "(pp + pq) / np.where(degenerate, 1.0, denominator)",
        ),
    ),
    mutant(
        "gram-degenerate-nan",
        "A degenerate pair in the gram tensor is NaN.",
        ("gram", "    return np.where(degenerate, 0.5, alpha)", "    return np.where(degenerate, np.nan, alpha)"),
    ),
    mutant(
        "gram-scale-below-zero",
        "Rounding leaves the scale of degenerate pairs below zero: zero is divided by zero.",
        ("gram", "np.maximum(scale, 0.0)", "scale"),
    ),
    mutant(
        "gram-scale-of-any-sign",
        "A scale that rounding left below zero is taken without its sign.",
        ("gram", "degenerate_threshold() * np.maximum(scale, 0.0)", "1e9 * np.maximum(-scale, 0.0)"),
    ),
    mutant(
        "gram-outputs-mixed",
        "Merging mixes the value outputs in the gram tensor too.",
        ("gram", "if axis in (1, 3) else first + second", "if True else first + second"),
    ),
    mutant(
        "gram-axes-confused",
        "Merging mixes the axes of value outputs and adds those of maps.",
        ("gram", "if axis in (1, 3) else", "if axis in (2, 4) else"),
    ),
    mutant(
        "gram-merged-last",
        "The merged head comes last in the gram tensor.",
        (
            "gram",
            "(np.expand_dims(merged, axis), np.take(g, rest, axis=axis))",
            "(np.take(g, rest, axis=axis), np.expand_dims(merged, axis))",
        ),
    ),
    mutant(
        "matched-greedily",
        "Matched pairs are taken greedily, the best one first.",
        (
            "matching",
            "    networkx = _import_networkx()\n",
            "    order = sorted((-scores[p, q], p, q) for p in range(len(scores)) for q in range(p + 1, "
            "len(scores)))\n"
            "    chosen: list[Pair] = []\n"
            "    for _, p, q in order:\n"
            "        if len(chosen) < num_pairs and not {p, q} & {head for pair in chosen for head in pair}:\n"
            "            chosen.append((p, q))\n"
            "    return tuple(sorted(chosen))\n"
            "    networkx = _import_networkx()\n",
        ),
    ),
    mutant(
        "matched-worst",
        "The pairs with the smallest sum of scores are matched.",
        ("matching", "pairs = match_pairs(scores,", "pairs = match_pairs(-scores,"),
    ),
    mutant(
        "matched-by-ignored",
        "Pairs are always matched by residual.",
        ("matching", '    if by == "similarity":', "    if False:"),
    ),
    mutant(
        "matched-by-distance",
        "Similarity is the distance of the maps, not its square.",
        (
            "matching",
            "        return -float(distance.sum() if",
            "        distance = np.sqrt((distance if mask is None else distance * mask).sum(axis=-1))  # (B,)\n"
            "        return -float(distance.sum() if True or",
        ),
    ),
    mutant(
        "matched-mask-ignored",
        "Padded rows of the calibration data enter the scores.",
        ("matching", "_score(pool[p], pool[q], mask, by", "_score(pool[p], pool[q], None, by"),
    ),
    mutant(
        "matched-first-item",
        "Only the first item of the calibration data is scored.",
        (
            "matching",
            "for pool, mask in zip(pools, masks, strict=True):\n",
            "for pool, mask in [(pools[0], masks[0])]:\n",
        ),
    ),
    mutant(
        "matched-relative",
        "The scores are relative errors, so that every sample weighs the same.",
        (
            "matching",
            "query_mask=mask).sum())",
            "query_mask=mask).sum() / ((a_p @ x_p + a_q @ x_q) ** 2).sum())",
        ),
    ),
    mutant(
        "matched-unmerged",
        "Later rounds are scored with the mean of the value outputs of merged heads.",
        (
            "matching",
            "        rounds.append(pairs)\n",
            "        rounds.append(pairs)\n"
            "        pools = [[(a, x / 2 if i < len(pairs) else x) for i, (a, x) in enumerate(pool)] for pool in "
            "pools]\n",
        ),
    ),
    mutant(
        "matched-merged-with-padding",
        "The scores leave padded rows out, the alphas of the merged pool do not.",
        ("matching", "merge_round(pool, pairs, query_mask=mask,", "merge_round(pool, pairs, query_mask=None,"),
    ),
    mutant(
        "matched-merged-per-map",
        "The pool of later rounds is merged with one alpha a map where one a row is asked for.",
        ("matching", "query_mask=mask, alpha_per=alpha_per)[0]", "query_mask=mask)[0]"),
    ),
    mutant(
        "matched-unsorted",
        "A matched round lists its pairs from last to first.",
        (
            "matching",
            "return tuple(sorted((int(p), int(q)) for p, q in pairs if q < heads))",
            "return tuple(sorted(((int(p), int(q)) for p, q in pairs if q < heads), reverse=True))",
        ),
    ),
)
