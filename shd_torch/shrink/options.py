"""The options of ``shrink``, which its command reads as they are; without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any

from cyclopts import Parameter

from shd_ref.errors import ShdError, need
from shd_ref.integers import check_integer, check_number
from shd_ref.shrink.heads import PLANS
from shd_ref.teacher.options import FROM_1, OPTIONS, one_of, read_by, read_list


def _read_count(option: str, text: str) -> int | tuple[int, ...]:
    """``--layers 3``, ``--layers 0,2,4``."""
    numbers = read_list(option, text, least=0)
    return numbers if "," in text else int(numbers[0])


COUNT = read_by(_read_count, "N|N,...")
LAYERS = read_by(partial(read_list, least=0), "N,...")


@OPTIONS
@dataclass(frozen=True)
class ShrinkOptions:
    """Options of ``shrink``; each field is also a keyword of ``shrink``. ``argument-value``.

    Attributes:
        heads: Query heads: 4, or of each student layer, 4,6,4. Default: the teacher's.
        layers: Number of layers, or a list of the teacher's: 3, or 0,2,4. Default: all.
        hidden: Channels of the student's residual stream. Default: the teacher's.
        neurons: Neurons per FFN: 768, or of each student layer, 512,768,768; the most important are kept.
        kv_heads: Key and value heads of the student. Default: the teacher's number where it divides heads, else the
            largest divisor of heads below it.
        head_dim: Width of a head. BERT, RoBERTa, GPT-2: hidden / heads by default, which saves no time.
        drop_attention: Teacher layers that lose their attention block: 1,4.
        drop_activations: Teacher layers whose FFN becomes one linear map: 2,3.
        stack: encoder or decoder: which to shrink of a model with both.
        plan: Heads to merge: auto, matched (needs networkx), balanced or progressive.
        align: Refit matrices to the teacher's outputs, or use the closed form.
        ridge: Ridge towards the closed form for refitted matrices. Default: chosen per matrix on every fourth sample,
            which may also keep the closed form.
        batch_size: Samples per batch.
    """

    heads: Annotated[int | Sequence[int] | None, COUNT] = None
    layers: Annotated[int | Sequence[int] | None, COUNT] = None
    hidden: Annotated[int | None, FROM_1] = None
    neurons: Annotated[int | Sequence[int] | None, COUNT] = None
    kv_heads: Annotated[int | None, FROM_1] = None
    head_dim: Annotated[int | None, FROM_1] = None
    drop_attention: Annotated[Sequence[int], LAYERS] = ()
    drop_activations: Annotated[Sequence[int], LAYERS] = ()
    stack: str | None = None
    plan: Annotated[str, one_of(PLANS)] = "auto"
    align: Annotated[bool, Parameter(negative="--no-align")] = True
    ridge: float | None = None
    batch_size: Annotated[int, FROM_1] = 16

    def __post_init__(self) -> None:
        need(self.plan in PLANS, "argument-value", "plan", f"be one of {', '.join(PLANS)}", repr(self.plan))
        object.__setattr__(self, "batch_size", check_integer("batch_size", self.batch_size, 1, None))
        if self.ridge is not None:
            check_number("ridge", self.ridge, least=0)

    def changed(self, changes: Mapping[str, Any]) -> ShrinkOptions:
        """These options with some replaced by name, or ``argument-value``."""
        known = [field.name for field in fields(self)]
        if unknown := [name for name in changes if name not in known]:
            raise ShdError("argument-value", f"options must be of {', '.join(known)}; got {', '.join(unknown)}")
        return replace(self, **changes)
