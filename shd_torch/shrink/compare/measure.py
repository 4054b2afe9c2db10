"""What a model costs, and how far it is from its teacher on data that it was not made from."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shd_ref.errors import ShdError

REPEATS = 7
MEASURES = ("cross entropy", "KL from the teacher", "1 - cosine")
"""Of the next token; of the logits; of the last hidden states."""


@torch.no_grad()
def choose_measure(teacher: Any, data: Mapping[str, Tensor]) -> str:
    """One of ``MEASURES``: the first for causal language models, the second for others with logits.

    Raises:
        ShdError: ``inputs-invalid`` for inputs that the teacher does not take.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        found = teacher(**{key: part[:1] for key, part in data.items()})
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ShdError("inputs-invalid", f"the data to compare on must be the teacher's inputs: {error}") from error
    causal = type(teacher).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and "input_ids" in data
    return MEASURES[0 if causal else 1 if hasattr(found, "logits") else 2]


@torch.no_grad()
def measure_loss(teacher: Any, model: Any, data: Mapping[str, Tensor], batch_size: int, name: str) -> float:
    """Mean over what counts of a measure; entropies in nats.

    Args:
        teacher: the reference, for measures that need one.
        model: a student of it, or the teacher.
        data: inputs by name; rows that a 2-D ``attention_mask`` leaves out do not count.
        batch_size: samples that run together.
        name: of ``MEASURES``.

    Raises:
        ShdError: ``inputs-invalid`` where nothing counts.
    """
    total, count = 0.0, 0
    for start in range(0, len(next(iter(data.values()))), batch_size):
        batch = {key: part[start : start + batch_size] for key, part in data.items()}
        mask = batch.get("attention_mask")
        if name == MEASURES[0]:
            logits = model(**batch, use_cache=False).logits[:, :-1]
            there = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
            there = there if mask is None else mask[:, 1:].bool() & mask[:, :-1].bool()
            goal = batch["input_ids"][:, 1:][there]
            found = torch.nn.functional.cross_entropy(logits[there].float(), goal, reduction="none")
        else:
            key = "logits" if name == MEASURES[1] else "last_hidden_state"
            outputs = [getattr(each(**batch), key).float() for each in (teacher, model)]
            if outputs[0].ndim == 3 and mask is not None and mask.shape == outputs[0].shape[:2]:
                outputs = [output[mask.bool()] for output in outputs]
            if key == "logits":
                wanted, given = (output.log_softmax(-1) for output in outputs)
                found = (wanted.exp() * (wanted - given)).sum(-1)
            else:
                found = 1 - torch.nn.functional.cosine_similarity(outputs[0], outputs[1], dim=-1)
        # None of these is below 0, but rounding can leave a row of equal outputs there.
        total, count = total + float(found.clamp_min(0).sum()), count + found.numel()
    if not count:
        raise ShdError("inputs-invalid", "the data to compare on must hold a row that counts; got none")
    return total / count


def count_flops(model: Any, data: Mapping[str, Tensor]) -> int:
    """Floating point operations of matrix products in a forward pass of one sample."""
    from torch.utils.flop_counter import FlopCounterMode

    # The counter knows the fused attention of GPUs and not that of CPUs, and takes what it does not know as free.
    fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _count_attention}
    counter = FlopCounterMode(display=False, custom_mapping=fused)
    with torch.no_grad(), counter:
        model(**{key: part[:1] for key, part in data.items()})
    return int(counter.get_total_flops())


def _count_attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Two products, of ``(B, H, L, d)`` with ``(B, H_kv, S, d)`` and of the map with ``(B, H_kv, S, d_v)``."""
    samples, heads, length, size = query
    return 2 * samples * heads * length * key[2] * (size + value[3])


@torch.no_grad()
def time_model(model: Any, data: Mapping[str, Tensor], batch_size: int, repeats: int = REPEATS) -> float:
    """Seconds a sample of a forward pass: the median of several, after one that does not count."""
    batch = {key: part[:batch_size] for key, part in data.items()}
    size = len(next(iter(batch.values())))
    seconds = []
    for _ in range(repeats + 1):
        _wait(model)
        started = time.perf_counter()
        model(**batch)
        _wait(model)
        seconds.append((time.perf_counter() - started) / size)
    return statistics.median(seconds[1:])


def _wait(model: Any) -> None:
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
