"""Shared paths for tests. Real data lives beside the project and is never required."""

import gc
import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object_store import environment, missing_packages, serve_s3

# A console takes its width when its module is first imported, whichever test that is.
os.environ["COLUMNS"] = "250"

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_configure() -> None:
    """Exports make objects by the million and little garbage: a twentieth of their time went to looking for it."""
    gc.set_threshold(50_000, 20, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Among several processes, which take whole files, those with most slow tests go first."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    """Threads of onnxruntime that have nothing to do sleep: by default they spin, on cores that other tests need."""
    if "onnx" not in sys.modules:
        return
    try:
        import onnxruntime
    except ImportError:
        return

    class Options(onnxruntime.SessionOptions):
        def __init__(self) -> None:
            super().__init__()
            self.add_session_config_entry("session.intra_op.allow_spinning", "0")

    onnxruntime.SessionOptions = Options


@pytest.fixture(autouse=True, scope="module")
def freeze_what_lives() -> None:
    """What lives when a file begins is not searched for garbage again.

    Each ``Trainer.train`` asks for a search: among the modules and cases of the whole suite it took a second.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """The last search, as the interpreter ends, is of everything: nanobind complains of what is left."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; skips, with the reason, where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real data not found: no folder {SHARED_DATA.parent.name}/{SHARED_DATA.name} beside the project")
    return SHARED_DATA


@pytest.fixture(scope="session")
def s3_server() -> Iterator[int]:
    """Port of an S3 server; skips, with the reason, where its packages are absent."""
    missing = missing_packages()
    if missing:
        pytest.skip(f"the S3 server of the tests needs {', '.join(missing)}: pip install s3fs 'moto[server]'")
    with serve_s3() as port:
        yield port


@pytest.fixture
def bucket(s3_server: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of a new bucket, reached through the environment alone."""
    import fsspec

    for name, value in environment(s3_server).items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{secrets.token_hex(4)}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}"
