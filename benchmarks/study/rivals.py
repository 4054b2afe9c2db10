"""Rivals of SHD: what else can be taught beside a base loss, each a plain function of a pair of layers.

``make_rival("hard", teacher, student, batch)`` reads both models on one batch; another name of ``RIVALS`` is another
rival. A rival is a module, as some have a part that is trained with the student and thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention  # the function itself: captures replace its name
from torch.nn.utils.parametrizations import orthogonal
from torch.overrides import TorchFunctionMode

from shd_ref.layers import layer_map
from shd_ref.merging.plans import plan_groups
from shd_ref.shrink.heads import merge_heads
from shd_torch.capture import AttentionCall, Captured, capture_attention
from shd_torch.capture.layers import number_layers
from shd_torch.capture.outputs import ProjectionWatch, read_every_hidden_state
from shd_torch.capture.taps import record
from shd_torch.live import OnlineTeacher, layer_kls
from shd_torch.live.online import OnlineSupervision, eval_mode
from shd_torch.maps import shd_loss, softmax
from shd_torch.maps.alpha import gram_of_products, split_projection
from shd_torch.recipes import SHD, Term
from shd_torch.supervision.factored import Factored

Pairs = tuple[tuple[int, int], ...]


@dataclass(eq=False)
class ForwardPass:
    """The last forward pass of a model: its attention calls with values, and hidden states where they are read."""

    captured: Captured
    hidden: tuple[Tensor, ...] = field(default=())


class TeacherOutputs(NamedTuple):
    """Of one batch: squeezed attention where maps are merged; by teaching layer its call, and its block's output."""

    attention: OnlineSupervision | None
    calls: Mapping[int, AttentionCall]
    hidden: Mapping[int, Tensor]


class LayerPair(NamedTuple):
    """A layer of the student, with gradient, and the one that teaches it."""

    student: AttentionCall
    teacher: AttentionCall
    hidden: tuple[Tensor, ...]  # what the blocks return, (B, L, D_s) and (B, L, D_t); nothing where it is not read
    squeeze: Any  # of the teacher's maps; None where none are merged
    part: Any  # that is trained with the student, or None
    temperature: float


Loss = Callable[[LayerPair, Tensor | None], Tensor]


class Kind(NamedTuple):
    """How a rival teaches.

    Attributes:
        loss: of one pair of layers; None for SHD's own of all layers, and for copied attention, which has none.
        reads: of the teacher: ``merged`` maps, maps of all ``heads``, ``one`` map of them all, ``vectors`` (queries,
            keys and values) or ``hidden`` states.
        squeezing: options of ``OnlineTeacher``.
        make_part: what is trained, of the features' widths, or of the numbers of heads.
        copies: whether the student attends with the merged maps.
    """

    loss: Loss | None
    reads: str
    squeezing: Mapping[str, str] = {}
    make_part: Callable[[int, int], nn.Module] | None = None
    copies: bool = False


class Rival(nn.Module):
    """An additional loss term for these layers ``(student, teacher)``."""

    def __init__(
        self, kind: Kind, online: OnlineTeacher, pairs: Pairs, temperature: float, parts: Iterable[nn.Module]
    ) -> None:
        super().__init__()
        self.kind, self.online, self.pairs, self.temperature = kind, online, pairs, temperature
        self.parts = nn.ModuleList(parts)

    @property
    def needs_teacher(self) -> bool:
        """Whether the student cannot run without the teacher."""
        return self.kind.copies

    @torch.no_grad()
    def teach(self, **inputs: Tensor) -> TeacherOutputs:
        """Run the teacher on a batch."""
        model, attention = self.online.model, None
        with capture_model(model, hidden=self.kind.reads == "hidden") as own_pass:
            if self.kind.reads == "merged":
                attention = self.online(**inputs)
            else:
                with eval_mode(model):
                    model(**inputs)
        layers = sorted({teacher for _, teacher in self.pairs})
        hidden = {layer: own_pass.hidden[layer + 1] for layer in layers if own_pass.hidden}
        return TeacherOutputs(attention, {layer: own_pass.captured.layer(layer) for layer in layers}, hidden)

    @contextmanager
    def capture(self, student: nn.Module, outputs: TeacherOutputs) -> Iterator[ForwardPass]:
        """A block for the student's forward pass on the same batch."""
        with capture_model(student, hidden=self.kind.reads == "hidden") as own_pass:
            if not self.kind.copies:
                yield own_pass
                return
            assert outputs.attention is not None
            taught = zip(outputs.attention.layers, outputs.attention.supervise(), strict=True)
            maps = {layer: supervision.probs(temperature=self.temperature) for layer, supervision in taught}
            with _Copying(student, maps):
                yield own_pass

    def forward(self, own_pass: ForwardPass, outputs: TeacherOutputs, *, loss_mask: Tensor | None = None) -> Tensor:
        """The loss ``()`` before its weight, a sum over layers; ``loss_mask`` ``(B, L)`` True = the row counts."""
        if self.kind.copies:
            return own_pass.captured.layer(self.pairs[0][0]).query.new_zeros(())
        if self.kind.loss is None:
            assert outputs.attention is not None
            options: dict[str, Any] = {"temperature": self.temperature, "check": False}
            kls = layer_kls(own_pass.captured, outputs.attention, loss_mask=loss_mask, **options)
            return torch.stack(list(kls.values())).sum()
        terms = []
        for number, (student, teacher) in enumerate(self.pairs):
            calls = own_pass.captured.layer(student), outputs.calls[teacher]
            hidden = (own_pass.hidden[student + 1], outputs.hidden[teacher]) if outputs.hidden else ()
            squeeze = None if outputs.attention is None else outputs.attention.squeezes[number]
            part = self.parts[number] if len(self.parts) else None
            terms.append(self.kind.loss(LayerPair(*calls, hidden, squeeze, part, self.temperature), loss_mask))
        return torch.stack([term.to(terms[0].device) for term in terms]).sum()


@dataclass(frozen=True, eq=False)
class RivalTerm(SHD):
    """A rival's loss, before its weight, as the argument ``shd`` of a recipe."""

    value: Tensor | None = None

    @property
    def is_live(self) -> bool:
        """Always."""
        return True

    def term(self) -> Term:
        """The rival's loss and its weight."""
        assert self.value is not None
        return Term(self.value, self.beta)


# --- losses of a pair of layers, means over rows that count ------------------------------------------------------


def divergence(pair: LayerPair, mask: Tensor | None, *, name: str) -> Tensor:
    """Another divergence of SHD's merged maps."""
    maps = pair.squeeze.supervision.probs(temperature=pair.temperature)
    options: dict[str, Any] = {"temperature": pair.temperature, "divergence": name, "check": False}
    return shd_loss([maps], [pair.student.compute_logits()], loss_mask=mask, **options)


def geometric_mean(pair: LayerPair, mask: Tensor | None) -> Tensor:
    """The KL of ``A~_h ~ prod_t A_t^(1/k)`` over a group's k heads: the softmax of mean logits."""
    groups = plan_groups(pair.squeeze.plan, pair.teacher.num_heads)
    return _kl_of_means(pair, mask, groups, pair.student.compute_logits())


def mean_ce(pair: LayerPair, mask: Tensor | None) -> Tensor:
    """TextBrewer's: the same with one map of all the teacher's heads, and one of all the student's."""
    logits = pair.student.compute_logits().mean(1, keepdim=True)
    return _kl_of_means(pair, mask, (tuple(range(pair.teacher.num_heads)),), logits)


def _kl_of_means(pair: LayerPair, mask: Tensor | None, groups: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    other = pair.teacher.compute_logits()
    means = torch.stack([other[:, list(group)].mean(1) for group in groups], dim=1)
    maps = (means / pair.temperature).softmax(-1).nan_to_num(0.0)  # rows that see no key
    return shd_loss([maps], [logits], loss_mask=mask, temperature=pair.temperature, check=False)


def sum_mse(pair: LayerPair, mask: Tensor | None) -> Tensor:
    """TextBrewer's: the squared difference of sums of all heads' logits, a mean over entries that both models see.

    Deviation: the published code sets masked entries to 0 and counts them.
    """
    own, other = (call.compute_logits().sum(1) for call in (pair.student, pair.teacher))
    counted = ~(torch.isneginf(own) | torch.isneginf(other))
    if mask is not None:
        counted = counted & mask[:, :, None]
    difference = own.masked_fill(~counted, 0.0) - other.masked_fill(~counted, 0.0)
    return difference.square().sum() / counted.sum().clamp(min=1)


def relation_kl(pair: LayerPair, mask: Tensor | None) -> Tensor:
    """MiniLMv2's: the KL of relations between queries, between keys and between values, summed.

    Vectors of all heads are put side by side and split anew, by the largest divisor of all widths and of the
    teacher's number of heads; a relation is ``softmax(X X^T / sqrt(d_r))`` over the positions that the teacher's row
    may attend to. Deviations: every pair of layers is taught, and queries and keys are read after their rotation.
    """
    vectors = [(call.query, call.key, call.value) for call in (pair.student, pair.teacher)]
    widths = [x.shape[1] * x.shape[3] for triple in vectors for x in triple if x is not None]
    count = math.gcd(pair.teacher.num_heads, *widths)
    call = pair.teacher
    logits = call.rule.logits(call.query[:, :1], call.key[:, :1])[:, :1]
    # A row sees itself, so that none is empty; those that the mask leaves out do not count.
    seen = ~torch.isneginf(logits) | torch.eye(logits.shape[2], dtype=torch.bool, device=logits.device)
    terms = []
    for both in zip(*vectors, strict=True):
        own, other = (_relate(x, count).masked_fill(~seen, -math.inf) for x in both if x is not None)
        maps = (other / pair.temperature).softmax(-1)
        options: dict[str, Any] = {"temperature": pair.temperature, "reduction": "mean", "check": False}
        terms.append(shd_loss(maps, own, loss_mask=mask, **options))
    return torch.stack(terms).sum()


def _relate(vectors: Tensor, count: int) -> Tensor:
    """``(B, H, L, d)`` to logits ``(B, count, L, L)``."""
    batch, _, length, _ = vectors.shape
    split = vectors.transpose(1, 2).reshape(batch, length, count, -1).transpose(1, 2)
    return split @ split.mT / math.sqrt(split.shape[-1])


def soft_alignment(pair: LayerPair, mask: Tensor | None) -> Tensor:
    """AMAD's ("No Head Left Behind", AAAI 2024): every teacher head teaches each student head that resembles it.

    ``sum_t sum_h a_th KL(A_t || A_h)`` with ``a_t = softmax_h cos(A_t, A_h)`` of whole maps, for each sample; weights
    have no gradient. Our reading of the paper: no code of theirs was at hand.
    """
    maps, log_probs = _read_maps(pair)
    units = [F.normalize(x.detach().flatten(2), dim=-1) for x in (maps, log_probs.exp())]
    weights = (units[0] @ units[1].mT).softmax(-1)  # (B, H_t, H_s)
    cross = torch.einsum("btls,bhls,bth->bl", maps, log_probs, weights)
    return mean_rows(_entropies(maps).sum(1) - cross, mask)


def learned_alignment(pair: LayerPair, mask: Tensor | None) -> Tensor:
    """A trained mixing matrix, each row a softmax over teacher heads: ``sum_h KL(sum_t M_ht A_t || A_h)``."""
    maps, log_probs = _read_maps(pair)
    mixed = torch.einsum("ht,btls->bhls", pair.part[0].softmax(-1), maps)
    return mean_rows((_entropies(mixed) - (mixed * log_probs).sum(-1)).sum(1), mask)


def random_heads(pair: LayerPair, mask: Tensor | None) -> Tensor:
    """The source's hard selection: one teacher head for each of the student's, drawn before training."""
    maps, log_probs = _read_maps(pair)
    chosen = maps[:, pair.part.heads]
    return mean_rows((_entropies(chosen) - (chosen * log_probs).sum(-1)).sum(1), mask)


class DrawnHeads(nn.Module):
    """So many different heads of the teacher's, by PyTorch's generator, which each run seeds; rising."""

    heads: Tensor

    def __init__(self, student: int, teacher: int) -> None:
        super().__init__()
        self.register_buffer("heads", torch.randperm(teacher)[:student].sort().values)


def favour_adjacent(student: int, teacher: int) -> nn.Module:
    """Weights ``(H_s, H_t)`` that favour the heads which adjacent pairs would merge."""
    groups = torch.arange(teacher) * student // teacher
    return nn.ParameterList([nn.Parameter(2.0 * F.one_hot(groups, student).T.float())])


def _read_maps(pair: LayerPair) -> tuple[Tensor, Tensor]:
    """The teacher's maps ``(B, H_t, L, S)``, and the logarithm of the student's, -1e4 where it may not attend."""
    maps = softmax(pair.teacher.compute_logits() / pair.temperature, check=False)
    logits = pair.student.compute_logits() / pair.temperature
    return maps, logits.masked_fill(torch.isneginf(logits), -1e4).log_softmax(-1)


def _entropies(maps: Tensor) -> Tensor:
    """Negative, of each row; its gradient is finite where an entry is 0."""
    return (maps * maps.clamp(min=1e-30).log()).sum(-1)


def projected_mse(pair: LayerPair, mask: Tensor | None) -> Tensor:
    """``mean (P S - T)^2`` of hidden states, over rows that count and channels."""
    student, teacher = pair.hidden
    return mean_rows((pair.part(student) - teacher).square().mean(-1), mask)


def make_mlp(student: int, teacher: int) -> nn.Module:
    """Linear, GELU, Linear."""
    return nn.Sequential(nn.Linear(student, teacher), nn.GELU(), nn.Linear(teacher, teacher))


def make_orthogonal(student: int, teacher: int) -> nn.Module:
    """A matrix that stays orthonormal, as the exponential of a skew-symmetric one, cut to size."""
    return orthogonal(nn.Linear(student, teacher, bias=False), orthogonal_map="matrix_exp")


def output_mse(pair: LayerPair, mask: Tensor | None) -> Tensor:
    """The same on what attention returns before its output projection, ``A V`` with heads side by side."""
    sides = [_attention_output(call) for call in (pair.student, pair.teacher)]
    return mean_rows((pair.part(sides[0]) - sides[1]).square().mean(-1), mask)


def _attention_output(call: AttentionCall) -> Tensor:
    assert call.value is not None
    maps = softmax(call.compute_logits(), check=False)
    value = call.value[:, :, : maps.shape[3]].repeat_interleave(call.num_heads // call.value.shape[1], 1)
    return torch.einsum("bhls,bhsd->blhd", maps.to(value.dtype), value).flatten(2)


def orthogonal_l1(pair: LayerPair, mask: Tensor | None) -> Tensor:
    """VkD's ``SmoothL1(W S, LN(T))`` with an orthonormal W, position by position; VkD pools an image's first."""
    student, teacher = pair.hidden
    target = F.layer_norm(teacher, teacher.shape[-1:])
    return mean_rows(F.smooth_l1_loss(pair.part(student), target, reduction="none").mean(-1), mask)


def self_correlation(pair: LayerPair, mask: Tensor | None) -> Tensor:
    """Cosines of each position's features with every other's, compared by their mean squared difference (Eq. 12).

    Our reading: the source names the Gram matrix and the cosine, and no reduction.
    """
    own, other = (F.normalize(states, dim=-1) for states in pair.hidden)
    difference = (own @ own.mT - other @ other.mT).square()
    if mask is None:
        return difference.mean()
    both = mask[:, :, None] & mask[:, None, :]
    return difference.masked_fill(~both, 0.0).sum() / both.sum().clamp(min=1)


def mean_rows(losses: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of ``(B, L)`` over rows that count; exactly 0, and attached, where none does."""
    if mask is None:
        return losses.mean()
    return losses.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


RIVALS: dict[str, Kind] = {
    "shd": Kind(None, "merged"),
    "hard": Kind(None, "merged", {"strategy": "hard"}),
    "constant": Kind(None, "merged", {"strategy": "constant"}),
    "mean": Kind(None, "merged", {"strategy": "mean"}),
    "as_printed": Kind(None, "merged", {"alpha_rule": "as_printed"}),
    "geometric_mean": Kind(geometric_mean, "merged"),
    "mse": Kind(partial(divergence, name="mse"), "merged"),
    "js": Kind(partial(divergence, name="js"), "merged"),
    "reverse_kl": Kind(partial(divergence, name="reverse_kl"), "merged"),
    "relation_kl": Kind(relation_kl, "vectors"),
    "soft_alignment": Kind(soft_alignment, "heads"),
    "learned_alignment": Kind(learned_alignment, "heads", make_part=favour_adjacent),
    "random_heads": Kind(random_heads, "heads", make_part=DrawnHeads),
    "sum_mse": Kind(sum_mse, "one"),
    "mean_ce": Kind(mean_ce, "one"),
    "linear_projector": Kind(projected_mse, "hidden", make_part=nn.Linear),
    "mlp_projector": Kind(projected_mse, "hidden", make_part=make_mlp),
    "orthogonal_projector": Kind(orthogonal_l1, "hidden", make_part=make_orthogonal),
    "self_correlation": Kind(self_correlation, "hidden"),
    "attention_output": Kind(output_mse, "heads", make_part=nn.Linear),
    "attention_copy": Kind(None, "merged", copies=True),
}


def make_rival(
    name: str,
    teacher: nn.Module,
    student: nn.Module,
    batch: Mapping[str, Any],
    *,
    layer_pairs: Iterable[tuple[int, int]] | None = None,
    plan: Any = None,
    alpha_per: str = "map",
    temperature: float = 1.0,
) -> Rival:
    """A rival for this teacher and this student, on the student's device.

    Args:
        name: one of ``RIVALS``.
        teacher: as for ``OnlineTeacher``.
        student: its heads and layers are counted.
        batch: arguments of both models by name, of a few dozen samples if pairs are matched on it.
        layer_pairs: ``(student layer, teacher layer)``, zero-based; default spread as ``layer_map`` does.
        plan: as in ``OnlineTeacher``, or ``"matched"``: pairs of least residual on the batch, for each layer.
        alpha_per: ``"map"``; arms with ``"row"`` were measured before it was removed, and their results are kept.
        temperature: T_a of both maps.
    """
    if alpha_per != "map":
        raise ValueError(f"alpha_per must be map; got {alpha_per}: its results are kept, not run again")
    kind = RIVALS[name]
    passes = []
    for model in (student, teacher):
        with torch.no_grad(), eval_mode(model), capture_model(model, hidden=kind.reads == "hidden") as one:
            model(**batch)
        passes.append(one)
    own, other = passes
    pairs = layer_map(
        other.captured.num_calls, own.captured.num_calls, None if layer_pairs is None else tuple(layer_pairs)
    )
    heads = own.captured.layer(pairs[0][0]).num_heads
    if plan == "matched":
        plan = match_heads(teacher, batch, pairs, heads)
    online = OnlineTeacher(teacher, heads, pairs, plan=plan, **dict(kind.squeezing))  # type: ignore[arg-type]
    parts = []
    if kind.make_part is not None:
        parts = [kind.make_part(_width(kind, own, s), _width(kind, other, t)) for s, t in pairs]
    return Rival(kind, online, pairs, temperature, parts).to(next(student.parameters()).device)


def _width(kind: Kind, forward_pass: ForwardPass, layer: int) -> int:
    """Of the features of a layer, or how many heads it has."""
    if kind.reads == "hidden":
        return forward_pass.hidden[layer + 1].shape[-1]
    call = forward_pass.captured.layer(layer)
    assert call.value is not None
    return (
        call.num_heads if kind.make_part in (favour_adjacent, DrawnHeads) else call.num_heads * call.value.shape[-1]
    )


@contextmanager
def capture_model(model: nn.Module, *, hidden: bool) -> Iterator[ForwardPass]:
    """Read every forward pass inside the block, the last one wins; hidden states are asked for."""
    with capture_attention(model, keep_values=True) as captured:
        forward_pass, handles = ForwardPass(captured), []
        if hidden:

            def ask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
                return args, {**kwargs, "output_hidden_states": True}

            def take(_: nn.Module, __: Any, output: Any) -> None:
                forward_pass.hidden = read_every_hidden_state(output, type(model).__name__)

            handles = [model.register_forward_pre_hook(ask, with_kwargs=True), model.register_forward_hook(take)]
        try:
            yield forward_pass
        finally:
            for handle in handles:
                handle.remove()


@torch.no_grad()
def match_heads(teacher: nn.Module, batch: Mapping[str, Any], pairs: Pairs, heads: int) -> dict[int, Any]:
    """Matched rounds of each teacher layer that is paired, by its number."""
    with eval_mode(teacher), record(teacher, values=True) as calls, ProjectionWatch(teacher) as watch:
        teacher(**batch)
    numbers = tuple(sorted({layer for _, layer in pairs}))
    captured = Captured(numbers)
    layers = number_layers(calls, teacher)
    captured.take(layers, grad_enabled=False)
    mask = batch.get("attention_mask")
    counted = mask.bool() if mask is not None and mask.ndim == 2 else None
    plans = {}
    for layer in numbers:
        call = captured.layer(layer)
        assert call.value is not None
        projection = watch.find(layer, layers[layer][0], {}).matrix(teacher).to(call.value.device)
        # The maps are never formed: each head's product with every value head is fused attention.
        maps, values = Factored.teacher(call.query, call.key, rule=call.rule), call.value[:, :, : call.key.shape[2]]
        shape = (*call.query.shape[:3], call.key.shape[2])
        by_head = split_projection(shape, values, projection, counted, check=True)
        read = torch.stack([maps.apply_to(one) for one in values.split(1, dim=1)], dim=2)
        products = read.repeat_interleave(len(by_head) // values.shape[1], dim=2)
        gram = gram_of_products(products.double(), by_head, counted).sum(0)
        plans[layer] = merge_heads(gram.cpu().numpy(), heads, "matched", num_kv_heads=1).plan
    return plans


class _Copying(TorchFunctionMode):
    """Answers a model's calls of fused attention with A~ ``(B, H_s, L, S)`` by a call's number, in every pass.

    What a student could gain if it attended exactly as SHD asks: a bound, not a method. Queries and keys of those
    layers learn nothing.
    """

    def __init__(self, student: nn.Module, maps: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._maps, self._student, self._calls = maps, student, 0

    def __enter__(self) -> Any:
        hooks = self._student.register_forward_pre_hook, self._student.register_forward_hook
        self._handles = [hook(act) for hook, act in zip(hooks, (self._start, self._finish), strict=True)]
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it without a type

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _start(self, *_: Any) -> None:
        self._calls = 0

    def _finish(self, *_: Any) -> None:
        if self._calls <= max(self._maps):
            raise RuntimeError("attention_copy needs scaled_dot_product_attention: set attn_implementation to 'sdpa'")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every function of PyTorch that is called inside."""
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        maps = self._maps.get(self._calls)
        self._calls += 1
        if maps is None:
            return func(*args, **kwargs)
        value: Tensor = args[2] if len(args) > 2 else kwargs["value"]
        return maps.to(value.dtype) @ value.repeat_interleave(maps.shape[1] // value.shape[1], 1)
