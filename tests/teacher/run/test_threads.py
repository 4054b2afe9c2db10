"""Threads: two batches at once, and what goes wrong on any of them."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import threadpoolctl
from support.attention_graphs import bare_attention, language_model
from support.makers import contents

from shd_ref import ShdError
from shd_ref.cache import CacheWriter
from shd_ref.teacher import ModelInputs, PrecomputeOptions, RunOptions, Source, input_specs, session
from shd_ref.teacher.precompute.engine import precompute
from shd_ref.teacher.run import teacher, threads
from shd_ref.teacher.run.threads import SMALL_PRODUCT, count_cores, run_ahead, share_threads, threads_for
from shd_ref.teacher.sources.source import Spool


def make_arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "mask": np.ones((3, 5), dtype=np.int64),
        "logits_0": rng.normal(size=(3, 4, 5, 5)).astype(np.float32),
        "values_0": rng.normal(size=(3, 4, 5, 4)).astype(np.float32),
    }


def test_what_goes_wrong_with_the_hash_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Path) -> str:
        raise ShdError("graph-invalid", "the file is gone")

    monkeypatch.setattr(teacher, "hash_teacher", fails)
    onnx.save(bare_attention(4), tmp_path / "teacher.onnx")
    arrays = make_arrays()
    students = [(tmp_path / "cache", PrecomputeOptions(num_student_heads=2))]
    with pytest.raises(ShdError, match="the file is gone"):
        precompute(tmp_path / "teacher.onnx", arrays, students)
    assert not (tmp_path / "cache").exists()


def blas_threads() -> list[int]:
    return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]


def test_small_products_take_one_thread() -> None:
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        if max(before, default=1) < 2:
            pytest.skip("NumPy's BLAS has one thread here")
        with threads_for(SMALL_PRODUCT):
            assert set(blas_threads()) == {1}
        assert blas_threads() == before
        with threads_for(SMALL_PRODUCT + 1):
            assert blas_threads() == before
        with pytest.raises(ValueError, match="inside"), threads_for(1):
            raise ValueError("inside")
        assert blas_threads() == before


@pytest.mark.parametrize(
    ("num_threads", "on_cpu", "cores", "shares"),
    [
        *((1, True, 4, (0, 1)), (2, True, 4, (2, 1)), (8, True, 4, (2, 7)), (None, True, 4, (2, 3))),
        *((None, True, 1, (0, 1)), (None, False, 4, (2, None)), (1, False, 4, (0, 1)), (4, False, 4, (2, 4))),
    ],
)
def test_a_run_takes_the_threads_that_it_may(
    num_threads: int | None, on_cpu: bool, cores: int, shares: tuple[int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "count_cores", lambda: cores)
    assert share_threads(num_threads, on_cpu=on_cpu) == shares


def test_cores_are_those_that_the_process_may_use() -> None:
    assert 1 <= count_cores() <= (os.cpu_count() or 1)
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system binds no process to cores")
    usable = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(usable)})
        assert count_cores() == 1
    finally:
        os.sched_setaffinity(0, usable)


@pytest.mark.parametrize("callers", [1, 2])
def test_one_more_result_is_held_than_there_are_callers(callers: int) -> None:
    class Result:
        """Something that can be counted while it lives."""

    alive: weakref.WeakSet[Result] = weakref.WeakSet()
    most = 0

    def run(_: int) -> Result:
        nonlocal most
        made = Result()
        alive.add(made)
        most = max(most, len(alive))
        return made

    numbers = []
    for number, made in run_ahead(run, range(30), callers):
        numbers.append(number)
        assert made in alive
        del made
    assert numbers == list(range(30))
    assert most <= callers + 1
    assert not alive


@pytest.mark.parametrize("callers", [0, 1, 2])
@pytest.mark.parametrize("broken", [[], [0], [1]])
def test_an_error_of_the_items_waits_for_what_is_under_way(callers: int, broken: list[int]) -> None:
    def items() -> Iterator[int]:
        yield from (0, 1)
        raise OSError("no more")

    seen: list[int] = []
    expected: type[Exception] = KeyError if broken else OSError
    with pytest.raises(expected):
        seen.extend(
            item for item, _ in run_ahead(lambda item: {0: 0, 1: 1}[item + 5 * (item in broken)], items(), callers)
        )
    assert seen == list(range(broken[0] if broken else 2))


class Streamed(Source):
    """Arrays that can only be read from their beginning."""

    name, columns = "arrays", ("input_ids", "attention_mask")

    def __init__(self, arrays: dict[str, Any]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays["input_ids"])

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        return ({name: self._arrays[name][index] for name in columns} for index in range(len(self)))


def test_two_threads_read_their_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spool has one position in one file; samples that look faulty are read again while others are."""
    spool_read = Spool.read

    def slow(self: Spool, index: int) -> Any:
        class Slow:
            """Gives others the time to move the position."""

            def __init__(self, file: Any) -> None:
                self.file = file

            def seek(self, *arguments: int) -> None:
                self.file.seek(*arguments)
                time.sleep(0.001)

            def read(self, size: int) -> bytes:
                return bytes(self.file.read(size))

        if not isinstance(self._file, Slow):
            self._file = Slow(self._file)  # type: ignore[assignment]
        return spool_read(self, index)

    monkeypatch.setattr(Spool, "read", slow)
    model = language_model()
    ids = np.random.default_rng(0).integers(0, 50, (20, 9))
    inputs = ModelInputs(Streamed({"input_ids": ids, "attention_mask": np.ones_like(ids)}), input_specs(model), None)
    assert inputs._spool is not None

    def read(numbers: Iterable[int]) -> None:
        for number in numbers:
            np.testing.assert_array_equal(inputs.sample(number)["input_ids"], ids[number])

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(read, range(20)), pool.submit(read, reversed(range(20)))]:
            done.result()


@pytest.mark.parametrize("callers", [0, 1, 2])
def test_an_error_comes_in_its_turn_and_ends_all(callers: int) -> None:
    run: list[int] = []

    def fail(item: int) -> int:
        run.append(item)
        if item == 3:
            raise ValueError("the fourth")
        return item

    before, seen = threading.active_count(), []
    with pytest.raises(ValueError, match="the fourth"):
        seen.extend(item for item, _ in run_ahead(fail, range(50), callers))
    assert set(run) <= {0, 1, 2, 3, 4, 5}
    assert threading.active_count() == before
    ahead = run_ahead(fail, range(3), callers)  # whoever asks for no more waits for nothing else
    assert next(ahead) == (0, 0)
    ahead.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_sessions_are_opened_on_the_thread_that_calls(
    tmp_path: Path, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And on a device one batch runs at a time; here the processor stands in for it."""
    onnx.save(language_model(), tmp_path / "teacher.onnx")
    opened: list[str] = []
    plain_open, plain_run = teacher.open_session, teacher.run_batch
    running, most = [0], [0]
    lock, met = threading.Lock(), threading.Event()

    def open_here(model: Any, **options: Any) -> Any:
        opened.append(threading.current_thread().name)
        return plain_open(model, **(options | {"provider": "cpu"}))

    def watched(*arguments: Any) -> Any:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
            if running[0] == 2:
                met.set()
        if threading.current_thread().name.startswith("shd-batch"):
            met.wait(10 if provider == "cpu" else 0.01)  # a device runs one batch at a time
        values = plain_run(*arguments)
        with lock:
            running[0] -= 1
        return values

    monkeypatch.setattr(teacher, "open_session", open_here)
    monkeypatch.setattr(teacher, "run_batch", watched)
    monkeypatch.setattr(session, "check_session", lambda *_: "CPUExecutionProvider")
    ids = np.random.default_rng(0).integers(0, 50, (24, 9))
    run = RunOptions(batch_size=4, samples_per_shard=8, num_threads=2, provider=provider)
    students = [(tmp_path / "cache", PrecomputeOptions(num_student_heads=2))]
    precompute(tmp_path / "teacher.onnx", {"input_ids": ids, "attention_mask": np.ones_like(ids)}, students, run)
    assert len(opened) == 2
    assert not any(name.startswith("shd-batch") for name in opened)
    assert most[0] == (2 if provider == "cpu" else 1)


def test_one_thread_does_everything_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger follows ``--threads 1`` from end to end; only the watch over untrusted probes is a timer's."""
    started: list[type[threading.Thread]] = []
    plain_start, plain_run, plain_write = threading.Thread.start, teacher.run_batch, CacheWriter.write_shard
    stages: list[tuple[str, int]] = []

    def start(self: threading.Thread) -> None:
        started.append(type(self))
        plain_start(self)

    def run(*arguments: Any) -> Any:
        stages.append((threading.current_thread().name, threading.active_count()))
        return plain_run(*arguments)

    def write(*arguments: Any) -> Any:
        stages.append((threading.current_thread().name, threading.active_count()))
        return plain_write(*arguments)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(teacher, "run_batch", run)
    monkeypatch.setattr(CacheWriter, "write_shard", write)
    onnx.save(language_model(), tmp_path / "teacher.onnx")
    ids, before = np.random.default_rng(0).integers(0, 50, (12, 9)), threading.active_count()
    data = Streamed({"input_ids": ids, "attention_mask": np.ones_like(ids)})
    students = [(tmp_path / f"cache-{heads}", PrecomputeOptions(num_student_heads=heads)) for heads in (2, 1)]
    precompute(
        tmp_path / "teacher.onnx", data, students, RunOptions(batch_size=4, samples_per_shard=6, num_threads=1)
    )
    assert set(started) <= {threading.Timer}
    assert set(stages) == {(threading.current_thread().name, before)}
    assert len(stages) > 6


class TestWholeRuns:
    """Batches that run ahead change no byte, and lose nothing when one goes wrong."""

    NUM_SAMPLES = 30

    def write(self, folder: Path, num_threads: int, ids: Any, **options: Any) -> dict[str, bytes]:
        students = [(folder, PrecomputeOptions(num_student_heads=2, hidden=(0, 1), logits="topk", **options))]
        run = RunOptions(batch_size=4, samples_per_shard=3, num_threads=num_threads)
        precompute(
            folder.parent / "teacher.onnx", {"input_ids": ids, "attention_mask": np.ones_like(ids)}, students, run
        )
        return contents(folder)

    @pytest.fixture
    def ids(self, tmp_path: Path) -> Any:
        onnx.save(language_model(), tmp_path / "teacher.onnx")
        return np.random.default_rng(0).integers(0, 50, (self.NUM_SAMPLES, 9))

    @pytest.mark.parametrize("form", ["maps", "factored"])
    def test_the_bytes_are_those_of_one_thread(self, tmp_path: Path, ids: Any, form: str) -> None:
        alone = self.write(tmp_path / "alone", 1, ids, form=form)
        assert self.write(tmp_path / "ahead", 3, ids, form=form) == alone

    def test_an_interrupt_keeps_what_was_committed(
        self, tmp_path: Path, ids: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = self.write(tmp_path / "whole", 2, ids)
        plain, count = teacher.run_batch, itertools.count()

        def stopped(*arguments: Any) -> Any:
            if next(count) == 9:
                raise KeyboardInterrupt
            return plain(*arguments)

        monkeypatch.setattr(teacher, "run_batch", stopped)
        with pytest.raises(KeyboardInterrupt):
            self.write(tmp_path / "cache", 2, ids)
        monkeypatch.undo()
        assert list((tmp_path / "cache" / "receipts").iterdir())
        assert not (tmp_path / "cache" / "SEALED.json").exists()
        assert self.write(tmp_path / "cache", 2, ids) == whole
