"""Who may import whom, held by processes in which the forbidden modules do not exist."""

import ast
import importlib
import inspect
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from shd_ref import ERROR_CODES

ROOT = Path(__file__).resolve().parents[2]
HEAVY = (
    "torch",
    "transformers",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "xxhash",
    "msgspec",
    "rich",
    "cyclopts",
    "scipy",
    "networkx",
)


def run_without(blocked: tuple[str, ...], code: str) -> str:
    prelude = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
    command = [sys.executable, "-c", prelude + code]
    # Away from the source tree: what is installed is what is judged.
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tempfile.gettempdir())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reference_needs_numpy_alone() -> None:
    run_without(
        HEAVY,
        """
import numpy as np, shd_ref
maps = shd_ref.softmax(np.zeros((1, 4, 3, 3)))
result = shd_ref.squeeze_heads(maps, np.ones((1, 4, 3, 5)), 2)
assert shd_ref.shd_loss(result.probs, np.zeros((1, 2, 3, 3))) < 1e-12
assert "shd_ref.cache" not in sys.modules
""",
    )


def test_cache_needs_numpy_xxhash_and_msgspec_alone() -> None:
    pytest.importorskip("xxhash", reason="the cache needs the extra 'cache'")
    code = """
before = set(sys.modules)
import shd_ref.errors, numpy
import shd_ref.cache
shd_ref.cache.sample_key({"x": numpy.zeros(1)})
outside = {name.split(".")[0] for name in set(sys.modules) - before}
foreign = outside - set(sys.stdlib_module_names) - {"numpy", "xxhash", "msgspec", "shd_ref"}
assert not {name for name in foreign if not name.startswith(("_", "cython"))}, foreign  # NumPy 1 has Cython's
"""
    run_without((), code)


def test_codecs_work_without_xxhash_and_checksums_say_what_to_install() -> None:
    code = """
import numpy
from shd_ref.cache import decode, encode, sample_key
from shd_ref.errors import ShdError
assert decode("u4", encode("u4", numpy.ones((1, 1)))) == 1
try:
    sample_key({"x": numpy.zeros(1)})
except ShdError as error:
    assert error.code == "dependency-missing" and "pip install" in str(error)
else:
    raise SystemExit("a missing dependency must be an error")
"""
    run_without(("xxhash",), code)


@pytest.mark.parametrize("package", ["shd_ref", "shd_torch"])
def test_every_public_name_says_what_it_is(package: str) -> None:
    if package == "shd_torch":  # it loads without torch, its names do not
        pytest.importorskip("torch", reason="the names of shd_torch need torch")
    module = importlib.import_module(package)
    public = {name: getattr(module, name) for name in module.__all__}
    assert [name for name, value in public.items() if callable(value) and not inspect.getdoc(value)] == []


def test_shd_never_imports_torch(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="shd needs the extra 'teacher'")
    pytest.importorskip("cyclopts", reason="shd needs the extra 'teacher'")
    code = f"""
from shd_ref.cli import load_app
import shd_ref.teacher.precompute.engine, shd_ref.teacher.study.recheck
assert load_app()(["verify", {str(tmp_path)!r}]) == 1
"""
    run_without(("torch", "transformers", "shd_torch"), code)


SQUEEZED = "np.full((1, 4, 3, 3), 1 / 3), np.ones((1, 4, 3, 5))"
WITHOUT = {
    "fsspec.core": ("cache", "from shd_ref.cache import CacheReader; CacheReader('s3://bucket/cache')", "remote"),
    "networkx": ("", f"from shd_ref import matched_plan; matched_plan([({SQUEEZED})], 2)", "oracles"),
    "scipy.optimize": ("", f"from shd_ref import diagnose; diagnose({SQUEEZED}, 2)", "oracles"),
    **{
        package: ("onnx", f"from shd_ref.teacher import open_source; open_source('data.{suffix}')", "inputs")
        for package, suffix in (("pyarrow", "parquet"), ("pyarrow.ipc", "arrow"))
    },
    **dict.fromkeys(("onnx", "onnx_ir"), ("", "from shd_ref.teacher import find_sites", "teacher")),
    "onnxruntime": ("onnx", "from shd_ref.teacher import open_session; open_session(b'')", "teacher"),
    "transformers": ("torch", "from shd_torch.export import load_hf_model; load_hf_model('.')", "hf"),
    "onnxscript": (
        "torch",
        "import torch, shd_torch; shd_torch.export_teacher(torch.nn.Identity(), torch.ones(2, 3), 't.onnx')",
        "torch",
    ),
}
"""By missing package: what must be there for the code that needs it, the code, and the extra that is named."""


@pytest.mark.parametrize("package", WITHOUT)
def test_a_missing_package_is_named_with_its_extra(package: str, tmp_path: Path) -> None:
    needed, code, extra = WITHOUT[package]
    pytest.importorskip({"cache": "xxhash"}.get(needed, needed or "numpy"), reason="this part has other needs too")
    for name in ("data.parquet", "data.arrow"):
        (tmp_path / name).touch()
    lines = ["import os, numpy as np", f"os.chdir({str(tmp_path)!r})", f"sys.path.append({str(ROOT / 'tests')!r})"]
    lines += ["from shd_ref import ShdError", "try:", f"    {code}", "except ShdError as error:"]
    said = run_without((package,), "\n".join([*lines, "    print(error.code, error)"]))
    assert said.startswith("dependency-missing")
    assert f"pip install '.[{extra}]' (in a checkout" in said


@pytest.mark.parametrize(
    ("package", "needs", "extra"), [("shd_ref", "numpy", "teacher"), ("shd_torch", "torch", "cpu")]
)
def test_commands_say_what_to_install(package: str, needs: str, extra: str) -> None:
    pytest.importorskip(needs, reason="these commands need it")
    code = f"from {package}.cli import main\ntry:\n    main()\nexcept SystemExit as error:\n    print(error)"
    assert f"pip install '.[{extra}]' (in a checkout" in run_without(("cyclopts",), code)


def test_binding_says_what_to_install() -> None:
    code = """
try:
    from shd_torch import attention_kl
except ImportError as error:
    print(error)
"""
    assert "pip install '.[torch]' (in a checkout)" in run_without(("torch",), code)
    pytest.importorskip("cyclopts", reason="shd-torch needs the extra 'torch'")
    code = """
import sys
from shd_torch.cli import main
for words in ("--help", "export m --out o"):
    sys.argv = ["shd-torch", *words.split()]
    try:
        main()
    except SystemExit as end:
        print(end)
"""
    said = run_without(("torch",), code)
    assert "Usage: shd-torch" in said


ALLOWED_IN_TORCH = {
    "shd_ref.cache",
    "shd_ref.commands.program",
    "shd_ref.commands.terminal",
    "shd_ref.conformance",
    "shd_ref.errors",
    "shd_ref.integers",
    "shd_ref.layers",
    "shd_ref.merging.plans",
    "shd_ref.shrink",
    "shd_ref.teacher.graph.inputs",
    "shd_ref.teacher.options",
    "shd_ref.teacher.sentence_folder",
    "shd_ref.teacher.sources",
    "shd_ref.tokens",
    "shd_ref.tolerances",
}


def test_binding_shares_no_mathematics_with_the_reference() -> None:
    """Independence gives agreement its value in merging, alphas, mixing and the loss, which the judge compares.

    Shrinking has one implementation, in NumPy. Compress runs a teacher's graph, as ``shd`` does; an
    export and its int8 are saved as ``shd_ref`` saves a graph, and intervals are those of the studies.
    """
    of_rooms = {
        "doctor": {"shd_ref.teacher.study.intervals"},
        "compress": {
            "shd_ref.teacher.precompute.engine",
            "shd_ref.teacher.run.inputs",
            "shd_ref.teacher.study.intervals",
        },
        "export.py": {"shd_ref.teacher.opening.model", "shd_ref.teacher.graph.inputs"},
        "deploy": {"shd_ref.teacher.opening.model"},
    }
    for path in sorted((ROOT / "shd_torch").rglob("*.py")):
        allowed = ALLOWED_IN_TORCH | of_rooms.get(path.parent.name, of_rooms.get(path.name, set()))
        for module in _imported(path):
            if module.split(".")[0] == "shd_ref":
                assert any(module == name or module.startswith(f"{name}.") for name in allowed), (path, module)


def _imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


SHD_REF = """
errors integers tolerances cache/storage cache/codecs cache/forms cache/documents cache
chapters merging top shrink conformance teacher/sentence_folder
teacher/options teacher/opening teacher/session
teacher/graph teacher/rewrite teacher/sources teacher/run teacher/precompute teacher/study
report commands cli
"""
SHD_TORCH = """
checks maps supervision kernels kl indexer kd capture live data recipes training shrink export
deploy doctor compress top shrink_command commands cli
"""
FLOORS = {"shd_ref": SHD_REF.split(), "shd_torch": SHD_TORCH.split()}
"""Rooms and files of docs/architecture.md from the ground up; a file imports from its own floor and from below."""


@pytest.mark.parametrize("package", FLOORS)
def test_no_import_points_up(package: str) -> None:
    floors = FLOORS[package]
    for path in sorted((ROOT / package).rglob("*.py")):
        file = path.relative_to(ROOT / package).with_suffix("").parts
        own = _floor(file[: len(file) - (file[-1] == "__init__")], package)
        for module in _imported(path):
            if module.split(".")[0] == package:
                there = _floor(module.split(".")[1:], package)
                assert floors.index(there) <= floors.index(own), f"{path} ({own}) imports {module} ({there})"


def _floor(parts: Sequence[str], package: str) -> str:
    """The longest name of a floor that holds a file; ``chapters`` and ``top`` hold what lies beside the rooms."""
    names = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    beside = "chapters" if package == "shd_ref" and parts else "top"
    if parts and ROOT.joinpath(package, *parts).is_dir():
        beside = FLOORS[package][-1]  # a package that only holds rooms
    return next((name for name in names if name in FLOORS[package]), beside)


def test_every_error_code_in_use_is_listed_and_every_listed_one_is_used() -> None:
    used: set[str] = set()
    for path in [*(ROOT / "shd_ref").rglob("*.py"), *(ROOT / "shd_torch").rglob("*.py")]:
        if path.name == "errors.py":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in ERROR_CODES
        }
    assert used == set(ERROR_CODES)
