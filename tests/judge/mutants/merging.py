"""Mistakes in strategies, mixing, residuals and oracles."""

from __future__ import annotations

from judge.mutants.mutant import mutant

_MERGED = "merged.append((alpha * a_p + (1 - alpha) * a_q, x_p + x_q))"
_HARD = "chosen = np.where(solution.raw >= 0.5, 1.0, 0.0)"
_SOLVED_ON = 'solved_on = softened if alpha_from == "softened" else probs'
_MIXED = "mix_maps(softened, mixing)),"
_RESIDUAL = "residual=output_residual(probs, outputs, mixing, groups, mask),"
_COMPOSED = "    if alphas:\n        mixing = compose_mixing(alphas, rounds, num_heads)\n"
_RELATIVE = "relative = error / np.where(norm == 0.0, 1.0, norm)"
_MEAN = "mixing = np.full((batch, len(groups), num_heads, rows), 1.0 / num_heads)"
_SIMPLEX = "    return simplex_weights(gram)\n\n\ndef"
_WEIGHTS = "{weights} = compose_mixing(alphas, rounds, num_heads)"
_HEAD_RESIDUAL = "    error = (((maps @ merged - targets) ** 2) * weight).sum(axis=(1, 2, 3))\n"

MUTANTS = (
    mutant(
        "outputs-not-summed",
        "A merged head keeps the value output of its first head.",
        ("pairwise", _MERGED, _MERGED.replace("x_p + x_q", "x_p")),
        hint="a merged head keeps only the first head's value output",
    ),
    mutant(
        "outputs-averaged",
        "A merged head gets the mean of the two value outputs.",
        ("pairwise", _MERGED, _MERGED.replace("x_p + x_q", "(x_p + x_q) / 2")),
        hint="a merged head gets the mean of the two value outputs",
    ),
    mutant(
        "outputs-mixed",
        "A merged head gets the value outputs weighed by alpha.",
        (
            "pairwise",
            _MERGED,
            f"both = alpha.mean(1, keepdims=True) * x_p + (1 - alpha.mean(1, keepdims=True)) * x_q\n"
            f"        {_MERGED.replace('x_p + x_q', 'both')}",
        ),
        hint="a merged head gets the value output a X_p + (1 - a) X_q",
    ),
    mutant(
        "maps-averaged-in-the-pool",
        "Later rounds see the mean of two merged maps.",
        ("pairwise", _MERGED, _MERGED.replace("alpha * a_p + (1 - alpha) * a_q", "(a_p + a_q) / 2")),
    ),
    mutant(
        "maps-swapped-in-the-pool",
        "Later rounds see maps merged with 1 - alpha.",
        ("pairwise", _MERGED, _MERGED.replace("alpha * a_p + (1 - alpha) * a_q", "(1 - alpha) * a_p + alpha * a_q")),
    ),
    mutant(
        "maps-summed",
        "Merged maps are added, and divided by their row sums in the end.",
        (
            "mixing",
            _COMPOSED,
            f"{_COMPOSED}        mixing = (mixing > 0) * np.ones_like(mixing)\n"
            "        mixing = mixing / mixing.sum(axis=2, keepdims=True)\n",
        ),
    ),
    mutant(
        "hard-first",
        "hard always keeps head p.",
        ("pairwise", _HARD, "chosen = np.ones_like(solution.raw)"),
        hint="`hard` always keeps head p",
    ),
    mutant(
        "hard-second",
        "hard always keeps head q.",
        ("pairwise", _HARD, "chosen = np.zeros_like(solution.raw)"),
        hint="`hard` always keeps head q",
    ),
    mutant("hard-worse", "hard keeps the worse of the two heads.", ("pairwise", _HARD, _HARD.replace(">=", "<"))),
    mutant(
        "hard-tie-to-second",
        "In hard a tie goes to head q.",
        ("pairwise", _HARD, _HARD.replace(">= 0.5", "> 0.5")),
    ),
    mutant(
        "hard-counts-clipped",
        "hard counts as clipped the alphas that it rounds.",
        ("pairwise", "solution._replace(raw=chosen, clipped=chosen)", "solution._replace(clipped=chosen)"),
    ),
    mutant(
        "constant-by-group",
        "constant gives every head of a group the same weight, in groups of three too.",
        (
            "mixing",
            _COMPOSED,
            f'{_COMPOSED}        if strategy == "constant":\n'
            "            mixing = (mixing > 0) * np.ones_like(mixing)\n"
            "            mixing = mixing / mixing.sum(axis=2, keepdims=True)\n",
        ),
    ),
    mutant(
        "constant-counts-degenerate",
        "constant counts degenerate pairs.",
        ("pairwise", "np.zeros_like(solution.degenerate)", "solution.degenerate"),
    ),
    mutant(
        "mean-by-group",
        "mean takes the mean over the group of each student head.",
        (
            "mixing",
            _MEAN,
            "mixing = np.zeros((batch, len(groups), num_heads, rows))\n"
            "        for h, group in enumerate(groups):\n"
            "            mixing[:, h, list(group)] = 1.0 / len(group)",
        ),
    ),
    mutant(
        "mean-identity",
        "mean leaves the maps as they are where the head counts are equal.",
        ("mixing", _MEAN, f"mixing = mixing if num_student_heads == num_heads else {_MEAN[9:]}"),
    ),
    mutant(
        "simplex-uniform",
        "simplex takes equal weights.",
        ("simplex", _SIMPLEX, "    return np.full(len(gram), 1.0 / len(gram))\n\n\ndef"),
    ),
    mutant(
        "simplex-clipped",
        "simplex clips the affine minimum at zero and divides by the sum.",
        (
            "simplex",
            _SIMPLEX,
            "    clipped = np.maximum(_affine_minimum(gram), 0.0)\n    return clipped / clipped.sum()\n\n\ndef",
        ),
    ),
    mutant(
        "simplex-affine",
        "simplex allows negative weights.",
        ("simplex", _SIMPLEX, "    return _affine_minimum(gram)\n\n\ndef"),
    ),
    mutant(
        "simplex-best-head",
        "simplex keeps the best single head.",
        ("simplex", _SIMPLEX, "    return np.eye(len(gram))[int(np.argmin(np.diag(gram)))]\n\n\ndef"),
    ),
    mutant(
        "simplex-in-ten-steps",
        "simplex stops after ten steps of Frank and Wolfe's method.",
        (
            "simplex",
            _SIMPLEX,
            "    c = np.full(len(gram), 1.0 / len(gram))\n"
            "    for step in range(10):\n"
            "        c += 2 / (step + 3) * (np.eye(len(gram))[int(np.argmin(gram @ c))] - c)\n"
            "    return c\n\n\ndef",
        ),
    ),
    mutant(
        "simplex-greedy",
        "simplex is shd: pair after pair.",
        ("mixing", '    elif strategy == "simplex":\n', "    elif False:\n"),
    ),
    mutant(
        "simplex-mask-ignored",
        "Padded rows enter the problem of simplex.",
        (
            "simplex",
            "weight = np.ones((batch, num_rows)) if mask is None else",
            "weight = np.ones((batch, num_rows)) if True else",
        ),
    ),
    mutant(
        "simplex-degenerate-first",
        "simplex keeps the first head of a degenerate group.",
        ("simplex", "return np.full(len(gram), 1.0 / len(gram))", "return np.eye(len(gram))[0]"),
    ),
    mutant(
        "simplex-degenerate-by-size",
        "A group is degenerate in simplex where its maps differ by less than 1e-6, for outputs of any size.",
        ("simplex", "farthest <= degenerate_threshold() * scale", "farthest <= 1e-6"),
    ),
    mutant(
        "strategy-ignored",
        "Every strategy is shd.",
        (
            "mixing",
            '    check_option("strategy", strategy, STRATEGIES, "MIX-2")\n',
            '    check_option("strategy", strategy, STRATEGIES, "MIX-2")\n    strategy = "shd"\n',
        ),
    ),
    mutant(
        "plan-ignored",
        "squeeze_heads always runs the progressive plan.",
        ("mixing", '"progressive" if plan is None else plan)\n', '"progressive")\n'),
    ),
    mutant(
        "softened-after-mixing",
        "The mixed maps are softened and not each head.",
        ("mixing", _MIXED, "soften_rows(mix_maps(probs, mixing), temperature, row_sums=row_sums)),"),
        hint="the mixed map is softened",
    ),
    mutant(
        "squeeze-temperature-ignored",
        "The merged maps are not softened.",
        ("mixing", _MIXED, "mix_maps(probs, mixing)),"),
        hint="the temperature is ignored",
    ),
    mutant(
        "solved-on-softened",
        "Alpha is always solved on the softened maps.",
        ("mixing", _SOLVED_ON, "solved_on = softened"),
        hint="C is solved on the softened maps",
    ),
    mutant(
        "alpha-from-ignored",
        "Alpha is always solved on the maps as given.",
        ("mixing", _SOLVED_ON, "solved_on = probs"),
        hint="C is solved on the softened maps",
    ),
    mutant(
        "squeeze-fills-sinks",
        "Rows with a sink are scaled up to one before anything else.",
        (
            "mixing",
            "    softened = soften_rows(",
            '    if row_sums == "at_most_one":\n'
            "        mass = probs.sum(axis=-1, keepdims=True)\n"
            "        probs = probs / np.where(mass == 0.0, 1.0, mass)\n"
            "    softened = soften_rows(",
        ),
    ),
    mutant(
        "merged-maps-normalised",
        "Merged maps are divided by their row sums.",
        (
            "mixing",
            "    mixed: Array = np.einsum(terms, weights, probs)\n",
            "    mixed: Array = np.einsum(terms, weights, probs)\n"
            "    mass = mixed.sum(axis=-1, keepdims=True)\n"
            "    mixed = mixed / np.where(mass == 0.0, 1.0, mass)\n",
        ),
    ),
    mutant(
        "query-mask-ignored",
        "squeeze_heads does not use query_mask but for its checks.",
        (
            "mixing",
            "    batch, num_heads, rows, _ = probs.shape\n    rounds",
            "    mask = None\n    batch, num_heads, rows, _ = probs.shape\n    rounds",
        ),
    ),
    mutant(
        "query-mask-ignored-in-alpha",
        "The residual leaves padded rows out, alpha does not.",
        ("pairwise", "query_mask=query_mask, rule", "query_mask=None, rule"),
        hint="rows where query_mask is False enter the sums",
    ),
    mutant(
        "query-mask-ignored-in-residual",
        "Alpha leaves padded rows out, the residual does not.",
        ("mixing", _RESIDUAL, _RESIDUAL.replace("mask", "None")),
    ),
    mutant(
        "padded-rows-zeroed",
        "The merged maps are zero on rows that do not count.",
        ("mixing", _MIXED, "mix_maps(softened, mixing) * (1.0 if mask is None else mask[:, None, :, None])),"),
    ),
    mutant(
        "samples-mixed-alike",
        "Every sample is mixed with the weights of the first.",
        ("mixing", _MIXED, "mix_maps(softened, np.broadcast_to(mixing[:1], mixing.shape))),"),
    ),
    mutant(
        "mixing-without-rows",
        'mean and simplex have one weight a head with alpha_per="row" too.',
        ("mixing", '    elif alpha_per == "map":\n', "    else:\n"),
    ),
    mutant(
        "mixing-transposed",
        "C is read with teacher heads first where it is square.",
        (
            "mixing",
            '"bht,btls->bhls" if',
            '("bth,btls->bhls" if weights.shape[1] == weights.shape[2] else "bht,btls->bhls") if',
        ),
    ),
    mutant(
        "mixing-by-keys",
        "With one weight a row, the weights run along keys.",
        ("mixing", 'else "bhtl,btls->bhls"', 'else "bhts,btls->bhls"'),
    ),
    mutant(
        "mixing-unchecked",
        "A mixing matrix may hold anything.",
        ("mixing", "if (weights < 0.0).any() or", "if False and"),
    ),
    mutant(
        "mixing-normalised",
        "A mixing matrix is divided by its sums without a word.",
        (
            "mixing",
            "    if (weights < 0.0).any() or",
            "    if (weights >= 0.0).all():\n        return weights / weights.sum(axis=2, keepdims=True)\n"
            "    if (weights < 0.0).any() or",
        ),
    ),
    mutant(
        "composed-swapped",
        "compose_mixing takes alpha as the weight of the second head.",
        (
            "mixing",
            "merged.append(alpha * pool[p] + (1 - alpha) * pool[q])",
            "merged.append((1 - alpha) * pool[p] + alpha * pool[q])",
        ),
    ),
    mutant(
        "composed-last-round",
        "C holds the weights of the last round alone: a head of an earlier round counts whole.",
        (
            "mixing",
            "merged.append(alpha * pool[p] + (1 - alpha) * pool[q])",
            "merged.append(alpha * (pool[p] > 0) + (1 - alpha) * (pool[q] > 0))",
        ),
    ),
    mutant(
        "residual-squared",
        "The residual is the ratio of the squares.",
        ("mixing", _RELATIVE, f"{_RELATIVE}\n    relative = relative**2"),
    ),
    mutant("residual-absolute", "The residual is not relative.", ("mixing", _RELATIVE, "relative = error")),
    mutant(
        "residual-of-merged",
        "The residual is relative to the merged output.",
        (
            "mixing",
            "norm = np.sqrt(((target * weight) ** 2).sum(axis=(1, 2)))",
            "norm = np.sqrt(((merged * weight) ** 2).sum(axis=(1, 2)))",
        ),
    ),
    mutant(
        "residual-over-rows",
        "The residual is the mean of the rows' relative errors.",
        (
            "mixing",
            _RELATIVE,
            "each, whole = (np.sqrt(((t * weight) ** 2).sum(axis=2)) for t in (merged - target, target))\n"
            "    relative = (each / np.where(whole == 0.0, 1.0, whole)).mean(axis=1)",
        ),
    ),
    mutant(
        "residual-by-head",
        "The residual adds the heads' errors, which cannot cancel.",
        (
            "mixing",
            "    error = np.sqrt((((merged - target) * weight) ** 2).sum(axis=(1, 2)))\n",
            "    own = np.stack([(probs @ outputs)[:, list(group)].sum(axis=1) for group in groups], axis=1)\n"
            "    apart = (mix_heads(probs, mixing) @ merged_outputs - own) * (weight if mask is None else "
            "weight[:, None])\n"
            "    error = np.sqrt((apart**2).sum(axis=(1, 2, 3)))\n",
        ),
    ),
    mutant(
        "residual-softened",
        "The residual is taken at the temperature asked for.",
        ("mixing", _RESIDUAL, _RESIDUAL.replace("(probs,", "(softened,")),
    ),
    mutant(
        "residual-of-the-batch",
        "Every sample gets the residual of the whole batch.",
        (
            "mixing",
            _RELATIVE,
            "error, norm = (np.broadcast_to(np.sqrt((t**2).sum()), t.shape) for t in (error, norm))\n"
            f"    {_RELATIVE}",
        ),
    ),
    mutant(
        "residual-nan",
        "The residual of an output of zeros is zero divided by zero.",
        ("mixing", _RELATIVE, "relative = error / norm"),
    ),
    mutant(
        "clipped-counts-pairs",
        "A pair counts as clipped once, not once a sample.",
        (
            "mixing",
            "int(((s.raw < 0.0) | (s.raw > 1.0)).sum())",
            "int(((s.raw < 0.0) | (s.raw > 1.0)).any())",
        ),
    ),
    mutant(
        "counts-of-the-last-round",
        "Clipped and degenerate alphas are counted in the last round alone.",
        (
            "mixing",
            "num_clipped=sum(",
            "num_clipped=0 if not solutions else sum(",
        ),
        (
            "mixing",
            "| (s.raw > 1.0)).sum()) for r in solutions for s in r),",
            "| (s.raw > 1.0)).sum()) for r in solutions[-1:] for s in r),",
        ),
        ("mixing", "int(s.degenerate.sum()) for r in solutions", "int(s.degenerate.sum()) for r in solutions[-1:]"),
    ),
    mutant(
        "alphas-unclipped-in-the-record",
        "The record holds the alphas before clipping.",
        (
            "mixing",
            "np.stack([s.clipped for s in one_round], axis=1) for",
            "np.stack([s.raw for s in one_round], axis=1) for",
        ),
        (
            "mixing",
            "mixing = compose_mixing(alphas, rounds, num_heads)",
            "mixing = compose_mixing([np.clip(a, 0, 1) for a in alphas], rounds, num_heads)",
        ),
    ),
    mutant(
        "equal-heads-squeezed",
        "squeeze_heads refuses equal head counts.",
        (
            "mixing",
            "    softened = soften_rows(",
            '    if not rounds:\n        raise ShdError("heads-exceed", "nothing to merge", "PLAN-3")\n'
            "    softened = soften_rows(",
        ),
    ),
    mutant(
        "head-residual-of-the-sum",
        "The head residual lets the errors of the heads cancel.",
        (
            "oracles",
            _HEAD_RESIDUAL,
            "    error = ((((maps @ merged - targets).sum(axis=1)) ** 2)[:, None] * weight).sum(axis=(1, 2, 3))\n",
        ),
    ),
    mutant(
        "head-residual-of-padding",
        "Padded rows enter the head residual.",
        ("oracles", "weight = 1.0 if mask is None else", "weight = 1.0 if True else"),
    ),
    mutant(
        "head-residual-of-the-batch",
        "The error in the head residual is that of the whole batch.",
        ("oracles", _HEAD_RESIDUAL, _HEAD_RESIDUAL.replace("sum(axis=(1, 2, 3))", "sum()")),
    ),
    mutant(
        "head-residual-averaged",
        "The head residual is the mean over heads of each head's relative error.",
        (
            "oracles",
            "    ratio = np.sqrt(error / np.where(norm == 0.0, 1.0, norm))\n",
            "    ratio = np.sqrt(error / np.where(norm == 0.0, 1.0, norm))\n"
            "    each = (((maps @ merged - targets) ** 2) * weight).sum(axis=(2, 3))\n"
            "    whole = ((targets**2) * weight).sum(axis=(2, 3))\n"
            "    ratio = np.sqrt(each / np.where(whole == 0.0, 1.0, whole)).mean(axis=1)\n",
        ),
    ),
    mutant(
        "optimum-over-all-keys",
        "The row-stochastic optimum may use keys on which no teacher head has mass.",
        (
            "oracles",
            "allowed = probs.max(axis=1) > 0.0",
            "allowed = probs.max(axis=1) >= 0.0",
        ),
    ),
    mutant(
        "optimum-without-sink",
        "With sinks the row-stochastic optimum still sums to one.",
        ("oracles", '        if row_sums == "at_most_one":  #', "        if False:  #"),
    ),
    mutant(
        "optimum-clipped",
        "The row-stochastic optimum is the unconstrained one, clipped at zero and divided by its sums.",
        (
            "oracles",
            "    return best\n\n\ndef nearest_weights",
            "    best = np.maximum(unconstrained_optimum(probs, outputs, groups), 0.0) * allowed[:, None]\n"
            "    return best / np.maximum(best.sum(axis=-1, keepdims=True), 1e-30)\n\n\ndef nearest_weights",
        ),
    ),
    mutant(
        "optimum-not-normalised",
        "The solution of the least squares problem is not divided by its sum.",
        ("oracles", "normalised: Array = weights / weights.sum()", "normalised: Array = weights"),
    ),
    mutant(
        "unconstrained-by-transpose",
        "The unconstrained optimum takes the transpose for the pseudo-inverse.",
        ("oracles", "np.linalg.pinv(merged, rcond=cutoff)", "merged.swapaxes(-1, -2)"),
    ),
    mutant(
        "ratio-of-squares",
        "The ratios to the optimum are of squares.",
        ("oracles", "np.inf), reached / divisor)", "np.inf), (reached / divisor) ** 2)"),
    ),
    mutant(
        "ratio-nan",
        "A head residual of 0 over one of 0 is NaN.",
        ("oracles", "np.where(reached_zero, 1.0, np.inf)", "np.where(reached_zero, np.nan, np.inf)"),
    ),
    mutant(
        "diagnosed-per-map",
        "diagnose runs its strategies with one alpha a map where one a row is asked for.",
        ("oracles", "            alpha_per=alpha_per,\n            row_sums", "            row_sums"),
    ),
    mutant(
        "diagnosed-plan-ignored",
        "diagnose always runs the progressive plan.",
        ("oracles", '"progressive" if plan is None else plan)', '"progressive")'),
    ),
    mutant(
        "hard-forgets-rule",
        "The strategy hard chooses by least squares and does not read alpha_rule.",
        ("pairwise", "rule=rule, alpha_per", "rule=rule if strategy == 'shd' else 'least_squares', alpha_per"),
        on=("squeeze_heads",),
    ),
    mutant(
        "simplex-forgets-softened",
        "The strategy simplex solves on the teacher's maps and does not read alpha_from.",
        ("mixing", "simplex_mixing(solved_on, outputs", "simplex_mixing(probs, outputs"),
    ),
    mutant(
        "explicit-forgets-softened",
        "With explicit rounds alphas are solved on the teacher's maps.",
        (
            "mixing",
            _SOLVED_ON,
            _SOLVED_ON.replace('"softened" else', '"softened" and isinstance(plan, str | None) else'),
        ),
    ),
    mutant(
        "temperature-forgotten-for-equal-counts",
        "With the empty plan the maps come back at temperature 1.",
        ("mixing", _MIXED, _MIXED.replace("softened", "softened if rounds else probs")),
        on=("squeeze_heads",),
    ),
    mutant(
        "weights-swapped-where-square",
        "Weights a row are read as (B, H_s, L, H_t) where H_t is L.",
        (
            "mixing",
            '"bhtl,btls->bhls"',
            '("bhtl,btls->bhls" if weights.shape[2] != weights.shape[3] else "bhlt,btls->bhls")',
        ),
    ),
    mutant(
        "first-rows-of-long-maps",
        "Alphas over maps of more than 128 rows leave the last rows out.",
        (
            "alpha",
            "numerator, denominator, scale = (t.sum(-1) for t in (numerator, denominator, scale))",
            "numerator, denominator, scale = (t[:, :128].sum(-1) for t in (numerator, denominator, scale))",
        ),
        on=("solve_alpha", "squeeze_heads"),
    ),
    mutant(
        "mass-below-1e-8-dropped",
        "Entries of maps below 1e-8 are taken as 0.",
        (
            "alpha",
            "    both = x_p + x_q\n",
            "    a_p, a_q = (np.where(a < 1e-8, 0.0, a) for a in (a_p, a_q))\n    both = x_p + x_q\n",
        ),
        on=("solve_alpha", "squeeze_heads"),
    ),
    mutant(
        "groups-of-many-tiled",
        "With groups of six or more, query heads read the value heads in turn.",
        (
            "attention",
            "    v = np.repeat(v, num_heads // num_kv_heads, axis=1)",
            "    v = (np.repeat if num_heads // num_kv_heads < 6 else lambda v, n, axis: np.tile(v, (1, n, 1, 1)))"
            "(v, num_heads // num_kv_heads, axis=1)",
        ),
        on=("value_outputs",),
    ),
    mutant(
        "one-sample-needs-no-axis",
        "A query_mask (L) is taken where there is one sample.",
        (
            "attention",
            "    if shape is not None and mask.shape != shape:",
            "    if shape is not None and shape[0] == 1 and mask.shape == shape[1:]:\n        mask = mask[None]\n"
            "    if shape is not None and mask.shape != shape:",
        ),
        on=("squeeze_heads", "solve_alpha"),
    ),
    mutant(
        "peak-with-a-floor",
        "Maps are softened relative to the row's largest entry or 2^-10.",
        (
            "attention",
            "    peak = probs.max(axis=-1, keepdims=True, initial=0.0)\n    powers",
            "    peak = np.maximum(probs.max(axis=-1, keepdims=True, initial=0.0), 2.0**-10)\n    powers",
        ),
        on=("soften",),
    ),
)
