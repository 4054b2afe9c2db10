"""The arguments of ``OnlineTeacher``: how its logits are kept, and what is checked before its model has run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from shd_ref.errors import ShdError, need
from shd_ref.integers import as_index, check_integer
from shd_ref.merging.plans import PLAN_KINDS, MergePlan, check_plan
from shd_torch.checks import check_option, check_real, check_temperature
from shd_torch.kd.targets import cut_teacher, kd_targets_topk
from shd_torch.supervision.taught import TopkTargets

Rounds: TypeAlias = Iterable[Iterable[Sequence[int]]]


def read_layer_map(layer_map: int | Iterable[tuple[int, int]]) -> int | tuple[tuple[int, int], ...]:
    """A number of student layers, or pairs of layers (LAYER-2, LAYER-4)."""
    try:
        count: int | None = as_index(layer_map)
    except TypeError:
        count = None
    pairs: tuple[tuple[int, int], ...] = ()
    if count is None:
        try:
            pairs = tuple((as_index(student), as_index(teacher)) for student, teacher in layer_map)  # type: ignore[union-attr]
        except (TypeError, ValueError):
            pairs = ()
    once = len({student for student, _ in pairs}) == len(pairs)
    if not (count is not None and count >= 1) and not (pairs and once and min(map(min, pairs)) >= 0):
        raise ShdError(
            "layers-invalid",
            "layer_map must be a number of student layers, at least 1, or pairs (student layer, teacher layer) of "
            f"integers of at least 0 that name each student layer once; got {layer_map!r}",
            "LAYER-2" if count is not None else "LAYER-4",
        )
    return pairs if count is None else count


def read_plan(plan: str | Rounds | None, num_student_heads: int) -> str | MergePlan | None:
    """A kind of plan, or its rounds, which are checked in full (PLAN-1, PLAN-7)."""
    if plan is None or isinstance(plan, str):
        if plan is not None:
            check_option("plan", plan, PLAN_KINDS, "PLAN-1")
        return plan
    try:
        rounds = [list(one_round) for one_round in plan]
    except TypeError:
        raise ShdError("plan-invalid", f"plan must be rounds of pairs of integers; got {plan!r}", "PLAN-7") from None
    # Each pair makes one head of two, so that the rounds say how many heads they begin with.
    return check_plan(rounds, num_student_heads + sum(map(len, rounds)), num_student_heads)


def read_plans(
    plan: str | Rounds | Mapping[int, Rounds] | None,
    num_student_heads: int,
    layer_map: int | tuple[tuple[int, int], ...],
) -> str | MergePlan | dict[int, str | MergePlan | None] | None:
    """One plan for all layers, or that of each teacher layer."""
    if not isinstance(plan, Mapping):
        return read_plan(plan, num_student_heads)
    paired = None if isinstance(layer_map, int) else {teacher for _, teacher in layer_map}
    if paired is None or set(plan) != paired:
        raise ShdError(
            "plan-invalid",
            "plan must hold the rounds of each teacher layer of an explicit layer_map, "
            f"{'which is missing' if paired is None else sorted(paired)}; got those of {sorted(map(str, plan))}",
            "PLAN-7",
        )
    return {layer: read_plan(rounds, num_student_heads) for layer, rounds in plan.items()}


def read_projections(given: Mapping[int, Tensor] | None) -> dict[int, Tensor]:
    if given is not None and not isinstance(given, Mapping):
        raise ShdError(
            "argument-value",
            f"output_projections must be W_o (H_t * d_v, D) by teacher layer; got {type(given).__name__}",
        )
    for layer, weight in (given or {}).items():
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise ShdError("argument-value", f"output_projections must name teacher layers from 0 on; got {layer!r}")
        check_real(weight, f"output_projections[{layer}]", check=False, ndim=2)
    return dict(given or {})


@dataclass(frozen=True)
class LiveTargets:
    """How to reduce a live teacher's logits: keep all of them, or the same part of a row as a cache.

    Attributes:
        vocab_size: number of classes to read; the others must be padding without mass.
        head: number of the likeliest classes to keep of each row, with the total mass of the rest; None keeps all
            logits.
        temperature: of kept classes and of the cut mass; complete logits work at any.

    Raises:
        ShdError: ``argument-value``.
    """

    vocab_size: int | None = None
    head: int | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if self.head is not None:
            check_integer("head", self.head, 1, None)
        if self.vocab_size is not None:
            check_integer("vocab_size", self.vocab_size, 1, None)

    @torch.no_grad()
    def read(self, logits: Tensor, *, check: bool) -> Tensor | TopkTargets:
        """Targets for ``kd_loss`` of logits ``(..., padded V)``, in the teacher's own dtype, or a record."""
        if self.head is None:  # the loss itself looks at what it is given
            return cut_teacher(logits, self.vocab_size, self.temperature, check=check)
        return kd_targets_topk(
            logits, self.head, temperature=self.temperature, vocab_size=self.vocab_size, check=check
        )


def read_hidden_layers(layers: Iterable[int]) -> tuple[int, ...]:
    try:
        numbers = {as_index(number) for number in layers}
    except TypeError:
        numbers = {-1}
    rule = "be integers of at least 0, 0 for the embeddings"
    need(min(numbers, default=0) >= 0, "layers-invalid", "hidden_layers", rule, repr(layers))
    return tuple(sorted(numbers))
