"""Sparse targets as a cache stores them, bytes to numbers on the device: rows at once, and no loop over them."""

from __future__ import annotations

import torch
from torch import Tensor

from shd_ref.cache import Logits
from shd_torch.supervision.supervision import tile_entries

_TINY = 2.0**-25  # what float16 rounds to nothing: a tail that close to one leaves at least this to the head


def decode_rows(form: Logits, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of ``topk`` and ``sampled`` (CACHE-164 to CACHE-167); numbers are found in float64.

    Bytes that no encoder makes give numbers that mean nothing, within the vocabulary; a reader has compared their
    checksums, and the loss looks at its first targets.

    Args:
        form: how they are coded.
        rows: uint8 ``(R, row_bytes)``.

    Returns:
        The first three fields of ``TopkTargets``, or with draws of ``SampledTargets``: ids ``(R, slots)``, numbers by
        slot, numbers by row; float32.
    """
    # Bits are unpacked to a number each.
    together = max(tile_entries(rows.device) // (8 * rows.shape[1]), 1)
    parts = [_decode(form, part) for part in torch.split(rows, together)]
    ids, by_slot, by_row = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, by_slot, by_row


def _decode(form: Logits, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    numbers = 2 + 2 * (form.draws > 0)
    header = rows[:, :numbers].contiguous().view(torch.float16).double()
    log_tail = header[:, :1]
    codes_end = numbers + -(-form.head * form.value_bits // 8)
    codes = _unpack(rows[:, numbers:codes_end], form.head, form.value_bits)
    shares = (codes.double() / ((1 << form.value_bits) - 1)).pow(3)
    # log(1 - exp(log_tail)), stable: what the tail leaves is shared out by the codes.
    rest = torch.log(-torch.expm1(log_tail.clamp(max=-_TINY)))
    log_probs = torch.log(shares / shares.sum(-1, keepdim=True)) + rest
    head_end = codes_end + _id_bytes(form.head, form.vocab_size)
    ids = _unpack_ids(rows[:, codes_end:head_end], form.head, form.vocab_size)
    if not form.draws:
        return ids, log_probs.float(), log_tail[:, 0].float()
    drawn = _unpack_ids(rows[:, head_end:], form.draws, form.vocab_size)
    each = (log_tail.exp() / form.draws).expand(-1, form.draws)
    return torch.cat((ids, drawn), -1), torch.cat((log_probs.exp(), each), -1).float(), header[:, 1].float()


def _low_bits(count: int, vocab_size: int) -> int:
    return max(vocab_size // count, 1).bit_length() - 1


def _id_bytes(count: int, vocab_size: int) -> int:
    if not count:
        return 0
    low = _low_bits(count, vocab_size)
    return -(-count * low // 8) + -(-(count + ((vocab_size - 1) >> low) + 1) // 8)


def _unpack_ids(rows: Tensor, count: int, vocab_size: int) -> Tensor:
    """Ascending ids by Elias and Fano: low bits side by side, then a one at ``i + (id >> low)`` for each id."""
    if not count:
        return torch.zeros((len(rows), 0), dtype=torch.int64, device=rows.device)
    low = _low_bits(count, vocab_size)
    start = -(-count * low // 8)
    eight = torch.arange(8, device=rows.device, dtype=torch.uint8)
    bits = ((rows[:, start:, None] >> eight) & 1).flatten(1)
    # Where the running number of ones reaches i + 1 stands the i-th of them.
    numbers = torch.arange(count, device=rows.device, dtype=torch.int32)
    wanted = (numbers + 1).expand(len(rows), count).contiguous()
    places = torch.searchsorted(bits.cumsum(-1, dtype=torch.int32), wanted)
    ids = ((places - numbers) << low) | _unpack(rows[:, :start], count, low)
    # An index beyond the vocabulary would end a process on a GPU.
    return ids.clamp_(max=vocab_size - 1)


def _unpack(rows: Tensor, count: int, width: int) -> Tensor:
    """``(R, count)`` numbers of ``width`` bits, at most 24, side by side from the lowest bit up."""
    if not count or not width:
        return torch.zeros((len(rows), count), dtype=torch.int64, device=rows.device)
    first = torch.arange(count, device=rows.device) * width
    byte, shift = first >> 3, first & 7
    numbers = torch.zeros((len(rows), count), dtype=torch.int64, device=rows.device)
    for step in range((width + 14) // 8):  # the bytes that a number may touch
        # Beyond the last byte nothing of a number stands.
        numbers |= rows[:, (byte + step).clamp(max=rows.shape[1] - 1)].long() << (8 * step)
    return (numbers >> shift) & ((1 << width) - 1)
