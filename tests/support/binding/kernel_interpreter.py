"""A process in which Triton interprets its programs on the host.

``TRITON_INTERPRET`` counts when a program is first imported, and for good: in the tests' own process it would reach
every other test, and the programs could not be compiled there. This module imports nothing that imports Triton.
"""

import multiprocessing
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def start_interpreter() -> Iterator[ProcessPoolExecutor]:
    """One process, started afresh, that serves calls in turn."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare) as pool:
        yield pool


@contextmanager
def open_adapter() -> "Iterator[InterpretedAdapter]":
    """The kernels as the judge calls them."""
    with start_interpreter() as pool:
        yield InterpretedAdapter(pool)


class InterpretedAdapter:
    """``KernelAdapter`` in another process."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self.pool = pool

    def run_operation(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> Any:
        """One operation on arrays."""
        return self.pool.submit(call_adapter, operation, dict(inputs), dtype).result(timeout=300)


def call_adapter(operation: str, inputs: dict[str, Any], dtype: str) -> Any:
    """One operation of the judge."""
    from support.binding.judged_kl import KernelAdapter

    return KernelAdapter("cpu").run_operation(operation, inputs, dtype)


def call_loss(
    supervision: dict[str, Any], arguments: dict[str, Any], deterministic: bool = False, device: str = "cpu"
) -> dict[str, Any]:
    """``attention_kl`` by the kernels with arrays for tensors: the loss, its gradients, and how it was chosen.

    Supervision has fields of ``Coded`` or ``Factored``; a mask is the teacher's as well; two passes if deterministic.
    """
    import torch

    from shd_torch import attention_kl, explain_backend
    from shd_torch.supervision import Coded, Factored
    from support.binding.twins import to_tensor

    def convert(fields: dict[str, Any]) -> dict[str, Any]:
        return {key: to_tensor(value, device) if hasattr(value, "dtype") else value for key, value in fields.items()}

    options, fields = {"backend": "triton"} | convert(arguments), convert(supervision)
    tensors = [value for value in (options | fields).values() if isinstance(value, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    shared = {name: options[name] for name in ("attn_mask", "is_causal", "window") if name in options}
    taught = Coded(**fields) if "buffer" in fields else Factored(**shared | fields)
    q, k = options.pop("student_q").requires_grad_(), options.pop("student_k").requires_grad_()
    (choice,) = explain_backend(q, k, taught, **options)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS refuses to be deterministic
    torch.use_deterministic_algorithms(deterministic)
    try:
        loss = attention_kl(q, k, taught, **options)
        # As a gradient scaler does; small numbers would vanish in float16.
        scaler = 16.0 / options["beta"]
        dq, dk = torch.autograd.grad(loss, (q, k), loss.new_tensor(scaler))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(old, new) for old, new in zip(before, tensors, strict=True)), "an argument was written"
    results = {"loss": loss, "dq": dq.double() / scaler, "dk": dk.double() / scaler}
    return {name: value.detach().double().cpu().numpy() for name, value in results.items()} | {"choice": choice}


def _prepare() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    # NumPy, which interprets, says so where a logarithm of zero is meant to be -inf.
    warnings.simplefilter("ignore", RuntimeWarning)
    import torch

    torch.set_num_threads(1)
