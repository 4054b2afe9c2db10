"""What ``SHDTrainer`` is fed: samples with their records in training, samples alone in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from shd_ref.cache import Manifest, SampleRecord
from shd_ref.errors import ShdError, need
from shd_torch.data.batches import pack_records
from shd_torch.data.dataset import SupervisedDataset
from shd_torch.data.stream import SupervisedStream


@dataclass(frozen=True)
class SupervisedCollator:
    """Any collator for samples, with the records of a cache beside them in one buffer."""

    collate: Callable[[list[Any]], Mapping[str, Any]]
    manifest: Manifest
    layers: tuple[int, ...]  # of the student, that are read

    def __call__(self, batch: Sequence[Any]) -> dict[str, Any]:
        """Samples with records become a mapping with ``supervision``; samples alone what they always became."""
        if not isinstance(batch[0], tuple) or not isinstance(batch[0][1], SampleRecord):
            return dict(self.collate(list(batch)))
        samples, records = zip(*batch, strict=True)
        joined = dict(self.collate(list(samples)))
        mask = joined.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            _check_padding(mask, [self._seen(*pair) for pair in zip(samples, records, strict=True)])
        joined["supervision"] = pack_records(batch, self.manifest, self.layers)
        tallies = {form.SUBJECT: [form.tally(record) for record in records] for form in self.manifest.forms}
        joined["tallies"] = {name: torch.tensor(counts).sum(0) for name, counts in tallies.items() if counts[0]}
        return joined

    def _seen(self, sample: Any, record: SampleRecord) -> Tensor:
        """``(n,)``, the mask of the positions that the teacher saw; ones where the sample does not hold it."""
        name = self.manifest.inputs.mask
        if name is None or not isinstance(sample, Mapping) or name not in sample:
            return torch.ones(record.length, dtype=torch.bool)
        return torch.as_tensor(sample[name])[: record.length].bool()


class _Samples(Dataset[Any]):
    """Supervised data without its supervision."""

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


def _check_padding(mask: Tensor, seen: Sequence[Tensor]) -> None:
    """Refuse a batch whose collation moved the positions of a sample, or cut them."""
    for number, (row, expected) in enumerate(zip(mask.bool().cpu(), seen, strict=True)):
        n = len(expected)
        if len(row) < n or row[n:].any() or not torch.equal(row[:n], expected):
            what = "ones" if expected.all() else f"{expected.int().tolist()}, as in the sample,"
            rule = f"attention_mask must be {what} for the {n} positions that the teacher saw, then zeros"
            advice = "set the tokenizer's padding_side to 'right', and truncate as for precompute; or pad the samples"
            message = f"{rule}; sample {number} of a batch has {mask[number].tolist()}: {advice} before precompute"
            raise ShdError("inputs-invalid", message, "CACHE-82")
