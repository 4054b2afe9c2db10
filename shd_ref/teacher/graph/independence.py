"""Whether a site's maps are those of single samples: shown by running different ones together, then copies of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.attention import check_probs
from shd_ref.errors import ShdError, graph_unsupported
from shd_ref.teacher.graph.inputs import BoundError, Layout, Probe, probe_feeds
from shd_ref.teacher.graph.measure import by_sample
from shd_ref.teacher.opening.model import all_nodes, all_tensors, onnx
from shd_ref.tolerances import load_tolerances

Arrays = Mapping[str, NDArray[Any]]
Maps = NDArray[Any]
"""One for each of N samples: ``(N, H, L, S)``."""

_LARGEST: Final = float(np.finfo(np.float32).max)
_DYNAMIC_QUANTISERS: Final = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"})
_ROUNDING: Final = ("DynamicQuantize", "MatMulNBits", "QAttention", "QGemm", "QLinear", "QuantizeLinear")
"""Parts of the names of operators that round to integers what a run computes; DequantizeLinear is none of them."""
_HALVES: Final = ((int(onnx.TensorProto.BFLOAT16), "bfloat16"), (int(onnx.TensorProto.FLOAT16), "float16"))

_NOT_ITS_OWN: Final = (
    "its maps of a sample change with the other samples of the batch, or from run to run: export the model in "
    "evaluation mode (model.eval()), with the samples on the first axis of every input (batch_first=True in "
    "torch.nn.MultiheadAttention and torch.nn.TransformerEncoder), and without layers that compute over the batch"
)
SEVERAL: Final = (
    "it has {number} maps per sample, such as for windows of an image, and a record holds one: select other sites "
    "(--sites), or take a teacher whose attention spans the whole sample"
)
NOT_TOLD: Final = (
    "its maps came out the same for all samples of a small trial, which then cannot show that samples stay apart; "
    "nothing is wrong, and precompute looks again on your data"
)
_FROZEN: Final = (
    "the exporter left the length {length} of its example in the constants, although the axes of the graph's inputs "
    "are dynamic, so it runs on samples of that length alone: for others export with torch.onnx.export(..., "
    "dynamo=True, dynamic_shapes=...)"
)
MASKS_ALL: Final = (
    "its maps are NaN where input {name!r} is 1 everywhere, so the graph masks where that is not 0: pass 0 (False) "
    "for every key that may be attended to, and at least one such key for every row"
)
"""Note of a site whose maps are numbers only where an input that is no mask of tokens is 0."""
_MASK_TURNED: Final = (
    "its maps are NaN where input {name!r} is 1 everywhere, so the graph masks where that is not 0, and 1 stands for "
    "a token: export a wrapper that takes 1 for tokens and turns the mask round inside"
)
SHARED_SCALES: Final = (
    "dynamic quantisation takes scales from the whole batch, so precompute runs one sample at a time: the float form "
    "of the model runs in batches"
)
"""Note of a site whose maps of a sample are its own except for the scales, which the batch shares."""


@dataclass(frozen=True)
class Finding:
    """Why a site cannot be used, or what is open, as a run showed; inputs as long as the map's rows and keys."""

    reason: str | None = None
    note: str | None = None
    row_inputs: tuple[str, ...] | None = None
    key_inputs: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Allowed:
    """How far maps of a sample may move when others of its batch change: by a ``share`` of the distance to another's
    maps (``least``, if that tells them apart), for ``rounding``. ``same_samples``: the others may only change places.
    """

    share: float
    least: float
    rounding: float
    same_samples: bool

    @classmethod
    def of(cls, model: onnx.ModelProto) -> Allowed:
        """By the precision in which a graph computes."""
        precision, tolerances = _precision(model), load_tolerances()
        table, rounding = tolerances["samples"], tolerances["graph"]["probs"]
        return cls(
            share=table["share"][precision],
            least=table["least"],
            rounding=rounding.get(precision, rounding["float32"]),
            same_samples=precision == "int8",
        )


def shares_scales(model: onnx.ModelProto) -> bool:
    """Whether numbers of a sample depend on the samples that run with it, by scales that all of these share."""
    return any(node.op_type in _DYNAMIC_QUANTISERS for node in all_nodes(model.graph))


def rounds_in_run(model: onnx.ModelProto) -> bool:
    """Whether a graph rounds what it computes to integers, between which a last bit, and so a fusion, may decide."""
    return any(part in node.op_type for node in all_nodes(model.graph) for part in _ROUNDING)


class Trial:
    """A graph that runs on different samples, and on others of them that tell whether its maps keep to samples.

    Those are copies of sample 1, or the same in another order where the others may change the graph's scales.
    """

    def __init__(
        self,
        run: Callable[[Arrays], Arrays],
        feeds: Arrays,
        sampled: Collection[str],
        allowed: Allowed,
        *,
        grows: bool,
    ) -> None:
        self._run, self._feeds, self._sampled, self._allowed = run, feeds, sampled, allowed
        self._samples = min(len(feeds[name]) for name in sampled)
        self._places = self._choose_places(self._samples, grows)
        self._first = run(feeds)
        self._second = run(self._take(self._places))

    def judge(self, name: str, layout: Layout | None, num_heads: int) -> Finding:
        """What was found about the maps of this name."""

        def maps_of(run: Arrays) -> Maps:
            return by_sample(run[name], layout, num_heads)

        first, second = maps_of(self._first), maps_of(self._second)
        number, rest = divmod(len(first), self._samples)
        if rest or not number or len(second) != number * len(self._places):
            return Finding(_NOT_ITS_OWN)
        first, second = (maps.reshape(-1, number, *maps.shape[1:]) for maps in (first, second))
        if self._samples > 1 and not self._keeps_samples(first, second, self._places):
            return Finding(_NOT_ITS_OWN)
        if number > 1:
            return Finding(SEVERAL.format(number=number))
        if self._samples > 1 and distance(first[1], first[0]) <= self._allowed.least:
            return Finding(note=NOT_TOLD)
        return Finding()

    def inputs_as_long(self, name: str) -> tuple[tuple[str, ...], ...]:
        """The inputs with as many positions as a map has rows, and those with as many as it has keys."""
        lengths = sorted((name, array.shape[1]) for name, array in self._feeds.items() if array.ndim > 1)
        sizes = self._first[name].shape[-2:]
        return tuple(tuple(name for name, length in lengths if length == size) for size in sizes)

    def why_no_distribution(self, name: str, row_sums: str) -> str | None:
        """Why rows of a map are not what ``row_sums`` says; None where they are."""
        maps = self._first[name]
        if maps.dtype.kind != "f":  # NumPy has no bfloat16
            return None
        try:
            check_probs(np.nan_to_num(maps), "its map", ndim=None, row_sums=row_sums)
        except ShdError as error:
            if not np.isfinite(maps).all():
                return (
                    "its map holds NaN or infinity on a small trial, whichever of the inputs is 0 or 1 "
                    f"({', '.join(sorted(self._feeds))}): see whether the model's weights are numbers, run it in "
                    "float32, or choose other layers (--sites)"
                )
            return (
                f"its map is changed after the softmax, as by a gate or a scale ({error}): choose other layers "
                "(--sites), or a teacher that uses its maps as they are"
            )
        return None

    def _keeps_samples(self, first: Maps, second: Maps, places: Sequence[int]) -> bool:
        """Whether maps of samples 0 and 1 are the same in both runs; ``places`` says which the second run has."""
        if first.shape[1:] != second.shape[1:]:
            return False
        apart = distance(first[0], first[1])
        limit = self._allowed.share * apart if apart > self._allowed.least else self._allowed.rounding
        compared = ((first[sample], maps) for sample, maps in zip(places, second, strict=True) if sample < 2)
        return all(distance(expected, maps) <= limit for expected, maps in compared)

    def _choose_places(self, samples: int, grows: bool) -> Sequence[int]:
        if self._allowed.same_samples:
            return [*range(samples)[::-1], *[0] * grows]
        return [min(1, samples - 1)] * (samples + grows)

    def _take(self, places: Sequence[int]) -> Arrays:
        return {
            name: array.take(places, 0) if name in self._sampled and array.ndim else array
            for name, array in self._feeds.items()
        }


def probe_samples(model: onnx.ModelProto, maps: Mapping[str, tuple[Layout | None, int, str]]) -> dict[str, Finding]:
    """Whether maps are those of single samples, and distributions, by name: one session on tiny inputs."""
    findings, is_shared = _probe_samples(model, maps), Allowed.of(model).same_samples
    for name, finding in findings.items():
        if finding.reason is None and is_shared:  # whatever else could be shown or not
            notes = "; ".join(filter(None, (finding.note, SHARED_SCALES))).removeprefix(f"{NOT_TOLD}; ")
            findings[name] = replace(finding, note=notes)
    return findings


def _probe_samples(model: onnx.ModelProto, maps: Mapping[str, tuple[Layout | None, int, str]]) -> dict[str, Finding]:
    try:
        probe = Probe(model, sorted(maps))
        feeds, masking = _different_samples(probe)
        if any(spec.part == "mask" for spec in probe.specs if spec.name == masking):
            return dict.fromkeys(maps, Finding(_MASK_TURNED.format(name=masking)))
        trial = _open_trial(probe, feeds, Allowed.of(model))
        findings = {name: trial.judge(name, *kind[:2]) for name, kind in maps.items()}
        for name, (_, _, row_sums) in maps.items():
            reason = findings[name].reason or trial.why_no_distribution(name, row_sums)
            findings[name] = findings[name] if reason is None else Finding(reason)
        if probe.is_frozen_inside():
            frozen = Finding(note=_FROZEN.format(length=probe.frozen_length))
            findings = {name: frozen if finding == Finding() else finding for name, finding in findings.items()}
        if masking is not None:
            note = MASKS_ALL.format(name=masking)
            findings = {
                name: finding if finding.reason else replace(finding, note=note) for name, finding in findings.items()
            }
        for name, finding in findings.items():
            if finding.reason is None:
                rows, keys = trial.inputs_as_long(name)
                findings[name] = replace(finding, row_inputs=rows, key_inputs=keys)
        return findings
    except BoundError as error:
        return dict.fromkeys(maps, Finding(str(error)))
    except ShdError as error:
        problem = str(error)
    except Exception as error:  # onnxruntime raises its own types, which share no base class
        problem = f"the graph does not run on samples that differ ({error})"
    note = f"a probe run could not show that its maps are of single samples, as precompute will: {problem}"
    return dict.fromkeys(maps, Finding(note=note))


def _open_trial(probe: Probe, feeds: Arrays, allowed: Allowed) -> Trial:
    specs = {spec.name: spec for spec in probe.specs}
    data = [name for name, spec in specs.items() if spec.part == "data" and spec.shape]
    # Fixed numbers, such as a temperature (1,), are not samples, unless there is nothing else.
    data = [name for name in data if len(specs[name].shape) > 1 or not isinstance(specs[name].shape[0], int)] or data
    if not data:
        raise graph_unsupported("the graph takes no data")
    samples = min(len(feeds[name]) for name in data)
    sampled = [name for name, array in feeds.items() if array.ndim and len(array) == samples]
    if probe.frozen_batch is None and not any(isinstance(specs[name].shape[0], int) for name in sampled):
        try:
            return Trial(probe.run, feeds, sampled, allowed, grows=True)
        except BoundError:
            raise
        except Exception:  # as above; inputs that hold samples on other axes do not grow with these
            pass
    return Trial(probe.run, feeds, sampled, allowed, grows=False)


def _different_samples(probe: Probe) -> tuple[dict[str, NDArray[Any]], str | None]:
    """Inputs that differ by sample where the graph runs on such; an input that must be 0, or None."""
    feeds, masking = probe_feeds(probe.specs, probe.sizes, largest=probe.largest), None
    if not _gives_numbers(probe, feeds):
        zeros = {name: np.zeros_like(array) for name, array in feeds.items() if array.any()}
        masking = next((name for name in zeros if _gives_numbers(probe, feeds | {name: zeros[name]})), None)
        feeds |= {name: zeros[name] for name in zeros if name == masking}
    drawn = probe_feeds(probe.specs, probe.sizes, samples=range(probe.sizes.batch), largest=probe.largest)
    for name, array in drawn.items():
        if array.ndim and array.dtype.kind == "f":  # other statistics, not only other numbers
            spread = np.arange(1, 1 + len(array)).reshape(-1, *[1] * (array.ndim - 1))
            drawn[name] = (array * spread).astype(array.dtype)
    drawn |= {name: array for name, array in feeds.items() if name == masking}
    if _gives_numbers(probe, drawn):
        return drawn, masking
    for name, array in drawn.items():
        changed = feeds | {name: array}
        feeds = changed if _gives_numbers(probe, changed) else feeds
    return feeds, masking


def _gives_numbers(probe: Probe, feeds: Arrays) -> bool:
    try:
        return all(np.isfinite(array).all() for array in probe.run(feeds).values())
    except BoundError:
        raise
    except Exception:  # as above
        return False


def _precision(model: onnx.ModelProto) -> str:
    """The key of the tolerances: what rounds most in this graph."""
    if shares_scales(model):
        return "int8"
    nodes = all_nodes(model.graph)
    types = {int(tensor.data_type) for tensor in all_tensors(model)}
    types |= {int(attribute.i) for node in nodes if node.op_type == "Cast" for attribute in node.attribute}
    return next((name for kind, name in _HALVES if kind in types), "float32")


def distance(maps: Maps, other: Maps) -> float:
    """Root mean square of the difference, in float64, of one head or sample at a time; NaN of nothing."""
    total, count = 0.0, 0
    for pair in zip(np.atleast_2d(maps), np.atleast_2d(other), strict=True):
        # Infinity becomes a number whose square is one too.
        one, two = (np.nan_to_num(array.astype(np.float64), posinf=_LARGEST, neginf=-_LARGEST) for array in pair)
        total, count = total + float(((one - two) ** 2).sum()), count + one.size
    return float(np.sqrt(total / count)) if count else float("nan")
