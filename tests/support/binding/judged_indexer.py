"""``indexer_kl`` as the judge of ``specs/conformance.md`` calls it: the loss, its gradients, and the target."""

from typing import Any

import torch
from torch import Tensor

from shd_ref import ShdError
from shd_ref.integers import check_integer, check_number
from shd_torch.checks import check_attn_mask, check_query_key, check_real, compute_dtype
from shd_torch.indexer import indexer_kl
from shd_torch.indexer.request import IndexerRequest, Scorer
from shd_torch.maps.judged import Adapter
from shd_torch.supervision import Factored

_OPERATIONS = ("indexer_target", "indexer_loss", "indexer_loss_gradient")


class IndexerAdapter(Adapter):
    """Runs the operations of chapter IDX."""

    def call(self, operation: str, **arguments: Any) -> Any:
        """One operation on tensors."""
        if operation not in _OPERATIONS:
            raise NotImplementedError(f"indexer_kl has no {operation}")
        teacher = _teacher_of(arguments)
        if operation == "indexer_target":
            return _target(teacher, **arguments)
        names = ("queries", "keys", "weights")
        for name, axes in zip(names, (4, 4, 3), strict=True):
            if arguments.get(name) is not None:  # before they are widened, which would hide what they were
                check_real(arguments[name], name, check=True, ndim=axes)
        if arguments.get("weights") is None:
            arguments["weights"] = torch.ones_like(arguments["queries"][..., 0])
        leaves = [arguments.pop(name) for name in names]
        leaves = [leaf.to(compute_dtype(leaf)).requires_grad_() for leaf in leaves]
        loss = indexer_kl(leaves[0], leaves[1], teacher, weights=leaves[2], **arguments)
        return loss.detach() if operation == "indexer_loss" else torch.autograd.grad(loss, leaves)


def _teacher_of(arguments: dict[str, Any]) -> list[Factored]:
    """The teacher's layers; a mask without a head axis, and the scale, are their rule's."""
    queries, keys = arguments.pop("teacher_queries"), arguments.pop("teacher_keys")
    scale = check_number("teacher_scale", arguments.pop("teacher_scale"), "IDX-6")
    mask, outside = arguments.pop("attn_mask", None), arguments.get("outside")
    single = isinstance(queries, Tensor)
    layers = [queries, keys, *([] if outside is None else [outside])]
    if len({None if isinstance(one, Tensor) else len(one) for one in layers}) > 1:
        raise ShdError("argument-shape", f"one array each, or equally long lists; got {layers}", "IDX-8")
    teachers = []
    for q, k in zip(*(([queries], [keys]) if single else (queries, keys)), strict=True):
        for name, one in (("teacher_queries", q), ("teacher_keys", k)):
            check_real(one, name, check=True, ndim=4)
        check_query_key(q, k)
        if mask is not None:
            check_attn_mask(mask, (q.shape[0], 1, q.shape[2], k.shape[2]))
        teachers.append(Factored.teacher(q, k, scale=scale, attn_mask=mask))
    return teachers


def _target(teachers: list[Factored], *, groups: Any = 1, block_size: Any = 1, **options: Any) -> Tensor:
    """The targets of all tiles, with a scorer that plays no part."""
    batch, _, rows, _ = teachers[0].queries.shape
    heads = check_integer("groups", groups, 1, None, "IDX-6")
    blocks = -(-teachers[0].keys.shape[2] // check_integer("block_size", block_size, 1, None, "IDX-4"))
    zeros = teachers[0].queries.new_zeros(batch, heads, rows, 1, dtype=compute_dtype(teachers[0].queries))
    scorer = Scorer(zeros, zeros.new_zeros(batch, 1, blocks, 1), None, 1.0, True, groups, check=False)
    request = IndexerRequest.of(scorer, teachers, block_size=block_size, **options)
    target = torch.zeros(request.shape, dtype=request.dtype, device=zeros.device)
    for tile in request.tiles():
        target[tile.samples, :, tile.rows, tile.blocks] = tile.target
    return target
