"""The kernels' tests run on a CUDA device where there is one, and in Triton's interpreter everywhere."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.binding.kernel_interpreter import call_loss, start_interpreter

pytest.importorskip("triton", reason="the kernels need the extra 'triton' (Linux only)")

ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Any]:
    """A process whose Triton interprets."""
    with start_interpreter() as pool:
        yield pool


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=ON_CUDA)])
def loss(request: pytest.FixtureRequest) -> Any:
    """``loss(supervision, arguments)``: ``attention_kl`` with arrays for tensors, see ``call_loss``."""
    if request.param == "cuda":
        return lambda *arguments: call_loss(*arguments, device="cuda")
    pool = request.getfixturevalue("interpreter")
    return lambda *arguments: pool.submit(call_loss, *arguments).result(timeout=300)
