"""Writers that are killed or race: a cache that is finished later is the undisturbed one."""

import random
import time
from pathlib import Path

import numpy as np
import pytest
from support.interrupted_writer import NUM_SAMPLES, interrupted_job, start_writer
from support.makers import contents, key_of, read_everything, record_of, write_cache

from shd_ref.cache import CacheReader, verify_cache

KILLS = 6
MANIFEST = interrupted_job(NUM_SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills"), [("one-sequence", KILLS), ("decoder", 2)])
def test_killed_writers_resume(tmp_path: Path, kind: str, kills: int) -> None:
    undisturbed = write_cache(tmp_path / "undisturbed", interrupted_job(NUM_SAMPLES, kind))
    tmp_path /= "killed"
    moments = random.Random(11)
    committed = 0
    for kill in range(kills):
        with start_writer(tmp_path, kind=kind) as process:
            assert process.stdout is not None
            if kill:  # the first one may die before it is ready
                assert process.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0, 0.03))
            process.kill()
        if not (tmp_path / "manifest.json").exists():
            continue
        partial = CacheReader(tmp_path, allow_partial=True)  # what was committed is whole
        assert committed <= len(partial)
        committed = len(partial)
        read_everything(partial)
    with start_writer(tmp_path, kind=kind) as process:
        output, _ = process.communicate(timeout=30)
    assert output == b"ready\nsealed\n"
    assert read_everything(CacheReader(tmp_path)) == read_everything(CacheReader(undisturbed))
    assert contents(tmp_path) == contents(undisturbed)
    assert len(CacheReader(tmp_path)) == NUM_SAMPLES
    assert verify_cache(tmp_path).ok


def test_racing_writers_that_round_differently_do_not_mix(tmp_path: Path) -> None:
    scales = (1.0, 0.5, 0.25)
    writers = [start_writer(tmp_path, scale) for scale in scales]
    outputs = [writer.communicate(timeout=30)[0] for writer in writers]
    assert outputs == [b"ready\nsealed\n"] * 3
    assert verify_cache(tmp_path).ok
    reader = CacheReader(tmp_path)
    for index in range(NUM_SAMPLES):
        written = record_of(MANIFEST, index).parts["alphas"]
        found = reader.read(key_of(index)).parts["alphas"]
        assert any(np.array_equal(found, written * np.float32(scale)) for scale in scales)
