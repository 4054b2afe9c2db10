"""Precompute on Ray: two actors, one of them killed at work, give the bytes of a single process."""

import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from support.attention_graphs import saved, token_samples, token_teacher
from support.makers import contents
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import list_cache, verify_cache
from shd_ref.teacher import ArraySource, PrecomputeOptions, Row, RunOptions
from shd_ref.teacher.precompute.engine import precompute

ray = pytest.importorskip("ray", reason="--engine ray needs the extra 'ray'")
pytestmark = [
    pytest.mark.slow,
    # Ray warns of its own settings and leaves sockets and processes to the collector.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROOT = Path(__file__).resolve().parents[3]
OPTIONS = PrecomputeOptions(num_student_heads=2)
RUN = RunOptions(batch_size=4, samples_per_shard=3, num_threads=1)
NUM_SAMPLES, NUM_SHARDS = 40, 14
make_tokens = partial(token_samples, NUM_SAMPLES, 10, seed=5)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Actors import this file, and what it imports.
        patch.setenv(
            "PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        )
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(token_teacher(), tmp_path_factory.mktemp("teacher"))


def test_a_killed_actor_changes_nothing(teacher: Path, tmp_path: Path) -> None:
    from shd_ref.teacher.precompute.ray_engine import RayEngine

    folder, driver = tmp_path / "cache", os.getpid()
    precompute(teacher, make_tokens(), tmp_path / "whole", OPTIONS, RUN)
    part = RunOptions(batch_size=4, samples_per_shard=3, shards=(1, 6))
    first = precompute(teacher, make_tokens(), folder, OPTIONS, part)

    class Deadly(ArraySource):
        """Kills the actor that reads it, once, in the middle of a shard when some are committed already."""

        def row(self, index: int, columns: Sequence[str]) -> Row:
            committed = len(list(folder.glob("receipts/*.json")))
            if os.getpid() != driver and committed >= 4 and not (tmp_path / "killed").exists():
                (tmp_path / "killed").write_text(f"{os.getpid()} with {committed}")
                os.kill(os.getpid(), signal.SIGKILL)
            return super().row(index, columns)

    seen: list[tuple[int, int, int]] = []
    summary = precompute(
        teacher,
        lambda: Deadly(make_tokens()),
        folder,
        OPTIONS,
        RUN,
        engine=RayEngine(2),
        on_progress=lambda *counts: seen.append(counts),
    )
    assert 4 <= int((tmp_path / "killed").read_text().split()[-1]) < NUM_SHARDS
    assert (summary.samples, summary.missing_shards, summary.resumed) == (NUM_SAMPLES, 0, first.written)
    assert [total for _, total, _ in seen] == [NUM_SAMPLES] * len(seen)
    assert seen[-1][0] == NUM_SAMPLES
    assert verify_cache(folder).ok
    assert contents(folder) == contents(tmp_path / "whole")


def test_what_an_actor_raises_comes_out(teacher: Path, tmp_path: Path) -> None:
    from shd_ref.teacher.precompute.ray_engine import RayEngine

    driver = os.getpid()

    def open_changed() -> ArraySource:
        tokens = make_tokens()
        if os.getpid() != driver:
            tokens["input_ids"][7, 0] += 1
        return ArraySource(tokens)

    with refusal("cache-mismatch", r"dataset\.fingerprint"):
        precompute(teacher, open_changed, tmp_path, OPTIONS, RUN, engine=RayEngine(1))
    assert list_cache(tmp_path).written == ()


def test_a_cluster_without_room_is_named(teacher: Path, tmp_path: Path) -> None:
    from shd_ref.teacher.precompute.ray_engine import RayEngine

    inputs = ArraySource(make_tokens())
    with refusal("argument-value", "workers must be 1 to 2"):
        precompute(teacher, lambda: inputs, tmp_path, OPTIONS, RUN, engine=RayEngine(3))
    with pytest.raises(ShdError, match="workers must be 1 to 0"):
        precompute(
            teacher,
            lambda: inputs,
            tmp_path,
            OPTIONS,
            RunOptions(num_threads=3, samples_per_shard=3),
            engine=RayEngine(),
        )
    with refusal("argument-value", "inputs must be what opens them"):
        precompute(teacher, inputs, tmp_path, OPTIONS, RUN, engine=RayEngine())
