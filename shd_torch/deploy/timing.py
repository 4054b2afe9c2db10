"""How long graphs take in onnxruntime on the CPU, by turns: medians with intervals, wall time and processor time."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, TypeAlias

from numpy.typing import NDArray

from shd_ref.errors import ShdError, need
from shd_torch.deploy.inputs import GraphInputs, open_graph, run_graph

LEAST_ROUNDS: Final = 6
"""Fewer medians have no interval of 95%."""

_DEFAULTS: Final = {"batch": (1, 32), "length": (64,)}
_BUSY: Final = 0.1  # share of the runs' time that other programs may take without a remark
_WARM_SECONDS: Final = 0.05  # of runs that do not count: weights are back in the processor's caches
_LONG_SECONDS: Final = 0.5  # a run of this length needs no others before it
_TURN_SECONDS: Final = 0.1  # of runs that count, at least one
_MOST_RUNS: Final = 200  # of a graph so small that more would not move its median, either warm or counted


@dataclass(frozen=True)
class Interval:
    """A median, and the ends of its 95% interval by order statistics, which assumes no distribution."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of ``LEAST_ROUNDS`` independent values or more."""
        ordered, count = sorted(values), len(values)
        # The true median is below the k-th smallest of n values with probability sum_{i<k} C(n, i) / 2^n.
        rank, below = 0, 1 / 2**count
        while below <= 0.025:
            rank += 1
            below += math.comb(count, rank) / 2**count
        return cls(statistics.median(ordered), ordered[rank - 1], ordered[count - rank])


Setting: TypeAlias = tuple[int, int | None, int | None]
"""Threads, samples per run and size of the other dynamic axes; None where a graph has no such axis."""
Turns: TypeAlias = dict[Setting, dict[str, list[tuple[float, float]]]]
"""Wall and processor seconds of a run in each turn, by setting and graph."""


@dataclass(frozen=True)
class GraphTime:
    """Seconds of one run of a graph, at one setting.

    Attributes:
        graph: its name.
        batch: samples per run; None where the graph fixes it.
        length: size of the other dynamic axes; None where there are none.
        threads: ``intra_op_num_threads``; operators run one after the other.
        wall: seconds on the clock.
        processor: seconds of all threads together.
        times_faster: wall time of the reference over this graph's, paired by round.
    """

    graph: str
    batch: int | None
    length: int | None
    threads: int
    wall: Interval
    processor: Interval
    times_faster: Interval


def time_graphs(
    graphs: Mapping[str, str | os.PathLike[str]],
    *,
    reference: str | None = None,
    batch: Sequence[int] | None = None,
    length: Sequence[int] | None = None,
    threads: Sequence[int] = (1,),
    rounds: int = 15,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[GraphTime]:
    """Time graphs by turns in onnxruntime on the CPU, as a loop over ``InferenceSession.run`` of each would.

    Inputs are random and without padding. In each round each graph has one turn: once the workers of the graph before
    have stopped spinning, it runs until its weights are in the caches again, and is timed from there on.

    Args:
        graphs: ``.onnx`` files by name.
        reference: the name of the graph that others are compared with. Default: the first.
        batch: samples per run; only where every graph has a dynamic first axis. Default: 1 and 32.
        length: sizes of the other dynamic axes, as of texts; only where every graph has some. Default: 64, or the
            most that every graph runs with.
        threads: threads per session.
        rounds: turns of each graph at each setting, from 6.
        progress: called with the number of finished turns and of all.

    Returns:
        One entry for each graph and setting: threads, then batch, then length, then graph.

    Raises:
        ShdError: ``dependency-missing``, ``read-failed``, ``inputs-invalid`` where a graph does not run at a setting,
            ``argument-value`` where a graph lacks the axis, or a number is out of range: of its positions too.
    """
    if reference is not None and reference not in graphs:
        raise ShdError("argument-value", f"reference must be one of {', '.join(graphs)}; got {reference!r}")
    need(rounds >= LEAST_ROUNDS, "argument-value", "rounds", f"be {LEAST_ROUNDS} or more, for an interval", rounds)
    turns = take_turns(graphs, batch=batch, length=length, threads=threads, rounds=rounds, progress=progress)
    return compare_turns(turns, reference)


def take_turns(
    graphs: Mapping[str, str | os.PathLike[str]],
    *,
    batch: Sequence[int] | None,
    length: Sequence[int] | None,
    threads: Sequence[int],
    rounds: int,
    progress: Callable[[int, int], None],
) -> Turns:
    """Any number of rounds, with the arguments of ``time_graphs``."""
    for name, numbers in (("batch", batch), ("length", length), ("threads", threads)):
        if numbers is not None and min(numbers, default=0) < 1:
            raise ShdError("argument-value", f"{name} must be numbers from 1; got {numbers}")
    readers = {name: GraphInputs(path) for name, path in graphs.items()}
    settings = list(product(_axis_sizes("batch", batch, readers), _axis_sizes("length", length, readers)))
    total, done = len(threads) * len(settings) * rounds * len(graphs), 0
    times: Turns = {}
    for num_threads in threads:
        sessions = {name: reader.session for name, reader in readers.items()}
        if num_threads > 1:
            sessions = {name: open_graph(path, num_threads) for name, path in graphs.items()}
        for samples, size in settings:
            inputs = {name: reader.draw(samples or 1, size or 1) for name, reader in readers.items()}
            turns: dict[str, list[tuple[float, float]]] = {name: [] for name in graphs}
            times[num_threads, samples, size] = turns
            for _ in range(rounds):
                for name, session in sessions.items():
                    turns[name].append(_take_turn(session, inputs[name], num_threads, name, turns[name]))
                    done += 1
                    progress(done, total)
    return times


def _axis_sizes(
    argument: str, sizes: Sequence[int] | None, readers: Mapping[str, GraphInputs]
) -> Sequence[int | None]:
    """Sizes of an axis: as given, or else the default; None where a graph has no such axis."""
    fixed = [name for name, reader in readers.items() if not getattr(reader, f"has_{argument}")]
    if fixed and sizes is not None:
        rule = f"{argument} must be left out: {fixed[0]} has no dynamic axis for it"
        raise ShdError("argument-value", f"{rule}; its inputs are {readers[fixed[0]].shapes}")
    if fixed:
        return (None,)
    chosen = tuple(dict.fromkeys(sizes or _DEFAULTS[argument]))
    if argument == "length":
        for name, reader in readers.items():
            most = reader.longest(max(chosen))
            if sizes is not None:
                check_length(name, most, chosen)
            chosen = tuple(min(size, most) for size in chosen)
    return chosen


def check_length(name: str, most: int | None, lengths: Sequence[int]) -> None:
    """Refuse samples that a graph or a model has no positions for: ``argument-value``."""
    if most is not None and max(lengths, default=0) > most:
        rule = f"length must be at most {most}, the longest text that {name} takes"
        raise ShdError("argument-value", f"{rule}; got {max(lengths)}")


def _take_turn(
    session: Any, inputs: Mapping[str, NDArray[Any]], threads: int, name: str, earlier: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Median wall and processor seconds of a run, as a loop over this session alone would see them."""
    if threads > 1:
        _wait_for_spinning()
    if not earlier:
        run_graph(session, inputs, name)  # alone allocates what later runs use again
    if not earlier or earlier[-1][0] < _LONG_SECONDS:
        until = time.perf_counter() + _WARM_SECONDS
        for _ in range(_MOST_RUNS):
            session.run(None, inputs)
            if time.perf_counter() >= until:
                break
    runs: list[tuple[float, float]] = []
    until = time.perf_counter() + _TURN_SECONDS
    while not runs or (time.perf_counter() < until and len(runs) < _MOST_RUNS):
        processor, wall = time.process_time(), time.perf_counter()
        session.run(None, inputs)
        runs.append((time.perf_counter() - wall, time.process_time() - processor))
    wall, processor = map(statistics.median, zip(*runs, strict=True))
    return wall, processor


def _wait_for_spinning() -> None:
    """Until threads of other sessions sleep: they spin for tens of milliseconds after a run and take a core each."""
    for _ in range(100):
        before = time.process_time()
        time.sleep(0.01)
        if time.process_time() - before < 0.002:
            return


def compare_turns(turns: Turns, reference: str | None = None) -> list[GraphTime]:
    """Intervals of ``LEAST_ROUNDS`` rounds or more, compared with the graph ``reference``; default: the first."""
    times = []
    for (threads, batch, length), by_graph in turns.items():
        base = [wall for wall, _ in by_graph[reference or next(iter(by_graph))]]
        for name, seconds in by_graph.items():
            wall, processor = zip(*seconds, strict=True)
            ratios = [first / second for first, second in zip(base, wall, strict=True)]
            intervals = Interval.of(wall), Interval.of(processor), Interval.of(ratios)
            times.append(GraphTime(name, batch, length, threads, *intervals))
    return times


def median_runs(turns: Turns) -> Iterator[tuple[str, float, float]]:
    """Name, wall and processor seconds of a run of each graph, setting by setting."""
    for by_graph in turns.values():
        for name, seconds in by_graph.items():
            wall, processor = map(statistics.median, zip(*seconds, strict=True))
            yield name, wall, processor


def estimate_round(turns: Turns) -> float:
    """Seconds of one more round, with the runs before the timed ones, see ``_take_turn``."""
    runs = [wall for _, wall, _ in median_runs(turns)]
    warm = [min(max(run, _WARM_SECONDS), _MOST_RUNS * run) for run in runs if run < _LONG_SECONDS]
    return sum(warm) + sum(min(max(run, _TURN_SECONDS), _MOST_RUNS * run) for run in runs)


def find_busy(runs: Iterable[tuple[float, float]]) -> str | None:
    """A remark where other programs took the processor, by wall and processor seconds of runs; else None."""
    wall, processor = (sum(column) for column in zip(*runs, strict=True))
    waited = 1 - processor / wall
    remark = f"the machine was busy: graphs waited for it {waited:.0%} of their time; repeat this when it is idle"
    return remark if waited > _BUSY else None
