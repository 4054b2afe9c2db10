"""Mistakes in maps, masks, temperature, value outputs and what is refused."""

from __future__ import annotations

from judge.mutants.mutant import mutant

_SOFTMAX = ("softmax",)
_SOFTENED = ("soften", "squeeze_heads")
_MASKED = ("softmax", "shd_loss", "shd_loss_gradient")
_DIVIDE = "return exps / np.where(sums == 0.0, 1.0, sums)"
_WRONG_ROWS = """    if wrong.any():
        where = _first(wrong)
        if row_sums"""
_BAD = "    if bad.any():"

MUTANTS = (
    mutant(
        "masked-row-nan",
        "A fully masked row is NaN: zero is divided by zero.",
        ("attention", _DIVIDE, "return exps / sums"),
        on=_SOFTMAX,
        hint="fully masked rows are NaN",
    ),
    mutant(
        "masked-row-uniform",
        "A fully masked row is uniform.",
        ("attention", _DIVIDE, "return np.where(sums == 0.0, 1.0 / logits.shape[-1], exps / sums)"),
        on=_SOFTMAX,
        hint="fully masked rows are uniform",
    ),
    mutant(
        "masked-with-a-large-number",
        "Masked keys get the logit -1e9 and not minus infinity.",
        ("attention", "return np.where(mask, logits, -np.inf)", "return np.where(mask, logits, -1e9)"),
        on=_MASKED,
    ),
    mutant(
        "masked-with-a-small-number",
        "Masked keys get 10 subtracted from their logit.",
        ("attention", "return np.where(mask, logits, -np.inf)", "return np.where(mask, logits, logits - 10.0)"),
        on=_MASKED,
    ),
    mutant(
        "masked-after-softmax",
        "The mask is multiplied onto the probabilities, which are not divided by their sum again.",
        ("attention", "mask_logits(logits, attn_mask), check_temp", "logits, check_temp"),
        ("attention", _DIVIDE, "return exps / sums * (1.0 if attn_mask is None else np.asarray(attn_mask))"),
        on=_SOFTMAX,
    ),
    mutant(
        "mask-inverted",
        "True in a mask hides the key.",
        ("attention", "return np.where(mask, logits, -np.inf)", "return np.where(mask, -np.inf, logits)"),
        on=_MASKED,
        hint="attn_mask is read as True = masked",
    ),
    mutant(
        "mask-ignored",
        "attn_mask is not used.",
        ("attention", "return np.where(mask, logits, -np.inf)", "return logits"),
        on=_MASKED,
        hint="attn_mask is ignored",
    ),
    mutant(
        "mask-transposed",
        "The attention mask is read as (keys, queries).",
        (
            "attention",
            'mask = as_mask(attn_mask, "attn_mask")',
            'mask = as_mask(attn_mask, "attn_mask")\n    mask = mask.swapaxes(-1, -2) if mask.ndim > 1 else mask',
        ),
        on=_MASKED,
    ),
    mutant(
        "mask-off-by-one",
        "The attention mask is read one key further on: a causal row looks ahead.",
        ("attention", "np.where(mask, logits, -np.inf)", "np.where(np.roll(mask, 1, axis=-1), logits, -np.inf)"),
        on=_MASKED,
    ),
    mutant(
        "mask-not-broadcast-by-head",
        "A mask with a head axis is read at its first head alone.",
        (
            "attention",
            "np.where(mask, logits, -np.inf)",
            "np.where(mask[:, :1] if mask.ndim == 4 else mask, logits, -np.inf)",
        ),
        on=_MASKED,
    ),
    mutant(
        "softmax-overflows",
        "The exponentials are taken without subtracting the row's largest logit.",
        ("attention", "np.exp((logits - np.where(np.isneginf(peak), 0.0, peak)) / t", "np.exp(logits / t"),
        on=_SOFTMAX,
    ),
    mutant(
        "softmax-over-queries",
        "Probabilities sum to one over queries and not over keys.",
        ("attention", "sums = exps.sum(axis=-1, keepdims=True)", "sums = exps.sum(axis=-2, keepdims=True)"),
        on=_SOFTMAX,
    ),
    mutant(
        "softmax-peak-of-the-array",
        "The largest logit of the whole array is subtracted, so that a distant row vanishes.",
        ("attention", "peak = logits.max(axis=-1, keepdims=True, initial=-np.inf)", "peak = logits.max()"),
        on=_SOFTMAX,
    ),
    mutant(
        "softmax-temperature-multiplied",
        "The logits are multiplied by the temperature.",
        ("attention", "0.0, peak)) / temperature)", "0.0, peak)) * temperature)"),
        on=_SOFTMAX,
        hint="the temperature multiplies the logits",
    ),
    mutant(
        "softmax-temperature-ignored",
        "The logits are not divided by the temperature.",
        ("attention", "0.0, peak)) / temperature)", "0.0, peak)))"),
        on=_SOFTMAX,
        hint="the temperature is ignored",
    ),
    mutant(
        "softmax-in-place",
        "Masked logits are written into the caller's array.",
        (
            "attention",
            "    return np.where(mask, logits, -np.inf)",
            "    return np.where(mask, logits, -np.inf)\n\n\n_pure = softmax\n\n\n"
            "def softmax(attn_logits, attn_mask=None, **options):\n"
            "    probs = _pure(attn_logits, attn_mask, **options)\n"
            "    if attn_mask is not None:\n"
            "        np.copyto(attn_logits, -np.inf, where=~attn_mask)\n"
            "    return probs",
        ),
        on=_SOFTMAX,
    ),
    mutant(
        "mask-in-place",
        "Rows that do not count are set to zero in the caller's maps.",
        (
            "mixing",
            "    maps = np.asarray(teacher_probs)\n",
            "    maps = np.asarray(teacher_probs)\n"
            "    if query_mask is not None and np.asarray(query_mask).shape == maps.shape[::2]:\n"
            "        maps *= np.asarray(query_mask)[:, None, :, None] > 0\n",
        ),
    ),
    mutant(
        "softened-in-place",
        "soften raises the caller's own array to the power.",
        (
            "attention",
            "    return in_dtype_of(attn_probs, soften_rows(probs,",
            "    if isinstance(attn_probs, np.ndarray):\n"
            "        attn_probs **= 1.0 / temperature\n"
            "    return in_dtype_of(attn_probs, soften_rows(probs,",
        ),
        on=("soften",),
    ),
    mutant(
        "soften-power",
        "Probabilities are raised to T and not to 1/T.",
        ("attention", "** (1.0 / temperature)", "** temperature"),
        on=_SOFTENED,
        hint="the temperature multiplies the logits",
    ),
    mutant(
        "soften-not-normalised",
        "A^(1/T) is not divided by its row sum.",
        (
            "attention",
            "softened = powers / np.where(sums == 0.0, 1.0, sums)",
            "softened = powers * peak ** (1.0 / temperature)",
        ),
        on=_SOFTENED,
    ),
    mutant(
        "soften-through-logarithms",
        "1e-8 is added to the probabilities before their logarithm is divided by T: zeros are no longer zero.",
        ("attention", "(probs / np.where(peak == 0.0, 1.0, peak))", "(probs + 1e-8 * (peak > 0.0))"),
        on=_SOFTENED,
    ),
    mutant(
        "soften-underflows",
        "A^(1/T) is taken as it is, so that a small T turns rows into zeros.",
        ("attention", "(probs / np.where(peak == 0.0, 1.0, peak))", "probs"),
        on=_SOFTENED,
    ),
    mutant(
        "soften-peak-of-the-array",
        "A^(1/T) is taken relative to the largest entry of the whole array, so that a flat row vanishes.",
        ("attention", "peak = probs.max(axis=-1, keepdims=True, initial=0.0)", "peak = probs.max(initial=0.0)"),
        on=_SOFTENED,
    ),
    mutant(
        "soften-fills-sinks",
        "Rows with a sink are scaled up to one by softening.",
        ("attention", 'if row_sums == "at_most_one" else softened', "if False else softened"),
        on=_SOFTENED,
        hint="rows with a sink are scaled up to one",
    ),
    mutant(
        "soften-the-sink",
        "The missing mass is softened like one more key.",
        (
            "attention",
            "sums = powers.sum(axis=-1, keepdims=True)\n    softened",
            "sums = powers.sum(axis=-1, keepdims=True)\n"
            '    if row_sums == "at_most_one":\n'
            "        sink = np.maximum(1.0 - probs.sum(axis=-1, keepdims=True), 0.0)\n"
            "        sums = sums + (sink / np.where(peak == 0.0, 1.0, peak)) ** (1.0 / temperature)\n"
            "        return powers / np.where(sums == 0.0, 1.0, sums)\n"
            "    softened",
        ),
        on=_SOFTENED,
    ),
    mutant(
        "soften-normalises-at-one",
        "At temperature 1 a map is divided by its row sums all the same.",
        ("attention", "    if temperature == 1.0:\n        return probs\n", ""),
        on=_SOFTENED,
    ),
    mutant(
        "value-heads-interleaved",
        "With grouped queries, query head i reads value head i mod H_kv.",
        (
            "attention",
            "np.repeat(v, num_heads // num_kv_heads, axis=1)",
            "np.tile(v, (1, num_heads // num_kv_heads, 1, 1))",
        ),
        on=("value_outputs",),
        hint="query head i reads value head i mod H_kv",
    ),
    mutant(
        "projection-transposed",
        "The output projection is read as a linear layer stores it, transposed.",
        (
            "attention",
            '    w = as_float(output_projection, "output_projection", ndim=2)\n',
            '    w = as_float(output_projection, "output_projection", ndim=2).T\n',
        ),
        on=("value_outputs",),
    ),
    mutant(
        "projection-rows-interleaved",
        "Head i takes every H_t-th row of the output projection and not its own block of rows.",
        (
            "attention",
            "w.reshape(num_heads, d_v, -1))",
            "w.reshape(d_v, num_heads, -1).swapaxes(0, 1))",
        ),
        on=("value_outputs",),
    ),
    mutant(
        "projection-in-float16",
        "The products of values and projection are summed in float16.",
        (
            "attention",
            'np.einsum("bhsv,hvd->bhsd", v, w.reshape(num_heads, d_v, -1))',
            "(v[..., None] * w.reshape(num_heads, 1, d_v, -1)).astype(np.float16)"
            ".cumsum(axis=-2, dtype=np.float16)[..., -1, :]",
        ),
        on=("value_outputs",),
    ),
    mutant(
        "rows-not-checked",
        "Rows may sum to anything.",
        ("attention", _WRONG_ROWS, _WRONG_ROWS.replace("wrong.any()", "False")),
    ),
    mutant(
        "rows-normalised",
        "Rows that do not sum to one are divided by their sum without a word.",
        (
            "attention",
            _WRONG_ROWS,
            "    if wrong.any():\n        return np.where(wrong[..., None], probs / sums[..., None], probs)\n"
            + _WRONG_ROWS,
        ),
    ),
    mutant(
        "rows-checked-loosely",
        "Rows may be off by a tenth.",
        ("attention", "tolerance = row_sum_tolerance(dtype_name(given))", "tolerance = 0.1"),
    ),
    mutant(
        "rows-checked-exactly",
        "Rows must sum to one within 1e-9, which float32 maps do not.",
        ("attention", "tolerance = row_sum_tolerance(dtype_name(given))", "tolerance = 1e-9"),
    ),
    mutant(
        "masked-rows-refused",
        "A row of zeros is refused as no distribution.",
        ("attention", "wrong |= (1.0 - sums > tolerance) & (sums != 0.0)", "wrong |= 1.0 - sums > tolerance"),
    ),
    mutant(
        "uncounted-rows-refused",
        "Rows outside the mask must be distributions too.",
        ("attention", "        wrong &= query_mask[:, None, :]\n", "        pass\n"),
    ),
    mutant(
        "sinks-refused",
        'A row that falls short of one is refused with row_sums="at_most_one" too.',
        ("attention", '    if row_sums == "one":\n        wrong |=', "    if True:\n        wrong |="),
    ),
    mutant(
        "sinks-unasked",
        "A row that falls short of one is taken without being asked for.",
        ("attention", '    if row_sums == "one":\n        wrong |=', "    if False:\n        wrong |="),
    ),
    mutant(
        "sinks-above-one",
        'With row_sums="at_most_one" a row may sum to more than one.',
        ("attention", "wrong = sums - 1.0 > tolerance", 'wrong = (sums - 1.0 > tolerance) & (row_sums == "one")'),
    ),
    mutant(
        "negative-accepted",
        "Negative probabilities are taken where the row sums to one.",
        ("attention", "    if probs.size and probs.min() < 0.0:", "    if False:"),
    ),
    mutant(
        "masks-coerced",
        "Masks of integers and numbers are read as booleans.",
        (
            "attention",
            "    mask = np.asarray(value)\n    if mask.dtype",
            "    mask = np.asarray(value).astype(np.bool_)\n    if mask.dtype",
        ),
    ),
    mutant(
        "mask-shape-unchecked",
        "A mask of another shape is not refused.",
        ("attention", "    if shape is not None and mask.shape != shape:", "    if False:"),
    ),
    mutant("nan-accepted", "NaN and infinity pass.", ("attention", _BAD, "    if False:")),
    mutant(
        "nan-zeroed",
        "NaN and infinity are replaced by zero.",
        ("attention", _BAD, "    if bad.any():\n        return np.where(bad, 0.0, array)\n" + _BAD),
    ),
    mutant(
        "plus-infinity-accepted",
        "A logit may be plus infinity.",
        ("attention", "np.isnan(array) | np.isposinf(array) if allow", "np.isnan(array) if allow"),
        on=_MASKED,
    ),
    mutant(
        "minus-infinity-refused",
        "A logit may not be minus infinity.",
        ("attention", "np.isnan(array) | np.isposinf(array) if allow", "~np.isfinite(array) if allow"),
        on=_MASKED,
    ),
    mutant(
        "complex-accepted",
        "The imaginary part of an array is dropped.",
        ("attention", 'or given.dtype.kind in "iu"):', 'or given.dtype.kind in "iubc"):'),
    ),
    mutant(
        "temperature-unchecked",
        "Any number is taken as the temperature.",
        ("attention", "or not 0 < temperature < np.inf:", "or False:"),
        on=("softmax", "soften", "shd_loss"),
    ),
    mutant(
        "options-unchecked",
        "An option that is not in its list is read as the default.",
        ("attention", "    if value not in options:", "    if False:"),
    ),
    mutant(
        "errors-without-codes",
        "Bad input raises a plain ValueError.",
        ("attention", "from shd_ref.errors import ShdError", "ShdError = ValueError"),
    ),
    mutant(
        "wrong-mask-code",
        "A mask that is not boolean is refused as argument-value.",
        (
            "attention",
            '"argument-dtype",\n            f"{name} must be boolean',
            '"argument-value",\n            f"{name} must be boolean',
        ),
    ),
    mutant(
        "wrong-distribution-code",
        "A row that does not sum to one is refused as argument-value.",
        ("attention", '"not-a-distribution", f"{name} must have', '"argument-value", f"{name} must have'),
    ),
)
