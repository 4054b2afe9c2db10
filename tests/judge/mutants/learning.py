"""Mistakes in the loss, its gradients, supports, layers and tokens."""

from __future__ import annotations

from judge.mutants.mutant import mutant

_LOSSES = ("shd_loss",)
_BOTH = ("shd_loss", "shd_loss_gradient")
_N = "num_rows = np.maximum(counted.sum(axis=(0, 2)), 1)  # n, per map (H_s,)"
_WEIGHT = "weight=np.where(counted, scale / num_rows[None, :, None], 0.0),"
_SCALE = 'scale = float(beta) / num_maps if reduction == "mean" and num_maps else float(beta)'
_LOG_Q = "log_q=log_softmax(masked, temperature),"
_KL = "terms = p * (log_p - rows.log_q)"
_JS = "terms = (p * (log_p - log_r) + q * (rows.log_q - log_r)) / 2"
_ROWS = "layers = layer_rows(maps, logits, **keywords)"
_DZ_WEIGHT = "weight = (rows.weight * rows.mass / rows.temperature)[..., None]"
_DZ_KL = "through: Array = weight * (p.sum(axis=-1, keepdims=True) * q - p)"
_JACOBIAN = "gradient: Array = weight * q * (slope - (q * slope).sum(axis=-1, keepdims=True))"
_TEACHER = "(2 * s * num_teacher_layers + num_student_layers) // (2 * num_student_layers) - 1)"
_RESCALED = "rescaled = kept / np.where(left == 0.0, 1.0, left) * mass[..., None]"
_MASS = 'mass = counted.astype(np.float64) if row_sums == "one" else teacher.sum(axis=-1)'
_SUPPORT = "        check_support(teacher, may_attend, counted, divergence=divergence, layer=layer)\n"
_ALIGNED = "aligned = rescale_rows(probs[..., kept_columns], probs.sum(axis=-1), dropped)"


def _divided(by: str) -> tuple[str, str, str]:
    return "loss", _N, f"num_rows = np.maximum(counted.sum(axis=(0, 2)), 1)\n        num_rows = {by}"


MUTANTS = (
    mutant(
        "cross-entropy",
        "The teacher's entropy is left out.",
        ("loss", _KL, "terms = -p * rows.log_q"),
        on=_LOSSES,
        hint="this is the cross entropy, not KL",
    ),
    mutant(
        "reverse-kl",
        "The student comes first in the divergence.",
        ("loss", _KL, "terms = q * (rows.log_q - log_p)"),
        on=_LOSSES,
        hint="the arguments are in the other order",
    ),
    mutant(
        "base-two",
        "The logarithm is base 2.",
        ("loss", _KL, _KL + " / np.log(2.0)"),
        on=_LOSSES,
        hint="the logarithm is base 2",
    ),
    mutant(
        "squared-error",
        "The KL is a squared error.",
        ("loss", _KL, "terms = (p - q) ** 2"),
        on=_LOSSES,
        hint="it is the squared error of the maps",
    ),
    mutant(
        "kl-without-signs",
        "Negative terms of the KL are left out.",
        ("loss", _KL, "terms = np.maximum(p * (log_p - rows.log_q), 0.0)"),
        on=_LOSSES,
    ),
    mutant(
        "divergence-ignored",
        "Every divergence is the KL.",
        ("loss", '    if divergence == "kl":\n', "    if True:\n"),
        on=_LOSSES,
    ),
    mutant(
        "reverse-kl-is-forward",
        "reverse_kl is the KL.",
        ("loss", "terms = q * (rows.log_q - log_p)", "terms = p * (log_p - rows.log_q)"),
        on=_LOSSES,
    ),
    mutant("js-without-halves", "js is the sum of its two parts.", ("loss", _JS, _JS[:-4]), on=_LOSSES),
    mutant(
        "js-of-sums",
        "In js the middle is P + Q and not half of it.",
        ("loss", "log_r = safe_log((p + q) / 2)", "log_r = safe_log(p + q)"),
        on=_LOSSES,
    ),
    mutant(
        "js-is-jeffreys",
        "js is the mean of the KL in both directions.",
        ("loss", _JS, "terms = (p * (log_p - rows.log_q) + q * (rows.log_q - log_p)) / 2"),
        on=_LOSSES,
    ),
    mutant(
        "js-is-a-distance",
        "js is the root of the divergence.",
        (
            "loss",
            "    summed: Array = terms.sum(axis=-1)\n",
            "    summed: Array = terms.sum(axis=-1)\n"
            '    summed = np.sqrt(np.maximum(summed, 0.0)) if divergence == "js" else summed\n',
        ),
        on=_LOSSES,
    ),
    mutant(
        "mse-over-keys",
        "mse is the mean over keys.",
        ("loss", "terms = (p - q) ** 2", "terms = (p - q) ** 2 / p.shape[-1]"),
        on=_LOSSES,
    ),
    mutant(
        "mse-halved",
        "mse has a factor of one half.",
        ("loss", "terms = (p - q) ** 2", "terms = (p - q) ** 2 / 2"),
        on=_LOSSES,
    ),
    mutant(
        "mse-of-logarithms",
        "mse is taken between logarithms.",
        ("loss", "terms = (p - q) ** 2", "terms = (log_p - rows.log_q) ** 2 * (p > 0)"),
        on=_LOSSES,
    ),
    mutant(
        "mean-over-all-rows",
        "The mean is over all rows, padded ones too.",
        ("loss", _N, "num_rows = np.full(counted.shape[1], counted[:, 0].size)"),
        on=_BOTH,
        hint="the mean is over all rows",
    ),
    mutant(
        "zero-rows-counted",
        "Fully masked rows count in the mean.",
        ("loss", "        counted &= teacher.sum(axis=-1) > 0.0\n", ""),
        on=_BOTH,
    ),
    mutant(
        "rows-of-the-first-head",
        "n is counted on the first head for all heads.",
        _divided("np.full_like(num_rows, max(counted[:, 0].sum(), 1))"),
        on=_BOTH,
    ),
    mutant(
        "rows-of-all-heads",
        "n is the number of counted rows of all heads together.",
        _divided("np.full_like(num_rows, num_rows.sum())"),
        on=_BOTH,
    ),
    mutant(
        "per-sample-mean",
        "The mean is taken per sample, then over samples.",
        (
            "loss",
            _WEIGHT,
            "weight=np.where(counted, scale / np.maximum(counted.sum(axis=2, keepdims=True), 1) / len(counted), "
            "0.0),",
        ),
        on=_BOTH,
        hint="the mean is taken per sample and then over samples",
    ),
    mutant(
        "rows-summed",
        "Rows are summed.",
        _divided("np.ones_like(num_rows)"),
        on=_BOTH,
        hint="rows are summed, not averaged",
    ),
    mutant(
        "batchmean",
        "Rows are summed and divided by the batch size.",
        _divided("np.full_like(num_rows, len(counted))"),
        on=_BOTH,
        hint="rows are summed and divided by the batch size",
    ),
    mutant(
        "mean-over-keys",
        "The mean is over keys too.",
        _divided("num_rows * teacher.shape[-1]"),
        on=_BOTH,
        hint="the mean is over keys too",
    ),
    mutant(
        "weighed-by-mass",
        "With sinks the rows are divided by their mass and not by their number.",
        (
            "loss",
            _WEIGHT,
            "weight=np.where(counted, scale / np.where(mass.sum((0, 2)) == 0, 1, mass.sum((0, 2)))[None, :, "
            "None], 0.0),",
        ),
        on=_BOTH,
    ),
    mutant(
        "mean-by-default",
        "The default is the mean over layers and heads.",
        ("loss", _SCALE, "scale = float(beta) / num_maps"),
        on=_BOTH,
        hint="reductions sum and mean over layers and heads are confused",
    ),
    mutant(
        "reduction-ignored",
        "The reduction mean is the sum.",
        ("loss", _SCALE, "scale = float(beta)"),
        on=_BOTH,
        hint="reductions sum and mean over layers and heads are confused",
    ),
    mutant(
        "layers-averaged",
        "The default averages over layers.",
        ("loss", _SCALE, f"{_SCALE} / len(supervision)"),
        on=_BOTH,
    ),
    mutant(
        "heads-averaged",
        "The default averages over heads.",
        (
            "loss",
            _SCALE,
            f"{_SCALE}\n    scale = scale / np.shape(student_logits[0])[1] if np.ndim(student_logits[0]) == 4 "
            f"else scale",
        ),
        on=_BOTH,
    ),
    mutant(
        "mean-over-layers-alone",
        "The reduction mean divides by the number of layers.",
        ("loss", _SCALE, 'scale = float(beta) / len(supervision) if reduction == "mean" else float(beta)'),
        on=_BOTH,
    ),
    mutant(
        "mean-of-layer-means",
        "The reduction mean is the mean over layers of the mean over heads, with any number of heads.",
        (
            "loss",
            _WEIGHT,
            "weight=np.where(\n                    counted,\n"
            '                    (float(beta) / len(supervision) / counted.shape[1] if reduction == "mean" else '
            "scale)\n"
            "                    / num_rows[None, :, None],\n                    0.0,\n                ),",
        ),
        on=_BOTH,
    ),
    mutant(
        "empty-maps-left-out",
        "The reduction mean leaves out maps with no counted row.",
        (
            "loss",
            _WEIGHT,
            "weight=np.where(\n                    counted,\n"
            "                    scale / num_rows[None, :, None]\n"
            '                    * (counted.shape[1] / max(counted.any((0, 2)).sum(), 1) if reduction == "mean" '
            "else 1),\n"
            "                    0.0,\n                ),",
        ),
        on=_BOTH,
    ),
    mutant(
        "first-layer-alone",
        "Of a list of layers the first is used.",
        ("loss", "for rows in layers))", "for rows in layers[:1]))"),
        on=_LOSSES,
    ),
    mutant(
        "empty-mask-nan",
        "A map with no counted row is zero divided by zero.",
        (
            "loss",
            _N,
            "num_rows = counted.sum(axis=(0, 2))",
        ),
        ("loss", _WEIGHT, "weight=counted * np.divide(scale, num_rows)[None, :, None],"),
        on=_BOTH,
    ),
    mutant(
        "temperature-squared",
        "The loss is multiplied by T squared.",
        ("loss", _SCALE, f"{_SCALE}\n    scale *= temperature**2"),
        on=_BOTH,
        hint="the loss is multiplied by T^2",
    ),
    mutant(
        "temperature-once",
        "The loss is multiplied by T, so that its gradient does not shrink.",
        ("loss", _SCALE, f"{_SCALE}\n    scale *= temperature"),
        on=_BOTH,
        hint="the loss is multiplied by T; there is no such factor",
    ),
    mutant(
        "student-not-softened",
        "The student's logits are not divided by T.",
        ("loss", _LOG_Q, "log_q=log_softmax(masked, 1.0),"),
        on=_BOTH,
        hint="the student's logits are not divided by T",
    ),
    mutant(
        "teacher-softened-again",
        "The supervision is softened once more in the loss.",
        (
            "loss",
            _MASS,
            f"teacher = teacher ** (1.0 / temperature)\n"
            "        teacher = teacher / np.where(counted, teacher.sum(axis=-1), 1.0)[..., None]\n"
            f"        {_MASS}",
        ),
        on=_BOTH,
    ),
    mutant(
        "beta-ignored",
        "beta is not used.",
        ("loss", _SCALE, _SCALE.replace("float(beta)", "1.0")),
        on=_BOTH,
        hint="beta is ignored",
    ),
    mutant(
        "beta-unchecked",
        "beta may be negative, infinite or NaN.",
        ("loss", "or not 0 <= beta < np.inf:", "or False:"),
        on=_BOTH,
    ),
    mutant(
        "constant-inside-log",
        "1e-8 is added inside the logarithm of the student's map.",
        (
            "loss",
            _LOG_Q,
            "log_q=np.where(np.isneginf(masked), 0.0, np.log(np.exp(log_softmax(masked, temperature)) + 1e-8)),",
        ),
        on=_LOSSES,
        hint="1e-8 is added inside the logarithm",
    ),
    mutant(
        "larger-constant-inside-log",
        "1e-5 is added inside the logarithm of the student's map.",
        (
            "loss",
            _LOG_Q,
            "log_q=np.where(np.isneginf(masked), 0.0, np.log(np.exp(log_softmax(masked, temperature)) + 1e-5)),",
        ),
        on=_LOSSES,
    ),
    mutant(
        "student-clamped",
        "The student's probabilities are clamped from below at 1e-7.",
        (
            "loss",
            _LOG_Q,
            "log_q=np.where(np.isneginf(masked), 0.0, np.maximum(log_softmax(masked, temperature), np.log(1e-7))),",
        ),
        on=_LOSSES,
    ),
    mutant(
        "log-of-softmax",
        "The logarithm is taken of float32 probabilities, which underflow.",
        (
            "loss",
            _LOG_Q,
            "log_q=np.where(\n                    np.isneginf(masked), 0.0, np.log(np.exp(log_softmax(masked, "
            "temperature)).astype(np.float32))\n"
            "                ),",
        ),
        on=_LOSSES,
    ),
    mutant(
        "constant-inside-teacher-log",
        "1e-5 is added inside the logarithm of the supervision.",
        ("loss", "np.log(np.where(probs > 0.0, probs, 1.0))", "np.log(np.where(probs > 0.0, probs + 1e-5, 1.0))"),
        on=_LOSSES,
    ),
    mutant(
        "zero-log-zero",
        "0 log 0 is NaN.",
        ("loss", "np.log(np.where(probs > 0.0, probs, 1.0))", "np.log(probs)"),
        on=_LOSSES,
    ),
    mutant(
        "loss-in-float16",
        "Rows are summed in float16.",
        (
            "loss",
            "(rows.weight * rows.mass * row_divergence(rows, divergence)).sum()",
            "(np.where(rows.weight > 0, rows.mass * row_divergence(rows, divergence), 0.0).swapaxes(0, 1)"
            ".reshape(rows.p.shape[1], -1).astype(np.float16).cumsum(-1, dtype=np.float16)[:, -1]"
            " * rows.weight.max((0, 2))).sum()",
        ),
        on=_LOSSES,
    ),
    mutant(
        "loss-clipped",
        "A loss below zero is set to zero.",
        ("loss", "    return float(sum((", "    return max(0.0, sum(("),
        on=_LOSSES,
    ),
    mutant(
        "loss-mask-ignored",
        "Rows where loss_mask is False count.",
        (
            "support",
            "counted = np.ones((batch, rows), dtype=np.bool_) if row_mask is None else row_mask",
            "counted = np.ones((batch, rows), dtype=np.bool_)",
        ),
        on=_BOTH,
        hint="loss_mask is ignored",
    ),
    mutant(
        "loss-mask-inverted",
        "True in loss_mask leaves a row out.",
        (
            "support",
            "counted = np.ones((batch, rows), dtype=np.bool_) if row_mask is None else row_mask",
            "counted = np.ones((batch, rows), dtype=np.bool_) if row_mask is None else ~row_mask",
        ),
        on=_BOTH,
    ),
    mutant("support-unchecked", "Teacher mass on a masked key is not noticed.", ("loss", _SUPPORT, ""), on=_BOTH),
    mutant(
        "support-always-intersected",
        "Teacher mass on a masked key is dropped without being asked.",
        ("loss", '        if support == "intersect":\n', "        if True:\n"),
        on=_BOTH,
    ),
    mutant(
        "support-never-intersected",
        'support="intersect" is an error.',
        ("loss", '        if support == "intersect":\n', "        if False:\n"),
        on=_BOTH,
    ),
    mutant(
        "support-loosely",
        "Teacher mass below 1e-3 on a masked key is passed over.",
        ("support", "outside = (teacher > 0.0)", "outside = (teacher > 1e-3)"),
        on=_BOTH,
    ),
    mutant(
        "support-of-uncounted-rows",
        "Teacher mass on a masked key is an error on rows that do not count too.",
        (
            "support",
            "outside = (teacher > 0.0) & ~may_attend & counted[..., None]",
            "outside = (teacher > 0.0) & ~may_attend",
        ),
        on=_BOTH,
    ),
    mutant(
        "support-one-way",
        "reverse_kl takes a key without teacher mass, where it is infinite.",
        ("support", '    if divergence != "reverse_kl":\n', "    if True:\n"),
        on=_BOTH,
    ),
    mutant(
        "support-of-kl-alone",
        "Teacher mass on a masked key is an error for the KL alone.",
        ("support", "    if outside.any():\n", '    if outside.any() and divergence == "kl":\n'),
        on=_BOTH,
    ),
    mutant(
        "wrong-support-code",
        "Teacher mass on a masked key is refused as not-a-distribution.",
        (
            "support",
            '            "support-mismatch",\n            f"supervision must be 0',
            '            "not-a-distribution",\n            f"supervision must be 0',
        ),
        on=_BOTH,
    ),
    mutant(
        "intersected-not-scaled",
        "What is left after intersection is not scaled back.",
        ("support", _RESCALED, "rescaled = kept"),
    ),
    mutant(
        "intersected-to-one",
        "What is left is scaled to one, not to what the row had.",
        ("support", _RESCALED, _RESCALED.replace(" * mass[..., None]", "")),
    ),
    mutant(
        "intersected-evenly",
        "Dropped mass is spread evenly over the keys that are left.",
        (
            "support",
            _RESCALED,
            "share = dropped[..., None] / np.maximum((kept > 0).sum(axis=-1, keepdims=True), 1)\n"
            "    rescaled = kept + share * (kept > 0)",
        ),
    ),
    mutant(
        "intersected-nan",
        "A row that loses all its mass is NaN.",
        ("support", _RESCALED, "rescaled = kept / left * mass[..., None]"),
    ),
    mutant(
        "dropped-share",
        "The dropped mass is reported as a share of the row.",
        (
            "support",
            "    return IntersectedMaps(rescale_rows(kept, teacher.sum(axis=-1), dropped), dropped)",
            "    mass = teacher.sum(axis=-1)\n"
            "    return IntersectedMaps(rescale_rows(kept, mass, dropped), dropped / np.where(mass == 0.0, 1.0, "
            "mass))",
        ),
    ),
    mutant(
        "loss-fills-sinks",
        "Rows with a sink weigh one.",
        ("loss", "mass=mass,", "mass=counted.astype(np.float64),"),
        on=_BOTH,
        hint="rows with a sink are scaled up to one",
    ),
    mutant(
        "sinks-not-normalised",
        "Rows with a sink enter the plain formula of the KL.",
        ("loss", _MASS, "mass = counted.astype(np.float64)"),
        on=_BOTH,
    ),
    mutant(
        "sinks-weighed-twice",
        "Rows with a sink weigh with the square of their mass.",
        ("loss", "mass=mass,", "mass=mass**2,"),
        on=_BOTH,
    ),
    mutant(
        "gradient-of-a-sum",
        "The gradient is not divided by the number of counted rows.",
        (
            "gradients",
            _DZ_WEIGHT,
            f"{_DZ_WEIGHT}\n    weight = weight * np.maximum((rows.weight > 0).sum((0, 2)), 1)[None, :, None, None]",
        ),
        hint="rows are summed, not averaged",
    ),
    mutant(
        "gradient-without-beta",
        "The gradient leaves beta out.",
        ("gradients", _ROWS, _ROWS.replace("**keywords", '**{**keywords, "beta": 1.0}')),
        on=("shd_loss_gradient",),
        hint="beta is ignored",
    ),
    mutant(
        "gradient-without-temperature",
        "The gradient is not divided by T.",
        ("gradients", _DZ_WEIGHT, _DZ_WEIGHT.replace(" / rows.temperature", "")),
        hint="the gradient is not divided by T",
    ),
    mutant(
        "gradient-temperature-twice",
        "The gradient is divided by T twice.",
        ("gradients", _DZ_WEIGHT, _DZ_WEIGHT.replace("rows.temperature", "rows.temperature**2")),
    ),
    mutant(
        "gradient-sign",
        "The gradient is A~ - A_student.",
        ("gradients", _DZ_WEIGHT, _DZ_WEIGHT.replace("(rows.weight", "-(rows.weight")),
        hint="the gradient has the wrong sign",
    ),
    mutant(
        "gradient-without-reduction",
        "The gradient leaves the reduction mean out.",
        ("gradients", _ROWS, _ROWS.replace("**keywords", '**{**keywords, "reduction": "sum"}')),
        on=("shd_loss_gradient",),
        hint="reductions sum and mean over layers and heads are confused",
    ),
    mutant(
        "gradient-on-masked-rows",
        "Rows where loss_mask is False get a gradient.",
        ("gradients", _ROWS, _ROWS.replace("**keywords", '**{**keywords, "loss_mask": None}')),
        on=("shd_loss_gradient",),
    ),
    mutant(
        "gradient-leaks",
        "Rows that do not count get the gradient towards the uniform map.",
        (
            "gradients",
            _DZ_KL,
            "through: Array = weight * (p.sum(axis=-1, keepdims=True) * q - p) + 1e-6 * (rows.weight == 0)[..., "
            "None]",
        ),
    ),
    mutant(
        "gradient-of-the-teacher",
        "The gradient is that towards the supervision.",
        ("gradients", _DZ_KL, "through: Array = weight * np.where(p > 0, safe_log(p) + 1 - rows.log_q, 0.0)"),
    ),
    mutant(
        "gradient-through-probabilities",
        "The gradient stops at the student's probabilities.",
        ("gradients", _JACOBIAN, "gradient: Array = weight * slope * (q > 0)"),
    ),
    mutant(
        "gradient-not-centred",
        "In the softmax's derivative the sum over keys is left out.",
        ("gradients", _JACOBIAN, "gradient: Array = weight * q * slope"),
    ),
    mutant(
        "gradient-without-row-sum",
        "The KL's gradient is Q - P where the row does not sum to one exactly.",
        ("gradients", _DZ_KL, "through: Array = weight * (q - p)"),
    ),
    mutant(
        "gradient-is-the-kl's",
        "Every divergence has the gradient of the KL.",
        ("gradients", '    if divergence == "kl":\n', "    if True:\n"),
    ),
    mutant(
        "mse-gradient-halved",
        "The gradient of mse lacks the factor 2.",
        ("gradients", "slope = 2 * (q - p)", "slope = q - p"),
    ),
    mutant(
        "js-gradient-doubled",
        "The gradient of js lacks the factor 1/2.",
        (
            "gradients",
            "slope = (rows.log_q - safe_log((p + q) / 2)) / 2",
            "slope = rows.log_q - safe_log((p + q) / 2)",
        ),
    ),
    mutant(
        "gradient-in-float16",
        "The gradient is rounded to float16.",
        (
            "gradients",
            "    return gradients if isinstance",
            "    gradients = [g.astype(np.float16) for g in gradients]\n    return gradients if isinstance",
        ),
        on=("shd_loss_gradient",),
    ),
    mutant(
        "gradient-clipped",
        "The gradient is clipped to [-0.1, 0.1].",
        ("gradients", _DZ_KL, f"{_DZ_KL.replace('weight * (', 'np.clip(weight * (')}, -0.1, 0.1)"),
    ),
    mutant(
        "one-layer-not-a-list",
        "A list of one layer gives an array.",
        (
            "gradients",
            "    return gradients if isinstance(student_logits, list | tuple) else gradients[0]",
            "    return gradients if len(gradients) > 1 else gradients[0]",
        ),
    ),
    mutant(
        "scale-in-logits-alone",
        "scale is left out of the way back to queries and keys.",
        ("gradients", "dq = [scale * (g @ k) for", "dq = [(g @ k) for"),
        ("gradients", "by_query_head = scale * (g", "by_query_head = (g"),
    ),
    mutant(
        "scale-ignored",
        "The logits are q k^T / sqrt(d), and scale is not read.",
        (
            "gradients",
            "    pairs = [_check_qk",
            "    scale = float(np.shape(given_q[0])[-1]) ** -0.5\n    pairs = [_check_qk",
        ),
    ),
    mutant(
        "key-heads-interleaved",
        "Query head h reads key head h mod H_kv.",
        (
            "gradients",
            "np.repeat(k, q.shape[1] // k.shape[1], axis=1) for",
            "np.tile(k, (1, q.shape[1] // k.shape[1], 1, 1)) for",
        ),
    ),
    mutant(
        "key-gradient-averaged",
        "The gradient of a shared key head is the mean over its query heads.",
        ("gradients", "-1, num_keys, width).sum(axis=2))", "-1, num_keys, width).mean(axis=2))"),
    ),
    mutant(
        "key-gradient-of-one-head",
        "The gradient of a shared key head is that of its first query head.",
        ("gradients", "-1, num_keys, width).sum(axis=2))", "-1, num_keys, width)[:, :, 0])"),
    ),
    mutant(
        "queries-and-keys-swapped",
        "The two gradients come in the wrong order.",
        ("gradients", "return (dq, dk) if", "return (dk, dq) if"),
        ("gradients", "else (dq[0], dk[0])", "else (dk[0], dq[0])"),
    ),
    mutant(
        "floored-layers",
        "s L_t / L_s is rounded down.",
        ("layers", _TEACHER, "s * num_teacher_layers // num_student_layers - 1)"),
        hint="s L_t / L_s is rounded down",
    ),
    mutant(
        "raised-layers",
        "s L_t / L_s is rounded up.",
        ("layers", _TEACHER, "-(-s * num_teacher_layers // num_student_layers) - 1)"),
        hint="s L_t / L_s is rounded up",
    ),
    mutant(
        "even-layers",
        "Halves are rounded to the even number.",
        ("layers", _TEACHER, "round(s * num_teacher_layers / num_student_layers) - 1)"),
        hint="halves are rounded to the even number",
    ),
    mutant(
        "halves-down-layers",
        "Halves are rounded down.",
        (
            "layers",
            _TEACHER,
            "(2 * s * num_teacher_layers + num_student_layers - 1) // (2 * num_student_layers) - 1)",
        ),
    ),
    mutant(
        "zero-based-layers",
        "The formula is used with zero-based layers.",
        ("layers", _TEACHER, "int((s - 1) * num_teacher_layers / num_student_layers + 0.5))"),
        hint="the formula is used with zero-based layers",
    ),
    mutant(
        "first-layers",
        "Student layer s meets teacher layer s.",
        ("layers", _TEACHER, "s - 1)"),
        hint="student layer s meets teacher layer s",
    ),
    mutant(
        "last-layers",
        "The student's layers meet the teacher's last ones.",
        ("layers", _TEACHER, "num_teacher_layers - num_student_layers + s - 1)"),
    ),
    mutant(
        "evenly-spread-layers",
        "The first layers meet, and the last, and the others lie evenly between.",
        ("layers", _TEACHER, "int((s - 1) * (num_teacher_layers - 1) / max(num_student_layers - 1, 1) + 0.5))"),
    ),
    mutant(
        "ratio-rounded-first",
        "L_t / L_s is computed in floating point and then multiplied by s.",
        ("layers", _TEACHER, "int(s * (num_teacher_layers / num_student_layers) + 0.5) - 1)"),
    ),
    mutant(
        "one-based-layers",
        "Pairs are returned one-based.",
        ("layers", "        (s - 1, " + _TEACHER, "        (s, " + _TEACHER.replace(" - 1)", ")")),
    ),
    mutant(
        "explicit-layers-unsorted",
        "Explicit pairs keep their order.",
        ("layers", "return tuple(sorted(given))", "return tuple(given)"),
    ),
    mutant(
        "layers-twice",
        "A student layer may be named twice.",
        ("layers", "        if student in seen:\n", "        if False:\n"),
    ),
    mutant(
        "teacher-layer-once",
        "A teacher layer may serve one student layer alone.",
        (
            "layers",
            "        seen.add(student)\n",
            "        if [t for _, t in given].count(teacher) > 1:\n"
            '            raise ShdError("layers-invalid", "twice", "LAYER-4")\n        seen.add(student)\n',
        ),
    ),
    mutant(
        "tokens-not-scaled",
        "Kept rows are not scaled back.",
        ("tokens", _ALIGNED, "aligned = probs[..., kept_columns]"),
    ),
    mutant(
        "tokens-scaled-to-one",
        "Kept rows are scaled to one, those with a sink too.",
        ("tokens", _ALIGNED, _ALIGNED.replace("probs.sum(axis=-1)", "np.ones_like(dropped)")),
    ),
    mutant(
        "tokens-sorted",
        "Kept positions come in their own order and not in the one that was asked for.",
        ("tokens", "    return kept\n", "    return sorted(kept)\n"),
    ),
    mutant(
        "tokens-dropped-instead",
        "The lists name the columns to drop.",
        (
            "tokens",
            "    others = ",
            "    kept_columns = [i for i in range(probs.shape[3]) if i not in kept_columns] or kept_columns\n"
            "    others = ",
        ),
    ),
    mutant(
        "tokens-negative",
        "Negative positions count from the end.",
        ("tokens", "not all(0 <= i < size for i in kept)", "not all(-size <= i < size for i in kept)"),
    ),
    mutant(
        "tokens-twice",
        "A position may be named twice.",
        ("tokens", " or len(set(kept)) < len(kept):", ":"),
    ),
    mutant(
        "tokens-dropped-mass-of-all-rows",
        "The dropped mass has an entry for every row, kept or not.",
        ("tokens", "    probs = probs[:, :, kept_rows]\n", "    every = probs\n    probs = probs[:, :, kept_rows]\n"),
        ("tokens", "aligned), dropped)", "aligned), every[..., others].sum(axis=-1))"),
    ),
    mutant(
        "temperature-lost-where-options-meet",
        "With js and the reduction mean the student is not softened.",
        (
            "loss",
            _LOG_Q,
            'log_q=log_softmax(masked, 1.0 if (divergence, reduction) == ("js", "mean") else temperature),',
        ),
        on=_BOTH,
    ),
    mutant(
        "mask-of-the-first-layers",
        "attn_mask is used in the first four layers alone.",
        (
            "loss",
            "attn_mask=attn_mask, row_sums=row_sums,",
            "attn_mask=attn_mask if layer < 4 else None, row_sums=row_sums,",
        ),
        on=_BOTH,
    ),
    mutant(
        "rows-beyond-256",
        "Rows from 256 on do not count.",
        (
            "loss",
            "        counted &= teacher.sum(axis=-1) > 0.0\n",
            "        counted &= teacher.sum(axis=-1) > 0.0\n        counted[:, :, 256:] = False\n",
        ),
        on=("shd_loss_gradient",),
    ),
    mutant(
        "samples-beyond-eight",
        "Samples from the ninth on do not count.",
        (
            "loss",
            "        counted &= teacher.sum(axis=-1) > 0.0\n",
            "        counted &= teacher.sum(axis=-1) > 0.0\n        counted[8:] = False\n",
        ),
        on=_BOTH,
    ),
    mutant(
        "logits-in-float16",
        "The student's logits are rounded to float16.",
        ("loss", _LOG_Q, "log_q=log_softmax(masked.astype(np.float16).astype(np.float64), temperature),"),
        on=("shd_loss_gradient",),
    ),
    mutant(
        "temperature-of-two-digits",
        "The temperature is rounded to two digits.",
        ("loss", _LOG_Q, "log_q=log_softmax(masked, round(temperature, 2) or temperature),"),
        on=("shd_loss_gradient",),
    ),
    mutant(
        "scale-in-float16",
        "scale is rounded to float16.",
        ("gradients", "    pairs = [_check_qk", "    scale = float(np.float16(scale))\n    pairs = [_check_qk"),
        on=("shd_loss_gradient_qk",),
    ),
    mutant(
        "first-sample-checked",
        "NaN is looked for in the first sample alone.",
        (
            "attention",
            "    if bad.any():\n",
            "    bad[1:] = False if bad.ndim == 4 else bad[1:]\n    if bad.any():\n",
        ),
        on=("shd_loss", "shd_loss_gradient_qk", "intersect_support", "align_tokens"),
    ),
    mutant(
        "row-mask-repeated",
        "A mask of one row or of one sample is repeated for all.",
        (
            "attention",
            "    if shape is not None and mask.shape != shape:\n",
            "    if shape is not None and mask.ndim == 2 and mask.size in shape:\n"
            "        mask = mask.reshape(1, -1) if mask.size == shape[1] else mask.reshape(-1, 1)\n"
            "        mask = np.broadcast_to(mask, shape)\n"
            "    if shape is not None and mask.shape != shape:\n",
        ),
        on=("shd_loss", "align_tokens"),
    ),
    mutant(
        "little-left-is-nothing",
        "A row that keeps less than 1e-6 of mass is empty.",
        (
            "support",
            "    left = kept.sum(axis=-1, keepdims=True)\n",
            "    left = kept.sum(axis=-1, keepdims=True)\n    kept = np.where(left < 1e-6, 0.0, kept)\n",
        ),
        on=("intersect_support", "align_tokens", "shd_loss"),
    ),
    mutant(
        "sink-sums-loosely",
        "With sinks a row may sum to ten times ROW_SUM above one.",
        (
            "attention",
            "    wrong = sums - 1.0 > tolerance\n",
            '    wrong = sums - 1.0 > (10 if row_sums == "at_most_one" else 1) * tolerance\n',
        ),
        on=("shd_loss_gradient_qk", "align_tokens"),
    ),
    mutant(
        "place-without-head",
        "The message about teacher mass on a masked key does not name the head.",
        ("support", "head {h}, row {i}", "row {i}"),
        on=_BOTH,
    ),
    mutant(
        "first-pairs-checked",
        "Of explicit pairs the first four are looked at for a student layer named twice.",
        ("layers", "        if student in seen:\n", "        if student in seen and len(seen) < 4:\n"),
    ),
    mutant(
        "long-lists-sorted",
        "A list of positions is sorted from its ninth on.",
        ("tokens", "    return kept\n", "    return kept[:8] + sorted(kept[8:])\n"),
    ),
)
