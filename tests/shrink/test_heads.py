"""Merges from the gram tensor are those of maps and value outputs; the goldens hold the weights of merged heads."""

from typing import Any

import numpy as np
import pytest

from shd_ref import gram_tensor, matched_plan, merge_plan, softmax, squeeze_heads, value_outputs
from shd_ref.shrink.heads import grouped_plan, merge_heads, pooled_mixing

RANDOM = np.random.default_rng(2)
PROBS, VALUES = softmax(2 * RANDOM.normal(size=(1, 6, 9, 9))), RANDOM.normal(size=(1, 6, 9, 3))
PROJECTION = RANDOM.normal(size=(18, 12))
OUTPUTS, GRAM = value_outputs(VALUES, PROJECTION), gram_tensor(PROBS, VALUES, PROJECTION)[0]


@pytest.mark.parametrize("count", [5, 4, 3, 2])
def test_without_key_groups_it_is_the_matched_plan_of_one_long_sample(count: int) -> None:
    pytest.importorskip("networkx")
    assert grouped_plan(GRAM, count, 1) == matched_plan([(PROBS, OUTPUTS)], count)


@pytest.mark.parametrize(("kind", "kv_heads"), [("matched", 2), ("matched", 3), ("balanced", 2), ("progressive", 2)])
def test_a_merge_by_a_kind_of_plan(kind: str, kv_heads: int) -> None:
    """Inside key heads where these divide the student's heads; the alphas are those of the plan."""
    if kind == "matched":
        pytest.importorskip("networkx")
    merge = merge_heads(GRAM, 4, kind, kv_heads)
    plan: Any = grouped_plan(GRAM, 4, {2: 2, 3: 1}[kv_heads]) if kind == "matched" else merge_plan(6, 4, kind)
    assert merge.plan == plan
    np.testing.assert_array_equal(merge.mixing, pooled_mixing(GRAM, plan).mixing)


def test_a_pool_s_alphas_are_those_of_its_merged_maps() -> None:
    """Two rounds on the gram tensor equal the same rounds on maps and value outputs (GRAM-4)."""
    mixing = pooled_mixing(GRAM, merge_plan(6, 2)).mixing
    np.testing.assert_allclose(mixing, squeeze_heads(PROBS, OUTPUTS, 2).mixing[0], atol=1e-9)
