"""Parts that may be cut from a teacher: sizes of the parts of each layer, and the students that they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from shd_ref.errors import ShdError
from shd_torch.shrink.families import Family
from shd_torch.shrink.sizes import Sizes

FRACTIONS: Final = (0.75, 0.5, 0.25)
"""Of a layer's heads and neurons, the sizes that are tried besides all and none."""

NONE: Final = 0
"""In place of a number of heads: no attention; in place of a number of neurons: one linear map."""


@dataclass(frozen=True)
class Space:
    """Sizes that each layer may have; the first of each is the teacher's.

    Attributes:
        num_layers: of the teacher.
        heads: numbers of query heads, 0 for no attention.
        neurons: numbers of neurons, 0 for one linear map in place of the FFN.
        keeps_first: whether layer 0 must stay.
        head_dim: of a head, which stays.
    """

    num_layers: int
    heads: tuple[int, ...]
    neurons: tuple[int, ...]
    keeps_first: bool
    head_dim: int

    @property
    def whole(self) -> Design:
        return self.uniform(self.heads[0], self.neurons[0])

    def uniform(self, heads: int, neurons: int, layers: int | None = None, attending: int = 0) -> Design:
        """A student with the same sizes in all layers, or in the first so many; one layer keeps its attention."""
        count = self.num_layers if layers is None else layers
        by_layer = [heads] * count
        if heads == NONE:
            by_layer[attending] = self.heads[0]
        return Design(tuple(range(count)), tuple(by_layer), (neurons,) * count)


@dataclass(frozen=True)
class Design:
    """A student by its layers: the teacher layer of each, its heads and its neurons."""

    kept: tuple[int, ...]
    heads: tuple[int, ...]
    neurons: tuple[int, ...]

    def options(self, space: Space) -> dict[str, Any]:
        """Keywords of ``shrink``."""
        heads = [count or space.heads[0] for count in self.heads]
        neurons = [count or space.neurons[0] for count in self.neurons]
        options: dict[str, Any] = {"layers": list(self.kept)}
        if set(heads) != {space.heads[0]}:
            options |= {"heads": heads if len(set(heads)) > 1 else heads[0], "head_dim": space.head_dim}
        if set(neurons) != {space.neurons[0]}:
            options["neurons"] = neurons if len(set(neurons)) > 1 else neurons[0]
        for name, counts in (("drop_attention", self.heads), ("drop_activations", self.neurons)):
            if NONE in counts:
                options[name] = [layer for layer, count in zip(self.kept, counts, strict=True) if count == NONE]
        return options

    def keeps_layers(self, space: Space) -> bool:
        """Whether it is the teacher with fewer layers, each as large as it was."""
        return (
            len(self.kept) < space.num_layers
            and {*self.heads} == {space.heads[0]}
            and {*self.neurons} == {space.neurons[0]}
        )

    def describe(self, space: Space) -> str:
        """In a few words, such as ``5 of 6 layers; neurons 1536, 768``."""
        words = [f"{len(self.kept)} of {space.num_layers} layers"]
        for name, counts in (("heads", self.heads), ("neurons", self.neurons)):
            whole = getattr(space, name)[0]
            if set(counts) != {whole}:
                words.append(f"{name} {', '.join(map(str, counts if len(set(counts)) > 1 else counts[:1]))}")
        return "; ".join(words)


def find_space(teacher: Sizes, family: Family, config: Any, fractions: tuple[float, ...] = FRACTIONS) -> Space:
    """The parts that a family lets be cut, to these fractions of its heads and neurons.

    Raises:
        ShdError: ``shrink-unsupported`` where nothing can be, and for a teacher whose own layers differ.
    """
    if not (isinstance(teacher.heads, int) and isinstance(teacher.neurons, int)):
        rule = "teacher must have layers of one size"
        raise ShdError("shrink-unsupported", f"{rule}; got heads {teacher.heads} and neurons {teacher.neurons}")
    refused = {name for name, _ in family.refused}
    heads, neurons = [teacher.heads], [teacher.neurons]
    if family.biases is None and not refused & {"heads", "head_dim", "heads by layer"}:
        heads += _sizes(teacher.heads, fractions, 1)
    if "neurons" not in refused:
        # Rows of a multiple of 16 fill the registers of every processor.
        neurons += _sizes(teacher.neurons, fractions, 16 if teacher.neurons % 16 == 0 else 1)
    kinds = set(getattr(config, "layer_types", None) or ())
    if "drop_attention" not in refused and len(kinds) < 2 and family.biases is None and teacher.layers > 1:
        heads.append(NONE)
    if "drop_activations" not in refused:
        neurons.append(NONE)
    if len(heads) == len(neurons) == teacher.layers == 1:
        raise ShdError("shrink-unsupported", f"teacher must have something to cut; got {config.model_type}")
    return Space(teacher.layers, tuple(heads), tuple(neurons), "layers" in refused, teacher.head_dim)


def _sizes(whole: int, fractions: tuple[float, ...], unit: int) -> list[int]:
    sizes = dict.fromkeys(max(unit, round(whole * fraction / unit) * unit) for fraction in fractions)
    return [size for size in sizes if size < whole]
