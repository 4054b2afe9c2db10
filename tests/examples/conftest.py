"""One folder in which examples run, with the small trained teacher that ``examples/make_data.py`` makes."""

import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE = ("--epochs", "1")
FEW = {
    "make_data": ("--steps", "30", "--samples", "64", "--layers", "2"),
    "indexer": ("--steps", "5"),
    "digits": ("--labels", "50", "--seeds", "1", "--steps", "2", "--epochs", "1"),
    **dict.fromkeys(
        ("classification", "encoder_decoder", "language_model", "lightning_module", "long_samples", "two_teachers"),
        ONE,
    ),
}
"""What makes a script short."""
SHORT = {"0,1,2,3": "0,1"}
"""Words of commands, for the shorter teacher."""


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    here = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)


def run_line(line: str) -> None:
    """A line of a shell, in this process: ``python script.py``, ``shd ...`` or ``shd-torch ...``."""
    program, *words = shlex.split(line)
    if program == "python":
        script = ROOT / "examples" / Path(words[0]).name
        before = sys.argv
        sys.argv = [str(script), *words[1:], *(() if "--steps" in words else FEW.get(script.stem, ()))]
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            sys.argv = before
        return
    from support.commands import invoke

    load_app = import_module({"shd": "shd_ref.cli", "shd-torch": "shd_torch.cli"}[program]).load_app
    result = invoke(load_app(), [SHORT.get(word, word) for word in words])
    assert result.exit_code == 0, f"{line}\n{result.output}"


@pytest.fixture(scope="session")
def run_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs lines of a shell in the folder that all examples share; a line that ran before is not run again."""
    for package in ("onnxruntime", "onnxscript", "transformers", "accelerate", "cyclopts"):
        pytest.importorskip(package, reason="examples go from a Hugging Face folder to a trained student")
    return runner(tmp_path_factory.mktemp("try"))


@pytest.fixture
def run_apart(tmp_path: Path, run_in: object) -> Callable[..., Path]:
    """As ``run_in``, in a folder of its own."""
    return runner(tmp_path)


def runner(folder: Path) -> Callable[..., Path]:
    done: set[str] = set()

    def run(*lines: str) -> Path:
        with inside(folder):
            for line in lines:
                said = re.sub(r"\s+#.*|\.\./examples/", "", line)  # one command, however it is shown
                if said not in done:
                    run_line(said)
                    done.add(said)
        return folder

    return run
