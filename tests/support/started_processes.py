"""Processes that tests start (not a test itself). A server forks them, so packages are imported once for all of them.

As with ``spawn``, everything that such a process is given is pickled, and it inherits nothing of the tests' own.
"""

import multiprocessing
from collections.abc import Callable
from functools import cache
from multiprocessing.process import BaseProcess
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
# What is not installed is passed over.
SERVER.set_forkserver_preload(
    [
        *("onnxruntime", "onnx.version_converter", "pytest", "shd_ref.cli", "shd_ref.teacher.precompute.engine"),
        *("shd_torch", "shd_torch.training.trainer", "torch.distributed.fsdp"),
    ]
)


def run_command(arguments: list[str]) -> None:
    from shd_ref.cli import load_app

    raise SystemExit(load_app()(arguments))


def start_command(arguments: list[str]) -> BaseProcess:
    """Start ``shd`` with these arguments, once the server has imported what it is to."""
    _wait_for_server()
    process = SERVER.Process(target=run_command, args=(arguments,))
    process.start()
    return process


@cache
def _wait_for_server() -> None:
    process = SERVER.Process(target=int)
    process.start()
    process.join()


def run_ranks(function: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """``function(rank, *arguments)`` in one process for each rank; an error in one is raised here."""
    import torch.multiprocessing

    torch.multiprocessing.start_processes(function, arguments, nprocs=ranks, start_method=SERVER.get_start_method())
