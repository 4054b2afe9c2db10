"""Is a sample alone what it is in company? Asked by running it: on tiny inputs here, by precompute on its data.

A record must be its sample's own, as batches of a resumed run, or of another machine, hold other samples beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

_ROUNDING: Final = ("DynamicQuantize", "MatMulNBits", "QAttention", "QGemm", "QLinear", "QuantizeLinear")
"""Parts of the names of operators that round to integers what a run computes; DequantizeLinear is none of them."""
_HALVES: Final = ((int(onnx.TensorProto.BFLOAT16), "bfloat16"), (int(onnx.TensorProto.FLOAT16), "float16"))

EXPORT_OTHERWISE: Final = (
    "export the model in evaluation mode (model.eval()), with the samples on the first axis of every input "
    "(batch_first=True in torch.nn.MultiheadAttention and torch.nn.TransformerEncoder), and without layers that "
    "compute over the batch"
)
NOT_ITS_OWN: Final = (
    f"its maps of a sample change with the other samples of the batch, or from run to run: {EXPORT_OTHERWISE}"
)
SEVERAL: Final = (
    "it has {number} maps per sample, such as for windows of an image, and a record holds one: select other sites "
    "(--sites), or take a teacher whose attention spans the whole sample"
)
_NOT_TOLD: Final = (
    "its maps came out the same for all samples of a small trial, which then cannot show that samples stay apart; "
    "nothing is wrong, and precompute looks again on your data"
)
_FROZEN: Final = (
    "the exporter left the length {length} of its example in the constants, although the axes of the graph's inputs "
    "are dynamic, so it runs on samples of that length alone: for others export with torch.onnx.export(..., "
    "dynamo=True, dynamic_shapes=...)"
)
SHARED_SCALES: Final = (
    "dynamic quantisation takes scales from the whole batch, so precompute runs one sample at a time: the float form "
    "of the model runs in batches"
)


@dataclass(frozen=True)
class Finding:
    """The part of an ``AttentionSite`` that a probe run tells."""

    reason: str | None = None
    note: str | None = None
    row_inputs: tuple[str, ...] | None = None
    key_inputs: tuple[str, ...] | None = None


def rounds_in_run(model: onnx.ModelProto, operators: tuple[str, ...] = _ROUNDING) -> bool:
    """Whether a graph rounds what it computes to integers, between which a last bit, and so a fusion, may decide."""
    return any(part in node.op_type for node in all_nodes(model.graph) for part in operators)


def shares_scales(model: onnx.ModelProto) -> bool:
    """Whether samples that run together share the scales that round them: none is then what it is alone."""
    return rounds_in_run(model, ("DynamicQuantize",))


def _precision(model: onnx.ModelProto) -> str:
    """The key of the tolerances: the type of the graph that rounds most."""
    types = {int(tensor.data_type) for tensor in all_tensors(model)}
    casts = (node for node in all_nodes(model.graph) if node.op_type == "Cast")
    types |= {int(attribute.i) for node in casts for attribute in node.attribute}
    return next((name for kind, name in _HALVES if kind in types), "float32")


def probe_samples(model: onnx.ModelProto, maps: Mapping[str, tuple[Layout | None, int, str]]) -> dict[str, Finding]:
    """Whether maps are those of single samples, and distributions, by name: one session on tiny inputs."""
    try:
        return _probe_samples(model, maps)
    except BoundError as error:
        return dict.fromkeys(maps, Finding(str(error)))
    except ShdError as error:
        problem = str(error)
    except Exception as error:  # onnxruntime raises its own types, which share no base class
        problem = f"the graph does not run on samples that differ ({error})"
    note = f"a probe run could not show that its maps are of single samples, as precompute will: {problem}"
    return dict.fromkeys(maps, Finding(note=note))


def _probe_samples(model: onnx.ModelProto, maps: Mapping[str, tuple[Layout | None, int, str]]) -> dict[str, Finding]:
    shared = SHARED_SCALES if shares_scales(model) else None
    precision = None if shared else _precision(model)
    probe = Probe(model, sorted(maps))
    feeds, masking = _different_samples(probe)
    masks_all = f"its maps are NaN where input {masking!r} is 1 everywhere, so the graph masks where that is not 0"
    if any(spec.part == "mask" for spec in probe.specs if spec.name == masking):
        turned = f"{masks_all}, and 1 stands for a token: export a wrapper that takes 1 for tokens and turns it round"
        return dict.fromkeys(maps, Finding(turned))
    # Fixed numbers, such as a temperature (1,), are not samples, unless there is nothing else.
    data = [spec for spec in probe.specs if spec.part == "data" and spec.shape]
    data = [spec for spec in data if len(spec.shape) > 1 or not isinstance(spec.shape[0], int)] or data
    if not data:
        raise graph_unsupported("the graph takes no data")
    samples = min(len(feeds[spec.name]) for spec in data)
    sampled = {name for name, array in feeds.items() if array.ndim and len(array) == samples}
    company, alone = probe.run(feeds), {}
    # One sample, or two that show that it is samples that the first axis counts; a batch that is fixed is filled up.
    for copies in (1 if samples > 1 else 2, samples):
        places = [samples - 1] * copies
        copied = {name: array.take(places, 0) if name in sampled else array for name, array in feeds.items()}
        try:
            alone = probe.run(copied)
            break
        except BoundError:
            raise
        except Exception:  # as above
            if copies == samples:
                raise
    frozen = _FROZEN.format(length=probe.frozen_length) if probe.is_frozen_inside() else None
    masked = None
    if masking is not None:
        masked = f"{masks_all}: pass 0 (False) for every key that may be attended to, and at least one such key"
    lengths = sorted((name, array.shape[1]) for name, array in feeds.items() if array.ndim > 1)
    findings = {}
    for name, (layout, num_heads, row_sums) in maps.items():
        first_run, second_run = (by_sample(run[name], layout, num_heads) for run in (company, alone))
        finding = _compare(first_run, second_run, samples, copies, precision)
        reason = finding.reason or _why_no_distribution(company[name], row_sums, sorted(feeds))
        sizes = company[name].shape[-2:]
        rows, keys = (tuple(source for source, length in lengths if length == size) for size in sizes)
        note = "; ".join(filter(None, (masked or finding.note or frozen, shared))) or None
        findings[name] = Finding(reason) if reason else Finding(None, note, rows, keys)
    return findings


def _compare(company: NDArray[Any], alone: NDArray[Any], samples: int, copies: int, precision: str | None) -> Finding:
    """Of maps ``(N, H, L, S)`` the last sample's in company and alone, and how many a sample has.

    Without a ``precision`` they are only counted.
    """
    number = len(company) // samples
    if not number or (len(company), len(alone)) != (number * samples, number * copies):
        return Finding(NOT_ITS_OWN)
    first, last, table, note = company[:number], company[-number:], load_tolerances()["samples"], None
    if samples > 1 and precision is not None:
        apart = distance(last, first)
        limit = table["share"][precision] * apart
        if apart <= table["least"]:  # all that is left is what rounding does
            limit, note = load_tolerances()["graph"]["probs"][precision], _NOT_TOLD
        if last.shape[1:] != alone.shape[1:] or not distance(last, alone[:number]) <= limit:
            return Finding(NOT_ITS_OWN)
    return Finding(SEVERAL.format(number=number)) if number > 1 else Finding(note=note)


def _different_samples(probe: Probe) -> tuple[dict[str, NDArray[Any]], str | None]:
    """Inputs that differ by sample where the graph runs on such; an input that must be 0, or None."""
    alike = probe_feeds(probe.specs, probe.sizes, largest=probe.largest)
    zeros: dict[str | None, dict[str, NDArray[Any]]] = {None: {}}
    zeros |= {name: {name: np.zeros_like(array)} for name, array in alike.items() if array.any()}
    masking = next((name for name, zero in zeros.items() if _gives_numbers(probe, alike | zero)), None)
    feeds = alike | zeros[masking]
    drawn = probe_feeds(probe.specs, probe.sizes, samples=range(probe.sizes.batch), largest=probe.largest)
    for name, array in drawn.items():
        if array.ndim and array.dtype.kind == "f":  # other statistics, not only other numbers
            spread = np.arange(1, 1 + len(array)).reshape(-1, *[1] * (array.ndim - 1))
            drawn[name] = (array * spread).astype(array.dtype)
    differing = feeds | drawn | zeros[masking]
    return (differing if _gives_numbers(probe, differing) else feeds), masking


def _gives_numbers(probe: Probe, feeds: Arrays) -> bool:
    try:
        return all(np.isfinite(array).all() for array in probe.run(feeds).values())
    except BoundError:
        raise
    except Exception:  # as above
        return False


def _why_no_distribution(maps: NDArray[Any], row_sums: str, inputs: Sequence[str]) -> str | None:
    """Why rows of a map are not what ``row_sums`` says; None where they are."""
    if maps.dtype.kind != "f":  # NumPy has no bfloat16
        return None
    try:
        check_probs(np.nan_to_num(maps), "its map", ndim=None, row_sums=row_sums)
    except ShdError as error:
        if np.isfinite(maps).all():
            return (
                f"its map is changed after the softmax, as by a gate or a scale ({error}): choose other layers "
                "(--sites), or a teacher that uses its maps as they are"
            )
        return (
            f"its map holds NaN or infinity on a small trial, whichever of the inputs is 0 or 1 ({', '.join(inputs)}"
            "): see whether the model's weights are numbers, run it in float32, or choose other layers (--sites)"
        )
    return None


def distance(maps: NDArray[Any], other: NDArray[Any]) -> float:
    """Root mean square of the difference, in float64; infinity counts as a number whose square is one too."""
    largest = float(np.finfo(np.float32).max)
    one, two = (np.nan_to_num(array.astype(np.float64), posinf=largest, neginf=-largest) for array in (maps, other))
    return float(np.sqrt(np.mean((one - two) ** 2))) if one.size else float("nan")
