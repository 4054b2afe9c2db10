"""``SHDTrainer``: Hugging Face's trainer with the SHD term, from a cache or from live teachers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shd_ref.cache import CacheReader, Manifest, StoredRecord
from shd_ref.errors import ShdError
from shd_torch.capture.capture import capture_attention
from shd_torch.data.batches import pack_records
from shd_torch.data.dataset import CacheJoin, SupervisedDataset, check_cache
from shd_torch.data.stream import SupervisedStream
from shd_torch.supervision.taught_layers import unite_layers
from shd_torch.teacher.online import LayerKeywords, OnlineTeacher, layer_kls
from shd_torch.training.record import StepRecord
from shd_torch.training.schedules import BetaSchedule, LossBalancer
from shd_torch.training.shares import batch_share

try:
    from accelerate.data_loader import prepare_data_loader
    from transformers import Trainer
except ImportError as error:
    raise ImportError(
        "shd_torch.training.trainer needs transformers and accelerate: pip install 'squeezing-heads[hf]'"
    ) from error


class SHDTrainer(Trainer):  # type: ignore[misc,unused-ignore]  # transformers is untyped in places
    """``transformers.Trainer`` that adds ``beta * KL(merged map || student map)`` to the student's own loss.

    The student keeps its fused attention; its queries and keys are captured while it trains. Evaluation, checkpoints
    and everything else are the base class's: a checkpoint holds the student alone. Ranks and accumulated batches
    with different numbers of rows add up to the whole batch (``batch_share``). A ``SupervisedStream`` gives each rank
    its share; what makes no whole step for every rank is left out at its end.

    Logged beside ``loss``, of all ranks, as means over the steps since the last log: ``base_loss``, ``shd_loss``
    (nats, before beta), ``shd_loss_layer_<i>``, ``beta`` (of the last micro-batch, with the balancer's scale),
    ``clipped_alphas`` (part of all merge weights that were outside [0, 1]) and ``wait_seconds`` (for data, a step).

    Args:
        *args: as for ``transformers.Trainer``.
        beta: weight of the term, a number or a function of progress in [0, 1] such as ``BetaSchedule``.
        teacher: live teachers (anything that is called and returns as ``OnlineTeacher`` does), which see every batch
            without its labels; or None where ``train_dataset`` is a ``SupervisedDataset`` or ``SupervisedStream``,
            whose cache then supervises. Several terms are averaged.
        temperature: T_a of both maps.
        balancer: scales the term to a part of the base loss before beta, each micro-batch of all ranks by itself.
        kl: more keywords of ``attention_kl``: ``backend``, ``value``, ``support``, ``product_dtype``, ``check``.
            ``check`` is on at the first step only, unless it is given.
        **kwargs: as for ``transformers.Trainer``.

    Raises:
        ShdError: ``cache-mismatch`` for a cache that is not for this student; ``argument-value`` without a teacher or
            supervised data, with ``DataParallel``, or where one rank is to read for all; during training what
            ``layer_kls`` raises, and ``inputs-invalid`` for batches that are not padded on the right.
    """

    def __init__(
        self,
        *args: Any,
        beta: float | Callable[[float], float],
        teacher: OnlineTeacher | Sequence[OnlineTeacher] | None = None,
        temperature: float = 1.0,
        balancer: LossBalancer | None = None,
        kl: LayerKeywords | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.beta = BetaSchedule(beta) if isinstance(beta, int | float) else beta
        self.teachers = [] if teacher is None else list(teacher) if isinstance(teacher, Sequence) else [teacher]
        self.temperature, self.balancer, self.kl = temperature, balancer, LayerKeywords(**(kl or {}))
        if self.args.n_gpu > 1:
            raise ShdError(
                "argument-value",
                f"SHDTrainer must run one process a device; got {self.args.n_gpu} devices in one process "
                "(DataParallel): start it with torchrun or accelerate",
            )
        if isinstance(self.train_dataset, CacheJoin):
            self._check_cache(self.train_dataset.cache)
            if self.accelerator.dispatch_batches:
                raise ShdError(
                    "argument-value",
                    "accelerator_config must leave dispatch_batches off; got True: every rank reads its own records",
                )
            self.data_collator = SupervisedCollator(
                # The base class removes columns from samples alone, not from samples with records.
                self._get_collator_with_removed_columns(self.data_collator, "training"),
                self.train_dataset.cache.manifest,
                self.train_dataset.layers,
            )
        elif not self.teachers:
            raise ShdError(
                "argument-value",
                "train_dataset must be a SupervisedDataset or SupervisedStream, or teacher an OnlineTeacher; got "
                "neither",
            )
        self._record = StepRecord()

    def _check_cache(self, cache: CacheReader) -> None:
        """Refuse a cache for another student before the first step, as far as the student's config says."""
        config = getattr(self.accelerator.unwrap_model(self.model), "config", None)
        check_cache(
            cache,
            num_student_heads=getattr(config, "num_attention_heads", None),
            # Of an encoder-decoder this is the encoder's alone: its kinds are counted in the first forward pass.
            num_student_layers=None if cache.manifest.attention.kinds else getattr(config, "num_hidden_layers", None),
            # Queries and keys are good at any temperature.
            temperature=self.temperature,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As the base class does it; a stream is read by every rank for itself."""
        if not isinstance(self.train_dataset, SupervisedStream):
            return super().get_train_dataloader()
        loader: DataLoader[Any] = DataLoader(
            self.train_dataset,
            self._train_batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
            persistent_workers=self.args.dataloader_persistent_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            drop_last=self.args.dataloader_drop_last,
        )
        # As one process: the stream divides itself, and Accelerate would divide each share again.
        prepared: DataLoader[Any] = prepare_data_loader(
            loader,
            self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            dispatch_batches=False,
        )
        return prepared

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """As the base class does it; of supervised data the samples alone."""
        chosen: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]  # type: ignore[index]  # a mapping by name
        return super().get_eval_dataloader(_leave_samples(chosen, "eval_dataset"))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """As the base class does it; of supervised data the samples alone."""
        return super().get_test_dataloader(_leave_samples(test_dataset, "test_dataset"))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The micro-batches of a step; counts their rows and how long they were waited for."""
        self._record.begin(self.state.global_step)
        started = time.perf_counter()
        taken = list(islice(epoch_iterator, num_batches))
        self._record.wait_seconds += time.perf_counter() - started
        if isinstance(self.train_dataset, SupervisedStream) and not self._is_whole_everywhere(taken, num_batches):
            # A rank that stepped alone would wait for the others for ever.
            taken, self.control.should_epoch_stop = [], True
        self._record.rows_in_step = sum(_count_rows(batch) for batch in taken)
        return super().get_batch_samples(iter(taken), len(taken), device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The student's own loss, and in training the SHD term beside it."""
        given = dict(inputs)
        stored, counts = given.pop("supervision", None), given.pop("alpha_counts", None)
        if not model.training:
            return super().compute_loss(model, given, return_outputs, num_items_in_batch)
        taught: list[Any] = [] if stored is None else [stored.to(self.args.device, non_blocking=True)]
        seen = {name: value for name, value in given.items() if not name.startswith("labels")}
        online = [teacher(**seen) for teacher in self.teachers]
        taught += online
        layers = unite_layers([each.layers for each in taught])
        with capture_attention(model, layers) as captured:
            base, outputs = super().compute_loss(model, given, True, num_items_in_batch)
        keywords = LayerKeywords(**({"check": self.state.global_step == 0} | self.kl))
        terms = layer_kls(
            captured,
            taught,
            loss_mask={layer: _mask_of_rows(given, layers.kind(layer)) for layer in layers},
            temperature=self.temperature,
            **keywords,
        )
        # The base class divides by the number of micro-batches what is not a part of the whole step yet.
        parts = 1 if self._is_scaled(num_items_in_batch) else self.current_gradient_accumulation_steps
        num_rows = _count_rows(inputs)
        share = batch_share(torch.tensor(num_rows, device=base.device), num_rows_in_all=self._record.rows_in_step)
        term = torch.stack(list(terms.values())).sum()
        beta = self.beta(self.state.global_step / max(self.state.max_steps, 1))
        scale = torch.tensor(beta, device=base.device)
        if self.balancer is not None:
            # Both as parts of the whole step, or the scale would depend on how it is divided.
            scale = scale * self.balancer.scale(base / parts, share * term)
        self._record.add(base / parts, {layer: share * each.detach() for layer, each in terms.items()}, scale)
        self._record.count_alphas(counts, online, num_rows)
        loss = base + parts * scale * share * term
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the terms of the steps since the last log to the training's own."""
        if "loss" in logs:
            here = self._record.means(self.state.global_step)
            # Ranks see different samples; every rank logs at the same step.
            reduced = self.accelerator.reduce(torch.tensor(list(here.values()), device=self.args.device), "mean")
            means = dict(zip(here, reduced.tolist(), strict=True))
            clipped, alphas = means.pop("clipped"), means.pop("alphas")
            logs |= means | {"clipped_alphas": clipped / alphas if alphas else 0.0}
        super().log(logs, start_time)

    def _is_whole_everywhere(self, taken: Sequence[Any], num_batches: int) -> bool:
        whole = len(taken) == num_batches
        if self.accelerator.num_processes == 1:
            return whole
        ranks = self.accelerator.reduce(torch.tensor(float(whole), device=self.args.device), "mean")
        return float(ranks) == 1.0

    def _is_scaled(self, num_items_in_batch: Tensor | int | None) -> bool:
        """Whether the base loss is normalised over the whole accumulated batch, as ``training_step`` sees it."""
        declared = getattr(self, "loss_is_scaled_for_ga", None)
        if declared is not None:
            return bool(declared)
        counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return counted or self.compute_loss_func is not None


@dataclass(frozen=True)
class SupervisedCollator:
    """Any collator for samples, with the records of a cache beside them in one buffer.

    Attributes:
        collate: of samples, to a mapping.
        manifest: of the cache.
        layers: student layers that are read.
    """

    collate: Callable[[list[Any]], Mapping[str, Any]]
    manifest: Manifest
    layers: tuple[int, ...]

    def __call__(self, batch: Sequence[Any]) -> dict[str, Any]:
        """Samples with records become a mapping with ``supervision``; samples alone what they always became.

        Raises:
            ShdError: ``inputs-invalid`` where the attention mask is not that of the samples, padded on the right.
        """
        if not isinstance(batch[0], tuple) or not isinstance(batch[0][1], StoredRecord):
            return dict(self.collate(list(batch)))
        samples, records = zip(*batch, strict=True)
        joined = dict(self.collate(list(samples)))
        mask = joined.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            _check_padding(mask, [self._seen(*pair) for pair in zip(samples, records, strict=True)])
        joined["supervision"] = pack_records(batch, self.manifest, self.layers)
        alphas = torch.cat([torch.from_numpy(record.alphas).flatten() for record in records])
        joined["alpha_counts"] = torch.tensor([int(((alphas < 0) | (alphas > 1)).sum()), alphas.numel()])
        return joined

    def _seen(self, sample: Any, record: StoredRecord) -> Tensor:
        """``(n,)``, the mask of the positions that the teacher saw; ones where the sample does not hold it."""
        name = self.manifest.inputs.mask
        if name is None or not isinstance(sample, Mapping) or name not in sample:
            return torch.ones(record.length, dtype=torch.bool)
        return torch.as_tensor(sample[name])[: record.length].bool()


def _mask_of_rows(given: Mapping[str, Any], kind: str | None) -> Tensor | None:
    """``(B, L)``, True = the row of an attention of this kind counts; None: those that the cache has mass for."""
    mask = given.get("decoder_attention_mask" if kind in ("decoder", "cross") else "attention_mask")
    return mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None


class _Samples(Dataset[Any]):
    """Supervised data without its supervision."""

    def __init__(self, supervised: SupervisedDataset) -> None:
        self._supervised = supervised

    def __len__(self) -> int:
        return len(self._supervised)

    def __getitem__(self, index: int) -> Any:
        return self._supervised.sample(index)


def _leave_samples(dataset: Any, argument: str) -> Any:
    """Supervised data without its supervision; any other data as they are."""
    if isinstance(dataset, SupervisedStream):
        raise ShdError(
            "argument-value",
            f"{argument} must hold samples alone; got a SupervisedStream: give the data it was made of",
        )
    return _Samples(dataset) if isinstance(dataset, SupervisedDataset) else dataset


def _count_rows(inputs: Mapping[str, Any]) -> int:
    """Query rows of a batch that count."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return int(mask.sum())
    if "supervision" in inputs:
        return sum(inputs["supervision"].lengths)
    first = next(value for value in inputs.values() if isinstance(value, Tensor))
    return first.shape[0] * (first.shape[1] if first.ndim == 2 else 1)


def _check_padding(mask: Tensor, seen: Sequence[Tensor]) -> None:
    """Refuse a batch whose collation moved the positions of a sample, or cut them."""
    for number, (given, expected) in enumerate(zip(mask.bool().cpu(), seen, strict=True)):
        n = len(expected)
        if len(given) < n or given[n:].any() or not torch.equal(given[:n], expected):
            what = "ones" if expected.all() else f"{expected.int().tolist()}, as in the sample,"
            raise ShdError(
                "inputs-invalid",
                f"attention_mask must be {what} for the {n} positions that the teacher saw, then zeros; "
                f"sample {number} of a batch has {mask[number].tolist()}: set the tokenizer's padding_side to "
                "'right', and truncate as for precompute; or pad the samples before precompute, and join those",
                "CACHE-82",
            )
