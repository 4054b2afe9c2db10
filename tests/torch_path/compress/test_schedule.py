"""The minutes of a run are divided so that the long training has its share, and what is printed is their sum."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="compress trains")
pytest.importorskip("transformers", reason="compress reads models of transformers")

from shd_torch.compress.options import CompressOptions
from shd_torch.compress.samples import typical_batch
from shd_torch.compress.space import NONE, Space
from shd_torch.compress.stages import BATCH, STAGES, Paces, Schedule, plan_schedule

PACES = Paces(graph=6.0, forward=0.2, step=0.8)


def space_of(fractions: tuple[float, ...]) -> Space:
    heads, neurons = (tuple(int(share * size) for share in (1.0, *fractions)) for size in (12, 1536))
    return Space(6, (*heads, NONE), (*neurons, NONE), False, 32)


def plan(minutes: float, *, may_gain: bool = True, samples: int = 30_000, **changes: Any) -> Schedule:
    options = CompressOptions(faster=(4.0,), minutes=minutes, **changes)
    return plan_schedule(options, PACES, 20.0, samples, space_of, may_gain)


def test_an_hour_has_room_for_all_and_is_an_hour() -> None:
    schedule = plan(60)
    assert (schedule.search.tries_shd, len(schedule.search.fractions), schedule.search.steps) == (True, 3, (100, 300))
    assert sum(schedule.seconds.values()) == pytest.approx(3600)
    assert schedule.seconds["training"] >= 0.4 * 3600
    assert tuple(schedule.seconds) == STAGES
    assert Schedule.read(asdict(schedule)) == schedule


def test_fewer_minutes_make_the_search_smaller() -> None:
    schedules = [plan(minutes) for minutes in (60, 30, 20, 12, 6, 3)]
    for before, after in pairwise(schedules):
        assert after.search.judged <= before.search.judged
        assert len(after.search.fractions) <= len(before.search.fractions)
        assert after.search.steps <= before.search.steps
        assert after.search.tries_shd <= before.search.tries_shd
    assert len({schedule.search for schedule in schedules}) >= 3
    assert sum(schedules[-1].seconds.values()) > 180  # the smallest search takes longer, which a dry run says


def test_shd_is_tried_where_it_may_gain_and_there_is_time() -> None:
    assert not plan(60, may_gain=False).search.tries_shd
    assert not plan(60, quick=True).search.tries_shd
    quick = CompressOptions(faster=(4.0,), quick=True)
    assert (quick.most_minutes, quick.most_candidates) == (12, 2)


def test_the_teacher_runs_over_a_fifth_of_the_time_and_no_more_than_trainings_read_once() -> None:
    schedule = plan(60, samples=1_000_000)
    assert schedule.seconds["cache"] == pytest.approx(0.2 * 3600, rel=0.01)
    assert schedule.samples == schedule.seconds["cache"] / PACES.forward * BATCH
    assert plan(60, samples=500).samples == 500
    shared = plan(60, samples=1_000_000, kept_layers=True)  # two students share the time
    assert shared.samples < schedule.samples
    steps = shared.samples / BATCH
    assert 2 * steps * 0.4 * PACES.step == pytest.approx(0.4 * 3600, rel=0.01)


def test_steps_are_timed_on_samples_of_the_mean_length() -> None:
    """One long text in a batch would pad all of it, which training's batches of similar length avoid."""
    rows = [{"input_ids": np.zeros(length, np.int64)} for length in (120, *range(4, 24), 90, 60, 40)]
    assert [len(row["input_ids"]) for row in typical_batch(rows, 4)] == [22, 23, 40, 60]
    assert [len(row["input_ids"]) for row in typical_batch(rows[1:21], 4)] == [12, 13, 14, 15]
    assert len(typical_batch(rows[:3], 4)) == 3
