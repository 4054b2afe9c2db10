"""Every function of the reference with one argument that does not fit: a right answer, or an error of chapter ERR."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import shd_ref
from shd_ref import ShdError


def numbers(*shape: int) -> Any:
    return np.random.default_rng(17).normal(size=shape)


def probs(*shape: int) -> Any:
    return shd_ref.softmax(numbers(*shape))


MASK = np.array([[True, False, True], [True, True, False]])
STUDENT = {"supervision": probs(2, 2, 3, 5), "student_logits": numbers(2, 2, 3, 5)}
LOSS = {"temperature": 2.0, "beta": 3.0, "loss_mask": MASK, "divergence": "js"}
TAUGHT = {"teacher_queries": numbers(2, 4, 3, 2), "teacher_keys": numbers(2, 2, 5, 2), "teacher_scale": 0.5}
OUTSIDE = {"outside": numbers(2, 4, 3), "groups": 2}
SCORER = {"queries": numbers(2, 2, 3, 2), "keys": numbers(2, 1, 5, 2), "scale": 0.25, "top_k": 2, "relu": False}
POOL = np.einsum("bijld,bmnld->bijmn", *[numbers(2, 3, 3, 2, 2)] * 2)
CALLS: dict[str, Mapping[str, Any]] = {
    "softmax": {"attn_logits": numbers(2, 2, 3, 5), "temperature": 3.0, "attn_mask": np.ones((3, 5), bool)},
    "soften": {"attn_probs": probs(2, 2, 3, 5), "temperature": 3.0, "row_sums": "at_most_one"},
    "value_outputs": {"values": numbers(2, 2, 5, 3), "output_projection": numbers(12, 4)},
    "merge_plan": {"num_teacher_heads": 9, "num_student_heads": 3, "kind": "balanced"},
    "plan_groups": {"plan": [[[0, 1], [2, 4]], [[1, 2]]], "num_teacher_heads": 5},
    "solve_alpha": {
        **{f"probs_{side}": probs(2, 3, 5) for side in "pq"},
        **{f"value_outputs_{side}": numbers(2, 5, 4) for side in "pq"},
        **{"rule": "as_printed", "query_mask": MASK},
    },
    "compose_mixing": {"alphas": [np.full((2, 2), 0.25)], "plan": [[[0, 1], [2, 3]]], "num_teacher_heads": 4},
    "mix_heads": {"teacher_probs": probs(2, 3, 3, 5), "mixing": probs(2, 2, 3)},
    "squeeze_heads": {
        **{"teacher_probs": probs(2, 4, 3, 5), "value_outputs": numbers(2, 4, 5, 3), "num_student_heads": 2},
        **{"strategy": "hard", "temperature": 2.0, "query_mask": MASK, "alpha_from": "softened"},
    },
    "shd_loss": {**STUDENT, **LOSS},
    "shd_loss_gradient": {**STUDENT, **LOSS},
    "shd_loss_gradient_qk": {
        **{"supervision": probs(2, 2, 3, 5), "queries": numbers(2, 2, 3, 4), "keys": numbers(2, 1, 5, 4)},
        **{"scale": 0.25, **LOSS},
    },
    "intersect_support": {**STUDENT, "loss_mask": MASK, "row_sums": "at_most_one"},
    "layer_map": {"num_teacher_layers": 9, "num_student_layers": 4, "pairs": [[0, 2], [3, 8]]},
    "align_tokens": {"attn_probs": probs(2, 2, 3, 5)},
    "gram_tensor": {
        **{"teacher_probs": probs(2, 4, 3, 5), "values": numbers(2, 2, 5, 3)},
        **{"output_projection": numbers(12, 4), "query_mask": MASK},
    },
    "solve_alpha_from_gram": {"gram": POOL, "p": 0, "q": 2},
    "merge_gram": {"gram": POOL, "p": 0, "q": 2, "alpha": np.full(2, 0.25)},
    "indexer_target": {**TAUGHT, **OUTSIDE, "block_size": 2},
    "indexer_loss": {**SCORER, **TAUGHT, **OUTSIDE, "loss_mask": MASK, "reduction": "rows"},
    "indexer_loss_gradient": {**SCORER, **TAUGHT, **OUTSIDE, "loss_mask": MASK, "reduction": "rows"},
}
FREE = """
softmax attn_logits: 0 1; soften attn_probs: 0 1 2 3; value_outputs values: 0 1 2 3
value_outputs output_projection: 1; compose_mixing alphas: 0; mix_heads teacher_probs: 2 3; mix_heads mixing: 1
squeeze_heads value_outputs: 3; shd_loss_gradient_qk keys: 1; align_tokens attn_probs: 0 1 2
gram_tensor values: 1; gram_tensor output_projection: 1; solve_alpha_from_gram gram: 0
indexer_target teacher_keys: 1 2; indexer_loss keys: 1; indexer_loss teacher_keys: 1
indexer_loss_gradient keys: 1; indexer_loss_gradient teacher_keys: 1
"""
"""Axes of one argument that no other argument shares, so that a longer or shorter one fits too."""
MAY_DIFFER = {
    tuple(entry.split(":")[0].split()): entry.split(":")[1].split()
    for entry in FREE.replace("\n", ";").split(";")
    if entry.strip()
}
MISFIT, ANY = "misfit", "any"


def variants(value: Any, free: list[str]) -> Iterator[tuple[str, Any]]:
    """Others in the place of one argument, each with whether it must be refused."""
    if isinstance(value, np.ndarray):
        for axis in range(value.ndim):
            rule = ANY if str(axis) in free else MISFIT
            yield rule, np.concatenate([value, np.take(value, [0], axis)], axis)
            if value.shape[axis] > 1:
                yield rule, np.take(value, range(value.shape[axis] - 1), axis)
        yield from ((ANY, value[None]), (ANY, value[0]), (MISFIT, value.astype(complex)), (MISFIT, value.astype(str)))
        if value.dtype == bool:
            yield from ((MISFIT, value.astype(kind)) for kind in (int, np.uint8, np.int8, object))
        else:
            broken = value.astype(float)
            broken.flat[0] = np.nan
            yield from ((MISFIT, broken), (MISFIT, value.astype(bool)), (ANY, value.astype(np.float16)))
    elif isinstance(value, bool):
        yield from ((MISFIT, other) for other in (2, 1.0, "yes", None, [value]))
    elif isinstance(value, int | float):
        odd = (True, np.True_, np.nan, np.inf, -np.inf, "2", 1j, [value], np.array(value, dtype=float))
        yield from ((MISFIT, other) for other in odd)
        yield from ((ANY, other) for other in (-1, 0, np.int64(value)))
        if isinstance(value, float):
            yield from ((MISFIT, 10**400), (ANY, np.float16(value)), (ANY, np.longdouble(value)))
    elif isinstance(value, str):
        yield from ((MISFIT, other) for other in ("nope", 7))
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from ((rule, {**value, name: other}) for rule, other in variants(item, free))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            for rule, other in variants(item, free):
                yield rule, [*value[:place], other, *value[place + 1 :]]


@pytest.mark.parametrize("name", CALLS)
def test_a_misfit_is_an_error_of_chapter_err(name: str) -> None:
    inputs, function = CALLS[name], getattr(shd_ref, name)
    function(**inputs)
    for argument, value in inputs.items():
        for rule, other in variants(value, MAY_DIFFER.get((name, argument), [])):
            try:
                function(**{**inputs, argument: other})
            except ShdError:
                continue
            assert rule == ANY, f"{name} took {argument}={other!r}"


@pytest.mark.parametrize("two", [2, 2.0, np.int64(2), np.uint8(2), np.float32(2), np.float16(2), np.longdouble(2)])
def test_numbers_of_every_kind_are_numbers(two: Any) -> None:
    logits, maps = numbers(1, 2, 3, 4), probs(1, 2, 3, 4)
    assert np.array_equal(shd_ref.softmax(logits, temperature=two), shd_ref.softmax(logits, temperature=2.0))
    plain = shd_ref.shd_loss(maps, logits, temperature=2.0, beta=2.0)
    assert shd_ref.shd_loss(maps, logits, temperature=two, beta=two) == plain
    torch = pytest.importorskip("torch")
    import shd_torch.maps as binding

    tensors = torch.tensor(maps), torch.tensor(logits)
    binding.shd_loss(*tensors, temperature=two, beta=two)
    odd: tuple[Any, ...] = (True, np.True_, np.nan, "2")
    for wrong in odd:
        with pytest.raises(ShdError, match="must be a finite number"):
            binding.shd_loss(*tensors, temperature=wrong)
        with pytest.raises(ShdError, match="must be a finite number"):
            binding.shd_loss(*tensors, beta=wrong)
