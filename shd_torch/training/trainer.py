"""``SHDTrainer``: Hugging Face's trainer with terms of distillation, from a cache or from live teachers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shd_ref.cache import Attention, CacheReader
from shd_ref.cache.storage.storage import write_errors
from shd_ref.errors import ShdError, need
from shd_torch.capture.capture import capture_attention
from shd_torch.capture.outputs import read_output
from shd_torch.data.dataset import CacheJoin, SupervisedDataset, SupervisedStream
from shd_torch.live.online import OnlineSupervision, OnlineTeacher
from shd_torch.supervision.supervision import Taught, unite_layers
from shd_torch.training.batch import (
    Counter,
    Forward,
    MicroBatch,
    SeenEmbeddings,
    SupervisedCollator,
    count_samples,
    leave_samples,
)
from shd_torch.training.recipe import Recipe
from shd_torch.training.terms import (
    AttentionTerm,
    EmbeddingTerm,
    Groups,
    HiddenTerm,
    KdTerm,
    Measured,
    Projectors,
    Term,
    Weight,
    no_logits,
    read_weight,
)

try:
    from accelerate.data_loader import prepare_data_loader
    from transformers import Trainer
    from transformers.trainer import TRAINER_STATE_NAME
except ImportError as error:
    raise ImportError(
        "shd_torch.training.trainer needs transformers and accelerate: pip install '.[hf]' (in a checkout)"
    ) from error


class SHDTrainer(Trainer):  # type: ignore[misc,unused-ignore]  # transformers is untyped in places
    """``transformers.Trainer`` with additional loss terms on attention, logits, hidden states and embeddings.

    The attention term is ``beta * KL(merged map || student map)``. The student keeps its fused attention; its queries
    and keys are captured during training. A student that returns no loss, because it has no head or its batches no
    labels, is trained with the terms only; its ``eval_loss`` is then their weighted sum, which needs live teachers or
    a ``SupervisedDataset`` for evaluation too. Checkpoints and everything else are the base class's: a checkpoint
    contains only the student, with the terms' projectors in their own file. Ranks and accumulated batches with
    different numbers of rows add up to the whole batch (``batch_share``), for each term by its counted rows. At the
    end of a ``SupervisedStream``, samples that do not fill a step are dropped.

    Logged in addition to ``loss``, over all ranks, as means over the steps since the last log: ``base_loss``;
    ``shd_loss`` (nats, before beta), ``shd_loss_layer_<i>``, ``beta`` (of the last micro-batch) and
    ``clipped_alphas`` (share of merge weights outside [0, 1]); ``kd_loss`` (before its weight) and ``kd_weight``;
    ``hidden_loss``, ``hidden_loss_layer_<i>`` and ``hidden_weight``; ``embedding_loss`` and ``embedding_weight``; and
    ``wait_seconds`` (per step, for data). Where evaluation measures the terms (a student that returns no loss),
    that on embeddings logs ``eval_spearman`` and ``eval_neighbours`` of ``compare_embeddings``, of the student's own
    embeddings of at most 2048 texts on each rank, the first ones.

    Args:
        *args: as for ``transformers.Trainer``.
        beta: weight of the term on attention, a number or a function of progress in [0, 1] such as ``BetaSchedule``;
            None leaves it out.
        recipe: one of ``shd_torch.recipes`` that replaces the student's loss in training, by name or as a ``Recipe``
            with options; its teachers' logits are cached or live. Its terms are logged as ``<term>_loss`` and
            ``<term>_weight``, their weighted sum as ``base_loss``. Evaluation keeps the student's loss.
        kd: the term on logits, or None. The student's loss computes the logits in any case; a loop without that loss
            can avoid them with ``linear_kd_loss``.
        hidden: the term on hidden states, or None. The student is called with ``output_hidden_states=True``.
        embeddings: the term on embeddings of texts, or None; from a cache alone.
        terms: your own further ones (``shd_torch.training.Term``).
        teacher: live teachers (callables that return the same as ``OnlineTeacher``), which see every batch without
            its labels; or None if ``train_dataset`` is a ``SupervisedDataset`` or ``SupervisedStream`` with a cache.
            Several are averaged, each term over the teachers that provide its targets.
        kl: keywords of ``attention_kl``: ``temperature``, T_a of both maps; ``backend``, ``value``, ``support``,
            ``product_dtype``; and ``check``, which is on at the first step only, unless given, for all terms.
        groups: for a student with fewer tokens than its teacher: which token each of the teacher's is part of, as for
            ``layer_kls``; or a function of the student's outputs, where it merges tokens in its forward pass. Records
            must not be pooled already. None where both have the same tokens, or the cache's maps are pooled.
        **kwargs: as for ``transformers.Trainer``.

    Raises:
        ShdError: ``cache-mismatch`` for a cache that is not for this student; ``argument-value`` without a term, a
            teacher or supervised data, for a term that these cannot teach, or with ``DataParallel``; during training
            what ``layer_kls``, ``kd_loss`` and ``hidden_loss`` raise, and ``inputs-invalid`` for batches that are not
            padded on the right.
    """

    def __init__(
        self,
        *args: Any,
        beta: Weight | None = None,
        recipe: str | Recipe | None = None,
        kd: KdTerm | None = None,
        hidden: HiddenTerm | None = None,
        embeddings: EmbeddingTerm | None = None,
        terms: Sequence[Term] = (),
        teacher: OnlineTeacher | Sequence[OnlineTeacher] | None = None,
        kl: Mapping[str, Any] | None = None,
        groups: Groups | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._is_self_taught: bool = self.can_return_loss  # as CLIP is; the attribute changes in prediction_step
        if not torch.accelerator.is_available():
            self.args.dataloader_pin_memory = False  # there is nothing to pin for, of which PyTorch warns
        self.kl = dict(kl or {})
        self.attention = None if beta is None else AttentionTerm(beta, self.kl, groups)
        self.terms: list[Term] = [t for t in (self.attention, kd, hidden, embeddings, *terms) if t is not None]
        self.recipe = Recipe(recipe) if isinstance(recipe, str) else recipe
        has_term = bool(self.terms) or self.recipe is not None
        rule = "have a term: beta, recipe, kd, hidden or embeddings"
        need(has_term, "argument-value", "SHDTrainer", rule, "none")
        self.teachers = [] if teacher is None else list(teacher) if isinstance(teacher, Sequence) else [teacher]
        devices = f"{self.args.n_gpu} devices in one process (DataParallel)"
        remedy = "start it with torchrun or accelerate"
        is_one = self.args.n_gpu <= 1
        need(is_one, "argument-value", "SHDTrainer", "run one process a device", devices, remedy=remedy)
        if self.recipe is not None:
            self._check_recipe(self.recipe, kd)
        if isinstance(self.train_dataset, CacheJoin):
            if self.attention is not None and (self.train_dataset.layers or not self.teachers):
                self._check_cache(self.train_dataset.cache)
            self._check_rows(self.train_dataset)
            self.data_collator = SupervisedCollator(
                # The base class removes columns from samples alone, not from samples with records.
                self._get_collator_with_removed_columns(self.data_collator, "training"),
                self.train_dataset.cache.manifest,
                self.train_dataset.layers,
            )
        else:
            # A recipe of labels alone is a baseline.
            needs_teaching = bool(self.terms) or self.recipe is None or self.recipe.kind.is_taught
            rule = "be a SupervisedDataset or SupervisedStream, or teacher an OnlineTeacher"
            need(not needs_teaching or bool(self.teachers), "argument-value", "train_dataset", rule, "neither")
        if self.eval_dataset is not None and self.args.eval_strategy != "no":
            sets = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
            for dataset in sets:
                self._check_eval(dataset)
        self._base = None if self.recipe is None else self.recipe.for_student(self._student)
        self._totals: dict[Counter, int] = {}  # rows that count in the running step's micro-batches
        self._record: StepRecord | None = None  # of the steps since the last log
        self._seen: SeenEmbeddings | None = None  # in an evaluation
        self.projectors = self._make_projectors()

    def _check_cache(self, cache: CacheReader) -> None:
        """Refuse a cache for another student before the first step, as far as the student's config says."""
        form, config = cache.manifest.attention, getattr(self._student, "config", None)
        # Where they differ by layer, the first forward pass counts them.
        heads = None if getattr(config, "layer_sizes", None) else getattr(config, "num_attention_heads", None)
        # Of an encoder-decoder this is the encoder's alone: its kinds are counted in the first forward pass.
        layers = None if form.kinds else _count_attention(config)
        advice = f"precompute with --student-layers {layers}, or with --layer-pairs where some are not to be taught"
        for name, of_student, of_cache, remedy in (
            ("num_student_heads", heads, form.num_student_heads, "precompute one for this student"),
            ("num_student_layers", layers, form.num_student_layers, advice),
        ):
            fits, rule = None in (of_student, of_cache) or of_student == of_cache, f"be {of_cache}, as {cache.folder}"
            need(fits, "cache-mismatch", name, f"{rule} was made for", of_student, remedy=remedy, spec_id="CACHE-104")

    def _check_recipe(self, recipe: Recipe, kd: KdTerm | None) -> None:
        """Refuse a second base loss, and a second term on logits."""
        names = ("kd", "compute_loss_func", "label_smoothing_factor")
        for name, value in zip(names, (kd, self.compute_loss_func, self.label_smoother), strict=True):
            rule = f"be left out where recipe={recipe.name!r} says what the loss is"
            need(value is None, "argument-value", name, rule, type(value).__name__)

    def _check_rows(self, joined: CacheJoin) -> None:
        """Refuse a term that neither the records nor a live teacher can teach."""
        folder, form = str(joined.cache.folder), joined.logits
        if self.recipe is not None and form is not None:
            self.recipe.check_cache(form.codec, form.temperature, folder)
        elif self.recipe is not None and self.recipe.kind.is_taught and not self.teachers:
            raise ShdError("cache-mismatch", no_logits("recipe", folder), "CACHE-160")
        for term in self.terms:
            term.check_cache(joined, has_teacher=bool(self.teachers))

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        return super()._get_train_sampler(leave_samples(dataset, "train_dataset"))  # which may look at lengths

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return super()._get_eval_sampler(leave_samples(eval_dataset, "eval_dataset"))

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
        alone: dict[str, Any] = {"num_processes": 1, "process_index": 0, "dispatch_batches": False}
        prepared: DataLoader[Any] = prepare_data_loader(loader, self.accelerator.device, put_on_device=True, **alone)
        return prepared

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """As in the base class; supervised data give plain samples if the student has a loss."""
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]  # type: ignore[index]  # a mapping by name
        self._check_eval(dataset)
        if self._takes_labels or not isinstance(dataset, SupervisedDataset):
            return super().get_eval_dataloader(leave_samples(dataset, "eval_dataset"))
        collator: Any = self.data_collator
        is_joined = isinstance(collator, SupervisedCollator)
        alone = collator.collate if is_joined else self._get_collator_with_removed_columns(collator, "evaluation")
        self.data_collator = SupervisedCollator(alone, dataset.cache.manifest, dataset.layers)
        try:
            return super().get_eval_dataloader(dataset)
        finally:
            self.data_collator = collator

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """As in the base class; if the student has no loss, that of the terms, if there is a teacher."""
        if self._has_own_loss(inputs):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        unlabelled = {name: value for name, value in inputs.items() if not name.startswith("label")}
        attributes = self.label_names, self.can_return_loss
        self.label_names, self.can_return_loss = [], bool(self.teachers) or "supervision" in inputs
        try:
            loss, outputs, _ = super().prediction_step(model, unlabelled, prediction_loss_only, ignore_keys)
        finally:
            self.label_names, self.can_return_loss = attributes
        return loss, outputs, None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in the base class, with how far student and teacher agree on which texts are alike."""
        of_texts = any(isinstance(term, EmbeddingTerm) for term in self.terms)
        self._seen = SeenEmbeddings() if of_texts else None
        try:
            output = super().evaluation_loop(*args, **kwargs)
            agreement = None if self._seen is None else self._seen.agreement()
        finally:
            self._seen = None
        if of_texts and output.metrics is not None:
            sums = [0.0, 0.0, 0.0] if agreement is None else [agreement.spearman, agreement.neighbours, 1.0]
            reduced = self.accelerator.reduce(torch.tensor(sums, device=self.args.device), "sum")
            spearman, neighbours, ranks = reduced.tolist()
            prefix = kwargs.get("metric_key_prefix", "eval")
            measured = {"spearman": spearman, "neighbours": neighbours} if ranks else {}
            output.metrics.update({f"{prefix}_{name}": total / ranks for name, total in measured.items()})
        return output

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return super().get_test_dataloader(leave_samples(test_dataset, "test_dataset"))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The micro-batches of a step; counts their rows and measures the waiting time."""
        # Not at step 0 where a training is resumed.
        self._record = self._record or StepRecord(self.state.global_step)
        self.projectors.zero_grad()  # the base class does so for the student alone
        started = time.perf_counter()
        batches = list(islice(epoch_iterator, num_batches))
        self._record.wait_seconds += time.perf_counter() - started
        if isinstance(self.train_dataset, SupervisedStream) and len(batches) < num_batches:
            # Of a rest of a stream, the same on all ranks, the base class adds gradients to the next epoch's.
            batches, self.control.should_epoch_stop = [], True
        self._totals = self._count(batches)
        return super().get_batch_samples(iter(batches), len(batches), device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The student's loss, if it has one, plus the terms in training.

        Teachers teach; the student runs, its attention captured; each term measures its losses on that pass; and each
        loss, as its part of the whole step, is added by its weight.
        """
        batch = MicroBatch.of(inputs, has_decoder=self._has_decoder)
        if not model.training:
            if self._has_own_loss(batch.inputs):
                return super().compute_loss(model, batch.inputs, return_outputs, num_items_in_batch)
            self._totals = self._count([inputs])
        batch = batch.to(self.args.device)
        if self.teachers or self._base is not None:
            self._check_decoder(batch.seen)
        progress = self.state.global_step / max(self.state.max_steps, 1)
        terms = [term for term in self.terms if not (model.training and term.is_over(progress))]
        teachers = self.teachers if terms or self._base is not None else []
        online = [teacher(**batch.seen) for teacher in teachers]
        supervisions: list[Taught] = [*([] if batch.stored is None else [batch.stored]), *online]
        layers = unite_layers([supervision.layers for supervision in supervisions])
        keywords = {name: value for term in terms for name, value in term.KEYWORDS.items()}
        attends = self.attention in terms
        with capture_attention(model, layers) if attends else nullcontext() as captured:
            if self._base is None:
                base, outputs = self._own_loss(model, batch.inputs | keywords, num_items_in_batch)
            else:
                base, outputs = None, model(**(batch.seen | keywords))
        forward = Forward(
            batch=batch,
            supervisions=supervisions,
            outputs=outputs,
            captured=captured,
            layers=layers,
            student=type(self.model).__name__,
            project=self.projectors,
            # Values are validated at the first step alone: it makes the host wait for the device.
            check=bool(self.kl.get("check", self.state.global_step == 0)),
            is_training=model.training,
            totals=self._totals,
            device=self.args.device,
            seen=self._seen,
        )
        # The base class divides by the number of micro-batches what is not a part of the whole step yet.
        is_whole = not model.training or self._is_scaled(num_items_in_batch)
        parts = 1 if is_whole else self.current_gradient_accumulation_steps
        record = self._record if model.training and self._record is not None else StepRecord(0)
        weigh = partial(self._weigh, record, forward)
        losses: list[Tensor] = []
        if self._base is not None:
            for name, weight, measured in self._base.measure(forward):
                losses.append(parts * weigh(measured, name, f"{name}_weight", weight))
            base = torch.stack(losses).sum()
        elif base is not None:
            losses = [base]
        elif self.state.global_step == 0:
            ends = all(term.is_over(1.0) for term in self.terms)
            rule = f"last to the end of training, as a {type(self._student).__name__} has no other loss"
            need(not ends, "argument-value", "beta", rule, "terms that all end before")
        for term in terms:
            weighed = weigh(term.measure(forward), term.NAME, term.WEIGHT_NAME, read_weight(term.weight)(progress))
            losses.append(parts * weighed)
        loss = torch.stack(losses).sum()
        if base is not None:
            record.add({"base_loss": base / parts})
        if attends:
            record.count_alphas(batch.tallies.get(Attention.SUBJECT), online)
        return (loss, outputs) if return_outputs else loss

    def _weigh(
        self, record: StepRecord, forward: Forward, measured: Measured, name: str, weight_name: str, weight: float
    ) -> Tensor:
        """A term times its weight, as its part of the whole step's loss."""
        share = forward.share(measured.counter)
        losses = {f"{name}_loss{end}": share * loss for end, loss in measured.losses.items()}
        value = torch.stack(list(losses.values())).sum()
        record.add(losses | {f"{name}_loss": value}, {weight_name: torch.tensor(weight)})
        return weight * value

    def _count(self, batches: Sequence[Mapping[str, Any]]) -> dict[Counter, int]:
        micro_batches = [MicroBatch.of(batch, has_decoder=self._has_decoder) for batch in batches]
        terms = [term for term in (self._base, *self.terms) if term is not None]
        counters: list[Counter] = [count_samples, *(term.count for term in terms)]
        return {counter: sum(map(counter, micro_batches)) for counter in counters}

    @property
    def _takes_labels(self) -> bool:
        return bool(self.label_names) or self.compute_loss_func is not None or self._is_self_taught

    def _has_own_loss(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the base class makes a loss of this batch."""
        is_labelled = any(inputs.get(name) is not None for name in self.label_names)
        return is_labelled or self.compute_loss_func is not None or self._is_self_taught

    def _own_loss(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> tuple[Tensor | None, Any]:
        """The student's own loss, None where it returns none, and its outputs."""
        if self._has_own_loss(inputs):
            # The base class removes the labels from its argument.
            base, outputs = super().compute_loss(model, inputs, True, num_items)
            return base, outputs
        outputs = model(**{name: value for name, value in inputs.items() if not name.startswith("label")})
        loss = outputs[0] if isinstance(outputs, tuple) and outputs else read_output(outputs, "loss")
        return (loss if isinstance(loss, Tensor) and loss.ndim == 0 else None), outputs

    def _check_eval(self, dataset: Any) -> None:
        """Refuse an evaluation that could measure nothing."""
        is_taught = bool(self.teachers) or isinstance(dataset, CacheJoin)
        measures = self._takes_labels or is_taught or self.compute_metrics is not None
        rule = "be a SupervisedDataset, or teacher an OnlineTeacher"
        rule += f", as a {type(self._student).__name__} returns no loss"
        need(measures, "argument-value", "eval_dataset", rule, "neither, nor compute_metrics")

    def _check_decoder(self, inputs: Mapping[str, Any]) -> None:
        """Refuse a batch from which the student alone could tell what its decoder reads, by shifting the labels."""
        fits = not self._has_decoder or bool({"decoder_input_ids", "decoder_inputs_embeds"} & inputs.keys())
        who = "a live teacher" if self.recipe is None else f"recipe {self.recipe.name}"
        rule = f"hold decoder_input_ids, as {who} is given no labels to shift"
        advice = "make them in the collator, such as by DataCollatorForSeq2Seq(tokenizer, model=student)"
        need(fits, "argument-value", "a batch of an encoder-decoder", rule, ", ".join(inputs), remedy=advice)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in the base class, with the projectors as a parameter group that clipping ignores."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        optimized = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        parameters = [parameter for parameter in self.projectors.parameters() if parameter.requires_grad]
        absent = [parameter for parameter in parameters if parameter not in optimized]
        if absent:
            optimizer.add_param_group({"params": absent, "weight_decay": self.args.weight_decay})
        return optimizer

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in the base class; True resumes from the newest checkpoint that was written to its end."""
        if resume_from_checkpoint is True:
            last = last_checkpoint(Path(self.args.output_dir or ""))
            resume_from_checkpoint = True if last is None else str(last)
        self._record = None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with write_errors(Path(self._get_output_dir(trial))):  # a full disk is an error of ours, with the folder
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.projectors.save(output_dir or self.args.output_dir or "")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.projectors.load(resume_from_checkpoint)

    def _make_projectors(self) -> Projectors:
        """The projectors on this process's device, the same on every rank."""
        joined, width = self.train_dataset, _find_width(self._student)
        manifest = joined.cache.manifest if isinstance(joined, CacheJoin) else None
        modules: dict[int, nn.Module] = {}
        widths = (_find_width(teacher.model) for teacher in self.teachers if isinstance(teacher, OnlineTeacher))
        live = next((width for width in widths if width is not None), None)
        # The seed makes the layers the same on every rank, without a draw of the training's own.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.args.seed)
            for term in self.terms:
                modules |= term.make_projectors(width, manifest, live)
        projectors = Projectors(modules)
        projectors.to(self.args.device).join_ranks()
        return projectors

    @property
    def _student(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    @property
    def _has_decoder(self) -> bool:
        """Whether the student's logits are those of an encoder-decoder's decoder."""
        return bool(getattr(getattr(self._student, "config", None), "is_encoder_decoder", False))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._record is not None:
            of_rank = self._record.means(self.state.global_step)
            self._record = StepRecord(self.state.global_step)
            # Ranks see different samples; every rank logs at the same step.
            reduced = self.accelerator.reduce(torch.tensor(list(of_rank.values()), device=self.args.device), "mean")
            means = dict(zip(of_rank, reduced.tolist(), strict=True))
            clipped, alphas = means.pop("clipped"), means.pop("alphas")
            if self.attention is not None:
                means["clipped_alphas"] = clipped / alphas if alphas else 0.0
            logs |= means
        super().log(logs, start_time)

    def _is_scaled(self, num_items_in_batch: Tensor | int | None) -> bool:
        """Whether the base loss is normalised over the whole accumulated batch, as ``training_step`` sees it."""
        declared = getattr(self, "loss_is_scaled_for_ga", None)
        if declared is not None:
            return bool(declared)
        counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return counted or self.compute_loss_func is not None


def _count_attention(config: Any) -> int | None:
    """Attention calls of a forward pass; ``shrink`` may have dropped the attention of some layers."""
    layers = getattr(config, "num_hidden_layers", None)
    return None if layers is None else layers - len(getattr(config, "dropped_attention", ()))


def _find_width(model: Any) -> int | None:
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    return width if isinstance(width, int) else None


class StepRecord:
    """Sums over the steps from one log to the next, of this process; kept on the device until they are logged."""

    def __init__(self, first_step: int) -> None:
        self.wait_seconds = 0.0  # for data
        self._first_step = first_step
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._alphas: list[tuple[Tensor, Tensor | int]] = []  # clipped and all, of each batch

    def add(self, losses: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None = None) -> None:
        """A micro-batch's parts of its step's losses, by the names they are logged under, and what weighs them."""
        for name, value in losses.items():
            loss = value.detach()
            self._sums[name] = self._sums[name] + loss if name in self._sums else loss
        self._weights |= weights or {}

    def count_alphas(self, counts: Tensor | None, online: Sequence[OnlineSupervision]) -> None:
        """Merge weights of a micro-batch: ``(clipped, all)`` of a cache, and what live teachers report."""
        if counts is not None:
            self._alphas.append((counts[0], counts[1]))
        for supervision in online:
            for squeeze in supervision.squeezes:
                self._alphas.append((squeeze.num_clipped, sum(alpha.numel() for alpha in squeeze.alphas)))

    def means(self, step: int) -> dict[str, float]:
        steps = max(step - self._first_step, 1)
        means = {name: float(value) / steps for name, value in self._sums.items()}
        means |= {name: float(weight) for name, weight in self._weights.items()}
        for index, name in enumerate(("clipped", "alphas")):
            means[name] = float(sum(int(pair[index]) for pair in self._alphas))
        means["wait_seconds"] = self.wait_seconds / steps
        return means


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in a folder that was not killed while it was written."""
    numbers = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    checkpoints = [path for path in numbers if numbers[path].isdecimal()]
    for path in sorted(checkpoints, key=lambda path: -int(numbers[path])):
        with suppress(OSError, ValueError):
            json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))  # which the base class writes last
            return path
    return None
