"""Rivals for unequal numbers of heads without merge weights: relations, and heads that are aligned by the loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_torch.maps import shd_loss, softmax
from shd_torch.rivals.rival import LayerPair, Rival, mean_rows


class RelationKl(Rival):
    """MiniLMv2: the KL of relations between queries, between keys and between values.

    Vectors of all heads are put side by side and split anew into ``relation_heads`` of d_r channels, the same number
    in both models; a relation is ``softmax(X X^T / sqrt(d_r))`` over the positions that the teacher's row may attend
    to. The mean over relation heads and rows, summed over the three relations.

    Deviations: every pair of layers is taught, not one; queries and keys are read after their rotation.

    Args:
        relation_heads: default the largest divisor of all widths and of the teacher's number of heads.
    """

    def __init__(self, *args: Any, relation_heads: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.relation_heads = relation_heads

    def layer_loss(self, pair: LayerPair, loss_mask: Tensor | None) -> Tensor:
        """The mean over relation heads and rows, summed over the relations."""
        vectors = [(call.query, call.key, call.value) for call in (pair.student, pair.teacher)]
        widths = [x.shape[1] * x.shape[3] for triple in vectors for x in triple if x is not None]
        count = self.relation_heads or math.gcd(pair.teacher.num_heads, *widths)
        if count < 1 or any(width % count for width in widths):
            raise ShdError(
                "argument-value", f"relation_heads must divide the widths {sorted(set(widths))}; got {count}"
            )
        call = pair.teacher
        mask = call.rule.logits(call.query[:, :1], call.key[:, :1])[:, :1]
        # A row sees itself, so that none is empty; those that ``loss_mask`` leaves out do not count.
        seen = ~torch.isneginf(mask) | torch.eye(mask.shape[2], dtype=torch.bool, device=mask.device)
        terms = []
        for own, other in zip(*vectors, strict=True):
            assert own is not None
            assert other is not None
            logits, taught = (_relations(x, count).masked_fill(~seen, -math.inf) for x in (own, other))
            maps = (taught / self.temperature).softmax(-1)
            options = {"loss_mask": loss_mask, "temperature": self.temperature, "check": False}
            terms.append(shd_loss(maps, logits, reduction="mean", **options))  # type: ignore[arg-type]
        return torch.stack(terms).sum()


def _relations(vectors: Tensor, count: int) -> Tensor:
    """``(B, H, L, d)`` to logits ``(B, count, L, L)``."""
    batch, _, length, _ = vectors.shape
    split = vectors.transpose(1, 2).reshape(batch, length, count, -1).transpose(1, 2)
    return split @ split.mT / math.sqrt(split.shape[-1])


class SoftAlignment(Rival):
    """AMAD ("No Head Left Behind", AAAI 2024): every teacher head teaches each student head that resembles it.

    ``sum_t sum_h a_th KL(A_t || A_h)`` with ``a_t = softmax_h cos(A_t, A_h)`` of whole maps, for each sample; weights
    have no gradient. Our reading of the paper: no code of theirs was at hand.
    """

    def layer_loss(self, pair: LayerPair, loss_mask: Tensor | None) -> Tensor:
        """A sum over teacher heads, a mean over rows."""
        maps, log_probs = _read(pair, self.temperature)
        units = [nn.functional.normalize(x.detach().flatten(2), dim=-1) for x in (maps, log_probs.exp())]
        weights = (units[0] @ units[1].mT).softmax(-1)  # (B, H_t, H_s)
        cross = torch.einsum("btls,bhls,bth->bl", maps, log_probs, weights)
        return mean_rows(_entropies(maps).sum(1) - cross, loss_mask)


class LearnedAlignment(Rival):
    """A trained mixing matrix, each row a softmax over teacher heads: ``sum_h KL(sum_t M_ht A_t || A_h)``.

    It is trained with the student, from weights that favour the heads which adjacent pairs would merge.

    Args:
        heads: H_s and H_t.
    """

    def __init__(self, *args: Any, heads: tuple[int, int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        student, teacher = heads
        groups = torch.arange(teacher) * student // teacher
        start = 2.0 * nn.functional.one_hot(groups, student).T.float()
        self.mixing = nn.ParameterList(nn.Parameter(start.clone()) for _ in self.pairs)

    def layer_loss(self, pair: LayerPair, loss_mask: Tensor | None) -> Tensor:
        """A sum over student heads, a mean over rows."""
        maps, log_probs = _read(pair, self.temperature)
        mixed = torch.einsum("ht,btls->bhls", self.mixing[pair.number].softmax(-1), maps)
        cross = (mixed * log_probs).sum(-1)
        return mean_rows((_entropies(mixed) - cross).sum(1), loss_mask)


def _read(pair: LayerPair, temperature: float) -> tuple[Tensor, Tensor]:
    """The teacher's maps ``(B, H_t, L, S)``, and the logarithm of the student's, -1e4 where it may not attend."""
    maps = softmax(pair.teacher.compute_logits() / temperature, check=False)
    logits = pair.student.compute_logits() / temperature
    return maps, logits.masked_fill(torch.isneginf(logits), -1e4).log_softmax(-1)


def _entropies(maps: Tensor) -> Tensor:
    """Negative, of each row; its gradient is finite where an entry is 0."""
    return (maps * maps.clamp(min=1e-30).log()).sum(-1)
