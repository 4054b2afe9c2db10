"""The fidelity test: what a teacher loses when its own layers must work with the squeezed attention.

It needs no student and no training, so it tells how to merge before anything is precomputed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.documents.members import sample_order
from shd_ref.errors import ShdError
from shd_ref.merging.alpha import ALPHA_PER, check_option
from shd_ref.merging.matching import MATCHED_BY
from shd_ref.merging.mixing import STRATEGIES
from shd_ref.merging.plans import MergePlan, merge_plan
from shd_ref.teacher.graph.embeddings import count_rows
from shd_ref.teacher.graph.find import AttentionSite, find_sites, projection_of
from shd_ref.teacher.graph.kinds import find_kinds
from shd_ref.teacher.graph.selection import select_sites
from shd_ref.teacher.graph.shapes import frozen_specs
from shd_ref.teacher.opening.load import load_teacher
from shd_ref.teacher.opening.weights import take_weights
from shd_ref.teacher.packages import onnx
from shd_ref.teacher.rewrite.replace import ReplacedGraph, replace_attention
from shd_ref.teacher.rewrite.rule import MergeRule, SqueezeOptions, make_rule
from shd_ref.teacher.run.calibration import calibrate_plans
from shd_ref.teacher.run.independence import check_samples
from shd_ref.teacher.run.inputs import Batch, ModelInputs, run_batch
from shd_ref.teacher.run.options import MATCHED, PLANS, RunOptions, check_run
from shd_ref.teacher.run.reading import AttentionReader
from shd_ref.teacher.session import open_session
from shd_ref.teacher.sources import Arrays, ArraySource, Source
from shd_ref.teacher.study.difference import (
    CosineDistance,
    CrossEntropy,
    RelativeError,
    RowMask,
    Targets,
    read_targets,
)
from shd_ref.teacher.study.intervals import Scores
from shd_ref.teacher.study.options import FidelityOptions
from shd_ref.teacher.study.ranking import WEIGHED, Fidelity, FidelityReport, Setting, rank_costs

LEAST_SAMPLES: Final = 8
"""Fewer tell hardly anything apart: then samples that plans were matched on are judged too."""

_HELD_BYTES: Final = 2**29
"""What the teacher's own results may take in memory; beyond it they are computed again for every setting."""

OnProgress = Callable[[int, int], None]
"""Called with batches done and batches in all."""


def measure_fidelity(
    teacher: str | Path,
    inputs: Source | Arrays,
    options: FidelityOptions,
    run: RunOptions | None = None,
    *,
    on_progress: OnProgress | None = None,
) -> FidelityReport:
    """Run a teacher with its attention squeezed in every layer at once, for every setting.

    Args:
        teacher: an ``.onnx`` file.
        inputs: model inputs: a source (``open_source``), or arrays by graph input name with first axis N; and the
            targets.
        options: what to try.
        run: how to run it; ``samples_per_shard`` plays no part.
        on_progress: called after every batch.

    Raises:
        ShdError: ``argument-value``, ``heads-exceed``, ``graph-invalid``, ``graph-unsupported`` (no site that can be
            squeezed), ``inputs-invalid``, ``provider-unavailable``, ``dependency-missing`` (matched plans),
            ``not-finite``.
    """
    settings = _settings(options)
    test = _FidelityTest(Path(teacher), inputs, options, run or RunOptions())
    # Before the first run, so that what cannot be merged is refused at once.
    rules = [test.rules(setting) for setting in settings]
    distinct = dict.fromkeys(rules)
    total, done = len(test.batches) * len(distinct), 0
    found: dict[tuple[MergeRule, ...], _Losses] = {}
    for merged in distinct:
        losses = _Losses(len(test.sites))
        for got, wanted, batch in test.compare(merged):
            losses.add(test, got, wanted, batch)
            done += 1
            if on_progress:
                on_progress(done, total)
        found[merged] = losses
    results = _summarise([(setting, merged, found[merged]) for setting, merged in zip(settings, rules, strict=True)])
    return FidelityReport(
        output=test.output,
        sites=tuple(site.name for site in test.sites),
        skipped=test.skipped,
        samples=sum(len(batch.indices) for batch in test.batches),
        held_out=test.held_out,
        loss=next(iter(found.values())).teacher_loss,
        results=results,
    )


def _settings(options: FidelityOptions) -> list[Setting]:
    """Every combination that makes a difference.

    Raises:
        ShdError: ``argument-value``.
    """
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


def _summarise(
    measured: Sequence[tuple[Setting, tuple[MergeRule, ...], _Losses]],
) -> tuple[Fidelity, ...]:
    """Each setting beside the best of its student heads, by cost."""
    # Equal costs keep the order of the settings: the source's own way comes first.
    ordered = [measured[number] for number in rank_costs([losses.scores.value for *_, losses in measured])]
    results = []
    for setting, rules, losses in ordered:
        rivals = [one for one in ordered if one[0].num_student_heads == setting.num_student_heads]
        best = next((one for one in rivals if _can_precompute(one[1])), rivals[0])
        excess, excess_margin = losses.scores.above(best[2].scores, len(rivals) - 1)
        results.append(
            losses.summarise(
                setting=setting,
                excess=excess,
                excess_margin=excess_margin,
                can_precompute=_can_precompute(rules),
                plans=tuple(rule.rounds for rule in rules),
            )
        )
    return tuple(results)


def _can_precompute(rules: Sequence[MergeRule]) -> bool:
    return all(rule.strategy != "simplex" for rule in rules)


Results = dict[str, NDArray[Any]]


class _FidelityTest:
    """The teacher, its samples, and its own results beside those of a squeezed one."""

    def __init__(self, teacher: Path, inputs: Source | Arrays, options: FidelityOptions, run: RunOptions) -> None:
        self.options, self.run = options, run
        check_run(run)
        self.model = load_teacher(teacher)
        found = find_sites(self.model)
        sites = select_sites(found, options.sites)
        self.sites = tuple(site for site in sites if site.supported)
        self.skipped = tuple(f"{site.name}: {site.reason}" for site in sites if not site.supported)
        if not self.sites:
            raise ShdError(
                "graph-unsupported",
                f"teacher graph {teacher} must hold an attention site that can be squeezed; found "
                f"{'; '.join(self.skipped) or 'none'}: see shd inspect {teacher}",
            )
        self.output = _choose_output(self.model, options.graph_output)
        source = inputs if isinstance(inputs, Source) else ArraySource(inputs)
        specs = frozen_specs(self.model, [site.probs for site in self.sites])
        kinds = find_kinds(self.model, found, specs, run.decoder_mask)
        self.inputs = ModelInputs(
            source,
            specs,
            run.mask,
            decoder=kinds.decoder_inputs,
            decoder_mask=kinds.decoder_mask,
            rows=count_rows(self.model),
        )
        self._kinds = kinds
        self._masks = [self._mask_of_rows(site) for site in self.sites]
        order = [int(index) for index in sample_order(len(self.inputs), run.seed)]
        # Plans are matched on the first of them, as precompute will match them.
        others = order[options.calibration_samples :] if MATCHED in options.plan else order
        self.held_out = len(others) >= LEAST_SAMPLES or len(others) == len(order)
        chosen = (others if self.held_out else order)[: options.samples]
        self.targets: Targets | None = None
        if options.targets is not None:
            self.targets = read_targets(
                source, options.targets, chosen, next_token=options.targets in self.inputs.names
            )
        self.batches = list(self.inputs.batches(chosen, run.batch_size, run.batch_tokens))
        self.projections = [projection_of(site).astype(np.float32) for site in self.sites]
        self._plans: dict[tuple[int, str, str], tuple[MergePlan, ...]] = {}
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
        """The merge of every site."""
        strategy = setting.strategy
        pairwise = "shd" if strategy == "simplex" else strategy
        options = SqueezeOptions(
            setting.num_student_heads, "progressive", pairwise, "least_squares", setting.alpha_per, 1.0, "float32"
        )
        rules = []
        for site, rounds in zip(self.sites, self._plans_of(setting), strict=True):
            rule = make_rule(options, site.num_heads or 0, site.d_v or 0, rounds)
            # For two heads the simplex is the segment that the clipped alpha minimises over.
            large = any(len(group) > 2 for group in rule.groups)
            rules.append(replace(rule, strategy="simplex") if strategy == "simplex" and large else rule)
        return tuple(rules)

    def compare(self, rules: tuple[MergeRule, ...]) -> Iterator[tuple[Results, Results, Batch]]:
        """Results of the squeezed teacher, of the teacher, and the batch that both ran."""
        squeezed = self._open(rules)
        for number, batch in enumerate(self.batches):
            yield _run(squeezed, batch), self._wanted(number), batch

    def row_mask(self, batch: Batch, number: int | None = None) -> RowMask | None:
        """``(B, L)``, True = the row of a site counts, or without a number that of the output; None: every row."""
        last = self.inputs.decoder_mask if self._kinds.kinds else self.inputs.mask  # a decoder's output
        name = last if number is None else self._masks[number]
        return None if name is None else batch.arrays[name][: len(batch.indices)].astype(np.bool_)

    def _mask_of_rows(self, site: AttentionSite) -> str | None:
        return self.inputs.decoder_mask if self._kinds.has_decoder_rows(site) else self.inputs.mask

    def _plans_of(self, setting: Setting) -> tuple[MergePlan, ...]:
        heads, by, alpha_per = setting.num_student_heads, setting.matched_by, setting.alpha_per
        if by is None:
            return tuple(merge_plan(site.num_heads or 0, heads, setting.plan) for site in self.sites)
        key = (heads, by, alpha_per)
        if key not in self._plans:
            self._plans[key] = calibrate_plans(
                self._reader(),
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

    def _reader(self) -> AttentionReader:
        return AttentionReader(
            self._bare,
            self.sites,
            provider=self.run.provider,
            num_threads=self.run.num_threads,
            weights=self._weights,
        )

    def _open(self, rules: Sequence[MergeRule] | None) -> tuple[ReplacedGraph, Any]:
        graph = replace_attention(self._bare, self.sites, rules, output=self.output, row_mask_input=self._masks)
        session = open_session(
            graph.model, provider=self.run.provider, num_threads=self.run.num_threads, weights=self._weights
        )
        return graph, session

    def _wanted(self, number: int) -> Results:
        if number in self._held:
            return self._held[number]
        results = _run(self._teacher, self.batches[number])
        self._held_bytes += sum(array.nbytes for array in results.values())
        if self._held_bytes <= _HELD_BYTES:
            self._held[number] = results
        return results


class _Losses:
    """What one setting loses, summed over batches."""

    def __init__(self, num_sites: int) -> None:
        self._output, self._cosine = RelativeError(), CosineDistance()
        self._attention = [RelativeError() for _ in range(num_sites)]
        self._merge = [RelativeError() for _ in range(num_sites)]
        self._loss, self._teacher_loss = CrossEntropy(), CrossEntropy()

    def add(self, test: _FidelityTest, got: Results, wanted: Results, batch: Batch) -> None:
        """Count one batch."""
        mask = test.row_mask(batch)
        output, own = got[test.output], wanted[test.output]
        if not np.isfinite(output).all():
            raise ShdError(
                "not-finite",
                f"output {test.output!r} must be finite; got NaN or infinity in the batch of sample "
                f"{batch.indices[0]}: look at its inputs",
                "MAP-5",
            )
        self._output.add(output, own, mask)
        self._cosine.add(output, own, mask)
        for number, projection in enumerate(test.projections):
            merged, unmerged, teacher = (
                _project(array, projection)
                for array in (got[f"context_{number}"], got[f"unmerged_{number}"], wanted[f"context_{number}"])
            )
            rows = test.row_mask(batch, number)
            self._attention[number].add(merged, teacher, rows)
            self._merge[number].add(merged, unmerged, rows)
        if test.targets is not None:
            targets = test.targets.of_batch(batch, mask, own)
            self._loss.add(output, targets)
            self._teacher_loss.add(own, targets)

    @property
    def teacher_loss(self) -> float | None:
        """None without targets."""
        return _number(self._teacher_loss.scores)

    @property
    def scores(self) -> Scores:
        """What settings are ranked by, of every sample."""
        return self._cosine.scores if _number(self._loss.scores) is None else self._loss.scores

    def summarise(self, **beside: Any) -> Fidelity:
        """The means, and what is said of a setting beside others."""
        return Fidelity(
            output_error=self._output.value,
            cosine_distance=self._cosine.scores.value,
            attention_error=float(np.mean([error.value for error in self._attention])),
            merge_error=float(np.mean([error.value for error in self._merge])),
            loss=_number(self._loss.scores),
            margin=self.scores.margin(),
            **beside,
        )


def _number(scores: Scores) -> float | None:
    """The value; None where nothing counted."""
    return None if np.isnan(scores.value) else scores.value


def _run(opened: tuple[ReplacedGraph, Any], batch: Batch) -> Results:
    """The output by its name, and ``context_i`` and ``unmerged_i`` of every site."""
    graph, session = opened
    names = {graph.output: graph.output}
    for number, site in enumerate(graph.sites):
        names |= {f"context_{number}": site.context, f"unmerged_{number}": site.unmerged}
    values = run_batch(session, list(names.values()), batch)
    count = len(batch.indices)  # a fixed batch may have been filled up
    return {name: values[tensor][:count] for name, tensor in names.items()}


def _project(context: NDArray[Any], projection: NDArray[np.float32]) -> NDArray[np.float32]:
    """The heads' outputs ``(B, H, L, d_v)`` times W_o: ``(B, L, D)``."""
    batch, heads, rows, width = context.shape
    joined: NDArray[np.float32] = context.transpose(0, 2, 1, 3).reshape(batch, rows, heads * width) @ projection
    return joined


def _choose_output(model: onnx.ModelProto, wanted: str | None) -> str:
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
    names = [value.name for value in model.graph.output if value.type.tensor_type.elem_type in floats]
    if not names or wanted not in (None, *names):
        raise ShdError(
            "argument-value",
            f"graph_output must be one of the graph's floating-point outputs {', '.join(names) or '(it has none)'}; "
            f"got {wanted!r}",
        )
    return wanted or names[0]
