"""``AttentionRule``: all pairs of what it may hold, whole and in tiles, against logits made entry by entry."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shd_torch.supervision import AttentionRule

BATCH, HEADS, KEY_HEADS, ROWS, KEYS, WIDTH = 2, 4, 2, 7, 9, 3
STRUCTURES: tuple[dict[str, Any], ...] = ({}, {"is_causal": True}, {"window": 3}, {"is_causal": True, "window": 2})
MASKS = ("none", "keys", "heads", "added")
OTHERS: tuple[dict[str, Any], ...] = ({}, {"softcap": 1.5})


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def make_mask(name: str) -> Tensor | None:
    if name == "none":
        return None
    if name == "keys":
        mask = torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool)
        mask[1, ..., :4] = False
        return mask
    kept = draw(HEADS, ROWS, KEYS) > -0.5
    kept[1, 2] = False  # a row that may attend to nothing
    return kept if name == "heads" else draw(1, HEADS, ROWS, KEYS).masked_fill(~kept, -torch.inf)


def expected_logits(q: Tensor, k: Tensor, rule: AttentionRule) -> Tensor:
    """One entry after another."""
    logits = torch.full((BATCH, HEADS, ROWS, KEYS), -torch.inf, dtype=torch.float64)
    mask = None if rule.attn_mask is None else rule.attn_mask.expand(BATCH, HEADS, ROWS, KEYS)
    for b, h, i, j in itertools.product(*map(range, logits.shape)):
        entry = None if mask is None else mask[b, h, i, j].item()
        masked = entry is False or entry == -math.inf
        if masked or (rule.is_causal and j > i) or (rule.window is not None and abs(i - j) >= rule.window):
            continue
        z = (q[b, h, i] @ k[b, h // (HEADS // KEY_HEADS), j]).item() * (rule.scale or WIDTH**-0.5)
        z = z if rule.softcap is None else rule.softcap * math.tanh(z / rule.softcap)
        logits[b, h, i, j] = z + (0.0 if entry is None or entry is True else entry)
    return logits


@pytest.mark.parametrize("other", OTHERS, ids=["plain", "softcap"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_whole_and_in_tiles(structure: dict[str, Any], mask: str, other: dict[str, Any]) -> None:
    q, k = draw(BATCH, HEADS, ROWS, WIDTH), draw(BATCH, KEY_HEADS, KEYS, WIDTH)
    rule = AttentionRule(make_mask(mask), scale=None if mask == "keys" else -0.7, **structure, **other)
    expected = expected_logits(q, k, rule)
    may_attend = ~torch.isneginf(expected)
    torch.testing.assert_close(rule.logits(q, k), expected)
    fitted = rule.fit(q, k)
    torch.testing.assert_close(fitted.fit(q, k).logits(q, k), expected)
    live = fitted.live_rows(ROWS, KEYS, q.device)
    everywhere = torch.ones(BATCH, HEADS, ROWS, dtype=torch.bool)
    assert torch.equal(everywhere if live is None else live.expand(BATCH, HEADS, ROWS), may_attend.any(-1))
    for rows in (slice(0, ROWS), slice(0, 3), slice(4, 7), slice(6, 7)):
        keys = fitted.key_range(rows, KEYS)
        assert not may_attend[:, :, rows, : keys.start].any()
        assert not may_attend[:, :, rows, keys.stop :].any()
        tile, _ = fitted.tile_logits(q[:, :, rows], k[:, :, keys], rows, keys)
        target = expected[:, :, rows, keys]
        open_rows = may_attend[:, :, rows, keys].any(-1, keepdim=True)  # the others hold anything finite
        torch.testing.assert_close(tile.masked_fill(~open_rows, 0.0), target.masked_fill(~open_rows, 0.0))
        assert torch.isfinite(tile.masked_fill(open_rows, 0.0)).all()
    heads = torch.tensor([3, 2])  # that read one key head
    part = fitted.narrow(slice(1, 2), heads)
    torch.testing.assert_close(part.logits(q[1:, heads], k[1:, 1:]), expected[1:, heads])


def test_a_learned_bias_gets_its_gradient_and_masked_keys_none() -> None:
    q, k, bias = draw(1, 1, 2, 3), draw(1, 1, 2, 3), torch.tensor([[0.5, -torch.inf], [0.0, 1.0]])
    logits = AttentionRule(bias.requires_grad_()).logits(q, k)
    logits.masked_fill(torch.isneginf(logits), 0.0).sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [[1.0, 0.0], [1.0, 1.0]]
