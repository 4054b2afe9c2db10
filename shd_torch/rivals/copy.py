"""Attention copy: the student attends with the teacher's merged maps, and learns all else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention  # the function itself: captures replace its name
from torch.overrides import TorchFunctionMode

from shd_ref.errors import ShdError
from shd_torch.rivals.rival import Lesson, Rival
from shd_torch.rivals.watch import Seen, watch_model


class AttentionCopy(Rival):
    """What a student could gain if it attended exactly as SHD asks: a bound, not a method.

    Inside ``watch`` the maps of taught layers are the merged ones, frozen, in training as in evaluation; queries and
    keys of those layers learn nothing. The loss is 0. The student's attention must be
    ``torch.nn.functional.scaled_dot_product_attention``; its dropout is left out.
    """

    merges_maps = True
    needs_teacher = True

    def watch(self, student: nn.Module, lesson: Lesson) -> Any:
        """A block for the student's forward pass on the lesson's batch, with the lesson's maps in it."""
        maps = dict(zip(lesson.squeezed.layers, lesson.squeezed.supervisions, strict=True))
        return _copy_maps(student, {layer: each.probs(temperature=self.temperature) for layer, each in maps.items()})

    def forward(self, seen: Seen, lesson: Lesson, *, loss_mask: Tensor | None = None) -> Tensor:
        """0: what is copied needs no loss."""
        return seen.captured.layer(self.pairs[0][0]).query.new_zeros(())


@contextmanager
def _copy_maps(student: nn.Module, maps: Mapping[int, Tensor]) -> Iterator[Seen]:
    with watch_model(student, hidden=False) as seen, _Copying(student, maps):
        yield seen


class _Copying(TorchFunctionMode):
    """Answers a model's calls of fused attention with given maps, forward pass after forward pass.

    Args:
        student: whose passes count.
        maps: A~ ``(B, H_s, L, S)`` by the number of a call.
    """

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
