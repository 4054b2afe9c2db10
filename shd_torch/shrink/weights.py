"""The weights of one attention layer, head by head and in float64, from any layout and dtype of the module."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """One layer of attention; inputs are rows (HEAD-1).

    Attributes:
        query: ``(H, D, d)``.
        key: ``(H_kv, D, d)``.
        value: ``(H_kv, D, d_v)``.
        output: ``(H, d_v, D)``.
        query_bias: ``(H, d)``, or None without one, as the other three: ``(H_kv, d)``, ``(H_kv, d_v)``, ``(D,)``.
        key_bias: see ``query_bias``.
        value_bias: see ``query_bias``.
        output_bias: see ``query_bias``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor | None = None
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    output_bias: Tensor | None = None

    @property
    def num_heads(self) -> int:
        """H."""
        return self.query.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """H_kv."""
        return self.key.shape[0]

    @property
    def head_dim(self) -> int:
        """Entries of a query."""
        return self.query.shape[2]

    def read_by(self, head: int) -> int:
        """Which key and value head a query head reads (MAP-6)."""
        return head // (self.num_heads // self.num_kv_heads)
