"""What parts of a teacher are worth: how much its loss rises where one is smaller, and what is left refitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from shd_torch.checks import without_autocast
from shd_torch.compress.costs import random_student
from shd_torch.compress.space import NONE, Design, Space
from shd_torch.compress.stages import Run
from shd_torch.compress.task import model_run
from shd_torch.shrink.calibration import rotary_frequencies, run_layer, start_batches
from shd_torch.shrink.folders import padding_of
from shd_torch.shrink.layer import AttentionStatistics, Work, make_layer
from shd_torch.shrink.options import ShrinkOptions
from shd_torch.shrink.student import plan_student


@dataclass(frozen=True)
class Worths:
    """Rises of the loss over the teacher's, never below 0.

    Attributes:
        heads: where a layer has another number of heads ``(layers, options)``.
        neurons: where its FFN is smaller, likewise.
        layers: where it is left out ``(layers,)``.
    """

    heads: list[list[float]]
    neurons: list[list[float]]
    layers: list[float]

    def predict(self, design: Design, space: Space) -> float:
        """The sum over what a student lacks."""
        total = sum(worth for layer, worth in enumerate(self.layers) if layer not in design.kept)
        for layer, heads, neurons in zip(design.kept, design.heads, design.neurons, strict=True):
            total += self.heads[layer][space.heads.index(heads)]
            total += self.neurons[layer][space.neurons.index(neurons)]
        return total


@torch.no_grad()
@without_autocast
def measure_worths(run: Run) -> Worths:
    """Replace one part of one layer at a time, refitted on the teacher's stream, and read the loss."""
    teacher, family, space, judge = run.model, run.family, run.space, run.judge("choices", run.search.judged)
    calibration = run.samples.calibration(run.search.judged, padding_of(teacher.config))
    layers = family.layers_of(teacher)
    teacher.eval()
    batches = start_batches(teacher, family, calibration, ShrinkOptions().batch_size)
    streams = [[batch.stream for batch in batches]]
    for number, layer in enumerate(layers):
        streams.append([stream for stream, _ in run_layer(layer, streams[-1], batches, number)])
    frequencies = rotary_frequencies(teacher, family)
    studies: dict[int, AttentionStatistics] = {}  # gathered once, for all parts
    whole_model = model_run(teacher)
    base = judge.measure(whole_model).loss
    whole = space.whole
    options = [("heads", count, space.uniform(count, whole.neurons[0])) for count in space.heads[1:]]
    options += [("neurons", count, space.uniform(whole.heads[0], count)) for count in space.neurons[1:]]
    rises: dict[tuple[str, int, int], float] = {}
    total, done = space.num_layers * (len(options) + 1), 0

    def read(number: int, replacement: Sequence[nn.Module]) -> float:
        nonlocal done
        with replaced(layers, number, replacement):
            loss = judge.measure(whole_model).loss
        done += 1
        run.progress(done, total, "parts are weighed")
        return max(loss - base, 0.0)

    def work_of(design: Design) -> Work:
        shrink_options = ShrinkOptions(**design.options(space))
        sizes, kept = plan_student(teacher, family, shrink_options)
        return Work(
            teacher=teacher,
            student=random_student(run, design),
            family=family,
            batches=batches,
            kept=kept,
            sizes=sizes,
            options=shrink_options,
            frequencies=frequencies,
            tell=lambda *_: None,
            studies=studies,
        )

    def remake(work: Work, number: int, following: int) -> nn.Module:
        stream = streams[number]
        make_layer(work, number, number, following, stream, stream)
        return family.layers_of(work.student)[number]

    run.progress(0, total, "parts are weighed")
    for kind, count, design in options:
        works = [work_of(design)]
        if count == NONE and kind == "heads":  # some layer must attend: the first is weighed where the last does
            works.append(work_of(space.uniform(count, whole.neurons[0], attending=-1)))
        for number in range(space.num_layers):
            work = works[-1] if number == 0 else works[0]
            rises[kind, number, count] = read(number, [remake(work, number, number + 1)])
    work = work_of(whole)
    skipped = []
    for number in range(space.num_layers):
        if number == 0:
            skipped.append(read(0, []) if not space.keeps_first and space.num_layers > 1 else float("inf"))
            continue
        before = remake(work, number - 1, number + 1)
        with replaced(layers, number, []):
            skipped.append(read(number - 1, [before]))

    def table(kind: str, counts: Sequence[int]) -> list[list[float]]:
        """By layer, then by size: at least what a larger size costs."""
        rows = ([rises[kind, number, count] for count in counts[1:]] for number in range(space.num_layers))
        return [list(accumulate([0.0, *row], max)) for row in rows]

    return Worths(table("heads", space.heads), table("neurons", space.neurons), skipped)


@contextmanager
def replaced(layers: nn.ModuleList, number: int, modules: Sequence[nn.Module]) -> Iterator[None]:
    """One layer of a model in another form, or none in its place."""
    before = layers._modules
    kept = list(layers)
    layers._modules = dict(nn.ModuleList([*kept[:number], *modules, *kept[number + 1 :]]).named_children())
    try:
        yield
    finally:
        layers._modules = before
