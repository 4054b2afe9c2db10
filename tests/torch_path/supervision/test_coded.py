"""Maps as a cache's bytes: every tile is what the reference decodes, and the loss is that of the maps."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.makers import job
from support.refusals import refusal

from shd_ref.cache import CODECS, decode, encode, pack
from shd_torch import attention_kl
from shd_torch.supervision import CachedSupervision, Coded, Dense, TaughtLayers

HEADS, LENGTHS = 3, (7, 7, 5, 7, 1)
LONGEST = 8


def make_maps(length: int, support: str, seed: int) -> NDArray[np.float32]:
    logits = np.random.default_rng(seed).normal(0, 1.5, (HEADS, length, length))
    weights = np.exp(logits) * (np.tri(length) if support == "causal" else 1)
    weights[:, length // 2, :] = 0  # a row that is fully masked
    return (weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30)).astype(np.float32)


def make_batch(codec: str, support: str) -> tuple[CachedSupervision, list[NDArray[np.float32]]]:
    """Two layers as the bytes of a cache, and what the reference decodes from them."""
    blobs, expected = [], []
    for layer in range(2):
        maps = np.zeros((len(LENGTHS), HEADS, LONGEST, LONGEST), np.float32)
        for sample, length in enumerate(LENGTHS):
            codes = encode(codec, make_maps(length, support, 10 * layer + sample))
            blobs.append(pack(codes, support, codec))
            maps[sample, :, :length, :length] = decode(codec, codes)
        expected.append(maps)
    buffer = torch.from_numpy(np.concatenate(blobs))
    form = replace(job().attention, num_student_heads=HEADS, codec=codec, support=support, temperature=2.0)
    others = ((), (), 0, (), frozenset())  # forms that the batch lacks
    return CachedSupervision(buffer, LENGTHS, TaughtLayers((0, 2)), form, (), *others), expected


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shd_torch.supervision.supervision.TILE_ENTRIES", 20)


@pytest.mark.parametrize("support", ["full", "causal"])
@pytest.mark.parametrize("codec", CODECS)
def test_tiles_are_the_decoded_maps(codec: str, support: str, small_tiles: None) -> None:
    batch, expected = make_batch(codec, support)
    for coded, maps in zip(batch.supervise(LONGEST), expected, strict=True):
        assert coded.shape == maps.shape
        assert coded.num_heads == HEADS
        np.testing.assert_allclose(coded.probs(temperature=2.0), maps, rtol=1e-6, atol=0)
        for rows in (slice(0, 3), slice(2, 8), slice(6, 7), slice(7, 8)):
            keys = coded.key_range(rows)
            tile = coded.probs(rows, keys, temperature=2.0)
            np.testing.assert_allclose(tile, maps[:, :, rows, keys], rtol=1e-6, atol=0)
            assert not maps[:, :, rows, keys.stop :].any()
        np.testing.assert_allclose(coded.mass(), maps.sum(-1), atol=2e-6)
        some = coded.samples(1, 4)
        np.testing.assert_allclose(some.probs(temperature=2.0), maps[1:4], rtol=1e-6, atol=0)
    for one, maps in zip(batch.decode(LONGEST), expected, strict=True):
        np.testing.assert_allclose(one, maps, rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("support", ["full", "causal"])
@pytest.mark.parametrize("backend", ["dense", "sdpa"])
def test_the_loss_is_that_of_the_maps(backend: str, support: str, codec: str, small_tiles: None) -> None:
    batch, _ = make_batch(codec, support)
    generator = torch.Generator().manual_seed(0)
    arguments: dict[str, Any] = {"is_causal": support == "causal", "temperature": 2.0, "backend": backend}
    results = []
    for supervision in (batch.supervise(LONGEST), [Dense(maps, 2.0) for maps in batch.decode(LONGEST)]):
        generator.manual_seed(0)
        shape = (len(LENGTHS), HEADS, LONGEST, 4)
        q, k = ([torch.randn(shape, generator=generator, requires_grad=True) for _ in range(2)] for _ in range(2))
        loss = attention_kl(q, k, supervision, **arguments)
        loss.backward()
        results.append([loss.detach(), *(one.grad for one in (*q, *k))])
    for coded, dense in zip(*results, strict=True):
        torch.testing.assert_close(coded, dense, rtol=1e-5, atol=1e-7)
    assert results[0][0] > 0.1


def test_what_is_refused() -> None:
    batch, _ = make_batch("sqrt8-row", "full")
    with refusal("argument-shape", "longest sample's 7; got 6"):
        batch.supervise(6)
    (coded, _) = batch.supervise()
    assert coded.length == 7
    with refusal("argument-value", "--temperature 1"):
        coded.probs()


def test_numbers_that_are_no_distribution_are_found() -> None:
    entries = torch.full((1, 2, 3, 3), 1 / 3)
    for place, code in (((0, 1, 2, 0), torch.nan), ((0, 0, 1, 1), -1.0)):
        broken = entries.clone()
        broken[place] = code
        buffer = broken.view(torch.uint8).flatten()
        coded = Coded(buffer, (0,), (3,), 2, "float32", "full", 3)
        with refusal("not-finite" if np.isnan(code) else "not-a-distribution"):
            attention_kl(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), coded)
    sound = replace(coded, buffer=entries.view(torch.uint8).flatten())
    assert attention_kl(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), sound) == pytest.approx(0, abs=1e-6)
