"""A live teacher: its attention, squeezed without maps, at every step.

The teacher runs its own fused attention under ``no_grad``. What passes there (queries, keys, values) and the output
projection after it are all that alpha needs, and queries, keys and mixing are all that the loss needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError, need
from shd_ref.layers import layer_map as pair_layers
from shd_ref.merging.plans import PLAN_KINDS, check_count
from shd_torch.capture.capture import AttentionCall, Captured
from shd_torch.capture.layers import Layer, SameLayers, check_calls, check_every_layer, check_single, number_layers
from shd_torch.capture.outputs import Projection, ProjectionWatch, read_hidden_states, read_logits, without
from shd_torch.capture.taps import RawCall, never_compiled, record, run_eagerly
from shd_torch.checks import check_option
from shd_torch.kl.backends import attention_kl
from shd_torch.live.squeeze import FactoredSqueeze, squeeze_factored
from shd_torch.maps.mixing import check_strategy
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.supervision import Length, Taught, TaughtLayers, pool_supervision

Rounds: TypeAlias = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True, eq=False)
class OnlineSupervision(Taught):
    """A live teacher's outputs for one batch.

    Attributes:
        layers: student layers, zero-based, in ascending order.
        squeezes: one per layer, with the supervision and its report (alphas, residual, clip counts).
        output: what the teacher's forward pass returned, without hidden states if some were chosen: their memory is
            free again.
        logits: the teacher's ``(..., V)`` in its own dtype; None where it returns none.
        hidden: the chosen hidden states ``(B, L, D)``, by number as Hugging Face counts them.
    """

    layers: tuple[int, ...]
    squeezes: tuple[FactoredSqueeze, ...]
    output: Any
    logits: Tensor | None = None
    hidden: Mapping[int, Tensor] = field(default_factory=dict)

    def supervise(self, length: Length = None) -> list[Factored]:
        """One per layer, good at any temperature; the teacher saw the student's positions: nothing is padded."""
        return [squeeze.supervision for squeeze in self.squeezes]

    def targets(self, length: int | None = None) -> Tensor | None:
        """``logits``, for ``kd_loss``."""
        return self.logits

    def hidden_states(self, length: int | None = None) -> Mapping[int, Tensor]:
        """``hidden``, for ``hidden_loss``."""
        return self.hidden


class OnlineTeacher:
    """A live teacher that supervises each batch; see ``OnlineTeacher.__call__``.

    Not a ``Module``, so a student that references it neither trains nor saves it. On the first batch, output
    projections are located, layers are paired, and values are checked. A projection is read again for every batch, so
    weights may be trained or loaded in between; a projection that the model computes during its pass (gathered from
    shards, dequantised) is taken from the first batch.

    Args:
        model: any module whose attention ``capture_attention`` can read; it stays on its device, keeps its attention
            implementation, and may be compiled. Each call runs it in eval mode and then restores the mode of its
            modules, so it can be the student itself (self-distillation): with a started capture, call the teacher
            before the student, as the last pass wins.
        num_student_heads: H_s, from 1 to H_t.
        layer_map: the number of student layers, paired as ``shd_torch.maps.layer_map`` does, or explicit pairs
            ``(student layer, teacher layer)``, zero-based; teacher layers are numbered as in ``capture_attention``,
            and with explicit pairs the others need not be capturable.
        plan: as in ``squeeze_heads``, or the rounds of each paired teacher layer, by its number.
        strategy: as in ``squeeze_heads``.
        alpha_rule: as in ``solve_alpha``.
        output_projections: W_o ``(H_t * d_v, D)`` by teacher layer, for layers whose projection cannot be located.
        hidden_layers: hidden states to keep, numbered as in Hugging Face: 0 for the embeddings, k for block k. The
            model is then called with ``output_hidden_states=True``.

    Raises:
        ShdError: ``argument-value``, ``argument-dtype``, ``argument-shape``, ``layers-invalid`` and ``plan-invalid``
            for arguments that are invalid for any model; other errors at the first batch.

    Source: Algorithm 1, Eq. 5-10.
    """

    def __init__(
        self,
        model: nn.Module,
        num_student_heads: int,
        layer_map: int | Iterable[tuple[int, int]],
        *,
        plan: str | Rounds | Mapping[int, Rounds] | None = None,
        strategy: str = "shd",
        alpha_rule: str = "least_squares",
        output_projections: Mapping[int, Tensor] | None = None,
        hidden_layers: Iterable[int] = (),
    ) -> None:
        check_count("num_student_heads", num_student_heads)
        check_strategy(strategy, alpha_rule)
        self.model = model
        self.num_student_heads = num_student_heads
        self._layer_map = _read_layer_map(layer_map)
        self._merging = {"strategy": strategy, "alpha_rule": alpha_rule}
        if isinstance(plan, str):
            check_option("plan", plan, PLAN_KINDS, "PLAN-1")
        if isinstance(plan, Mapping):
            _check_plans(plan, self._layer_map)
        self._plan = plan
        self._output_projections = dict(output_projections or {})
        self.hidden_layers = tuple(sorted(set(hidden_layers)))
        self._same = SameLayers(model)
        self._projections: dict[int, Projection] = {}
        self._pairs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def for_student(
        cls, model: nn.Module, student: str | os.PathLike[str] | Mapping[str, Any], **options: Any
    ) -> OnlineTeacher:
        """The teacher of a student made by ``shrink``: heads, layer map and plans come from the student.

        Args:
            model: the teacher that was shrunk, or one with the same layers and heads.
            student: the student's folder, or the report of ``shrink``.
            **options: more of ``OnlineTeacher``.

        Raises:
            ShdError: ``read-failed``; as ``OnlineTeacher``.
        """
        from shd_ref.shrink.student import read_student

        report = read_student(student)
        plans = {teacher: plan for (_, teacher), plan in zip(report.layer_pairs, report.plans, strict=True)}
        return cls(model, report.num_heads, report.layer_pairs, plan=plans, **options)

    @property
    def student_layers(self) -> TaughtLayers:
        """The supervised student layers, zero-based, ascending, for ``capture_attention``."""
        if isinstance(self._layer_map, int):
            return TaughtLayers(range(self._layer_map), self._layer_map)
        return TaughtLayers(sorted(student for student, _ in self._layer_map))

    @never_compiled
    @torch.no_grad()
    def __call__(
        self, *args: Any, query_mask: Tensor | None = None, check: bool | None = None, **kwargs: Any
    ) -> OnlineSupervision:
        """Run the teacher on a batch and squeeze its attention.

        Args:
            *args: the teacher's own arguments.
            query_mask: boolean ``(B, L)``, True = the row counts for alpha; default the argument ``attention_mask``
                where the teacher is given one of that shape, else all rows.
            check: validate the values, which costs a device sync; default at the first batch only.
            **kwargs: the teacher's own arguments.

        Returns:
            The supervision of this batch, its report and the teacher's output.

        Raises:
            ShdError: ``capture-failed`` where attention or an output projection is not found, a layer makes several
                calls, or a number means another layer than in the first batch; ``layers-invalid``, ``heads-exceed``,
                ``not-finite`` and what else ``squeeze_heads`` raises.
        """
        check = not self._pairs if check is None else check
        if self.hidden_layers:
            kwargs = {**kwargs, "output_hidden_states": True}
        with eval_mode(self.model):
            calls, output = self._run(args, kwargs)
        padding, squeezes = kwargs.get("attention_mask"), {}
        for layer, call in calls.items():
            counted = query_mask
            if counted is None and isinstance(padding, Tensor) and padding.shape == call.query.shape[::2]:
                counted = padding != 0
            squeezes[layer] = self._squeeze_layer(layer, call, counted, check)
        logits = read_logits(output)
        hidden: dict[int, Tensor] = {}
        if self.hidden_layers:
            hidden = read_hidden_states(output, self.hidden_layers, type(self.model).__name__)
            output = without(output, "hidden_states", "decoder_hidden_states", "encoder_hidden_states")
        of_student_layers = tuple(squeezes[teacher] for _, teacher in self._pairs)
        return OnlineSupervision(self.student_layers, of_student_layers, output, logits, hidden)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[int, AttentionCall], Any]:
        """The calls of the teaching layers, which the first batch pairs with the student's."""
        watch = None if self._pairs else ProjectionWatch(self.model)
        # Compiled code would show the watch nothing.
        mode = nullcontext() if watch is None else run_eagerly()
        with mode, record(self.model, values=True) as calls, watch or nullcontext():
            output = self.model(*args, **kwargs)
        layers = number_layers(calls, self.model)
        if watch is not None:
            self._pair(layers, calls, watch, encoder_ran=kwargs.get("encoder_outputs") is None)
        self._same.check(layers, self._projections)
        check_single(layers, self._projections, self.model)
        captured = Captured(tuple(self._projections))
        captured.take(layers, grad_enabled=False)
        return {layer: captured.layer(layer) for layer in self._projections}, output

    def _pair(
        self, layers: Sequence[Layer], calls: Sequence[RawCall], watch: ProjectionWatch, *, encoder_ran: bool
    ) -> None:
        check_calls(len(layers), None, None, type(self.model).__name__)
        if isinstance(self._layer_map, int):
            remedy = "name the pairs (layer_map=[(0, 0), ...], student first)"
            check_every_layer(self.model, calls, encoder_ran, remedy)
            pairs = pair_layers(len(layers), self._layer_map)
        else:
            num_student_layers = 1 + max((student for student, _ in self._layer_map), default=0)
            pairs = pair_layers(len(layers), num_student_layers, self._layer_map)
        check_single(layers, {teacher for _, teacher in pairs}, self.model)
        for layer in {teacher for _, teacher in pairs}:
            self._projections[layer] = watch.find(layer, layers[layer][0], self._output_projections)
        self._pairs = pairs

    def _squeeze_layer(
        self, layer: int, call: AttentionCall, query_mask: Tensor | None, check: bool
    ) -> FactoredSqueeze:
        if call.value is None:
            rule = f"attention call {layer} of {type(self.model).__name__} must show its values; got queries and keys"
            raise ShdError("capture-failed", f"{rule} alone: give record_query_key value= and output=")
        try:
            return squeeze_factored(
                Factored.teacher(call.query, call.key, rule=call.rule),
                call.value[:, :, : call.key.shape[2]],
                self._projections[layer].matrix(self.model).to(call.value.device),
                self.num_student_heads,
                query_mask=query_mask,
                check=check,
                plan=self._plan[layer] if isinstance(self._plan, Mapping) else self._plan,
                **self._merging,
            )
        except ShdError as error:
            raise ShdError(error.code, f"teacher layer {layer}: {error}") from error


def layer_kls(
    captured: Captured,
    supervision: Taught | Sequence[Taught],
    *,
    loss_mask: Tensor | Mapping[int, Tensor | None] | None = None,
    temperature: float = 1.0,
    beta: float = 1.0,
    groups: Tensor | Mapping[int, Tensor] | None = None,
    **keywords: Any,
) -> dict[int, Tensor]:
    """The SHD terms of a captured student, one per layer; the loss is their sum, averaged over teachers.

    Args:
        captured: the student's attention on the same batch, with every supervised layer.
        supervision: of one or several teachers, live or cached, which may differ in everything but the positions they
            see.
        loss_mask: boolean ``(B, L)``, True = the row counts; or one per student layer, if rows belong to different
            sequences. Of layers with ``groups`` it is over the teacher's tokens.
        temperature: T_a of both maps.
        beta: weight of the term.
        groups: where the student has other tokens than the teacher, such as merged ones: of each of the teacher's
            tokens the number of the student's that it is part of, integers ``(L,)`` or ``(B, L)``, below 0 for none,
            or weights ``(l, L)`` or ``(B, l, L)`` in floating point, see ``shd_torch.maps.pool_tokens``; by student
            layer where they differ. Maps are then held as a whole, one layer at a time.
        **keywords: more of ``attention_kl``'s: ``support``, ``value``, ``backend``, ``product_dtype``, ``check``.

    Returns:
        ``()`` tensors by student layer, ascending, in nats times beta; a layer supervised by k of n teachers has
        their sum over n.

    Raises:
        ShdError: what ``attention_kl`` raises; ``capture-failed`` where a layer was not captured; ``cache-mismatch``
            for a student of another depth than was meant, however it was captured.

    Source: Eq. 11.
    """
    teachers = list(supervision) if isinstance(supervision, Sequence) else [supervision]
    if not teachers:
        raise ShdError("argument-value", "supervision must come from at least one teacher; got none")
    terms: dict[int, Tensor] = {}
    for teacher in teachers:
        captured.check_taught(teacher.layers)
        calls = [captured.layer(layer) for layer in teacher.layers]
        by_layer = [groups.get(layer) if isinstance(groups, Mapping) else groups for layer in teacher.layers]
        sizes = [
            (call.query.shape[2], call.key.shape[2]) if tokens is None else (tokens.shape[-1], tokens.shape[-1])
            for call, tokens in zip(calls, by_layer, strict=True)
        ]
        of_layers = zip(teacher.layers, calls, by_layer, teacher.supervise(sizes), strict=True)
        for layer, call, tokens, of_layer in of_layers:
            counted = loss_mask.get(layer) if isinstance(loss_mask, Mapping) else loss_mask
            if tokens is not None:
                of_layer = pool_supervision(
                    of_layer,
                    tokens,
                    call.query.shape[2],
                    query_mask=counted,
                    temperature=temperature,
                    check=keywords.get("check", True),
                )
                counted = None  # a token without a part that counts is an empty row
            term = attention_kl(
                call.query,
                call.key,
                of_layer,
                loss_mask=counted,
                temperature=temperature,
                beta=beta,
                **call.mask_keywords,
                **keywords,
            ) / len(teachers)
            terms[layer] = terms[layer] + term if layer in terms else term
    return dict(sorted(terms.items()))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block; after it every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    if not any(training for _, training in modes):
        yield
        return
    root = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(root)  # modules may do more than note their mode
        for module, training in modes:
            if module.training != training:
                module.training = training


def _read_layer_map(layer_map: int | Iterable[tuple[int, int]]) -> int | tuple[tuple[int, int], ...]:
    """A number of student layers, or pairs of layers, of a teacher of any depth (LAYER-2, LAYER-4)."""
    if isinstance(layer_map, Iterable):
        return pair_layers(sys.maxsize, sys.maxsize, layer_map)
    return len(pair_layers(layer_map, layer_map))


def _check_plans(plan: Mapping[int, Rounds], layer_map: int | tuple[tuple[int, int], ...]) -> None:
    """Each teacher layer that is paired must have its rounds, which its first squeeze checks."""
    paired = None if isinstance(layer_map, int) else {teacher for _, teacher in layer_map}
    rule = "hold the rounds of each teacher layer of an explicit layer_map, "
    rule += "which is missing" if paired is None else f"{sorted(paired)}"
    need(paired == set(plan), "plan-invalid", "plan", rule, f"those of {sorted(map(str, plan))}", spec_id="PLAN-7")
