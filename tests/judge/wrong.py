"""Wrong implementations, to judge the judge: plain functions, each right but for one change.

``WRONG`` maps a name to an operation, the dtype at which the judge must see the change, and the function. They call
the reference's public operations and change what goes in or comes out: no local of the reference is named here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import shd_ref as right
from shd_ref import ShdError

Function = Callable[..., Any]
WRONG: dict[str, tuple[str, str, Function]] = {}


def wrong(operation: str, dtype: str = "float64") -> Callable[[Function], Function]:
    """Adds a function under its name."""

    def decorate(function: Function) -> Function:
        add(f"{operation}: {function.__name__.replace('_', ' ')}", function, dtype)
        return function

    return decorate


def add(name: str, function: Function, dtype: str = "float64") -> None:
    WRONG[name] = name.partition(":")[0], dtype, function


def named(table: Mapping[str, Function], make: Callable[[str, Function], Function]) -> None:
    """Adds a wrong implementation for each row: its name, perhaps with a dtype, and what is changed."""
    for name, change in table.items():
        name, _, dtype = name.partition(" @ ")
        add(name, make(name.partition(":")[0], change), dtype or "float64")


def first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value


def damaged(answer: Any, share: float = 1.01) -> Any:
    """An answer with its numbers a hundredth off."""
    if hasattr(answer, "_asdict"):
        return {name: damaged(value) for name, value in answer._asdict().items()}
    if hasattr(answer, "__dict__") and not isinstance(answer, np.ndarray):
        return {
            **vars(answer),
            **{name: damaged(vars(answer)[name]) for name in ("mixing", "probs") if name in vars(answer)},
        }
    if isinstance(answer, list | tuple):
        if all(isinstance(item, np.ndarray) for item in answer):
            return type(answer)(item * share for item in answer)
        return list(answer)[::-1] if len(answer) > 1 else []
    return answer * share


# --- right up to a size -------------------------------------------------------------------------------------------

_LIMITS: list[tuple[str, str, int, int]] = [
    *(("softmax", "attn_logits", axis, limit) for axis, limit in ((-1, 128), (-2, 64), (0, 4))),
    *(("soften", "attn_probs", axis, limit) for axis, limit in ((-1, 128), (-2, 16), (0, 4))),
    *(("value_outputs", "values", axis, limit) for axis, limit in ((0, 4), (1, 64), (2, 128))),
    ("value_outputs", "output_projection", 1, 64),
    *(("solve_alpha", "probs_p", axis, limit) for axis, limit in ((0, 4), (1, 64), (2, 128))),
    ("solve_alpha", "value_outputs_p", 2, 64),
    *(("mix_heads", "teacher_probs", axis, limit) for axis, limit in ((1, 64), (3, 128))),
    *(("squeeze_heads", "teacher_probs", axis, limit) for axis, limit in ((0, 4), (1, 64), (2, 64))),
    *(("shd_loss", "student_logits", axis, limit) for axis, limit in ((0, 4), (1, 64), (3, 128))),
    *(("shd_loss_gradient", "student_logits", axis, limit) for axis, limit in ((1, 16), (2, 128))),
    *(("shd_loss_gradient_qk", "queries", axis, limit) for axis, limit in ((0, 4), (2, 64))),
    *(("intersect_support", "supervision", axis, limit) for axis, limit in ((0, 4), (3, 64))),
    *(("align_tokens", "attn_probs", axis, limit) for axis, limit in ((1, 64), (3, 128))),
    *(("pool_tokens", "attn_probs", axis, limit) for axis, limit in ((0, 4), (2, 64))),
    *(("gram_tensor", "teacher_probs", axis, limit) for axis, limit in ((0, 4), (3, 64))),
    *(("solve_alpha_from_gram", "gram", 0, 4), ("merge_gram", "gram", 1, 4)),
    *(("indexer_target", "teacher_queries", axis, limit) for axis, limit in ((0, 4), (1, 64))),
    *(("indexer_target", "teacher_keys", 2, 128), ("indexer_loss", "teacher_keys", 2, 64)),
    *(("indexer_loss", "queries", 1, 32), ("indexer_loss_gradient", "keys", 2, 64)),
]


def limited(operation: str, argument: str, axis: int, limit: int) -> Function:
    def call(**inputs: Any) -> Any:
        answer = getattr(right, operation)(**inputs)
        shape = np.shape(first(inputs[argument]))
        return damaged(answer) if -axis <= len(shape) > axis and shape[axis] > limit else answer

    return call


for _operation, _argument, _axis, _limit in _LIMITS:
    _name = f"{_operation}: right up to {_limit} on axis {_axis} of {_argument}"
    add(_name, limited(_operation, _argument, _axis, _limit))


# --- an option that something else makes it forget ----------------------------------------------------------------

_FORGOTTEN: list[tuple[str, str, tuple[str, ...]]] = [
    ("softmax", "attn_mask", ("temperature",)),
    ("solve_alpha", "query_mask", ("rule", "row_sums")),
    ("squeeze_heads", "query_mask", ("alpha_from", "plan")),
    ("squeeze_heads", "alpha_from", ("temperature", "row_sums")),
    ("squeeze_heads", "strategy", ("plan", "query_mask")),
    ("shd_loss", "beta", ("reduction", "divergence")),
    ("shd_loss", "reduction", ("loss_mask", "support")),
    ("shd_loss_gradient", "beta", ("attn_mask", "divergence")),
    ("shd_loss_gradient_qk", "reduction", ("divergence", "loss_mask")),
    ("indexer_target", "outside", ("groups", "block_size")),
    ("indexer_target", "segments", ("outside",)),
    ("indexer_loss", "reduction", ("segments", "loss_mask")),
    ("indexer_loss", "restriction", ("groups", "outside")),
    ("diagnose", "query_mask", ()),
    ("align_tokens", "columns", ("rows", "query_mask")),
    ("pool_tokens", "column_groups", ("row_groups", "query_mask")),
    ("gram_tensor", "query_mask", ("row_sums",)),
]


def forgetful(operation: str, option: str, others: tuple[str, ...]) -> Function:
    def call(**inputs: Any) -> Any:
        answer = getattr(right, operation)(**inputs)
        if option in inputs and all(name in inputs for name in others):
            try:
                return getattr(right, operation)(**{name: value for name, value in inputs.items() if name != option})
            except ShdError:
                return answer
        return answer

    return call


for _operation, _option, _others in _FORGOTTEN:
    _name = f"{_operation}: {_option} is forgotten with {' and '.join(_others) or 'anything'}"
    add(_name, forgetful(_operation, _option, _others))


# --- masks and dtypes ---------------------------------------------------------------------------------------------


def coerced(operation: str, argument: str, kind: str) -> Function:
    def call(**inputs: Any) -> Any:
        mask = inputs.get(argument)
        if isinstance(mask, np.ndarray) and (
            mask.dtype.kind == "O" if kind == "objects" else mask.dtype.name == kind
        ):
            inputs[argument] = mask.astype(bool)
        return getattr(right, operation)(**inputs)

    return call


for _operation, _argument in (
    *(("softmax", "attn_mask"), ("solve_alpha", "query_mask"), ("squeeze_heads", "query_mask")),
    *(("shd_loss", "loss_mask"), ("shd_loss", "attn_mask"), ("indexer_loss", "loss_mask")),
):
    for _kind in ("uint8", "int64", "objects"):
        add(f"{_operation}: {_argument} of {_kind} is taken", coerced(_operation, _argument, _kind))


@wrong("solve_alpha")
def differences_of_unsigned_integers_wrap(**inputs: Any) -> Any:
    p, q = inputs["value_outputs_p"], inputs["value_outputs_q"]
    if np.asarray(p).dtype.kind == "u" and np.asarray(q).dtype == np.asarray(p).dtype:
        inputs["value_outputs_q"] = np.asarray(p + q, np.float64) - p
    return right.solve_alpha(**inputs)


# --- other arguments than those given, or another answer ----------------------------------------------------------


def altered(operation: str, change: Function) -> Function:
    """Computes with changed arguments, once the reference has taken them as they are."""

    def call(**inputs: Any) -> Any:
        getattr(right, operation)(**inputs)
        return getattr(right, operation)(**{**inputs, **change(inputs)})

    return call


def answered(operation: str, change: Function) -> Function:
    """Changes the answer, by what it is and by the arguments."""
    return lambda **inputs: change(getattr(right, operation)(**inputs), inputs)


def each(change: Function, value: Any) -> Any:
    return [change(item) for item in value] if isinstance(value, list) else change(value)


def lists_to(number: int) -> Function:
    return lambda i: {name: value[:number] for name, value in i.items() if isinstance(value, list)}


def with_float32(*names: str) -> Function:
    return lambda i: {name: float(np.float32(i[name])) for name in names if name in i}


def renamed(segments: Any) -> Any:
    """Runs of equal ids, numbered: an id that returns is another segment."""
    steps = np.diff(segments, axis=1, prepend=segments[:, :1]) != 0
    return np.cumsum(steps, axis=1)


def segments_as(change: Function) -> Function:
    return lambda i: {"segments": change(i["segments"])} if "segments" in i else {}


def first_of_groups(inputs: Mapping[str, Any]) -> Any:
    """Gives a key that lies in two groups to the first alone."""
    groups = inputs.get("column_groups")
    if groups is None:
        return {}
    return {"column_groups": groups * ((groups != 0).cumsum(axis=-2) == 1)}


def narrow_outputs(inputs: Mapping[str, Any]) -> Any:
    narrow = np.asarray(inputs["value_outputs"], np.float32).astype(np.float64)
    return {"value_outputs": narrow} if np.isfinite(narrow).all() else {}


def flipped_keys(inputs: Mapping[str, Any]) -> Any:
    plain = not isinstance(inputs["teacher_keys"], list) and inputs.get("block_size", 1) == 1
    plain = plain and inputs.get("top_k") is not None and not {"attn_mask", "segments"} & set(inputs)
    return {name: inputs[name][:, :, ::-1] for name in ("keys", "teacher_keys")} if plain else {}


def clamped(inputs: Mapping[str, Any]) -> Any:
    def below_60(array: Any) -> Any:
        return np.minimum(np.asarray(array, np.float64), 60.0)

    return {"outside": each(below_60, inputs["outside"])} if "outside" in inputs else {}


def no_small_mass(maps: Any) -> Any:
    return np.where(np.asarray(maps, np.float64) < 1e-8, 0, maps).astype(maps.dtype)


named(
    {
        "shd_loss: forgets the third layer": lists_to(2),
        "indexer_target: three layers are two": lists_to(2),
        "merge_plan: adjacent beyond 64 heads": lambda i: (
            {"kind": "progressive"} if i["num_teacher_heads"] > 64 and isinstance(i.get("kind"), str) else {}
        ),
        "softmax: temperature is float32": with_float32("temperature"),
        "indexer_loss: scale is float32": with_float32("scale", "teacher_scale"),
        "squeeze_heads: value outputs are float32": narrow_outputs,
        "indexer_loss: a negative scale selects by size": lambda i: (
            {} if i.get("top_k") is None else {"scale": abs(i["scale"])}
        ),
        "indexer_target: a negative scale is its size": lambda i: {"teacher_scale": abs(i["teacher_scale"])},
        "indexer_target: segments that return are others": segments_as(renamed),
        "indexer_target: segments are small integers": segments_as(lambda ids: ids.astype(np.int32)),
        "indexer_loss: ties go to the last": flipped_keys,
        "indexer_target: far sinks are clamped": clamped,
        "shd_loss: mass below 1e-8 is dropped": lambda i: {"supervision": each(no_small_mass, i["supervision"])},
        "pool_tokens: a key in two groups is the first one's": first_of_groups,
        "pool_tokens: rows weigh alike": lambda i: (
            {} if i.get("row_groups") is None else {"row_groups": (i["row_groups"] != 0).astype(float)}
        ),
        "align_tokens: sorts its columns": lambda i: {"columns": sorted(i["columns"])} if i.get("columns") else {},
    },
    altered,
)


def halved_in_part(probs: Any, _: Any) -> Any:
    probs[..., ::2] *= 0.5
    return probs


def with_a_floor(right_probs: Any, inputs: Mapping[str, Any]) -> Any:
    """A row whose peak is below 1e-12 is lost at small temperatures (TEMP-6)."""
    maps = np.asarray(inputs["attn_probs"], np.float64)
    powers = (maps / np.maximum(maps.max(-1, keepdims=True), 1e-12)) ** (1 / float(inputs["temperature"]))
    return right_probs if inputs["temperature"] == 1 else right_probs * powers.any(-1, keepdims=True)


def rounded_in_float32(pairs: Any, inputs: Mapping[str, Any]) -> Any:
    ratio = np.float32(inputs["num_teacher_layers"]) / np.float32(inputs["num_student_layers"])
    rounded = [(s, int(np.floor((s + 1) * ratio + np.float32(0.5))) - 1) for s, _ in pairs]
    return pairs if inputs.get("pairs") is not None else rounded


def other_half(answer: Any, inputs: Mapping[str, Any]) -> Any:
    alone = inputs.get("strategy") == "hard" and answer.num_degenerate and len(answer.plan) == 1
    return {**vars(answer), "alphas": [1 - alpha for alpha in answer.alphas]} if alone else answer


named(
    {
        "shd_loss_gradient: forgets the fourth layer": lambda a, _: (
            [g if number < 3 else 0 * g for number, g in enumerate(a)] if isinstance(a, list) else a
        ),
        "compose_mixing: six rounds at most": lambda a, i: a * 1.001 if len(i["alphas"]) > 6 else a,
        "layer_map: rounds in floating point": rounded_in_float32,
        "indexer_loss_gradient: the sign of the scale is lost": lambda a, i: (
            tuple(-part for part in a) if i["scale"] < 0 else a
        ),
        "softmax: loses row sums in half of its entries": halved_in_part,
        "soften: its peak has a floor": with_a_floor,
        "solve_alpha: snaps to one @ float32": lambda a, _: np.where(np.abs(a - 1) < 9e-4, 1.0, a),
        "squeeze_heads: hard takes the second at a tie": other_half,
        "squeeze_heads: counts one degenerate too few": lambda a, _: {
            **vars(a),
            "num_degenerate": min(a.num_degenerate, 1),
        },
        "squeeze_heads: counts no alpha as clipped @ float32": lambda a, _: {**vars(a), "num_clipped": 0},
        "squeeze_heads: counts degenerate alphas as clipped @ bfloat16": lambda a, _: {
            **vars(a),
            "num_clipped": a.num_clipped + a.num_degenerate,
        },
        "matched_plan: takes adjacent pairs": lambda _, i: right.merge_plan(
            np.shape(i["calibration"][0][0])[1], i["num_student_heads"]
        ),
        "shd_loss: is cut off at zero": lambda a, _: max(a, 0.0),
        "pool_tokens: dropped mass is not scaled back": lambda a, i: a._replace(
            probs=a.probs * (1 - a.dropped / np.maximum(a.dropped + a.probs.sum(-1), 1e-300))[..., None]
        ),
        "pool_tokens: an empty group attends alike": lambda a, _: a._replace(
            probs=np.where(a.probs.any(-1, keepdims=True), a.probs, 1 / a.probs.shape[-1])
        ),
    },
    answered,
)


@wrong("value_outputs")
def sums_of_bytes_wrap(values: Any, output_projection: Any) -> Any:
    if np.asarray(output_projection).dtype == np.uint8:
        output_projection = np.asarray(output_projection).astype(np.int8)
    return right.value_outputs(values, output_projection)


@wrong("mix_heads")
def sums_of_mixing_are_checked_as_float64(teacher_probs: Any, mixing: Any) -> Any:
    raw = np.asarray(mixing)
    answer = right.mix_heads(teacher_probs, mixing)
    if raw.dtype == np.float32 and (np.abs(raw.astype(np.float64).sum(2) - 1) > 1e-9).any():
        raise ShdError("mixing-invalid", "rows of mixing must sum to 1")
    return answer


@wrong("indexer_loss")
def top_k_beyond_the_blocks_is_refused(**inputs: Any) -> Any:
    if inputs.get("top_k") and inputs["top_k"] > np.shape(inputs["keys"])[2]:
        raise ShdError("argument-value", "top_k must be at most the number of blocks")
    return right.indexer_loss(**inputs)


# --- state between calls ------------------------------------------------------------------------------------------


def remembering(operation: str, key: Callable[[Mapping[str, Any]], Any]) -> Function:
    known: dict[Any, Any] = {}

    def call(**inputs: Any) -> Any:
        name = key(inputs)
        if name not in known:
            known[name] = inputs, getattr(right, operation)(**inputs)
        answer = known[name][1]
        return answer.copy() if isinstance(answer, np.ndarray) else answer

    return call


def _by_identity(inputs: Mapping[str, Any]) -> Any:
    return tuple((name, id(value)) for name, value in inputs.items())


def _by_first_and_shape(inputs: Mapping[str, Any]) -> Any:
    arrays = [
        (name, value.shape, repr(value.reshape(-1)[:1]))
        for name, value in inputs.items()
        if isinstance(value, np.ndarray)
    ]
    return repr(arrays), repr([(name, value) for name, value in inputs.items() if not isinstance(value, np.ndarray)])


for _operation in ("softmax", "solve_alpha", "shd_loss", "mix_heads", "indexer_target", "plan_groups"):
    add(f"{_operation}: remembered by identity", remembering(_operation, _by_identity))
for _operation in ("softmax", "soften", "value_outputs"):
    add(f"{_operation}: remembered by shape and first entry", remembering(_operation, _by_first_and_shape))


for _operation in ("solve_alpha_from_gram", "merge_gram"):
    add(f"{_operation}: gram remembered by bytes", remembering(_operation, lambda inputs: inputs["gram"].tobytes()))


def sticking(operation: str, option: str) -> Function:
    kept: dict[str, Any] = {}

    def call(**inputs: Any) -> Any:
        given = {option: inputs[option]} if option in inputs else dict(kept)
        answer = getattr(right, operation)(**inputs)
        kept.clear()
        if option in inputs:
            kept.update(given)
            return answer
        return getattr(right, operation)(**{**inputs, **given})

    return call


for _operation, _option in (
    ("softmax", "temperature"),
    ("squeeze_heads", "strategy"),
    ("shd_loss", "beta"),
    ("shd_loss", "divergence"),
    ("indexer_loss", "relu"),
    ("solve_alpha", "rule"),
):
    add(f"{_operation}: {_option} sticks to the next call", sticking(_operation, _option))


_buffer: dict[str, Any] = {}


@wrong("softmax")
def one_buffer_for_all_threads(**inputs: Any) -> Any:
    _buffer["logits"] = inputs
    for _ in range(300):
        pass
    return right.softmax(**_buffer["logits"])


@wrong("softmax")
def fails_after_a_refusal(**inputs: Any) -> Any:
    try:
        answer = right.softmax(**inputs)
    except ShdError:
        _buffer["refused"] = True
        raise
    return answer * (0.5 if _buffer.pop("refused", False) else 1.0)


_kept = np.zeros(1 << 12)


@wrong("solve_alpha")
def answers_in_one_array(**inputs: Any) -> Any:
    answer = right.solve_alpha(**inputs)
    _kept[: answer.size] = answer
    return _kept[: answer.size]


@wrong("soften")
def answers_with_the_argument(**inputs: Any) -> Any:
    right.soften(**inputs)
    return inputs["attn_probs"] if inputs["temperature"] == 1 else right.soften(**inputs)


@wrong("squeeze_heads")
def clears_rows_that_do_not_count(**inputs: Any) -> Any:
    answer = right.squeeze_heads(**inputs)
    maps, mask = inputs["teacher_probs"], inputs.get("query_mask")
    if mask is not None and maps.flags.writeable:
        maps[np.broadcast_to(~mask[:, None, :, None], maps.shape)] = 0
    return answer


@wrong("compose_mixing")
def empties_its_plan(alphas: Any, plan: Any, num_teacher_heads: Any) -> Any:
    mixing = right.compose_mixing(alphas, plan, num_teacher_heads)
    if isinstance(plan, list):
        plan.clear()
    return mixing


# --- thresholds and refusals ---------------------------------------------------------------------------------------


@wrong("solve_alpha")
def degenerate_below_1e_12(**inputs: Any) -> Any:
    alpha = right.solve_alpha(**inputs)
    a_p, a_q, x_p, x_q = (
        np.asarray(inputs[f"{name}_{side}"], np.float64) for name in ("probs", "value_outputs") for side in "pq"
    )
    counted = np.ones(a_p.shape[:2]) if inputs.get("query_mask") is None else inputs["query_mask"]
    both = x_p + x_q
    sums = [((each**2).sum(-1) * counted).sum(-1) for each in ((a_p - a_q) @ both, a_p @ both, a_q @ both)]
    n = (a_q - a_p) @ x_p if inputs.get("rule", "least_squares") == "least_squares" else a_q @ x_p - a_p @ x_q
    top = -((n * ((a_p - a_q) @ both)).sum(-1) * counted).sum(-1)
    flat = sums[0] <= 1e-12 * (sums[1] + sums[2])
    return (
        np.where(flat, 0.5, np.clip(top / np.where(sums[0] == 0, 1, sums[0]), 0, 1))
        if (alpha.shape == top.shape)
        else alpha
    )


@wrong("shd_loss")
def names_no_positions(**inputs: Any) -> Any:
    try:
        return right.shd_loss(**inputs)
    except ShdError as error:
        raise ShdError(error.code, "no") from None


@wrong("softmax")
def refuses_minus_infinity_in_whole_rows(**inputs: Any) -> Any:
    if np.isneginf(np.asarray(inputs["attn_logits"], np.float64)).all(-1).any():
        raise ShdError("not-finite", "a row without keys")
    return right.softmax(**inputs)


def accepting(operation: str, code: str) -> Function:
    def call(**inputs: Any) -> Any:
        try:
            return getattr(right, operation)(**inputs)
        except ShdError as error:
            if error.code == code:
                return 0.0
            raise

    return call


for _operation, _code in (
    *(("softmax", "argument-value"), ("softmax", "argument-shape"), ("softmax", "not-finite")),
    ("soften", "not-a-distribution"),
    *(("solve_alpha", "argument-shape"), ("solve_alpha", "not-a-distribution"), ("mix_heads", "mixing-invalid")),
    *(("squeeze_heads", "heads-exceed"), ("squeeze_heads", "plan-invalid"), ("shd_loss", "support-mismatch")),
    *(("layer_map", "layers-invalid"), ("indexer_loss", "argument-value"), ("indexer_target", "argument-dtype")),
):
    add(f"{_operation}: accepts {_code}", accepting(_operation, _code))
