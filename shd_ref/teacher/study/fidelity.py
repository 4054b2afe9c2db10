"""The fidelity test: what a teacher loses when its own layers must work with the squeezed attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.documents.manifest import sample_order
from shd_ref.errors import ShdError, argument_value, graph_unsupported, inputs_invalid
from shd_ref.merging.alpha import ALPHA_PER, check_option
from shd_ref.merging.matching import MATCHED_BY
from shd_ref.merging.mixing import STRATEGIES
from shd_ref.merging.plans import MergePlan, merge_plan
from shd_ref.teacher.graph.find import AttentionSite, find_kinds, find_sites, projection_of, select_sites
from shd_ref.teacher.graph.inputs import count_rows, read_pads
from shd_ref.teacher.graph.shapes import check_bounds, frozen_specs
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.opening.model import onnx, take_weights
from shd_ref.teacher.options import MATCHED, PLANS, FidelityOptions, RunOptions
from shd_ref.teacher.rewrite.function import MergeRule
from shd_ref.teacher.rewrite.squeeze import ReplacedGraph, replace_attention
from shd_ref.teacher.run.independence import check_samples
from shd_ref.teacher.run.inputs import Batch, ModelInputs, run_batch
from shd_ref.teacher.run.reading import AttentionReader, calibrate_plans
from shd_ref.teacher.session import check_run, open_session
from shd_ref.teacher.sources import Arrays, ArraySource, IndexedSource, Source
from shd_ref.teacher.study.intervals import Scores
from shd_ref.teacher.study.ranking import WEIGHED, Fidelity, FidelityReport, Setting, rank_costs

LEAST_SAMPLES: Final = 8
"""Fewer tell hardly anything apart: then samples that plans were matched on are judged too."""

_HELD_BYTES: Final = 2**29
"""The teacher's own results that are kept in memory; beyond it they are computed again for every setting."""

Results = dict[str, NDArray[Any]]
RowMask = NDArray[np.bool_]


def measure_fidelity(
    teacher: str | Path,
    inputs: Source | Arrays,
    options: FidelityOptions,
    run: RunOptions | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> FidelityReport:
    """Run a teacher with its attention squeezed in every layer at once, for every setting.

    Args:
        inputs: model inputs and targets: a source (``open_source``), or arrays by graph input name with first axis N.
        run: how to run it; ``samples_per_shard`` plays no part.
        on_progress: called after every batch, with batches done and in all.

    Raises:
        ShdError: ``argument-value``, ``heads-exceed``, ``graph-invalid``, ``graph-unsupported`` (no site that can be
            squeezed), ``inputs-invalid``, ``provider-unavailable``, ``dependency-missing`` (matched plans),
            ``not-finite``.
    """
    settings = _settings(options)
    test = _FidelityTest(Path(teacher), inputs, options, run or RunOptions())
    # Before the first run, so that what cannot be merged is refused at once.
    rules = [test.rules(setting) for setting in settings]
    losses = {merged: Losses() for merged in rules}
    total, done = len(test.batches) * len(losses), 0
    for merged, own in losses.items():
        for squeezed, plain, batch in test.compare(merged):
            test.add(own, squeezed, plain, batch)
            done += 1
            if on_progress:
                on_progress(done, total)
    return FidelityReport(
        output=test.output,
        sites=tuple(site.name for site in test.sites),
        skipped=test.skipped,
        samples=sum(len(batch.indices) for batch in test.batches),
        held_out=test.held_out,
        loss=next(iter(losses.values())).teacher_entropies.value_or_none,
        results=_summarise(
            [(setting, merged, losses[merged]) for setting, merged in zip(settings, rules, strict=True)]
        ),
    )


def _settings(options: FidelityOptions) -> list[Setting]:
    for name, known, sentence in (
        ("plan", PLANS, "PLAN-1"),
        ("matched_by", MATCHED_BY, "PLAN-9"),
        ("strategy", STRATEGIES, "MIX-2"),
        ("alpha_per", ALPHA_PER, "ALPHA-9"),
    ):
        for value in getattr(options, name):
            check_option(name, value, known, sentence)
    plans = [(plan, by) for plan in options.plan for by in (options.matched_by if plan == MATCHED else (None,))]
    weights = [
        (strategy, alpha_per)
        for strategy in options.strategy
        for alpha_per in (options.alpha_per if strategy in WEIGHED else ("map",))
    ]
    combined = itertools.product(options.student_heads, plans, weights)
    return list(dict.fromkeys(Setting(heads, *plan, *weight) for heads, plan, weight in combined))


def _summarise(measured: Sequence[tuple[Setting, tuple[MergeRule, ...], Losses]]) -> tuple[Fidelity, ...]:
    # Equal costs keep the order of the settings: the source's own way comes first.
    ordered = [measured[number] for number in rank_costs([losses.scores.value for *_, losses in measured])]
    results = []
    for setting, rules, losses in ordered:
        rivals = [one for one in ordered if one[0].num_student_heads == setting.num_student_heads]
        excess, excess_margin = losses.scores.above(rivals[0][2].scores, len(rivals) - 1)
        errors = [relative_error(*square) for square in np.transpose(losses.squares).tolist()]
        results.append(
            Fidelity(
                setting=setting,
                output_error=errors[0],
                cosine_distance=losses.distances.value,
                attention_error=float(np.mean(errors[1::2])),
                merge_error=float(np.mean(errors[2::2])),
                loss=losses.entropies.value_or_none,
                margin=losses.scores.margin(),
                excess=excess,
                excess_margin=excess_margin,
                plans=tuple(rule.rounds for rule in rules),
            )
        )
    return tuple(results)


class _FidelityTest:
    def __init__(self, teacher: Path, inputs: Source | Arrays, options: FidelityOptions, run: RunOptions) -> None:
        self.options, self.run = options, run
        check_run(run)
        self.model = load_teacher(teacher)
        everything = find_sites(self.model)
        sites = select_sites(everything, options.sites)
        self.sites = tuple(site for site in sites if site.supported)
        self.skipped = tuple(f"{site.name}: {site.reason}" for site in sites if not site.supported)
        if not self.sites:
            raise graph_unsupported(
                f"teacher graph {teacher} must hold an attention site that can be squeezed; found "
                f"{'; '.join(self.skipped) or 'none'}: see shd inspect {teacher}"
            )
        self.output = _choose_output(self.model, options.graph_output)
        source = inputs if isinstance(inputs, Source) else ArraySource(inputs)
        specs = frozen_specs(self.model, [site.probs for site in self.sites])
        kinds = find_kinds(self.model, everything, specs, run.decoder_mask)
        self.inputs = ModelInputs(
            source,
            specs,
            run.mask,
            decoder=kinds.decoder_inputs,
            decoder_mask=kinds.decoder_mask,
            rows=count_rows(self.model),
            pads=read_pads(self.model),
        )
        read = [self.output, *(name for site in self.sites for name in (site.probs, site.values))]
        check_bounds(self.model, read, lambda: self.inputs.shortest().arrays)
        self._kinds = kinds
        self._masks = [self._mask_of_rows(site) for site in self.sites]
        # Without kinds the output's rows are the inputs', else a decoder's.
        self._output_mask = self.inputs.decoder_mask if kinds.kinds else self.inputs.mask
        order = [int(index) for index in sample_order(len(self.inputs), run.seed)]
        # Plans are matched on the first of them, as precompute will match them.
        others = order[options.calibration_samples :] if MATCHED in options.plan else order
        self.held_out = len(others) >= LEAST_SAMPLES or len(others) == len(order)
        chosen = (others if self.held_out else order)[: options.samples]
        named = options.targets
        self.targets = None if named is None else read_targets(source, named, chosen, named in self.inputs.names)
        self.batches = list(self.inputs.batches(chosen, run.batch_size, run.batch_tokens))
        self.projections = [projection_of(site).astype(np.float32) for site in self.sites]
        self._plans: dict[tuple[int, str | None, str], tuple[MergePlan, ...]] = {}
        self._bare, self._weights = take_weights(self.model)
        self._teacher = self._open(None)
        graph, session = self._teacher
        check_samples(
            self.model,
            {site.context: site.site for site in graph.sites},
            self.inputs,
            lambda names, batch: run_batch(session, names, batch),
        )
        self._held: dict[int, Results] = {}
        self._held_bytes = 0

    def rules(self, setting: Setting) -> tuple[MergeRule, ...]:
        return tuple(
            MergeRule(site.num_heads or 0, site.d_v or 0, rounds, setting.strategy, alpha_per=setting.alpha_per)
            for site, rounds in zip(self.sites, self._plans_of(setting), strict=True)
        )

    def compare(self, rules: tuple[MergeRule, ...]) -> Iterator[tuple[Results, Results, Batch]]:
        squeezed = self._open(rules)
        for number, batch in enumerate(self.batches):
            yield _run(squeezed, batch), self._run_plain(number), batch

    def add(self, losses: Losses, squeezed: Results, plain: Results, batch: Batch) -> None:
        mask = _rows_that_count(self._output_mask, batch)
        output, own = squeezed[self.output], plain[self.output]
        if not np.isfinite(output).all():
            raise ShdError(
                "not-finite",
                f"output {self.output!r} must be finite; got NaN or infinity in the batch of sample "
                f"{batch.indices[0]}: check its inputs",
                "MAP-5",
            )
        squares = [squared_error(output, own, mask)]
        for number, projection in enumerate(self.projections):
            contexts = squeezed[f"context_{number}"], squeezed[f"unmerged_{number}"], plain[f"context_{number}"]
            merged, unmerged, teacher = (_project(array, projection) for array in contexts)
            rows = _rows_that_count(self._masks[number], batch)
            squares += [squared_error(merged, teacher, rows), squared_error(merged, unmerged, rows)]
        losses.squares = losses.squares + np.array(squares).T
        losses.distances = losses.distances.joined(cosine_distances(output, own, mask))
        if self.targets is not None:
            targets = self.targets.of_batch(batch, mask, own)
            losses.entropies = losses.entropies.joined(cross_entropies(output, targets))
            losses.teacher_entropies = losses.teacher_entropies.joined(cross_entropies(own, targets))

    def _mask_of_rows(self, site: AttentionSite) -> str | None:
        return self.inputs.decoder_mask if self._kinds.has_decoder_rows(site) else self.inputs.mask

    def _plans_of(self, setting: Setting) -> tuple[MergePlan, ...]:
        heads, by, alpha_per = key = setting.num_student_heads, setting.matched_by, setting.alpha_per
        if by is None:
            return tuple(merge_plan(site.num_heads or 0, heads, setting.plan) for site in self.sites)
        if key not in self._plans:
            run = self.run
            self._plans[key] = calibrate_plans(
                AttentionReader(self._bare, self.sites, run.provider, run.num_threads, self._weights),
                self.inputs,
                heads,
                by=by,
                alpha_per=alpha_per,
                num_samples=self.options.calibration_samples,
                seed=self.run.seed,
                batch_size=self.run.batch_size,
                mask_of_rows=self._mask_of_rows,
            )
        return self._plans[key]

    def _open(self, rules: Sequence[MergeRule] | None) -> tuple[ReplacedGraph, Any]:
        graph = replace_attention(self._bare, self.sites, rules, output=self.output, row_mask_input=self._masks)
        run = self.run
        opened = open_session(graph.model, provider=run.provider, num_threads=run.num_threads, weights=self._weights)
        return graph, opened

    def _run_plain(self, number: int) -> Results:
        if number in self._held:
            return self._held[number]
        results = _run(self._teacher, self.batches[number])
        self._held_bytes += sum(array.nbytes for array in results.values())
        if self._held_bytes <= _HELD_BYTES:
            self._held[number] = results
        return results


@dataclass
class Losses:
    """What one setting loses, summed over batches; ``squares`` ``(2, 1 + 2 sites)`` are those of errors and norms."""

    squares: NDArray[np.float64] | float = 0.0
    distances: Scores = field(default_factory=Scores)
    entropies: Scores = field(default_factory=Scores)
    teacher_entropies: Scores = field(default_factory=Scores)

    @property
    def scores(self) -> Scores:
        """What settings are ranked by, of every sample."""
        return self.distances if self.entropies.value_or_none is None else self.entropies


@dataclass(frozen=True)
class Targets:
    """A class for each sample or position, negative for none; ``next_token``: position i is judged by token i + 1."""

    name: str
    by_sample: Mapping[int, NDArray[np.int64]]
    next_token: bool

    def of_batch(self, batch: Batch, row_mask: RowMask | None, logits: NDArray[Any]) -> NDArray[np.int64]:
        """The target of every row of the logits, -1 where none counts; refused where they do not fit the output."""
        targets: NDArray[np.int64] = np.full(logits.shape[:-1], -1, dtype=np.int64)
        for number, index in enumerate(batch.indices):
            target = self.by_sample[index]
            if target.ndim != targets.ndim - 1:
                raise inputs_invalid(
                    f"targets {self.name!r} must hold a class for every row {logits.shape[:-1]} of the output; got "
                    f"{target.shape} a sample: choose another --output, or other targets"
                )
            if target.ndim:
                targets[number, : len(target)] = target[: targets.shape[-1]]  # the rest is padding
            else:
                targets[number] = target
        if row_mask is not None and row_mask.shape == targets.shape:
            targets = np.where(row_mask, targets, -1)
        if self.next_token:
            targets = np.concatenate([targets[:, 1:], np.full_like(targets[:, :1], -1)], axis=1)
        if targets.max(initial=-1) >= logits.shape[-1]:
            raise inputs_invalid(
                f"targets {self.name!r} must be below the output's {logits.shape[-1]} classes; got {targets.max()}"
            )
        return targets


def read_targets(source: Source, name: str, samples: Collection[int], next_token: bool) -> Targets:
    """The targets of some samples, by their indices: a column of classes, one per sample or one per position."""
    if name not in source.columns:
        raise source.refuse(f"must hold the targets {name}; found {', '.join(source.columns)}")
    if isinstance(source, IndexedSource):
        rows = {index: source.row(index, [name])[name] for index in samples}
    else:
        chosen = set(samples)
        rows = {index: row[name] for index, row in enumerate(source.rows([name])) if index in chosen}
    for index, row in rows.items():
        if isinstance(row, str) or row.dtype.kind not in "iu" or row.ndim > 1:
            raise source.refuse(f"{name} must hold integers, one per sample or position, to be targets", index)
    return Targets(name, {index: row.astype(np.int64) for index, row in rows.items()}, next_token)


def squared_error(got: NDArray[Any], own: NDArray[Any], row_mask: RowMask | None = None) -> tuple[float, float]:
    """``|| y~ - y ||^2`` and ``|| y ||^2`` over counted rows of ``(B, L, ...)``; all of ``(B, ...)``."""
    fits = row_mask is not None and own.ndim > 2 and own.shape[:2] == row_mask.shape
    rows: Any = row_mask if fits else slice(None)
    error = got[rows].astype(np.float64) - own[rows]
    return float((error**2).sum()), float((own[rows].astype(np.float64) ** 2).sum())


def relative_error(error: float, norm: float) -> float:
    """The root of the ratio of both squares; 0 where both vanish."""
    if norm == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return float(np.sqrt(error / norm))


def cosine_distances(got: NDArray[Any], own: NDArray[Any], row_mask: RowMask | None = None) -> Scores:
    """1 - cosine of each sample's outputs, at least 0; ``(B, L, D)`` is first averaged over counted rows."""
    a, b = (_pooled(array, row_mask) for array in (got, own))
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosine = (a * b).sum(axis=1) / np.where(norms == 0.0, 1.0, norms)
    equal_zeros = ~a.any(axis=1) & ~b.any(axis=1)
    return Scores(np.where(equal_zeros, 0.0, np.maximum(1.0 - cosine, 0.0)), np.ones(len(a)))


def _pooled(array: NDArray[Any], row_mask: RowMask | None) -> NDArray[np.float64]:
    wide = array.astype(np.float64)
    if wide.ndim < 3:
        return wide.reshape(len(wide), -1)
    wide = wide.reshape(*wide.shape[:2], -1)
    fits = row_mask is not None and row_mask.shape == wide.shape[:2]
    weight = np.asarray(row_mask if fits else np.ones(wide.shape[:2]), dtype=np.float64)
    mean: NDArray[np.float64] = np.einsum("bl,bld->bd", weight, wide) / np.maximum(weight.sum(1), 1.0)[:, None]
    return mean


def cross_entropies(logits: NDArray[Any], targets: NDArray[np.int64]) -> Scores:
    """Cross entropy of each sample in nats, with a count for each target; negative targets are left out."""
    sums, counts = [], []
    for row_logits, row_targets in zip(logits, targets, strict=True):  # one sample: vocabularies are large
        wide, classes = np.atleast_2d(row_logits).astype(np.float64), np.atleast_1d(row_targets)
        wide, classes = wide[classes >= 0], classes[classes >= 0]
        top = wide.max(axis=1, keepdims=True, initial=-np.inf)
        log_sum = np.log(np.exp(wide - top).sum(axis=1)) + top[:, 0]
        sums.append(float((log_sum - wide[np.arange(len(classes)), classes]).sum()))
        counts.append(len(classes))
    return Scores(np.array(sums), np.array(counts, dtype=np.float64))


def _rows_that_count(name: str | None, batch: Batch) -> RowMask | None:
    return None if name is None else batch.arrays[name][: len(batch.indices)].astype(np.bool_)


def _run(opened: tuple[ReplacedGraph, Any], batch: Batch) -> Results:
    graph, session = opened
    names = {graph.output: graph.output}
    for number, site in enumerate(graph.sites):
        names |= {f"context_{number}": site.context, f"unmerged_{number}": site.unmerged}
    values = run_batch(session, list(names.values()), batch)
    count = len(batch.indices)  # a fixed batch may have been filled up
    return {name: values[tensor][:count] for name, tensor in names.items()}


def _project(context: NDArray[Any], projection: NDArray[np.float32]) -> NDArray[np.float32]:
    batch, heads, rows, width = context.shape
    joined: NDArray[np.float32] = context.transpose(0, 2, 1, 3).reshape(batch, rows, heads * width) @ projection
    return joined


def _choose_output(model: onnx.ModelProto, name: str | None) -> str:
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
    names = [value.name for value in model.graph.output if value.type.tensor_type.elem_type in floats]
    if not names or name not in (None, *names):
        raise argument_value(
            f"graph_output must be one of the graph's floating-point outputs {', '.join(names) or '(it has none)'}; "
            f"got {name!r}"
        )
    return name or names[0]
