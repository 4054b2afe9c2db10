"""Which rows of a batch count, and how many: the same for a loss and for what its mean is divided by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from shd_ref.errors import ShdError

ROWS: Final[tuple[str, ...]] = ("positions", "labels", "next_labels")
"""Rules by which rows of logits count."""

IGNORED: Final = -100
"""The label that does not count, by the convention of PyTorch's cross entropy and Hugging Face."""


def mask_of_rows(given: Mapping[str, Any], *, of_decoder: bool = False) -> Tensor | None:
    """``(B, L)``, True = a position of the sample, by the batch's own mask; None where it has none.

    Args:
        given: the student's inputs.
        of_decoder: of an encoder-decoder, whether the rows are of its decoder.
    """
    mask = given.get("decoder_attention_mask" if of_decoder else "attention_mask")
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


def counted_rows(rule: str, given: Mapping[str, Any], *, of_decoder: bool = False) -> Tensor | None:
    """``(B, L)``, True = the row of logits counts by a rule of ``ROWS``; None: all do.

    Args:
        rule: one of ``ROWS``.
        given: the student's inputs, with ``labels`` ``(B, L)`` for the rules that read them.
        of_decoder: as in ``mask_of_rows``.

    Raises:
        ShdError: ``argument-value`` where labels are needed and absent.
    """
    mask = mask_of_rows(given, of_decoder=of_decoder)
    if rule == "positions":
        return mask
    labels = given.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2:
        got = "none" if labels is None else f"{tuple(getattr(labels, 'shape', ()))}"
        raise ShdError("argument-value", f"a batch must hold labels (B, L) where rows={rule!r}; got {got}")
    counted = labels != IGNORED
    if rule == "next_labels":
        counted = torch.cat((counted[:, 1:], torch.zeros_like(counted[:, :1])), 1)
    return counted if mask is None else counted & mask


def count_rows(given: Mapping[str, Any], rule: str = "positions", *, of_decoder: bool = False) -> int:
    """Rows of a batch that count by a rule of ``ROWS``, or its ``"samples"``.

    Args:
        given: the student's inputs; with ``supervision`` of a cache, which knows its lengths.
        rule: one of ``ROWS``, or ``"samples"``.
        of_decoder: as in ``mask_of_rows``.
    """
    first = next(value for value in given.values() if isinstance(value, Tensor))
    if rule == "samples":
        return int(first.shape[0])
    mask = counted_rows(rule, given, of_decoder=of_decoder)
    if mask is not None:
        return int(mask.sum())
    if of_decoder:
        tokens = given.get("decoder_input_ids", given.get("labels"))
        return int(tokens.numel()) if isinstance(tokens, Tensor) else int(first.shape[0])
    if "supervision" in given:
        return sum(given["supervision"].lengths)
    return int(first.shape[0] * (first.shape[1] if first.ndim == 2 else 1))
