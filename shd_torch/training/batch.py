"""A micro-batch from the collator to the loss: what it holds, what teaches it, and which of its rows count.

A loss is a mean over the rows that count in all micro-batches of a step, on all ranks: each micro-batch gives its
share of that mean (``batch_share``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from shd_ref.cache import Manifest, Maps, SampleRecord
from shd_ref.errors import ShdError, need
from shd_torch.capture.capture import Captured
from shd_torch.data.dataset import SupervisedDataset, SupervisedStream, pack_batch
from shd_torch.kd.embeddings import LEAST_TEXTS, MOST_TEXTS, EmbeddingAgreement, compare_embeddings
from shd_torch.recipes.terms import IGNORED
from shd_torch.supervision.cached import CachedSupervision
from shd_torch.supervision.supervision import Taught, TaughtLayers

_T = TypeVar("_T")


@dataclass(frozen=True)
class SupervisedCollator:
    """Any collator for samples, together with the records of a cache in one buffer."""

    collate: Callable[[list[Any]], Mapping[str, Any]]
    manifest: Manifest
    layers: tuple[int, ...]  # of the student, that are read

    def __call__(self, batch: Sequence[Any]) -> dict[str, Any]:
        """Samples with records become a mapping with ``supervision``; samples alone, the collator's batch."""
        if not isinstance(batch[0], tuple) or not isinstance(batch[0][1], SampleRecord):
            return dict(self.collate(list(batch)))
        samples, records = zip(*batch, strict=True)
        joined = dict(self.collate(list(samples)))
        mask = joined.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            _check_padding(mask, [self._seen(*pair) for pair in zip(samples, records, strict=True)])
        joined["supervision"] = pack_batch(batch, self.manifest, self.layers)
        tallies = {form.SUBJECT: [form.tally(record) for record in records] for form in self.manifest.forms}
        joined["tallies"] = {name: torch.tensor(counts).sum(0) for name, counts in tallies.items() if counts[0]}
        return joined

    def _seen(self, sample: Any, record: SampleRecord) -> Tensor:
        """``(n,)``, the mask of the positions that the teacher saw; ones where the sample does not hold it."""
        name, form = self.manifest.inputs.mask, self.manifest.find(Maps)
        if form is not None and form.groups is not None:  # which are of the student's tokens, without padding
            return torch.ones(record.shapes[0][0], dtype=torch.bool)
        if name is None or not isinstance(sample, Mapping) or name not in sample:
            return torch.ones(record.length, dtype=torch.bool)
        return torch.as_tensor(sample[name])[: record.length].bool()


class _Samples(Dataset[Any]):
    def __init__(self, supervised: SupervisedDataset) -> None:
        self._supervised = supervised

    def __len__(self) -> int:
        return len(self._supervised)

    def __getitem__(self, index: int) -> Any:
        return self._supervised.sample(index)


def leave_samples(dataset: Any, argument: str) -> Any:
    """Supervised data without its supervision; any other data as they are."""
    alone, advice = not isinstance(dataset, SupervisedStream), "give the data it was made of"
    need(alone, "argument-value", argument, "hold samples alone", "a SupervisedStream", remedy=advice)
    return _Samples(dataset) if isinstance(dataset, SupervisedDataset) else dataset


def _check_padding(mask: Tensor, masks: Sequence[Tensor]) -> None:
    """Refuse a batch whose collation moved the positions of a sample, or cut them."""
    for number, (row, expected) in enumerate(zip(mask.bool().cpu(), masks, strict=True)):
        n = len(expected)
        if len(row) < n or row[n:].any() or not torch.equal(row[:n], expected):
            expected_text = "ones" if expected.all() else f"{expected.int().tolist()}, as in the sample,"
            rule = f"attention_mask must be {expected_text} for the {n} positions that the teacher saw, then zeros"
            advice = "set the tokenizer's padding_side to 'right', and truncate as for precompute; or pad the samples"
            message = f"{rule}; sample {number} of a batch has {mask[number].tolist()}: {advice} before precompute"
            raise ShdError("inputs-invalid", message, "CACHE-82")


@dataclass(frozen=True)
class MicroBatch:
    """A collator's batch, taken apart."""

    inputs: dict[str, Any]  # of the student, with labels
    stored: CachedSupervision | None  # its supervision from a cache
    tallies: Mapping[str, Tensor]  # counts that a cache states of its records, by subject
    has_decoder: bool  # whether the rows of the student's outputs are those of a decoder, behind an encoder

    @classmethod
    def of(cls, collated: Mapping[str, Any], *, has_decoder: bool) -> MicroBatch:
        inputs = dict(collated)
        return cls(inputs, inputs.pop("supervision", None), inputs.pop("tallies", {}), has_decoder)

    def to(self, device: torch.device) -> MicroBatch:
        return replace(self, stored=None if self.stored is None else self.stored.to(device, non_blocking=True))

    @property
    def seen(self) -> dict[str, Any]:
        """The inputs without labels, as a teacher sees them."""
        return {name: value for name, value in self.inputs.items() if not name.startswith("labels")}

    def padding_mask(self, *, of_decoder: bool = False) -> Tensor | None:
        """``(B, L)``, True = a position of the sample (or of its decoder), by its own mask; None without one."""
        mask = self.inputs.get("decoder_attention_mask" if of_decoder else "attention_mask")
        return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def counted(self, rule: Rule, length: int | None = None) -> Tensor | None:
        """``(B, L)``, True = the row counts by a rule, is no padding, and a cache holds it; None: all do."""
        mask = _both(self.padding_mask(of_decoder=self.has_decoder), rule(self))
        if self.stored is None:
            return mask
        size = length if mask is None else mask.shape[1]
        return _both(mask, self.stored.decoder_mask(size) if self.has_decoder else self.stored.query_mask(size))

    def count(self, rule: Rule) -> int:
        mask = self.counted(rule)
        if mask is not None:
            return int(mask.sum())
        if not self.has_decoder:
            return count_positions(self)
        tokens = self.inputs.get("decoder_input_ids", self.inputs.get("labels"))
        return int(tokens.numel()) if isinstance(tokens, Tensor) else count_samples(self)


Rule: TypeAlias = Callable[[MicroBatch], Tensor | None]
"""Which rows count, ``(B, L)`` boolean, among those that are no padding; None: all."""

Counter: TypeAlias = Callable[[MicroBatch], int]
"""Rows of a micro-batch that a loss is a mean over."""


def every_row(batch: MicroBatch) -> None:
    """Each position of the attention mask."""


def labelled_rows(batch: MicroBatch) -> Tensor:
    labels = batch.inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2:
        got = tuple(labels.shape) if isinstance(labels, Tensor) else "none"
        rule = "a batch must hold labels (B, L) where they say which rows count"
        raise ShdError("argument-value", f"{rule}; got {got}")
    return labels != IGNORED


def rows_before_labels(batch: MicroBatch) -> Tensor:
    """Those that predict a label that counts, in causal language modelling."""
    counted = labelled_rows(batch)
    return torch.cat((counted[:, 1:], torch.zeros_like(counted[:, :1])), 1)


ROWS: Final[Mapping[str, Rule]] = {"positions": every_row, "labels": labelled_rows, "next_labels": rows_before_labels}
"""Rules by the option that names them."""


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first & second.to(first.device)


def count_samples(batch: MicroBatch) -> int:
    return len(_first(batch))


def count_positions(batch: MicroBatch) -> int:
    """Positions of the samples; of an encoder-decoder those of the encoder."""
    mask = batch.padding_mask()
    if mask is not None:
        return int(mask.sum())
    if batch.stored is not None:
        return sum(batch.stored.lengths)
    first = _first(batch)
    return int(first.shape[0] * (first.shape[1] if first.ndim == 2 else 1))


def _first(batch: MicroBatch) -> Tensor:
    return next(value for value in batch.inputs.values() if isinstance(value, Tensor))


class SeenEmbeddings:
    """Embeddings of an evaluation, of the first ``MOST_TEXTS`` texts, on the host."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._room = MOST_TEXTS

    def add(self, teacher: Tensor, student: Tensor) -> None:
        first = [side[: self._room].detach().to("cpu", torch.float32) for side in (teacher, student)]
        self._pairs.append((first[0], first[1]))
        self._room -= len(first[0])

    def agreement(self) -> EmbeddingAgreement | None:
        if MOST_TEXTS - self._room < LEAST_TEXTS:
            return None
        teacher, student = (torch.cat(side) for side in zip(*self._pairs, strict=True))
        return compare_embeddings(teacher, student)


@dataclass(frozen=True)
class Forward:
    """A pass of the student over a micro-batch, and the supervision that its terms compare it with."""

    batch: MicroBatch  # on the device
    supervisions: Sequence[Taught]  # of each teacher, the cache first
    outputs: Any  # of the student
    captured: Captured | None  # its attention, where a term is on it
    layers: TaughtLayers  # those that are taught
    student: str  # the name of its class, for errors
    project: Callable[[Mapping[int, Tensor]], dict[int, Tensor]]  # hidden states, by number, to the teachers' widths
    check: bool  # whether values are validated, which costs a device sync
    is_training: bool
    totals: Mapping[Counter, int]  # rows that count in the whole step of this rank
    device: torch.device
    seen: SeenEmbeddings | None  # where an evaluation gathers embeddings
    _shares: dict[Counter, Tensor] = field(default_factory=dict)

    def learn(self, read: Callable[[Taught], _T | None], lacking: str) -> list[_T]:
        """The targets of each teacher that has them; where none does, ``argument-value`` with this text."""
        targets = [target for supervision in self.supervisions if (target := read(supervision)) is not None]
        if not targets:
            raise ShdError("argument-value", lacking)
        return targets

    def share(self, counter: Counter) -> Tensor:
        if counter not in self._shares:
            rows = torch.tensor(counter(self.batch), device=self.device)
            self._shares[counter] = batch_share(rows, num_rows_in_all=self.totals[counter])
        return self._shares[counter]


def batch_share(num_rows: int | Tensor, *, num_rows_in_all: int | Tensor | None = None) -> Tensor:
    """The factor for this process's SHD term with which several ranks train like one on the same global batch.

    ``attention_kl`` and ``shd_loss`` average over the query rows that count. If ranks (or micro-batches) have
    different numbers of them, as with padded text, the mean of their means is not the mean of all rows; with this
    factor it is, provided that all heads count the same rows of a sample.

    Args:
        num_rows: rows that count in this process's batch, at least 0: for supervision from a cache
            ``supervision.query_mask().sum()``.
        num_rows_in_all: with gradient accumulation, the total rows of all micro-batches of this process's step; the
            gradients of the step must then be summed, not averaged.

    Returns:
        ``()`` float32, on the device of ``num_rows`` if that is a tensor; ranks x rows here / rows in all, 0 where no
        row counts anywhere. Every rank must call this as often as the others.

    Source: silent, as it trains in one process. Decision: D-10, a mean over the rows of the whole batch.
    """
    rows = torch.as_tensor(num_rows, dtype=torch.float64)
    all_rows = rows if num_rows_in_all is None else torch.as_tensor(num_rows_in_all).to(rows)
    ranks = 1
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
        all_rows = all_rows.clone()
        dist.all_reduce(all_rows)
    return torch.where(all_rows == 0, 0.0, ranks * rows / all_rows).to(torch.float32)
