"""The rivals: losses on attention maps and their logits, losses on features, and maps that are copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention  # the function itself: captures replace its name
from torch.overrides import TorchFunctionMode

from shd_ref.errors import ShdError
from shd_ref.merging.plans import plan_groups
from shd_torch.capture import AttentionCall
from shd_torch.maps import shd_loss, softmax
from shd_torch.recipes import OrthogonalProjection
from shd_torch.rivals.rival import ForwardPass, LayerPair, Rival, TeacherOutputs, capture_model, mean_rows
from shd_torch.teacher import layer_kls


class MergedMaps(Rival):
    """The KL of the teacher's maps, merged as ``online`` does it: SHD, and every other mixing matrix (Eq. 11)."""

    merges_maps = True

    def forward(self, own_pass: ForwardPass, outputs: TeacherOutputs, *, loss_mask: Tensor | None = None) -> Tensor:
        """``layer_kls``, a sum over layers and heads."""
        kls = layer_kls(
            own_pass.captured, outputs.squeezed, loss_mask=loss_mask, temperature=self.temperature, check=False
        )
        return torch.stack(list(kls.values())).sum()


class Divergence(Rival):
    """Another divergence of the same merged maps: ``mse`` (summed over keys), ``js`` or ``reverse_kl`` (LOSS-11)."""

    merges_maps = True

    def __init__(self, *args: Any, divergence: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.divergence = divergence

    def forward(self, own_pass: ForwardPass, outputs: TeacherOutputs, *, loss_mask: Tensor | None = None) -> Tensor:
        """``shd_loss``, a sum over layers and heads."""
        return shd_loss(
            [supervision.probs(temperature=self.temperature) for supervision in outputs.squeezed.supervisions],
            [own_pass.captured.layer(student).compute_logits() for student, _ in self.pairs],
            loss_mask=loss_mask,
            temperature=self.temperature,
            divergence=self.divergence,
            check=self.is_first(),
        )


class GeometricMean(Rival):
    """The KL of geometric means: ``A~_h ~ prod_t A_t^(1/k)`` over the k heads of a group, rows renormalised.

    With ``all_heads`` one map of all teacher heads teaches one of all student heads, as AttnDistill (BMVC 2022) does
    for heads of any numbers; with ``class_row`` the first row alone counts, as there. A geometric mean is the softmax
    of mean logits. Our reading: no code of theirs was at hand.
    """

    merges_maps = True

    def __init__(self, *args: Any, all_heads: bool = False, class_row: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.all_heads, self.class_row = all_heads, class_row

    def forward(self, own_pass: ForwardPass, outputs: TeacherOutputs, *, loss_mask: Tensor | None = None) -> Tensor:
        """A sum over layers and over maps."""
        taught, logits = [], []
        for (student, teacher), squeeze in zip(self.pairs, outputs.squeezed.squeezes, strict=True):
            own = own_pass.captured.layer(student).compute_logits()
            other = outputs.calls[teacher].compute_logits()
            groups = plan_groups(squeeze.plan, other.shape[1])
            if self.all_heads:
                own, groups = own.mean(1, keepdim=True), (tuple(range(other.shape[1])),)
            means = torch.stack([other[:, list(group)].mean(1) for group in groups], dim=1)
            taught.append((means / self.temperature).softmax(-1).nan_to_num(0.0))  # rows that see no key
            logits.append(own)
        if self.class_row:
            first = torch.zeros(taught[0].shape[0], taught[0].shape[2], dtype=torch.bool, device=taught[0].device)
            first[:, 0] = True
            loss_mask = first if loss_mask is None else first & loss_mask
        return shd_loss(taught, logits, loss_mask=loss_mask, temperature=self.temperature, check=self.is_first())


class ScoreMse(Rival):
    """TinyBERT: the mean squared difference of attention logits, head by head; heads must be equally many.

    With ``sum_heads`` the logits of all heads are added up first, as TextBrewer does for heads of any numbers.

    Deviation: the published code sets masked entries to 0 and counts them; here the mean is over entries that both
    models may attend to, in rows that count.
    """

    def __init__(self, *args: Any, sum_heads: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sum_heads = sum_heads

    def layer_loss(self, pair: LayerPair, loss_mask: Tensor | None) -> Tensor:
        """The mean over samples, heads, rows and keys."""
        if not self.sum_heads and pair.student.num_heads != pair.teacher.num_heads:
            raise ShdError(
                "argument-shape",
                "score_mse compares head with head, so that both models must have equally many; got "
                f"{pair.teacher.num_heads} of the teacher and {pair.student.num_heads} of the student",
            )
        own, other = pair.student.compute_logits(), pair.teacher.compute_logits()
        if self.sum_heads:
            own, other = own.sum(1, keepdim=True), other.sum(1, keepdim=True)
        counted = ~(torch.isneginf(own) | torch.isneginf(other))
        if loss_mask is not None:
            counted = counted & loss_mask[:, None, :, None]
        difference = own.masked_fill(~counted, 0.0) - other.masked_fill(~counted, 0.0)
        return difference.square().sum() / counted.sum().clamp(min=1)


class Projector(Rival):
    """The mean squared error of projected features: ``mean (P_l S_l - T_l)^2`` over rows and channels.

    P is linear, or with ``hidden_layer`` Linear, GELU, Linear of the teacher's width, for ``widths`` of each pair.
    """

    reads_hidden = True

    def __init__(
        self, *args: Any, widths: Sequence[tuple[int, int]], hidden_layer: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.projectors = nn.ModuleList(
            nn.Sequential(nn.Linear(student, teacher), nn.GELU(), nn.Linear(teacher, teacher))
            if hidden_layer
            else nn.Linear(student, teacher)
            for student, teacher in widths
        )

    def layer_loss(self, pair: LayerPair, loss_mask: Tensor | None) -> Tensor:
        """A mean over rows that count and channels."""
        student, teacher = self._features(pair)
        return mean_rows((self.projectors[pair.number](student) - teacher).square().mean(-1), loss_mask)

    def _features(self, pair: LayerPair) -> tuple[Tensor, ...]:
        return pair.hidden


class AttentionOutput(Projector):
    """The same on what attention returns before its output projection, heads side by side ``(B, L, H d_v)``."""

    reads_hidden = False

    def _features(self, pair: LayerPair) -> tuple[Tensor, ...]:
        return attention_output(pair.student), attention_output(pair.teacher)


class OrthogonalProjector(Rival):
    """VkD: ``SmoothL1(W S, LN(T))`` with a W whose rows or columns stay orthonormal, position by position.

    Deviation: VkD pools the positions of an image first; the rows of a text are not one thing.
    """

    reads_hidden = True

    def __init__(self, *args: Any, widths: Sequence[tuple[int, int]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.projectors = nn.ModuleList(OrthogonalProjection(*pair) for pair in widths)

    def layer_loss(self, pair: LayerPair, loss_mask: Tensor | None) -> Tensor:
        """A mean over rows that count and channels."""
        student, teacher = pair.hidden
        target = F.layer_norm(teacher, teacher.shape[-1:])
        projected = self.projectors[pair.number](student)
        return mean_rows(F.smooth_l1_loss(projected, target, reduction="none").mean(-1), loss_mask)


class SelfCorrelation(Rival):
    """Cosines of each position's features with every other's, compared by their mean squared difference (Eq. 12).

    ``G_ij = cos(f_i, f_j)``: no width takes part, so that there is no projector. Our reading: the source names the
    Gram matrix and the cosine, and no reduction.
    """

    reads_hidden = True

    def layer_loss(self, pair: LayerPair, loss_mask: Tensor | None) -> Tensor:
        """A mean over pairs of positions that both count."""
        own, other = (F.normalize(states, dim=-1) for states in pair.hidden)
        difference = (own @ own.mT - other @ other.mT).square()
        if loss_mask is None:
            return difference.mean()
        both = loss_mask[:, :, None] & loss_mask[:, None, :]
        return difference.masked_fill(~both, 0.0).sum() / both.sum().clamp(min=1)


def attention_output(call: AttentionCall) -> Tensor:
    """``A V`` of a call, heads side by side: ``(B, L, H d_v)``, with gradient."""
    assert call.value is not None
    maps = softmax(call.compute_logits(), check=False)
    value = call.value[:, :, : maps.shape[3]].repeat_interleave(call.num_heads // call.value.shape[1], 1)
    return torch.einsum("bhls,bhsd->blhd", maps.to(value.dtype), value).flatten(2)


class AttentionCopy(Rival):
    """What a student could gain if it attended exactly as SHD asks: a bound, not a method.

    Inside ``capture`` the maps of taught layers are the merged ones, frozen, in training as in evaluation; queries
    and keys of those layers learn nothing. The loss is 0. The student's attention must be
    ``torch.nn.functional.scaled_dot_product_attention``; its dropout is left out.
    """

    merges_maps = True
    needs_teacher = True

    @contextmanager
    def capture(self, student: nn.Module, outputs: TeacherOutputs) -> Iterator[ForwardPass]:
        """A block for the student's forward pass on the teacher's batch, with its maps in it."""
        taught = zip(outputs.squeezed.layers, outputs.squeezed.supervisions, strict=True)
        maps = {layer: supervision.probs(temperature=self.temperature) for layer, supervision in taught}
        with capture_model(student, hidden=False) as own_pass, _Copying(student, maps):
            yield own_pass

    def forward(self, own_pass: ForwardPass, outputs: TeacherOutputs, *, loss_mask: Tensor | None = None) -> Tensor:
        """0: what is copied needs no loss."""
        return own_pass.captured.layer(self.pairs[0][0]).query.new_zeros(())


class _Copying(TorchFunctionMode):
    """Answers a model's calls of fused attention with A~ ``(B, H_s, L, S)`` by a call's number, in every pass."""

    def __init__(self, student: nn.Module, maps: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._maps, self._student, self._calls = maps, student, 0

    def __enter__(self) -> Any:
        self._handles = [
            self._student.register_forward_pre_hook(self._start),
            self._student.register_forward_hook(self._finish),
        ]
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch leaves it without a type

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _start(self, *_: Any) -> None:
        self._calls = 0

    def _finish(self, *_: Any) -> None:
        if self._calls <= max(self._maps):
            raise ShdError(
                "capture-failed",
                f"attention_copy must see call {max(self._maps)} of scaled_dot_product_attention in "
                f"{type(self._student).__name__}; got {self._calls} calls: set attn_implementation to 'sdpa'",
            )

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
        value = value.repeat_interleave(maps.shape[1] // value.shape[1], 1)
        return maps.to(value.dtype) @ value
