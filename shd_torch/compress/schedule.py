"""An hour that is an hour: how the minutes of a run are divided among its stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch

from shd_torch.compress.options import CompressOptions
from shd_torch.compress.samples import BATCH, Row, collate, inputs_of
from shd_torch.compress.space import FRACTIONS, Space
from shd_torch.shrink.folders import padding_of

STAGES: Final = ("teacher", "costs", "parts", "candidates", "cache", "short trainings", "training", "graphs")
"""Names of the stages, in order; several targets go through the last three one by one."""

_TRAINED: Final = 0.4
"""Share of the time that the long training shall have; the search is made smaller until it leaves as much."""
_CACHED: Final = 0.2
"""Share of the time in which the teacher may run over the training set."""
_RATES: Final = 4  # learning rates that are tried
_RATED: Final = 100  # steps of each
_PROBES: Final = 6  # short trainings that tell whether SHD gains
_SHRUNK: Final = 50  # passes of a batch through the teacher, from which a student is made
_WEIGHED: Final = 8  # such passes to make a part of a layer smaller, and to judge it
_ENDING: Final = 4  # graphs that are written and timed, as long as the last judgement takes
_WARMING: Final = 4  # samples of a step that does not count
_STUDENT: Final = 0.7  # of the teacher's time that a step takes a student


@dataclass(frozen=True)
class Paces:
    """Seconds on this machine, measured on the teacher.

    Attributes:
        graph: to export a model, round it to int8, and time both at every setting.
        forward: of a batch of 32 samples through the teacher.
        step: of training on such a batch.
    """

    graph: float
    forward: float
    step: float


@dataclass(frozen=True)
class Search:
    """How much is looked at before the long training."""

    fractions: tuple[float, ...] = FRACTIONS  # of heads and neurons
    judged: int = 64  # samples on which parts are weighed
    steps: tuple[int, int] = (100, 300)  # of short trainings; the better half of the candidates has the longer one
    tries_shd: bool = True

    @property
    def rate_steps(self) -> int:
        """Of a training that compares learning rates: fewer prefer low ones, which barely leave the start."""
        return min(_RATED, self.steps[1])


def _searches() -> Iterator[Search]:
    """From the widest to the one that takes least; what tells least for its time goes first."""
    search = Search()
    yield search
    for change in (
        {"tries_shd": False},
        {"fractions": FRACTIONS[:2]},
        {"judged": 32},
        {"steps": (50, 150)},
        {"fractions": FRACTIONS[1:2]},
        {"judged": 16, "steps": (25, 75)},
    ):
        search = replace(search, **change)
        yield search


@dataclass(frozen=True)
class Schedule:
    """What is looked at, and about how many seconds each stage takes.

    Attributes:
        search: the widest that leaves the long training its share.
        samples: of the training set, that the teacher has time for.
        seconds: of each stage, by name, in order.
    """

    search: Search
    samples: int
    seconds: dict[str, float]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Schedule:
        """From what ``asdict`` and JSON made of it."""
        lists = document["search"]
        search = Search(**lists | {name: tuple(lists[name]) for name in ("fractions", "steps")})
        return cls(search, document["samples"], document["seconds"])

    def write(self) -> dict[str, Any]:
        return asdict(self)


def plan_schedule(
    options: CompressOptions,
    paces: Paces,
    spent: float,
    num_samples: int,
    space_of: Callable[[tuple[float, ...]], Space],
    may_gain: bool,
) -> Schedule:
    """Divide what is left of the minutes after ``spent`` seconds; ``may_gain``: whether SHD is worth a trial."""
    whole = 60 * options.most_minutes
    samples = min(num_samples, max(int(_CACHED * whole / paces.forward), 1) * BATCH)
    schedule = None
    for search in _searches():
        if search.tries_shd and (options.quick or not may_gain):
            continue
        space = space_of(search.fractions)
        seconds = {"teacher": spent} | _estimate(options, paces, search, space, max(samples, BATCH * search.steps[0]))
        left = whole - sum(seconds.values())
        seconds["training"] = max(left, _STUDENT * search.steps[0] * paces.step)
        ordered = {name: seconds[name] for name in STAGES}
        schedule = Schedule(search, min(num_samples, max(samples, BATCH * search.steps[0])), ordered)
        if left >= _TRAINED * whole:
            break
    assert schedule is not None
    return schedule


def _estimate(options: CompressOptions, paces: Paces, search: Search, space: Space, samples: int) -> dict[str, float]:
    """Seconds of all stages but the teacher's and the long training."""
    wishes = max(len(list(options.targets())), 1)
    # Kept layers are one more candidate, with its own choice of a learning rate.
    tried, parts = (options.most_candidates + 1) * wishes, len(space.heads) + len(space.neurons) - 1
    first, second = search.steps
    trainings = (tried + wishes * _PROBES * search.tries_shd) * first + tried / 2 * second
    trainings += 2 * wishes * (_RATES - 1) * search.rate_steps
    return {
        "costs": (len(space.heads) + len(space.neurons) + 3) * paces.graph,
        "parts": _WEIGHED * parts * space.num_layers * paces.forward * search.judged / 64,
        "candidates": tried * (paces.graph + _SHRUNK * paces.forward),
        "cache": samples / BATCH * paces.forward,
        "short trainings": _STUDENT * trainings * paces.step,
        "graphs": _ENDING * wishes * paces.graph,
    }


def half_is_faster(model: Any, rows: Sequence[Row]) -> bool:
    """Whether a step is faster here with products in bfloat16, by a fifth or more; on many CPUs it is not."""
    return time_step(model, rows, half=True)[1] < 0.8 * time_step(model, rows)[1]


def time_step(model: Any, rows: Sequence[Row], *, half: bool = False) -> tuple[float, float]:
    """Seconds of a forward pass and of a step over one batch, where training will run; a small one comes before."""
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    model.to(device)
    for some in (rows[:_WARMING], rows[:BATCH]):
        arrays = collate([inputs_of(row) for row in some], padding_of(model.config))
        batch = {name: tensor.to(device) for name, tensor in arrays.items()}
        started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            output = model(**batch)[0]
        forward = time.perf_counter() - started
        output.float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        step = time.perf_counter() - started
    return forward, step
