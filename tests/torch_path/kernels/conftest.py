"""The kernels' tests run on a CUDA device where there is one, and in Triton's interpreter everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.binding.kernel_interpreter import call_kernel, start_interpreter

pytest.importorskip("triton", reason="the kernels need the extra 'triton' (Linux only)")

Kernel = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Any]:
    """A process whose Triton interprets."""
    with start_interpreter() as pool:
        yield pool


@pytest.fixture(
    params=[
        "interpreted",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
            ],
        ),
    ]
)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """``kernel(name, **arguments)`` calls an entry point with arrays for tensors."""
    if request.param == "cuda":
        return lambda name, **arguments: call_kernel(name, arguments, "cuda")
    pool = request.getfixturevalue("interpreter")
    return lambda name, **arguments: pool.submit(call_kernel, name, arguments).result(timeout=300)
