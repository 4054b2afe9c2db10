"""Is the start worth it? A student, its teacher and other starts of its size in one table: cost and loss."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_ref.shrink.merges import HeadMerge, HeadWeights
from shd_ref.shrink.width import Axes
from shd_torch.shrink.calibration import read_data
from shd_torch.shrink.families import Array
from shd_torch.shrink.folders import load_teacher
from shd_torch.shrink.heads import AttentionStatistics, Squeezed
from shd_torch.shrink.sizes import ShrinkOptions, Squeezer, count_parameters
from shd_torch.shrink.student import Shrunk, shrink
from shd_torch.shrink.unfinished import Unfinished

MEASURES = ("cross entropy", "KL from the teacher", "1 - cosine")
"""Of the next token; of the logits; of the last hidden states."""


@torch.no_grad()
def choose_measure(teacher: Any, data: Mapping[str, Tensor]) -> str:
    """One of ``MEASURES``: the first for causal language models, the second for others with logits."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        output = teacher(**{key: tensor[:1] for key, tensor in data.items()})
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ShdError("inputs-invalid", f"the data to compare on must be the teacher's inputs: {error}") from error
    causal = type(teacher).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and "input_ids" in data
    return MEASURES[0 if causal else 1 if hasattr(output, "logits") else 2]


@torch.no_grad()
def measure_loss(teacher: Any, model: Any, data: Mapping[str, Tensor], batch_size: int, name: str) -> float:
    """Mean over the rows of a 2-D ``attention_mask`` of one of ``MEASURES``, of a model against its teacher."""
    total, count = 0.0, 0
    for start in range(0, len(next(iter(data.values()))), batch_size):
        batch = {key: tensor[start : start + batch_size] for key, tensor in data.items()}
        mask = batch.get("attention_mask")
        if name == MEASURES[0]:
            logits = model(**batch, use_cache=False).logits[:, :-1]
            there = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
            there = there if mask is None else mask[:, 1:].bool() & mask[:, :-1].bool()
            goal = batch["input_ids"][:, 1:][there]
            losses = torch.nn.functional.cross_entropy(logits[there].float(), goal, reduction="none")
        else:
            key = "logits" if name == MEASURES[1] else "last_hidden_state"
            outputs = [getattr(network(**batch), key).float() for network in (teacher, model)]
            if outputs[0].ndim == 3 and mask is not None and mask.shape == outputs[0].shape[:2]:
                outputs = [output[mask.bool()] for output in outputs]
            if key == "logits":
                log_p, log_q = (output.log_softmax(-1) for output in outputs)
                losses = (log_p.exp() * (log_p - log_q)).sum(-1)
            else:
                losses = 1 - torch.nn.functional.cosine_similarity(outputs[0], outputs[1], dim=-1)
        # None of these is below 0, but rounding can leave a row of equal outputs there.
        total, count = total + float(losses.clamp_min(0).sum()), count + losses.numel()
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
        model(**{key: tensor[:1] for key, tensor in data.items()})
    return int(counter.get_total_flops())


def _count_attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Two products, of ``(B, H, L, d)`` with ``(B, H_kv, S, d)`` and of the map with ``(B, H_kv, S, d_v)``."""
    samples, heads, length, size = query
    return 2 * samples * heads * length * key[2] * (size + value[3])


Choice = Callable[[HeadWeights, HeadMerge, AttentionStatistics], Sequence[Sequence[int]]]
"""Which teacher heads a student head is made of, student head by student head."""


def keep_largest(_: HeadWeights, merge: HeadMerge, statistics: AttentionStatistics) -> list[list[int]]:
    """Of each group the head with the largest output."""
    energy = np.einsum("hhhh->h", statistics.gram)
    return [[max(group, key=lambda head: float(energy[head]))] for group in merge.groups]


def keep_important(weights: HeadWeights, merge: HeadMerge, statistics: AttentionStatistics) -> list[list[int]]:
    """Minitron (arXiv 2407.14679): heads whose output before the projection is longest, not group by group.

    Inside key/value groups where all of these stay, else of all heads.
    """
    kept, groups = len(merge.groups), weights.num_kv_heads
    groups = groups if kept % groups == 0 else 1
    order = np.argsort(-statistics.output_size.reshape(groups, -1), axis=1, kind="stable")
    chosen = np.sort(order[:, : kept // groups], axis=1)
    starts = np.arange(groups)[:, None] * order.shape[1]
    return [[int(head)] for head in (chosen + starts).ravel()]


def pool_groups(_: HeadWeights, merge: HeadMerge, __: AttentionStatistics) -> list[list[int]]:
    """All heads of each group: the mean of their queries, keys and values, and the sum of their outputs."""
    return [list(group) for group in merge.groups]


def pick_heads(choose: Choice) -> Squeezer:
    """A ``squeezer`` of ``shrink`` that takes weights as they are, or their means."""

    def squeeze(
        weights: HeadWeights, merge: HeadMerge, study: AttentionStatistics, kv_heads: int, head_dim: int, **_: Any
    ) -> Squeezed:
        chosen = [list(heads) for heads in choose(weights, merge, study)]
        per = len(chosen) // kv_heads
        sharing = [chosen[start : start + per] for start in range(0, len(chosen), per)]
        read = [[weights.reads[head] for heads in group for head in heads] for group in sharing]
        scale = (head_dim / weights.head_dim) ** 0.5  # it undoes the scale of a head of another length

        def fit(rows: Array) -> Array:
            """``(..., d)`` filled with zeros, or cut, to the student's length."""
            room = max(0, head_dim - rows.shape[-1])
            return np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, room)])[..., :head_dim]

        means: dict[str, Any] = {"output_bias": weights.output_bias}
        for name, sets, factor in (("query", chosen, scale), ("key", read, 1.0), ("value", read, 1.0)):
            for field in (name, f"{name}_bias"):
                rows = getattr(weights, field)
                mean = None if rows is None else np.stack([rows[heads].mean(0) for heads in sets])
                means[field] = None if mean is None else fit(mean) * factor
        output = np.stack([weights.output[heads].sum(0) for heads in chosen]).swapaxes(1, 2)
        return Squeezed(HeadWeights(output=fit(output).swapaxes(1, 2), **means), "picked", False)

    return squeeze


def keep_channels(moment: Array, width: int, _: str) -> Axes:
    """``axes`` of ``shrink``: the channels with the largest activation in place of the principal axes."""
    size = moment.diagonal()
    best = np.sort(np.argsort(-size, kind="stable")[:width])
    return Axes(np.eye(len(moment))[:, best], float(size[best].sum() / size.sum()))


RIVALS: dict[str, dict[str, Any]] = {
    "kept heads": {"axes": keep_channels, "squeezer": pick_heads(keep_largest)},
    "mean pooling": {"axes": keep_channels, "squeezer": pick_heads(pool_groups)},
    "Minitron importance": {
        "axes": keep_channels,
        "squeezer": pick_heads(keep_important),
        "importance": lambda squares, _: np.sqrt(squares),  # how large neurons are, not how much of them is read
    },
}
"""Options of ``shrink`` by name; all are compared without alignment."""


@dataclass(frozen=True)
class Start:
    """One row of the table."""

    name: str
    parameters: int  # how many numbers it has
    flops: int  # floating point operations of matrix products, a sample
    loss: float  # on data that it was not made from, before any training
    measure: str  # what the loss is: "cross entropy" or "KL from the teacher", in nats, or "1 - cosine"


def compare_starts(
    teacher: nn.Module | str | os.PathLike[str],
    data: Mapping[str, Any],
    held_out: Mapping[str, Any],
    made: Shrunk,
    options: ShrinkOptions | None = None,
    *,
    progress: Callable[[int, int, str], None] | None = None,
    unfinished: Unfinished | None = None,
    **changes: Any,
) -> list[Start]:
    """The student that ``shrink`` made, its teacher and other starts of its size, in one table.

    Rivals have the student's sizes and are not aligned: those of ``RIVALS``; the teacher's layers as they are, where
    the student has fewer; random weights. One of them is in memory at a time. Teacher, data, options and changes are
    as they were given to ``shrink``, which made ``made``; losses are of ``held_out``, other samples in the same form.
    ``unfinished`` keeps rows as they are done, of a run that may be killed and started again.
    """
    options = (options or ShrinkOptions()).changed(changes)
    model: Any = teacher if isinstance(teacher, nn.Module) else load_teacher(teacher)
    model = model.float() if next(model.parameters()).dtype in (torch.float16, torch.bfloat16) else model
    example = next(model.parameters())
    samples = {
        name: tensor.to(device=example.device, dtype=example.dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in read_data(held_out).items()
    }
    rows, mode = [], model.training
    closing = ExitStack()
    try:
        measure = choose_measure(model.eval(), samples)
        if unfinished is None:  # what the rivals share
            folder = Path(closing.enter_context(TemporaryDirectory())) / "studies"
            unfinished = closing.enter_context(Unfinished(folder, {}))
        starts = _starts(model, data, made, options, unfinished)
        for number, (name, make) in enumerate(starts.items()):
            if progress is not None:
                progress(number, len(starts), name)
            piece = f"start-{number}"
            if (kept := unfinished.get(piece)) is not None:
                rows.append(Start(**kept[1]))
                continue
            start, size = make(), options.batch_size
            cost = count_parameters(start), count_flops(start, samples)
            rows.append(Start(name, *cost, measure_loss(model, start, samples, size, measure), measure))
            unfinished.put(piece, {}, asdict(rows[-1]))
    finally:
        model.train(mode)
        closing.close()
    return rows


def _starts(
    model: Any, data: Mapping[str, Any], made: Shrunk, options: ShrinkOptions, studies: Unfinished
) -> dict[str, Callable[[], Any]]:
    """By name what makes each start."""
    example = next(model.parameters())
    student = copy.deepcopy(made.student).to(example.dtype).eval()

    def plain(base: ShrinkOptions, **changes: Any) -> Callable[[], Any]:
        return lambda: shrink(model, data, base, align=False, studies=studies, **changes).student

    def random() -> Any:
        torch.manual_seed(0)
        return type(student)(student.config).to(device=example.device, dtype=example.dtype).eval()

    starts: dict[str, Callable[[], Any]] = {"teacher": lambda: model, "this student": lambda: student}
    if options.align:
        starts["closed form"] = plain(options)
    before, after = made.report["teacher"], made.report["student"]
    if any(before[name] != after[name] for name in ("heads", "hidden", "neurons")):
        starts |= {name: plain(options, **rival) for name, rival in RIVALS.items()}
    if after["layers"] != before["layers"]:
        layers = made.report["sources"]
        names = ", ".join(map(str, layers))
        starts[f"layers {names} as they are"] = plain(
            ShrinkOptions(batch_size=options.batch_size, stack=options.stack), layers=layers
        )
    return starts | {"random": random}
