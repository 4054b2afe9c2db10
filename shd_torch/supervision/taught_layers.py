"""The student layers that are taught, and how many layers the student was meant to have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self, TypeAlias, TypeVar

from shd_ref.cache import Attention, Manifest
from shd_ref.errors import need

Kinds: TypeAlias = tuple[tuple[str, int], ...]
Call = TypeVar("Call")


class TaughtLayers(tuple[int, ...]):
    """Numbers of student layers, a tuple, with the number of layers that their teaching was made for.

    A layer map spreads the teacher over so many layers: for another student the same numbers would mean other depths.
    So a capture for these layers refuses a student that makes more or fewer attention calls.

    Args:
        numbers: zero-based, in any order.
        num_student_layers: L_s; None where explicit pairs say which layers are taught, in a student of any depth.
        kinds: of an encoder-decoder: how many calls of each kind of attention (``encoder``, ``decoder``, ``cross``)
            it was meant to make, in the order in which they are numbered; calls of other kinds are not taught.

    Source: section 3 (t = s * L_t / L_s). Specification: CACHE-104.
    """

    num_student_layers: int | None
    kinds: Kinds

    def __new__(cls, numbers: Iterable[int], num_student_layers: int | None = None, kinds: Kinds = ()) -> Self:
        """A tuple takes its content when it is made."""
        self = super().__new__(cls, numbers)
        self.num_student_layers = num_student_layers
        self.kinds = kinds
        return self

    def __getnewargs__(self) -> tuple[tuple[int, ...], int | None, Kinds]:
        """What a copy in another process is made of."""
        return tuple(self), self.num_student_layers, self.kinds

    def kind(self, number: int) -> str | None:
        """The kind of a student layer; None where there is one kind alone."""
        for kind, count in self.kinds:
            if number < count:
                return kind
            number -= count
        return None

    def order_calls(self, calls: Sequence[Call], kinds: Sequence[str], name: str) -> list[Call]:
        """The calls of a forward pass of a student ``name``, kind after kind; ``cache-mismatch`` for other counts."""
        counts = {kind: kinds.count(kind) for kind in dict.fromkeys([*(kind for kind, _ in self.kinds), *kinds])}
        fits = all(counts[kind] == count for kind, count in self.kinds)
        meant, got = (", ".join(f"{kind}={n}" for kind, n in pairs) for pairs in (self.kinds, counts.items()))
        who, rule = f"a forward pass of {name}", f"make as many attention calls of each kind as its teaching, {meant}"
        advice = "precompute with --student-layers of this student's numbers"
        need(fits, "cache-mismatch", who, rule, got, remedy=advice, spec_id="CACHE-105")
        by_call = list(zip(calls, kinds, strict=True))
        return [call for taught_kind, _ in self.kinds for call, kind in by_call if kind == taught_kind]

    def check_calls(self, num_calls: int, name: str) -> None:
        """Refuse a student ``name`` of another depth than was meant: ``cache-mismatch``."""
        meant = None if self.kinds else self.num_student_layers
        rule = f"make {meant} attention calls, as its teaching was made for {meant} student layers"
        advice = f"precompute with --student-layers {num_calls} (a live teacher: layer_map={num_calls}), or with "
        advice += "--layer-pairs where some are not to be taught"
        who, fits = f"a forward pass of {name}", meant in (None, num_calls)
        need(fits, "cache-mismatch", who, rule, num_calls, remedy=advice, spec_id="CACHE-104")


def unite_layers(taught: Sequence[tuple[int, ...]]) -> TaughtLayers:
    """The layers that several teachers teach, ascending; ``cache-mismatch`` for students of different depths."""
    meant = {layers.num_student_layers for layers in taught if isinstance(layers, TaughtLayers)} - {None}
    counts = " and ".join(map(str, sorted(count for count in meant if count is not None)))
    rule, advice = (
        "be mapped to one number of student layers",
        "precompute, or make the live teacher, for this student",
    )
    need(len(meant) < 2, "cache-mismatch", "all teachers", rule, counts, remedy=advice, spec_id="CACHE-104")
    kinds = {layers.kinds for layers in taught if isinstance(layers, TaughtLayers)}
    rule, got = "number one set of attention kinds", " and ".join(map(str, sorted(kinds)))
    need(len(kinds) < 2, "cache-mismatch", "all teachers", rule, got, spec_id="CACHE-105")
    numbers = sorted({layer for layers in taught for layer in layers})
    return TaughtLayers(numbers, meant.pop() if meant else None, kinds.pop() if kinds else ())


def taught_layers(manifest: Manifest, numbers: Iterable[int] | None = None) -> TaughtLayers:
    """Some layers of a cache, by default all, with the student that its manifest was made for."""
    if numbers is None:
        if manifest.find(Attention) is None:
            return TaughtLayers(())
        numbers = manifest.attention.student_layers
    kinds = tuple((entry.kind, entry.num_student_layers) for entry in manifest.attention.kinds)
    return TaughtLayers(numbers, manifest.attention.num_student_layers, kinds)
