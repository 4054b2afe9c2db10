"""Factored records: queries and keys in place of maps (CACHE-140 to CACHE-153)."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.makers import FACTORS, job
from support.refusals import refusal

from shd_ref.cache import FACTORED_CODECS, LayerFactors, codec_error, decode_factors, encode_factors, rebuild_maps
from shd_ref.cache.codecs.factored import factored_kl_bound


def vectors(heads: int, length: int, width: int, seed: int, spread: float = 2.0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    offset = rng.normal(size=(heads, 1, width)) * 3  # real keys share a large part
    return (spread * rng.normal(size=(heads, length, width)) + offset).astype(np.float32)


def kl_rows(exact: NDArray[Any], found: NDArray[Any]) -> NDArray[np.float64]:
    p, q = exact.astype(np.float64), found.astype(np.float64)
    terms = np.where(p > 0, p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1)), 0)
    return np.asarray(terms.sum(axis=-1))


@pytest.mark.parametrize("codec", FACTORED_CODECS)
@pytest.mark.parametrize(
    ("heads", "key_heads", "length", "width", "support"),
    [(6, 2, 17, 5, "full"), (4, 4, 33, 8, "causal"), (2, 1, 1, 3, "full")],
)
def test_error_stays_below_the_bound(
    codec: str, heads: int, key_heads: int, length: int, width: int, support: str
) -> None:
    queries, keys = vectors(heads, length, width, 1), vectors(key_heads, length, width, 2)
    scale = width**-0.5
    coded = decode_factors(encode_factors(codec, queries, keys))
    exact, found = (rebuild_maps(q, k, scale, support) for q, k in ((queries, keys), coded))
    bound = factored_kl_bound(codec, queries, keys, scale, support)
    assert bound.shape == (heads, length)
    # What float32 maps of equal logits can differ by is no part of the bound.
    assert (kl_rows(exact, found) <= bound + 2.0**-22 * length).all()
    # The bound says something: int8 is coarse, float16 is fine.
    assert length == 1 or 0 < bound.mean() < (10.0 if codec == "int8" else 1e-3)
    mixing = np.full((2, heads), 1 / heads, dtype=np.float32)
    mixed = [rebuild_maps(q, k, scale, support, mixing) for q, k in ((queries, keys), coded)]
    assert (kl_rows(*mixed) <= bound.max(axis=0) + 2.0**-22 * length).all()


def test_what_all_keys_share_changes_nothing() -> None:
    queries, keys = vectors(2, 9, 4, 3), vectors(2, 9, 4, 4)
    shifted = keys + np.float32(256)  # which int8 would drown in, were keys not centred
    maps = [rebuild_maps(*decode_factors(encode_factors("int8", queries, k)), 0.5, "full") for k in (keys, shifted)]
    assert codec_error(maps[0], maps[1]).kl_max < 1e-3
    queries, keys = decode_factors(encode_factors("float16", queries, keys))
    np.testing.assert_allclose(keys.mean(axis=1), 0, atol=2.0**-9)


def test_zeros_and_tiny_numbers_have_no_step() -> None:
    queries = np.full((1, 2, 3), 1e-40, dtype=np.float32)
    coded = encode_factors("int8", queries, np.zeros((1, 2, 3), dtype=np.float32))
    assert coded.query_steps is not None
    assert not coded.query_steps.any()
    assert not coded.queries.any()


@pytest.mark.parametrize(
    ("codec", "change", "code"),
    [
        ("int4", None, "argument-value"),
        ("float16", 1e5, "argument-value"),
        ("int8", np.nan, "not-finite"),
        ("int8", np.inf, "not-finite"),
    ],
)
def test_what_cannot_be_coded_is_refused(codec: str, change: float | None, code: str) -> None:
    queries = vectors(2, 3, 4, 7)
    if change is not None:
        queries[0, 1, 2] = change
    with refusal(code):
        encode_factors(codec, queries, vectors(2, 3, 4, 8))


@pytest.mark.parametrize(
    "changes",
    [
        {"factors": (LayerFactors(2, 3, 0.5, 0), FACTORS[1])},
        {"padding": "in front"},
        {"factors": (LayerFactors(3, 3, 0.5), FACTORS[1])},
        {"factors": (LayerFactors(2, 3, 2.0**128), FACTORS[1])},  # maps of NaN
        {"codec": "sqrt8-row"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_manifest_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with refusal("argument-value"):
        job(**({"codec": "int8", "factors": FACTORS} | changes))
