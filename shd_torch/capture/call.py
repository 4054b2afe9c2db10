"""One attention call of a model, as its own tensors describe it: queries, keys, and who may attend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from shd_torch.supervision.mask import AttentionRule, RuleKeywords, mark_masked


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call: the tensors that its logits are made of, by reference and with their gradient.

    Attributes:
        query: ``(B, H, L, d_k)`` as the model multiplies them (rotated, normalised).
        key: ``(B, H_kv, S, d_k)``, rotated and normalised too; query head h reads key head ``h // (H / H_kv)``.
        rule: how the two become logits, and who may attend; its mask has four axes.
        value: ``(B, H_kv, S, d_v)``, where values were asked for.
        output: what the call returned, ``(B, H, L, d_v)`` or ``(B, L, H, d_v)``, where values were asked for.
        module: the attention module, where it is known.
        own_logits: computes the logits by the model's own code, where that forms them.
    """

    query: Tensor
    key: Tensor
    rule: AttentionRule
    value: Tensor | None = None
    output: Tensor | None = None
    module: nn.Module | None = None
    own_logits: Callable[[], Tensor] | None = None

    @property
    def num_heads(self) -> int:
        """H, the number of maps."""
        return self.query.shape[1]

    @property
    def mask_keywords(self) -> RuleKeywords:
        """The keywords of ``attention_kl`` that describe this call beside ``query`` and ``key``."""
        rule = self.rule
        return RuleKeywords(
            attn_mask=rule.attn_mask,
            is_causal=rule.is_causal,
            window=rule.window,
            scale=rule.scale,
            softcap=rule.softcap,
        )

    def compute_logits(self) -> Tensor:
        """The logits ``(B, H, L, S)``, with gradient; -inf where attending is not allowed.

        Computed at every call: by the model's own code where that forms them, else like a fused kernel, never
        accumulated in half precision.
        """
        if self.own_logits is not None:
            return mark_masked(self.own_logits())
        return self.rule.logits(self.query, self.key)


@dataclass(frozen=True, eq=False)
class LogitsCall:
    """An attention call of which only the logits are known: that of ``record_attention``."""

    attn_logits: Tensor  # (B, H, L, S)

    @property
    def num_heads(self) -> int:
        """H, the number of maps."""
        return self.attn_logits.shape[1]

    def compute_logits(self) -> Tensor:
        """The logits, -inf where an additive mask spoke."""
        return mark_masked(self.attn_logits)
