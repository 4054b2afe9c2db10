"""Kinds of attention as people write them in PyTorch, each with the maps and value outputs that it computes itself.

Every module keeps, of its last call, its maps ``(B, H, L, S)`` and the value outputs ``X = V W_o`` ``(B, H, S, D)``
that belong to them; what a graph tells is compared with these. Importing this needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from support.exporter import quicken_exports

quicken_exports()

WIDTH, HEADS, HEAD_WIDTH = 16, 4, 4


class Kind(nn.Module):
    """Self-attention of four heads on ``x (B, L, D)``, of which the kinds below change one thing or another."""

    heads: int = HEADS
    d_k: int = HEAD_WIDTH
    d_v: int = HEAD_WIDTH
    kv_heads: int = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.maps: Tensor | None = None
        self.value_outputs: Tensor | None = None
        self.query = nn.Linear(WIDTH, self.heads * self.d_k)
        self.key = nn.Linear(WIDTH, self.kv_heads * self.d_k)
        self.value = nn.Linear(WIDTH, self.kv_heads * self.d_v)
        self.output = nn.Linear(self.heads * self.d_v, WIDTH)

    def keep(self, maps: Tensor, values: Tensor, weight: Tensor | None = None) -> None:
        """What the graph is compared with: maps ``(B, H, L, S)``, values ``(B, H, S, d_v)``, W_o ``(H d_v, D)``."""
        if torch.compiler.is_exporting():
            return
        weight = self.output.weight.T if weight is None else weight
        by_head = weight.reshape(maps.shape[1], -1, weight.shape[1])
        self.maps, self.value_outputs = maps, values @ by_head

    def split(self, x: Tensor, heads: int = 0) -> Tensor:
        return x.unflatten(-1, (heads or self.heads, -1)).transpose(1, 2)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.split(self.query(x)),
            self.split(self.key(x), self.kv_heads),
            self.split(self.value(x), self.kv_heads),
        )

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.softmax(self.logits(query, key), dim=-1)

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(-1, -2) / math.sqrt(self.d_k)

    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = self.output(context.transpose(1, 2).flatten(2))
        return joined

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        maps = self.attend(query, key)
        self.keep(maps, value)
        return x + self.join(maps @ value)


class Encoder(nn.Module):
    """PyTorch's own encoder layer, ``x`` of either axis order; its fast path is no part of a graph."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, 0.0, batch_first=batch_first, norm_first=True)
        self.batch_first = batch_first
        self.maps: Tensor | None = None
        self.value_outputs: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            normed = self.layer.norm1(x if self.batch_first else x.transpose(0, 1))
            self.maps, self.value_outputs = tapped_module(self.layer.self_attn, normed)
        encoded: Tensor = self.layer(x)
        return encoded


def tapped_module(module: nn.MultiheadAttention, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Maps and value outputs of ``nn.MultiheadAttention`` by its own weights, for ``x (B, L, D)``."""
    projected = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
    logits = query @ key.transpose(-1, -2) / math.sqrt(HEAD_WIDTH)
    if padding is not None:
        logits = logits.masked_fill(padding[:, None, None, :], -math.inf)
    return torch.softmax(logits, -1), value @ module.out_proj.weight.T.reshape(HEADS, -1, WIDTH)


class Module(nn.Module):
    """``nn.MultiheadAttention``, with or without weights, with or without padding."""

    def __init__(self, *, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.need_weights = need_weights
        self.maps: Tensor | None = None
        self.value_outputs: Tensor | None = None

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        if not torch.compiler.is_exporting():
            self.maps, self.value_outputs = tapped_module(self.attention, x, padding)
        attended: Tensor = self.attention(x, x, x, key_padding_mask=padding, need_weights=self.need_weights)[0]
        return x + attended


class PaddedModule(Module):
    def __init__(self) -> None:
        super().__init__(need_weights=False)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:  # type: ignore[override]  # the mask is an input
        return super().forward(x, padding)


class FusedByPermute(Kind):
    """timm: ``(B, L, 3, H, d) -> (3, B, H, L, d)``, unbound."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        return query, key, value


class FusedByChunk(FusedByPermute):
    """lucidrains: chunked, then each part split."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (self.split(part) for part in self.qkv(x).chunk(3, dim=-1))
        return query, key, value


class T5Bias(Kind):
    """Relative position bias from a table of buckets, without scale."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, HEADS)

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        positions = torch.arange(query.shape[2], device=query.device)
        distance = (positions[None] - positions[:, None]).clamp(-4, 3) + 4
        return query @ key.transpose(-1, -2) + self.table(distance).permute(2, 0, 1)[None]


class Swin(Kind):
    """Windows of four positions, each attending within itself; shifted ones wrap around behind a mask."""

    def __init__(self, *, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.bias = nn.Parameter(torch.randn(HEADS, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shifted = torch.roll(x, -self.shift, 1) if self.shift else x
        windows = shifted.reshape(-1, 4, WIDTH)
        query, key, value = self.project(windows)
        logits = self.logits(query, key) + self.bias
        if self.shift:
            number = torch.arange(length, device=x.device) // 4
            wrapped = (number == length // 4 - 1)[:, None] & (torch.arange(4) >= 4 - self.shift)[None].repeat(
                length, 1
            )
            region = wrapped.reshape(-1, 4, 4)[:, 0]  # (windows, 4)
            apart = region[:, None, :] != region[:, :, None]
            mask = torch.where(apart, -100.0, 0.0).repeat(batch, 1, 1)[:, None]
            logits = logits + mask
        maps = torch.softmax(logits, -1)
        self.keep(maps, value)
        joined = self.join(maps @ value).reshape(batch, length, WIDTH)
        return x + (torch.roll(joined, self.shift, 1) if self.shift else joined)


class Perceiver(Kind):
    """Three learned latents attend to the sequence and to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        read = torch.cat([x, latents], dim=1)
        query, key, value = (self.split(part) for part in (self.query(latents), self.key(read), self.value(read)))
        maps = self.attend(query, key)
        self.keep(maps, value)
        return latents + self.join(maps @ value)


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding by halves, over the second last axis."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / 100 ** (torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    angles = torch.cat([angles, angles], -1)
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angles.cos() + turned * angles.sin()


class Latent(Kind):
    """MLA: keys and values from a narrow latent, a rotary part of the key shared by all heads; d_v other than d_k."""

    d_v = 3

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 6 + 2, bias=False)
        self.wide = nn.Linear(6, HEADS * (2 + self.d_v), bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query_plain, query_turned = self.split(self.query(x)).split([2, 2], -1)
        latent, key_turned = self.narrow(x).split([6, 2], -1)
        key_plain, value = self.split(self.wide(latent)).split([2, self.d_v], -1)
        key_turned = rotate(key_turned[:, None]).expand(-1, HEADS, -1, -1)
        query = torch.cat([query_plain, rotate(query_turned)], -1)
        return query, torch.cat([key_plain, key_turned], -1), value


class Modulated(Kind):
    """DiT: shift and scale before the attention, a gate behind it, all from a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.condition = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale, gate = self.condition(x.mean(1, keepdim=True)).chunk(3, -1)
        query, key, value = self.project(self.norm(x) * (1 + scale) + shift)
        maps = self.attend(query, key)
        self.keep(maps, value)
        return x + gate * self.join(maps @ value)


class Alibi(Kind):
    """A penalty for distance, of another slope in each head."""

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        positions = torch.arange(query.shape[2], device=query.device)
        distance = (positions[None] - positions[:, None]).abs()
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        return super().logits(query, key) - slopes[:, None, None] * distance


class Grouped(Kind):
    """Llama: two key and value heads, each for two queries; rotary embedding; a causal mask."""

    kv_heads = 2

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(x)
        return rotate(query), self.repeat(rotate(key)), self.repeat(value)

    def repeat(self, x: Tensor) -> Tensor:
        batch, heads, length, width = x.shape
        return x[:, :, None].expand(batch, heads, HEADS // heads, length, width).reshape(batch, HEADS, length, width)

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        length = query.shape[2]
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        return super().logits(query, key).masked_fill(~allowed, torch.finfo(torch.float32).min)


class OneKey(Kind):
    """MQA: one key and value head, which broadcasting gives to all queries."""

    kv_heads = 1


class Folded(Kind):
    """Samples and heads in one axis, multiplied by bmm and baddbmm."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (part.reshape(batch * HEADS, length, HEAD_WIDTH) for part in self.project(x))
        maps = torch.softmax(torch.bmm(query, key.transpose(1, 2)) * 0.5, -1)
        self.keep(maps.view(batch, HEADS, length, length), value.view(batch, HEADS, length, -1))
        context = torch.bmm(maps, value).view(batch, HEADS, length, HEAD_WIDTH)
        return x + self.join(context)


class ByEinsum(Kind):
    """Both products as equations over ``(B, L, H, d)``, without a transpose anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.query, self.key, self.value))
        maps = torch.softmax(torch.einsum("blhd,bshd->bhls", query, key) / 2, -1)
        self.keep(maps, value.transpose(1, 2))
        return x + self.output(torch.einsum("bhls,bshd->blhd", maps, value).flatten(2))


class ProjectedByConv(Kind):
    """W_o as a convolution of width one over ``(B, H d, L)``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)

    def keep(self, maps: Tensor, values: Tensor, weight: Tensor | None = None) -> None:
        super().keep(maps, values, self.conv.weight[:, :, 0].T)

    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = self.conv(context.transpose(2, 3).flatten(1, 2)).transpose(1, 2)
        return joined


class ProjectedByEinsum(Kind):
    """W_o as ``(H, d, D)``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HEADS, HEAD_WIDTH, WIDTH) / 4)

    def keep(self, maps: Tensor, values: Tensor, weight: Tensor | None = None) -> None:
        super().keep(maps, values, self.weight.flatten(0, 1))

    def join(self, context: Tensor) -> Tensor:
        return torch.einsum("bhld,hdm->blm", context, self.weight)


class ProjectedByHead(Kind):
    """W_o as a product a head, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ModuleList(nn.Linear(HEAD_WIDTH, WIDTH) for _ in range(HEADS))

    def keep(self, maps: Tensor, values: Tensor, weight: Tensor | None = None) -> None:
        super().keep(maps, values, torch.cat([layer.weight.T for layer in self.weights]))

    def join(self, context: Tensor) -> Tensor:
        total: Tensor = sum(layer(context[:, head]) for head, layer in enumerate(self.weights))  # type: ignore[assignment]
        return total


class GatedContext(Kind):
    """The heads' outputs times a sigmoid of the input, before W_o."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        maps = self.attend(query, key)
        self.keep(maps, value)
        context = (maps @ value).transpose(1, 2).flatten(2)
        return x + self.output(context * torch.sigmoid(self.gate(x)))


class SubNormed(Kind):
    """A norm between the heads' outputs and W_o."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def join(self, context: Tensor) -> Tensor:
        joined: Tensor = self.output(self.norm(context.transpose(1, 2).flatten(2)))
        return joined


class LowRank(Kind):
    """LoRA beside W_o, not merged into it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def keep(self, maps: Tensor, values: Tensor, weight: Tensor | None = None) -> None:
        super().keep(maps, values, (self.output.weight + 2.0 * self.up.weight @ self.down.weight).T)

    def join(self, context: Tensor) -> Tensor:
        flat = context.transpose(1, 2).flatten(2)
        joined: Tensor = self.output(flat) + self.up(self.down(flat)) * 2.0
        return joined


class Sinks(Kind):
    """GPT-OSS: a learned logit joins every row's softmax, and its column is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[2], -1)
        probs = torch.softmax(torch.cat([self.logits(query, key), sinks], -1), -1)
        return probs[..., :-1]


class TalkingHeads(Kind):
    """Heads are mixed before and after the softmax: map h takes part in what all value heads give."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(HEADS, HEADS, bias=False)
        self.after = nn.Linear(HEADS, HEADS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        logits = self.before(self.logits(query, key).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        maps = torch.softmax(logits, -1)
        if not torch.compiler.is_exporting():
            apart = value @ self.output.weight.T.unflatten(0, (HEADS, -1))
            self.maps, self.value_outputs = maps, torch.einsum("gh,bgsm->bhsm", self.after.weight, apart)
        mixed = self.after(maps.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return x + self.join(mixed @ value)


class WideValues(Kind):
    """d_v other than d_k."""

    d_v = 5


class PlusOne(Kind):
    """A one in the denominator, so that a head may attend to nothing."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        powers = torch.exp(self.logits(query, key))
        return powers / (1 + powers.sum(-1, keepdim=True))


class PlusOneFromMaximum(Kind):
    """The same without overflow."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        logits = self.logits(query, key)
        highest = logits.amax(-1, keepdim=True).clamp(min=0)
        powers = torch.exp(logits - highest)
        return powers / (torch.exp(-highest) + powers.sum(-1, keepdim=True))


class LogSoftmax(Kind):
    """The exponential of a logarithm."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.log_softmax(self.logits(query, key), -1).exp()


class LogSumExp(Kind):
    """The same without that function."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        logits = self.logits(query, key)
        return torch.exp(logits - torch.logsumexp(logits, -1, keepdim=True))


class MaskedBehind(Kind):
    """Masked behind the softmax, and scaled to one again."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        probs = super().attend(query, key)
        probs = probs * torch.ones(probs.shape[-2:], device=probs.device).tril()
        return probs / (probs.sum(-1, keepdim=True) + 1e-9)


class MaskedPowers(Kind):
    """Masked between the exponential and the sum."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        powers = torch.exp(self.logits(query, key))
        powers = powers * torch.ones(powers.shape[-2:], device=powers.device).tril()
        return powers / powers.sum(-1, keepdim=True).clamp(min=1e-6)


class Largest(Kind):
    """Only the two largest of each row, scaled to one."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        probs = super().attend(query, key)
        probs = torch.where(probs >= torch.topk(probs, 2, -1).values[..., -1:], probs, 0.0)
        return nn.functional.normalize(probs, p=1, dim=-1)


class Squared(Kind):
    """Squares of positive logits over their sum, without a softmax."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        weights = torch.relu(self.logits(query, key) + 1).square()
        return weights / (weights.sum(-1, keepdim=True) + 1e-8)


class Competing(Kind):
    """Slot attention: learned slots compete for positions, and each slot's share is scaled to one."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        slots = self.slots.expand(x.shape[0], -1, -1)
        query, key, value = (self.split(part) for part in (self.query(slots), self.key(x), self.value(x)))
        shares = torch.softmax(self.logits(query, key), -2)
        maps = shares / shares.sum(-1, keepdim=True)
        self.keep(maps, value)
        return slots + self.join(maps @ value)


class Routed(Kind):
    """Attention before a mixture of experts, whose router's shares of the best two are scaled to one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        shares = torch.softmax(self.router(x), -1)
        shares = torch.where(shares >= torch.topk(shares, 2, -1).values[..., -1:], shares, 0.0)
        shares = shares / shares.sum(-1, keepdim=True)
        given = torch.relu(torch.einsum("bld,edf->blef", x, self.experts))
        return x + (shares[..., None] * given).sum(2)


class PickedHeads(Kind):
    """Heads in another order before W_o, by a list of numbers."""

    def keep(self, maps: Tensor, values: Tensor, weight: Tensor | None = None) -> None:
        picked = self.output.weight.T.unflatten(0, (HEADS, -1))[[1, 3, 0, 2]]
        super().keep(maps, values, picked.flatten(0, 1))

    def join(self, context: Tensor) -> Tensor:
        return super().join(context[:, [2, 0, 3, 1]])


class Difference(Kind):
    """Differential attention: one map less a share of another."""

    def __init__(self) -> None:
        super().__init__()
        self.other_query, self.other_key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.share = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        other = self.attend(self.split(self.other_query(x)), self.split(self.other_key(x)))
        return x + self.join((self.attend(query, key) - torch.exp(self.share) * other) @ value)


class DifferenceOfPairs(Kind):
    """The same, with both maps from one softmax."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        pairs = self.attend(query, key).unflatten(1, (HEADS // 2, 2))
        maps = pairs[:, :, 0] - 0.3 * pairs[:, :, 1]
        return x + self.join(maps.repeat_interleave(2, 1) @ value)


class Smoothed(Kind):
    """A part of every row is spread over all keys."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        probs = super().attend(query, key)
        return 0.9 * probs + 0.1 / probs.shape[-1]


class SmoothedByConvolution(Kind):
    """Maps as images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(HEADS, HEADS, 3, padding=1, groups=HEADS)

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        smoothed: Tensor = self.conv(super().attend(query, key))
        return smoothed


class SmoothedAndMixed(Smoothed):
    """Smoothed maps that are mixed among heads."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Linear(HEADS, HEADS, bias=False)

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        mixed: Tensor = self.after(super().attend(query, key).permute(0, 2, 3, 1))
        return mixed.permute(0, 3, 1, 2)


class Sigmoids(Kind):
    """A sigmoid of every logit in place of a softmax."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.sigmoid(self.logits(query, key) - 2.0)


class Linear(Kind):
    """Keys and values are multiplied first; the softmax of a query is over its features."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        memory = torch.exp(key - 1.0).transpose(-1, -2) @ value
        return x + self.join(torch.softmax(query, -1) @ memory)


class GatedMaps(Kind):
    """Maps are multiplied by a sigmoid of the query."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        return super().attend(query, key) * torch.sigmoid(query[..., :1])


@dataclass(frozen=True)
class Case:
    """A kind of attention, its inputs, and what is to come of it.

    Attributes:
        make: the module.
        reason: part of the reason for which it is refused; None where it works.
        padded: it takes a boolean mask ``(B, L)`` of padding.
        sequence_first: its input is ``(L, B, D)``.
        fixed_length: only its batch size is dynamic.
        row_sums: of the site.
    """

    make: Callable[[], Any]
    reason: str | None = None
    padded: bool = False
    sequence_first: bool = False
    fixed_length: bool = False
    row_sums: str = "one"


CASES: dict[str, Case] = {
    "encoder": Case(lambda: Encoder(batch_first=True)),
    "encoder, sequence first": Case(
        lambda: Encoder(batch_first=False), reason="its maps run between samples", sequence_first=True
    ),
    "module without weights": Case(lambda: Module(need_weights=False)),
    "module with weights": Case(lambda: Module(need_weights=True)),
    "module with padding": Case(PaddedModule, padded=True),
    "fused qkv by permute": Case(FusedByPermute),
    "fused qkv by chunk": Case(FusedByChunk),
    "T5 bias": Case(T5Bias),
    "Swin": Case(lambda: Swin(shift=0), reason="2 maps per sample, such as for windows", fixed_length=True),
    "Swin, shifted": Case(lambda: Swin(shift=2), reason="2 maps per sample, such as for windows", fixed_length=True),
    "Perceiver": Case(Perceiver),
    "MLA": Case(Latent),
    "DiT": Case(Modulated),
    "ALiBi": Case(Alibi),
    "GQA with RoPE": Case(Grouped),
    "MQA": Case(OneKey),
    "folded bmm": Case(Folded),
    "einsum": Case(ByEinsum),
    "W_o as convolution": Case(ProjectedByConv),
    "W_o as einsum": Case(ProjectedByEinsum),
    "W_o by head": Case(ProjectedByHead),
    "gated context": Case(GatedContext, reason="multiplied by a computed tensor, such as a gate"),
    "sub-norm": Case(SubNormed, reason="a norm stands between"),
    "LoRA": Case(LowRank),
    "sinks": Case(Sinks, row_sums="at_most_one"),
    "talking heads": Case(TalkingHeads),
    "d_v other than d_k": Case(WideValues),
    "softmax plus one": Case(PlusOne, row_sums="at_most_one"),
    "softmax plus one, from the maximum": Case(PlusOneFromMaximum, row_sums="at_most_one"),
    "exponential of log-softmax": Case(LogSoftmax),
    "exponential less log-sum-exp": Case(LogSumExp),
    "masked behind the softmax": Case(MaskedBehind),
    "masked before the sum": Case(MaskedPowers),
    "largest entries": Case(Largest),
    "squares over their sum": Case(Squared),
    "slots": Case(Competing),
    "mixture of experts": Case(Routed),
    "heads picked": Case(PickedHeads),
    "difference of maps": Case(Difference, reason="Sub, as in differential attention"),
    "difference of pairs": Case(DifferenceOfPairs, reason="Sub, as in differential attention"),
    "smoothed maps": Case(Smoothed, reason="made of its map by Add, Mul, as in differential attention or"),
    "convolved maps": Case(SmoothedByConvolution, reason="made of its map by Conv"),
    "smoothed and mixed": Case(SmoothedAndMixed, reason="made of its map by Add, MatMul, Mul, as in differential"),
    "sigmoids": Case(Sigmoids, reason="made of queries and keys by Div, Sigmoid, Sub and by no softmax"),
    "linear attention": Case(Linear, reason="it is linear attention"),
    "gated maps": Case(GatedMaps, reason="changed after the softmax, as by a gate"),
}


def make(name: str) -> Any:
    """The module, with the same weights at every call; no two kinds have equal ones: exporters join equal parts."""
    torch.manual_seed(list(CASES).index(name))
    module = CASES[name].make().eval()
    for parameter in module.parameters():  # so that maps differ from row to row, and biases from zero
        parameter.data = parameter.data * 2 + 0.1 * torch.randn_like(parameter)
    return module


class Together(nn.Module):
    """Several kinds side by side on one input, so that one export serves all: a site each, in their order."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(make(name) for name in names)
        self.padded = [CASES[name].padded for name in names]

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        total = x + 0.0 * padding[..., None]
        for kind, padded in zip(self.kinds, self.padded, strict=True):
            output: Tensor = kind(x, padding) if padded else kind(x)
            total = total + (output if output.shape == x.shape else output.mean(1, keepdim=True))
        return total


def sample(names: Sequence[str], batch: int, length: int) -> dict[str, Tensor]:
    """Inputs of kinds, of which the last positions of every sample but the first are padding."""
    torch.manual_seed(batch * 100 + length)
    sizes = (length, batch) if any(CASES[name].sequence_first for name in names) else (batch, length)
    padding = torch.arange(length)[None] >= length - torch.arange(batch)[:, None]
    return {"x": torch.randn(*sizes, WIDTH), "padding": padding if sizes[0] == batch else padding.T}
