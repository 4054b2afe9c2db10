"""Which backend computes a layer: the table of them, and the reasons for a choice."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from shd_ref.errors import ShdError
from shd_torch.kl import dense, sdpa, triton
from shd_torch.kl.gradient import KlResult
from shd_torch.kl.request import KlRequest

FUSED_LENGTH = 512
"""Keys from which on fused attention is preferred on an accelerator."""


_MEASURED = json.loads(Path(__file__).with_name("measured.json").read_text(encoding="utf-8"))["devices"]
TRITON_LENGTHS: dict[tuple[int, int], int] = {
    tuple(device["capability"]): device["triton_from"] for device in _MEASURED if device["triton_from"] is not None
}
"""Keys from which on the kernels pay, for each compute capability on which ``benchmarks/gpu_pass.py`` showed that
they do, and wrote so into ``measured.json``; elsewhere they run where they are asked for."""

TRITON_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
"""Of the student's queries: float32 costs the kernels three products, and fused attention has its precision."""


class Backend(NamedTuple):
    """A way to compute one layer."""

    # why it cannot serve a request, in words; None where it can
    unsupported_reason: Callable[[KlRequest], str | None]
    run: Callable[[KlRequest], KlResult]  # value and gradients of a request that it can serve


class BackendChoice(NamedTuple):
    """What ``explain_backend`` returns for one layer."""

    name: str
    reason: str
    refused: dict[str, str]  # why not, for every backend that cannot serve the request


BACKENDS: dict[str, Backend] = {
    "dense": Backend(dense.unsupported_reason, dense.run),
    "sdpa": Backend(sdpa.unsupported_reason, sdpa.run),
    "triton": Backend(triton.unsupported_reason, triton.run),
}
"""Backends by name; one that is added here can be asked for at once."""


def choose_backend(request: KlRequest, name: str) -> BackendChoice:
    """The backend for one layer, by its name or ``"auto"``."""
    if name != "auto" and name not in BACKENDS:
        raise ShdError("argument-value", f"backend must be one of auto, {', '.join(BACKENDS)}; got {name!r}")
    reasons = {kind: backend.unsupported_reason(request) for kind, backend in BACKENDS.items()}
    refused = {kind: reason for kind, reason in reasons.items() if reason is not None}
    if name == "auto":
        chosen, reason = _choose(request, refused)
        return BackendChoice(chosen, reason, refused)
    if name in refused:
        raise ShdError(
            "argument-value", f"backend must be one that can serve this call; got {name!r}: {refused[name]}"
        )
    return BackendChoice(name, "it was asked for", refused)


def _choose(request: KlRequest, refused: dict[str, str]) -> tuple[str, str]:
    """The rule of ``"auto"``: device, length, dtype, and what is refused, in this order."""
    device, num_keys = request.weights.device, request.shape[3]
    if device.type == "cpu":
        return "dense", "on a processor tiles in its cache are as fast as fused attention, and give the value as well"
    if num_keys < FUSED_LENGTH:
        return "dense", f"{num_keys} keys are fewer than {FUSED_LENGTH}: tiles are as fast"
    if "triton" not in refused and request.queries.dtype in TRITON_DTYPES:
        capability = torch.cuda.get_device_capability(device)
        if num_keys >= TRITON_LENGTHS.get(capability, math.inf):
            return "triton", "its kernels subtract before they round, and were measured to be faster on such a device"
    if "sdpa" in refused:
        return "dense", f"fused attention cannot serve this call: {refused['sdpa']}"
    return "sdpa", f"{num_keys} keys are {FUSED_LENGTH} or more on {device.type}"
