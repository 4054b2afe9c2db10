"""Threads: two batches at once, and what goes wrong on any of them."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.attention_graphs import language_model, saved, token_samples
from support.calls import calls_of
from support.makers import contents

from shd_ref.teacher import ModelInputs, PrecomputeOptions, RunOptions, Source, input_specs
from shd_ref.teacher.precompute.engine import precompute


class Streamed(Source):
    """Arrays that can only be read from their beginning."""

    name, columns = "arrays", ("input_ids", "attention_mask")

    def __init__(self, arrays: dict[str, Any]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays["input_ids"])

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        return ({name: self._arrays[name][index] for name in columns} for index in range(len(self)))


def test_two_threads_read_their_own_samples() -> None:
    """A spool has one position in one file; samples that look faulty are read again while others are."""
    model = language_model()
    data = token_samples(20, 9, least=9)
    inputs = ModelInputs(Streamed(data), input_specs(model), None)

    def read(numbers: Iterable[int]) -> None:
        for number in numbers:
            np.testing.assert_array_equal(inputs.sample(number)["input_ids"], data["input_ids"][number])

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(read, list(range(20))[::step] * 100) for step in (1, -1, 2, -3)]:
            done.result()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_sessions_are_opened_and_shards_written_on_the_thread_that_calls(tmp_path: Path, num_threads: int) -> None:
    """With one thread everything is done there, so that a debugger follows it from end to end."""
    onnx.save(language_model(), tmp_path / "teacher.onnx")
    before = threading.active_count()
    options = PrecomputeOptions(num_student_heads=2)
    run = RunOptions(batch_size=4, samples_per_shard=8, num_threads=num_threads)
    names = ("open_session", "run_batch", "CacheWriter.write_shard")
    with calls_of(*names) as calls:
        precompute(
            tmp_path / "teacher.onnx", Streamed(token_samples(24, 9, least=9)), tmp_path / "cache", options, run
        )
    threads = {name: {call["thread"] for call in calls if call["name"] == name} for name in names}
    mine = threading.current_thread().name
    assert not any(name.startswith("shd-") for name in threads["open_session"])
    if num_threads == 1:
        assert set().union(*threads.values()) == {mine}
    else:
        assert any(name.startswith("shd-batch") for name in threads["run_batch"])
    assert threading.active_count() == before


class TestWholeRuns:
    """Batches that run ahead change no byte, and lose nothing when one goes wrong."""

    def write(self, folder: Path, num_threads: int, on_progress: Any = None, **options: Any) -> dict[str, bytes]:
        stored = PrecomputeOptions(num_student_heads=2, hidden=(0, 1), logits="topk", **options)
        run = RunOptions(batch_size=4, samples_per_shard=3, num_threads=num_threads)
        teacher = saved(language_model(), folder.parent)
        precompute(teacher, token_samples(30, 9, least=9), folder, stored, run, on_progress=on_progress)
        return contents(folder)

    def test_the_bytes_are_those_of_one_thread(self, tmp_path: Path) -> None:
        alone = self.write(tmp_path / "alone", 1, form="factored")
        assert self.write(tmp_path / "ahead", 3, form="factored") == alone

    def test_an_interrupt_keeps_what_was_committed(self, tmp_path: Path) -> None:
        whole = self.write(tmp_path / "whole", 2)

        def interrupt(done: int, *_: int) -> None:
            if done >= 12:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.write(tmp_path / "cache", 2, on_progress=interrupt)
        assert list((tmp_path / "cache" / "receipts").iterdir())
        assert not (tmp_path / "cache" / "SEALED.json").exists()
        assert self.write(tmp_path / "cache", 2) == whole
