"""What both forms of attention share, the squeeze and its weights; and merged maps, coded in graph or on host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache import (
    Attention,
    CodecError,
    Extent,
    Factors,
    Form,
    LayerPair,
    Manifest,
    Maps,
    Matching,
    SampleRecord,
    codec_error,
    decode,
    encode,
    merge_codec_errors,
)
from shd_ref.cache.codecs.codecs import code_dtype
from shd_ref.cache.codecs.distortion import row_tv_bound
from shd_ref.cache.forms.attention import blob_name
from shd_ref.cache.forms.maps import cut_map
from shd_ref.errors import ShdError
from shd_ref.merging.mixing import compose_mixing
from shd_ref.merging.plans import merge_plan
from shd_ref.teacher.options import MATCHED, NO_FORM, PrecomputeOptions, RunOptions
from shd_ref.teacher.precompute.forms.maker import Decided, Maker, tolerance_of
from shd_ref.teacher.run.outputs import LayerOutputs, StudentOutputs
from shd_ref.teacher.run.rows import MEASURED_ENTRIES
from shd_ref.teacher.run.teacher import TeacherRun

CODED_IN_GRAPH: Final = "sqrt8-row"
"""The codec whose quantiser ends the graph; the others code the graph's float32 maps on the host."""

AttentionT = TypeVar("AttentionT", Maps, Factors)


class AttentionMaker(Maker[AttentionT]):
    """Makes one of the two forms of attention, by its name in options and manifests."""

    NAME: ClassVar[str]
    BY_LAYER: ClassVar[bool] = True

    def describe(self, work: TeacherRun, outputs: StudentOutputs) -> AttentionT | None:
        options, plans = outputs.student.options, outputs.student.plans
        if options.form != self.NAME or not outputs.layers:
            return None
        same = len(set(plans)) == 1
        squeeze: dict[str, Any] = {
            "num_student_heads": options.num_student_heads,
            "layers": tuple(
                LayerPair(student, site.layer, site.name, work.num_teacher_heads) for student, site in work.layers
            ),
            "plan": plans[0] if same else (),
            "plans": None if same else plans,
            "matching": matching_of(options, work.run),
            "strategy": options.strategy,
            "alpha_rule": options.alpha_rule,
            "alpha_per": options.alpha_per,
            "codec": options.stored_codec,
            "num_student_layers": work.num_student_layers,
            "kinds": work.kinds,
        }
        return self.describe_form(work, outputs, squeeze)

    @abstractmethod
    def describe_form(self, work: TeacherRun, outputs: StudentOutputs, squeeze: dict[str, Any]) -> AttentionT:
        """The form, with the members that both forms share."""

    def options(self, form: AttentionT) -> dict[str, Any]:
        return {
            "num_student_heads": form.num_student_heads,
            "layer_pairs": tuple((layer.student_layer, layer.teacher_layer) for layer in form.layers),
            "plans": form.layer_plans,
            "strategy": form.strategy,
            "alpha_rule": form.alpha_rule,
            "alpha_per": form.alpha_per,
            "temperature": form.bound_temperature or 1.0,
            "form": form.form,
            "codec" if isinstance(form, Maps) else "factored_codec": form.codec,
        }

    def decided(self, form: Form | None, options: PrecomputeOptions, run: RunOptions) -> Decided:
        stored = form.form if isinstance(form, Maps | Factors) else NO_FORM
        yield "form", stored, options.form
        if not isinstance(form, Maps | Factors) or not options.has_attention:
            return
        for name in ("num_student_heads", "strategy", "alpha_rule", "alpha_per"):
            yield name, getattr(form, name), getattr(options, name)
        yield "codec", form.codec, options.stored_codec
        if not options.is_factored:
            yield "temperature", form.bound_temperature, float(options.temperature)
        matching = matching_of(options, run)
        if matching is None or form.matching is None:
            yield "matching", form.matching, matching
        else:
            for name, value in asdict(matching).items():
                yield f"matching.{name}", getattr(form.matching, name), value
        if matching is None and options.plans is None:
            heads = min(options.num_student_heads, form.num_teacher_heads)  # more are another job in any case
            yield "plan", form.plan, merge_plan(form.num_teacher_heads, heads, options.plan)

    def make(
        self, form: AttentionT, samples: Sequence[StudentOutputs], extents: Sequence[Extent]
    ) -> list[dict[str, Any]]:
        """Alphas before clipping, mixing (by row it follows from these, and would double a record), and codes."""
        alphas = _stack_layers(samples)
        mixings = mixings_of(form, alphas) if form.alpha_per == "map" else None
        made = []
        for number, sample in enumerate(samples):
            parts: dict[str, Any] = {"alphas": alphas[number]} if alphas.size else {}
            if mixings is not None:
                parts["mixing"] = mixings[number]
            codes = self.make_codes(form, sample)
            made.append(parts | dict(zip(map(blob_name, form.student_layers), codes, strict=True)))
        return made

    @abstractmethod
    def make_codes(self, form: AttentionT, sample: StudentOutputs) -> list[Any]:
        """The codes of each layer."""

    @abstractmethod
    def bound(
        self, form: AttentionT, layer: LayerOutputs, extent: Extent, merged: NDArray[Any]
    ) -> NDArray[np.float64]:
        """The total variation that coding may cost each row of a sample's merged maps, ``(H_s, n)`` (CACHE-91)."""

    def recheck(
        self, form: AttentionT, manifest: Manifest, sample: StudentOutputs, record: SampleRecord
    ) -> tuple[int, float]:
        """The total variation between each stored row, decoded, and the row that the teacher gives now."""
        rows, largest = 0, 0.0
        for layer in sample.layers:
            student_layer = layer.layer.student_layer
            stored = form.decode(record, student_layer)
            n, keys = form.map_shapes(record.extent)[form.column(student_layer)]
            merged = [maps["merged"][..., :keys] for _, maps in layer.tiles(shape=(n, keys))]
            again = np.concatenate(merged, axis=1).astype(np.float32)
            again[:, : record.first] = 0.0  # rows of padding in front, which factored records leave out
            if layer.row_mask is not None:
                again[:, ~layer.row_mask[:n]] = 0.0  # rows of padding hold nothing (CACHE-129)
            difference = 0.5 * np.abs(stored - again).sum(axis=-1, dtype=np.float64)
            rows += difference.size
            largest = max(largest, float(difference.max()))
            limits = self.bound(form, layer, record.extent, again) + tolerance_of("recheck", manifest.teacher.dtype)
            if not (difference <= limits).all():
                head, row = np.unravel_index(int((difference - limits).argmax()), difference.shape)
                session = f", by {said}" if (said := manifest.teacher.session) else ""
                raise ShdError(
                    "cache-mismatch",
                    f"record {record.index} (key {record.key}) layer {student_layer} head {head} "
                    f"row {row} must equal what the teacher gives now within a total variation of "
                    f"{limits[head, row]:.4f}, which is what {form.codec} and another run of the teacher may "
                    f"cost it; got {difference[head, row]:.4f}: the cache was made another way{session}",
                    "CACHE-91",
                )
        return rows, largest


class MapsMaker(AttentionMaker[Maps]):
    """Makes ``Maps``."""

    NAME: ClassVar[str] = "maps"

    def describe_form(self, work: TeacherRun, outputs: StudentOutputs, squeeze: dict[str, Any]) -> Maps:
        """Causal where no row that counts looks ahead; each record with its shape where maps are not square."""
        axes = {layer.map_axes for layer in outputs.layers}
        one_sequence = {work.site_kinds.kind(site) for _, site in work.layers} <= {None, "encoder"}
        own = not one_sequence or len(axes) > 1 or any(rows != keys for rows, keys in axes)  # CACHE-128
        full = own or outputs.layers[0].map_axes == (1, 1) or any(layer.looks_ahead.any() for layer in outputs.layers)
        return Maps(
            **squeeze,
            support="full" if full else "causal",
            temperature=outputs.student.options.temperature,
            shapes="own" if own else "length",
        )

    def check(self, form: Maps, samples: Sequence[StudentOutputs], extents: Sequence[Extent]) -> None:
        """Maps hold what any teacher gives."""

    def make_codes(self, form: Maps, sample: StudentOutputs) -> list[Any]:
        """Codes ``(H_s, rows, keys)``; ``support-mismatch`` for a teacher that attends to padding."""
        made: list[Any] = []
        for layer, (rows, keys) in zip(sample.layers, sample.extent.shapes, strict=True):
            where = f"record {sample.index} layer {layer.layer.student_layer}"
            # Rows of padding may also look at padding at the end: they are emptied before that is refused.
            codes = cut_map(_without_padding(layer.codes[:, :rows], layer), rows, keys, where)
            in_graph = form.codec == CODED_IN_GRAPH and codes.dtype == code_dtype(CODED_IN_GRAPH)
            made.append(np.ascontiguousarray(codes) if in_graph else encode(form.codec, codes))
        return made

    def measure(self, form: Maps, samples: Sequence[StudentOutputs], records: Sequence[SampleRecord]) -> CodecError:
        """Over the merged maps before coding; rows without mass do not count."""
        errors = []
        for sample in samples:
            for layer, shape in zip(sample.layers, sample.extent.shapes, strict=True):
                for tile, maps in layer.tiles(MEASURED_ENTRIES, sample.index, shape):
                    merged = _without_padding(maps["merged"][..., : shape[1]], layer, tile.start)
                    merged = merged.astype(np.float32, copy=False)
                    decoded = [decode(form.codec, encode(form.codec, head)) for head in merged]
                    errors.append(codec_error(merged, np.stack(decoded)))
        return merge_codec_errors(errors)

    def bound(self, form: Maps, layer: LayerOutputs, extent: Extent, merged: NDArray[Any]) -> NDArray[np.float64]:
        """By CACHE-121."""
        return row_tv_bound(form.codec, merged)


def matching_of(options: PrecomputeOptions, run: RunOptions) -> Matching | None:
    """What the manifest says of plans that are matched on the data; None for others."""
    if options.plan != MATCHED:
        return None
    return Matching(options.matched_by, options.calibration_samples, run.seed)


def mixings_of(form: Attention, raw_alphas: NDArray[np.float32]) -> NDArray[np.float32]:
    """C of some samples ``(B, num_layers, H_s, H_t)``, from alphas before clipping ``(B, num_layers, n)``."""
    (samples, num_layers, number), heads = raw_alphas.shape, form.num_teacher_heads
    shape = (samples, num_layers, form.num_student_heads, heads)
    if form.strategy == "mean":
        return np.full(shape, 1.0 / heads, dtype=np.float32)
    if not number:
        return np.broadcast_to(np.eye(heads, dtype=np.float32), (samples, num_layers, heads, heads))
    clipped = np.clip(raw_alphas.astype(np.float64), 0.0, 1.0)
    mixings = np.empty(shape, dtype=np.float32)
    for plan in set(form.layer_plans):  # layers that share a plan are composed at once
        columns = [column for column, other in enumerate(form.layer_plans) if other == plan]
        ends = np.cumsum([len(one_round) for one_round in plan])
        rounds: list[NDArray[Any]] = np.split(clipped[:, columns].reshape(-1, number), ends[:-1], axis=1)
        composed = compose_mixing(rounds, plan, heads)
        mixings[:, columns] = composed.reshape(samples, len(columns), *composed.shape[1:])
    return mixings


def _stack_layers(samples: Sequence[StudentOutputs]) -> NDArray[np.float32]:
    """Weights of all layers ``(B, layers, n)`` or ``(B, layers, n, L)``; layers with fewer rows end in zeros."""
    weights = [[layer.alphas for layer in sample.layers] for sample in samples]
    shape = max(alphas.shape for of_sample in weights for alphas in of_sample)
    stacked = np.zeros((len(samples), len(weights[0]), *shape), np.float32)
    for number, of_sample in enumerate(weights):
        for column, alphas in enumerate(of_sample):
            stacked[number, column, ..., : alphas.shape[-1]] = alphas
    return stacked


def _without_padding(maps: NDArray[Any], layer: LayerOutputs, start: int = 0) -> NDArray[Any]:
    """A copy of maps or codes ``(H_s, rows, keys)`` from a row on, with 0 in the rows of padding (CACHE-129)."""
    rows = maps.copy()
    if layer.row_mask is not None:
        rows[:, ~layer.row_mask[start : start + rows.shape[1]]] = 0
    return rows
