"""A process in which Triton interprets its programs on the host.

``TRITON_INTERPRET`` counts when a program is first imported, and for good: in the tests' own process it would reach
every other test, and the programs could not be compiled there. This module imports nothing that imports Triton.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

SCALER = 2.0**14


@contextmanager
def start_interpreter() -> Iterator[ProcessPoolExecutor]:
    """One process, started afresh, that serves calls in turn."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_prepare) as pool:
        yield pool


@contextmanager
def open_adapter() -> Iterator[InterpretedAdapter]:
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
    from shd_torch.adapters.kernels import KernelAdapter

    return KernelAdapter("cpu").run_operation(operation, inputs, dtype)


def call_kernel(name: str, arguments: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Call an entry point of ``shd_torch.kernels`` with arrays for tensors, and return arrays.

    Args:
        name: of the entry point.
        arguments: queries, keys and weights; ``scale``, ``key_mask``, ``is_causal`` and ``window``; the teacher's
            queries, keys, scale, mixing and groups, or ``codes``: ``(B, H_s, L, S)``, or the fields of ``Coded``.
        device: where to run.
    """
    import numpy as np
    import torch

    from shd_torch import kernels
    from shd_torch.supervision import AttentionRule, Coded, Factored
    from support.binding.twins import to_tensor

    def convert(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: to_tensor(value, device) if isinstance(value, np.ndarray) else value for key, value in values.items()
        }

    given = convert(arguments)
    before = {key: value.clone() for key, value in given.items() if isinstance(value, torch.Tensor)}
    left = dict(given)
    q, k, weights = left.pop("student_q"), left.pop("student_k"), left.pop("row_weights")
    key_mask = left.pop("key_mask", None)
    mask = None if key_mask is None else key_mask[:, None, None]
    rule = AttentionRule(mask, left.pop("is_causal", False), left.pop("window", None), scale=left.pop("scale"))
    if name == "kl_factored":
        of_teacher = (left.pop("teacher_q"), left.pop("teacher_k"), left.pop("mixing"), rule)
        taught: Any = Factored(*of_teacher, groups=left.pop("groups"), scale=left.pop("teacher_scale"))
    else:
        codes = left.pop("codes")
        taught = Coded(**convert(codes)) if isinstance(codes, dict) else _plain_codes(codes)
    result = getattr(kernels, name)(q, k, taught, weights, rule.fit(q, k), **left)
    changed = [key for key, value in before.items() if not torch.equal(value, given[key])]
    arrays = {key: None if value is None else value.cpu().numpy() for key, value in result._asdict().items()}
    return arrays | {"changed": changed}


def _plain_codes(codes: Any) -> Any:
    """Codes ``(B, H_s, L, S)`` of whole maps as a cache would hold them."""
    from shd_torch.supervision import Coded

    batch, heads, rows, keys = codes.shape
    starts = tuple(range(0, codes.numel(), codes.numel() // batch))
    shape = {} if rows == keys else {"key_lengths": (keys,) * batch, "num_keys": keys}
    return Coded(codes.flatten(), starts, (rows,) * batch, heads, "sqrt8-row", "full", rows, **shape)


def call_loss(supervision: dict[str, Any], arguments: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """``attention_kl`` by the kernels with arrays for tensors: the loss, its gradients, and how it was chosen.

    Args:
        supervision: fields of ``Coded`` where it has a buffer, else of ``Factored``.
        arguments: of ``attention_kl``; a mask is the tensor of the teacher as well.
        device: where to run.
    """
    import torch

    from shd_torch import attention_kl, explain_backend
    from shd_torch.supervision import Factored
    from shd_torch.supervision.coded import Coded
    from support.binding.twins import to_tensor

    def convert(fields: dict[str, Any]) -> dict[str, Any]:
        return {key: to_tensor(value, device) if hasattr(value, "dtype") else value for key, value in fields.items()}

    given = {"backend": "triton"} | convert(arguments)
    shared = {name: given[name] for name in ("attn_mask", "is_causal", "window") if name in given}
    taught = Coded(**convert(supervision)) if "buffer" in supervision else Factored(**shared | convert(supervision))
    q, k = given.pop("student_q").requires_grad_(), given.pop("student_k").requires_grad_()
    (choice,) = explain_backend(q, k, taught, **given)
    loss = attention_kl(q, k, taught, **given)
    # As a gradient scaler does; small numbers would vanish in float16.
    dq, dk = torch.autograd.grad(loss, (q, k), loss.new_tensor(SCALER))
    tensors = {"loss": loss, "dq": dq.double() / SCALER, "dk": dk.double() / SCALER}
    return {name: value.detach().double().cpu().numpy() for name, value in tensors.items()} | {"choice": choice}


def call_reason(*dtypes: str) -> str | None:
    """What keeps the kernels from serving these dtypes."""
    import torch

    from shd_torch.kernels import unsupported_reason

    return unsupported_reason(*(torch.zeros(1, 1, 2, 4, dtype=getattr(torch, dtype)) for dtype in dtypes))


def _prepare() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    # NumPy, which interprets, says so where a logarithm of zero is meant to be -inf.
    warnings.simplefilter("ignore", RuntimeWarning)
    import torch

    torch.set_num_threads(1)
