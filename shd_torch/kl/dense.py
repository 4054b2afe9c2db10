"""The fallback backend, which serves every request: both maps, a tile at a time, in float32 or wider.

Student and teacher are subtracted before anything is rounded: small divergences keep their gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shd_torch.kl.gradient import KlResult
from shd_torch.kl.request import KlRequest
from shd_torch.supervision.mask import is_allowed
from shd_torch.supervision.supervision import ALL


def unsupported_reason(request: KlRequest) -> str | None:
    return None


@torch.no_grad()
def run(request: KlRequest) -> KlResult:
    dtype = request.dtype
    value = request.mass_term
    if not request.wants_gradient:
        return KlResult(weighted_kl(request))
    dq = torch.zeros(request.queries.shape, dtype=dtype, device=value.device)
    # Transposed, so that a tile is added within its matrix product.
    dk = torch.zeros(request.keys.mT.shape, dtype=dtype, device=value.device)
    bias = request.rule.attn_mask
    dbias = None
    if bias is not None and request.wants_bias_gradient:
        dbias = torch.zeros(bias.shape, dtype=dtype, device=value.device)
    for tile, samples, rows in request.supervision.tiles():
        keys = request.key_range(rows)
        teacher = request.teacher_probs(tile, samples, rows, keys)
        log_q, slope = request.log_probs(samples, rows, keys)
        weights = request.weights[samples, :, rows]
        if request.wants_value:
            value += _weighted_kl(teacher, log_q, weights)
        # In place; and softmax avoids exp(-inf), which is twenty times slower on a CPU.
        dz = torch.softmax(log_q, -1, out=log_q)
        mass = request.mass[samples, :, rows]
        dz.mul_((weights * mass)[..., None]).addcmul_(teacher, weights[..., None], value=-1.0)
        if request.temperature != 1.0:
            dz /= request.temperature
        if dbias is not None:
            _add_bias_gradient(dbias, dz, samples, rows, keys)
        if slope is not None:
            dz *= slope
        batch, width = dz.shape[0], dz.shape[3]
        tile_keys, queries = request.keys[samples, :, keys].to(dtype), request.queries[samples, :, rows].to(dtype)
        grouped = dz.reshape(batch, tile_keys.shape[1], -1, width)
        dq[samples, :, rows] = (grouped @ tile_keys).reshape(queries.shape)
        sums = dk[samples, :, :, keys].view(-1, queries.shape[3], width)
        sums.baddbmm_(queries.reshape(len(sums), -1, queries.shape[3]).mT, grouped.flatten(0, 1))
    if dbias is not None and bias is not None:
        dbias.masked_fill_(~is_allowed(bias), 0.0)
    return KlResult(value if request.wants_value else None, request.scale * dq, request.scale * dk.mT, dbias)


def weighted_kl(request: KlRequest) -> Tensor:
    """The value alone, for backends that find the gradients without maps."""
    value = request.mass_term
    for tile, samples, rows in request.supervision.tiles():
        keys = request.key_range(rows)
        teacher = request.teacher_probs(tile, samples, rows, keys)
        log_q, _ = request.log_probs(samples, rows, keys)
        value += _weighted_kl(teacher, log_q, request.weights[samples, :, rows])
    return value


def _weighted_kl(teacher: Tensor, log_q: Tensor, weights: Tensor) -> Tensor:
    # What is -inf is held at the lowest number: nothing where the teacher has no mass, and huge where it has.
    log_q.clamp_(min=torch.finfo(log_q.dtype).min)
    # The logarithm of 0 is as slow; any other number times 0 is 0 as well.
    log_teacher = teacher.clamp(min=torch.finfo(teacher.dtype).tiny).log_()
    rows = log_teacher.sub_(log_q).mul_(teacher).sum(-1)
    return (weights * rows).sum()


def _add_bias_gradient(dbias: Tensor, dz: Tensor, samples: slice, rows: slice, keys: slice) -> None:
    """Add a tile's gradient to the mask's, summed over the axes that the mask shares."""
    shared = [axis for axis in range(4) if dbias.shape[axis] == 1 and dz.shape[axis] > 1]
    tile = dz.sum(shared, keepdim=True) if shared else dz
    where = [ALL if dbias.shape[axis] == 1 else cut for axis, cut in ((0, samples), (1, ALL), (2, rows), (3, keys))]
    dbias[tuple(where)] += tile
