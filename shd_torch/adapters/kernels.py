"""``attention_kl`` by the Triton kernels as the judge calls it: maps as queries and keys, which the kernels read.

Any map is one of queries and keys: ``A~ = rho softmax(log(A~ / rho) I^T)``. So every case of the loss goes through
the kernels' own products, except masks of heads or rows, and more keys than a head may be wide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shd_torch.adapters.kl import KlAdapter
from shd_torch.kl.loss import attention_kl, explain_backend
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.mask import is_allowed
from shd_torch.supervision.supervision import Dense

NEVER = -1e4
"""A logit whose exponential is exactly 0, and a number that every product keeps finite."""


class KernelAdapter(KlAdapter):
    """Runs ``OPERATIONS`` by the backend ``triton``; float64, large heads and masks of heads or rows are missing.

    Args:
        device: see ``Adapter``.
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        super().__init__("triton", device)

    def _loss(self, q: list[Tensor], k: list[Tensor], supervision: list[Dense], **arguments: Any) -> Tensor:
        # Errors about the arguments are raised for the maps themselves.
        explain_backend(q, k, supervision, **arguments)
        shape = (*q[0].shape[:3], k[0].shape[2])
        arguments |= _describe_mask(arguments.pop("attn_mask", None), shape) | {"check": False}
        shared = {name: arguments[name] for name in ("attn_mask", "is_causal")}
        temperature = arguments.get("temperature", 1.0)
        taught = [_factor_maps(maps, temperature, shared) for maps in supervision]
        for choice in explain_backend(q, k, taught, **arguments):
            if self.backend in choice.refused:
                raise NotImplementedError(f"{self.backend}: {choice.refused[self.backend]}")
        return attention_kl(q, k, taught, backend=self.backend, **arguments)


def _factor_maps(supervision: Dense, temperature: float, masks: dict[str, Any]) -> Factored:
    """The same maps as queries, keys that are the identity, and a mass for each row."""
    maps = supervision.maps.to(supervision.dtype)
    batch, heads, _, num_keys = maps.shape
    mass = maps.sum(-1)
    logits = temperature * (maps / mass.clamp_min(torch.finfo(maps.dtype).tiny)[..., None]).log()
    keys, mixing = (torch.eye(size, dtype=maps.dtype, device=maps.device) for size in (num_keys, heads))
    has_sinks = supervision.row_sums != "one"
    return Factored(
        logits.clamp_min(NEVER),
        keys.expand(batch, 1, -1, -1),
        mixing.expand(batch, -1, -1) if has_sinks else mixing[..., None] * mass[:, None],
        scale=1.0,
        groups=tuple((head,) for head in range(heads)),
        row_mass=mass if has_sinks else None,
        **masks,
    )


def _describe_mask(mask: Tensor | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """A mask as a mask of keys and causality where that says the same, else as it is."""
    if mask is None:
        return {"attn_mask": None, "is_causal": False}
    allowed = is_allowed(mask).expand(shape)
    keys = allowed.any((1, 2), keepdim=True)
    causal = torch.ones(shape[2:], dtype=torch.bool, device=mask.device).tril()
    for is_causal in (False, True):
        if torch.equal(allowed, (keys & causal if is_causal else keys).expand(shape)):
            return {"attn_mask": None if keys.all() else keys, "is_causal": is_causal}
    return {"attn_mask": mask, "is_causal": False}
