"""Kinds of attention as people write them in PyTorch, each with the maps and value outputs that it computes itself.

Every module keeps, of its last call, its maps ``(B, H, L, S)`` and the value outputs ``X = V W_o`` ``(B, H, S, D)``
that belong to them; what a graph tells is compared with these. Importing this needs torch.
"""

import math
from collections.abc import Callable, Iterable
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


class PlusOneFromMaximum(Kind):
    """The same without overflow."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        logits = self.logits(query, key)
        highest = logits.amax(-1, keepdim=True).clamp(min=0)
        powers = torch.exp(logits - highest)
        return powers / (torch.exp(-highest) + powers.sum(-1, keepdim=True))


class Largest(Kind):
    """Only the two largest of each row, scaled to one."""

    def attend(self, query: Tensor, key: Tensor) -> Tensor:
        probs = super().attend(query, key)
        probs = torch.where(probs >= torch.topk(probs, 2, -1).values[..., -1:], probs, 0.0)
        return nn.functional.normalize(probs, p=1, dim=-1)


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


class DifferenceOfPairs(Kind):
    """The same, with both maps from one softmax."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        pairs = self.attend(query, key).unflatten(1, (HEADS // 2, 2))
        maps = pairs[:, :, 0] - 0.3 * pairs[:, :, 1]
        return x + self.join(maps.repeat_interleave(2, 1) @ value)


class Linear(Kind):
    """Keys and values are multiplied first; the softmax of a query is over its features."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        memory = torch.exp(key - 1.0).transpose(-1, -2) @ value
        return x + self.join(torch.softmax(query, -1) @ memory)


@dataclass(frozen=True)
class Case:
    """A kind of attention, and what is to come of it; where it is refused, part of the reason."""

    make: Callable[[], Any]
    reason: str | None = None
    row_sums: str = "one"


CASES: dict[str, Case] = {
    "fused qkv by permute": Case(FusedByPermute),
    "Perceiver": Case(Perceiver),
    "MLA": Case(Latent),
    "sinks": Case(Sinks, row_sums="at_most_one"),
    "talking heads": Case(TalkingHeads),
    "softmax plus one, from the maximum": Case(PlusOneFromMaximum, row_sums="at_most_one"),
    "largest entries": Case(Largest),
    "slots": Case(Competing),
    "mixture of experts": Case(Routed),
    "difference of pairs": Case(DifferenceOfPairs, reason="Sub, as in differential attention"),
    "linear attention": Case(Linear, reason="it is linear attention"),
}


def make(name: str) -> Any:
    """The module, with the same weights at every call; no two kinds have equal ones: exporters join equal parts."""
    torch.manual_seed(list(CASES).index(name))
    module = CASES[name].make().eval()
    for parameter in module.parameters():  # so that maps differ from row to row, and biases from zero
        parameter.data = parameter.data * 2 + 0.1 * torch.randn_like(parameter)
    return module


class Together(nn.Module):
    """Kinds side by side on one input, so that one export serves all: a site each, in their order."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(make(name) for name in names)

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for kind in self.kinds:
            output: Tensor = kind(x)
            total = total + (output if output.shape == x.shape else output.mean(1, keepdim=True))
        return total


def sample(batch: int, length: int) -> dict[str, Tensor]:
    torch.manual_seed(batch * 100 + length)
    return {"x": torch.randn(batch, length, WIDTH)}
