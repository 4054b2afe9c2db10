"""``shd`` in a process that the tests kill (not a test itself). A server forks it, so packages are imported once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess

from shd_ref.cli import load_app

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["onnxruntime", "onnx.version_converter", "pytest", "shd_ref.cli", "shd_ref.teacher.precompute.engine"]
)


def run_command(arguments: list[str]) -> None:
    load_app()(arguments)


def start_command(arguments: list[str]) -> BaseProcess:
    """Start ``shd`` with these arguments."""
    process = SERVER.Process(target=run_command, args=(arguments,))
    process.start()
    return process
