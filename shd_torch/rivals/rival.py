"""What all rivals share: a live teacher, a captured student, a loss, and the term that joins a recipe."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shd_torch.capture import AttentionCall, Captured, capture_attention
from shd_torch.capture.outputs import read_every_hidden_state, read_logits
from shd_torch.recipes import SHD, Term
from shd_torch.supervision.targets import TopkTargets
from shd_torch.teacher.online import OnlineSupervision, OnlineTeacher, eval_mode


@dataclass(eq=False)
class ForwardPass:
    """The last forward pass of a model that is read.

    Attributes:
        captured: its attention calls, with values.
        hidden: hidden states ``(B, L, D)`` numbered as in Hugging Face, 0 for the embeddings; empty unless requested.
    """

    captured: Captured
    hidden: tuple[Tensor, ...] = field(default=())


@contextmanager
def capture_model(model: nn.Module, *, hidden: bool) -> Iterator[ForwardPass]:
    """Read every forward pass inside the block; the last one wins.

    With ``hidden`` the model is asked for hidden states, by ``output_hidden_states=True``.
    """
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


class TeacherOutputs(NamedTuple):
    """A live teacher's outputs for one batch.

    Attributes:
        attention: its squeezed attention; None for a rival that merges no maps.
        calls: its attention calls, by the number of the teaching layer.
        hidden: outputs of those layers' blocks ``(B, L, D_t)``; empty unless the rival reads hidden states.
        output: of its forward pass.
    """

    attention: OnlineSupervision | None
    calls: Mapping[int, AttentionCall]
    hidden: Mapping[int, Tensor]
    output: Any

    @property
    def squeezed(self) -> OnlineSupervision:
        """``attention``, of a rival that merges."""
        assert self.attention is not None
        return self.attention

    def targets(self) -> Tensor | TopkTargets | None:
        """The teacher's logits, for ``kd_loss`` and recipes; None for a model without logits."""
        return read_logits(self.output) if self.attention is None else self.attention.targets()


class LayerPair(NamedTuple):
    """A layer of the student and the one that teaches it."""

    number: int  # of the pair, from 0
    student: AttentionCall  # with gradient
    teacher: AttentionCall
    hidden: tuple[Tensor, ...]  # what the blocks return, (B, L, D_s) and (B, L, D_t); nothing where it is not read


class Rival(nn.Module):
    """An additional loss term; its parameters, if any, are trained with the student's.

    Args:
        online: the teacher.
        pairs: ``(student layer, teacher layer)``, zero-based; hidden states of an encoder-decoder are not paired.
        temperature: T_a of both maps, if the rival uses maps.
    """

    reads_hidden = False
    """Whether hidden states of both models are read."""

    merges_maps = False
    """Whether the teacher's maps are merged, which costs a squeeze a batch."""

    needs_teacher = False
    """Whether the student cannot run without the teacher."""

    def __init__(
        self, online: OnlineTeacher, pairs: tuple[tuple[int, int], ...], *, temperature: float = 1.0
    ) -> None:
        super().__init__()
        self.online = online
        self.pairs = pairs
        self.temperature = temperature
        self._is_checked = False

    def is_first(self) -> bool:
        """True once: values are validated only on the first batch, as this syncs the device."""
        first, self._is_checked = not self._is_checked, True
        return first

    @torch.no_grad()
    def teach(self, *args: Any, **kwargs: Any) -> TeacherOutputs:
        """Run the teacher on a batch; arguments as of ``OnlineTeacher.__call__``."""
        model = self.online.model
        with capture_model(model, hidden=self.reads_hidden) as forward_pass:
            if self.merges_maps:
                attention = self.online(*args, **kwargs)
                output = attention.output
            else:
                with eval_mode(model):
                    attention, output = None, model(*args, **kwargs)
        layers = sorted({teacher for _, teacher in self.pairs})
        hidden = {layer: forward_pass.hidden[layer + 1] for layer in layers} if self.reads_hidden else {}
        calls = {layer: forward_pass.captured.layer(layer) for layer in layers}
        return TeacherOutputs(attention, calls, hidden, output)

    def capture(self, student: nn.Module, outputs: TeacherOutputs) -> AbstractContextManager[ForwardPass]:
        """A context for the student's forward pass on the same batch."""
        return capture_model(student, hidden=self.reads_hidden)

    def forward(self, own_pass: ForwardPass, outputs: TeacherOutputs, *, loss_mask: Tensor | None = None) -> Tensor:
        """The loss ``()`` before its weight: a sum over layers, with gradients for the student and the rival's
        parameters.

        Args:
            own_pass: of the student.
            outputs: of the same batch.
            loss_mask: boolean ``(B, L)``, True = the row counts; default all.

        Raises:
            ShdError: what the loss raises.
        """
        terms = [self.layer_loss(pair, loss_mask) for pair in self._pair_layers(own_pass, outputs)]
        return torch.stack([term.to(terms[0].device) for term in terms]).sum()

    def beside(
        self, own_pass: ForwardPass, outputs: TeacherOutputs, beta: float, *, loss_mask: Tensor | None = None
    ) -> RivalTerm:
        """The argument ``shd`` of any recipe, with this loss instead of SHD."""
        value = self(own_pass, outputs, loss_mask=loss_mask)
        return RivalTerm(own_pass.captured, outputs.attention or (), beta, loss_mask=loss_mask, value=value)

    @abstractmethod
    def layer_loss(self, pair: LayerPair, loss_mask: Tensor | None) -> Tensor:
        """The loss ``()`` of one pair of layers."""

    def _pair_layers(self, own_pass: ForwardPass, outputs: TeacherOutputs) -> list[LayerPair]:
        pairs = []
        for number, (student, teacher) in enumerate(self.pairs):
            calls = own_pass.captured.layer(student), outputs.calls[teacher]
            hidden = (own_pass.hidden[student + 1], outputs.hidden[teacher]) if self.reads_hidden else ()
            pairs.append(LayerPair(number, *calls, hidden))
        return pairs


@dataclass(frozen=True, eq=False)
class RivalTerm(SHD):
    """A rival's loss as the argument ``shd`` of a recipe.

    Attributes:
        value: the loss ``()`` before beta.
    """

    value: Tensor | None = None

    @property
    def is_live(self) -> bool:
        """Always true: a rival's teacher is live."""
        return True

    def term(self) -> Term:
        """The rival's loss and its weight."""
        assert self.value is not None
        return Term(self.value, self.beta)


def mean_rows(losses: Tensor, loss_mask: Tensor | None) -> Tensor:
    """The mean of ``(B, L)`` over rows that count; exactly 0, and attached, where none does."""
    if loss_mask is None:
        return losses.mean()
    return losses.masked_fill(~loss_mask, 0.0).sum() / loss_mask.sum().clamp(min=1)
