"""Small caches for the tests, the same on every machine."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from shd_ref.cache import (
    Attention,
    AveragedTeacher,
    CacheReader,
    CacheWriter,
    CodecError,
    Dataset,
    Embeddings,
    Errors,
    Exact,
    Extent,
    Factors,
    FinalNorm,
    Hidden,
    HiddenError,
    HiddenLayer,
    KindLayers,
    LayerFactors,
    LayerPair,
    Logits,
    LogitsError,
    Manifest,
    Maps,
    SampleInputs,
    SampleRecord,
    ShardPlan,
    Skipped,
    Teacher,
    TeacherHead,
    dataset_fingerprint,
    encode,
    encode_factors,
    sample_key,
)

Place = TypeVar("Place", Path, str)

NUM_TEACHER_HEADS = 4
NUM_STUDENT_HEADS = 2
PLAN = (((0, 1), (2, 3)),)
OTHER_PLAN = (((1, 3),), ((0, 2),))
MAX_LENGTH = 9
FACTORS = (LayerFactors(2, 3, 0.5), LayerFactors(4, 2, 0.75))
WINDOWED = (LayerFactors(2, 3, 0.5, 2), LayerFactors(4, 2, 0.75))
MEASURED = Errors(attention=CodecError(kl_mean=2.0**-14, kl_max=2.0**-12, tv_mean=2.0**-9, rows=16))

VOCABULARY = 37
TOPK = Logits(
    codec="topk",
    rows="positions",
    tensor="logits",
    vocab_size=VOCABULARY,
    padded_vocab_size=40,
    temperature=2.0,
    head=5,
    value_bits=8,
)
NARROW = Logits(
    codec="topk", rows="positions", tensor="logits", vocab_size=VOCABULARY, temperature=1.0, head=3, value_bits=5
)
ALL_CLASSES = Logits(codec="float16", rows="sample", tensor="logits", vocab_size=VOCABULARY)
HIDDEN_LAYERS = (HiddenLayer(0, "embeddings", 4), HiddenLayer(11, "/block.10/Add", 7))
HIDDEN_INT8 = Hidden(codec="int8", rows="positions", layers=HIDDEN_LAYERS)
HIDDEN_FLOAT16 = Hidden(codec="float16", rows="positions", layers=HIDDEN_LAYERS[1:])
EMBEDDINGS = Embeddings(codec="float32", pooling="mean", normalize=True, tensor="last_hidden_state", width=5)


def generated(shape: tuple[int, ...], seed: int) -> NDArray[np.uint64]:
    """Numbers from 1 to 65536, by integer arithmetic: the same with every numpy and processor."""
    numbers = np.arange(1, 1 + np.prod(shape, dtype=np.int64), dtype=np.uint64) + np.uint64(seed << 20)
    mixed = numbers * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(48)) + np.uint64(1)).reshape(shape)


def fractions(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    return generated(shape, seed).astype(np.float32) / np.float32(2**16)


NORM = FinalNorm("layer", 2.0**-10, True)


def head_of(width: int = 6) -> TeacherHead:
    """With everything that a head may have; its matrix in binary16."""
    weight = (8 * fractions((VOCABULARY, width), 9001) - 4).astype(np.float16)
    bias, *norm = (fractions((size,), 9002 + number) for number, size in enumerate((VOCABULARY, width, width)))
    return TeacherHead(weight, bias, 0.5, 7.0, NORM, *norm)


AVERAGED = replace(
    TOPK,
    rows="decoder",
    with_teachers=(
        AveragedTeacher("cd" * 32, "second", "float32", "logits"),
        AveragedTeacher("ef" * 32, "third", "float16", "scores", 48),
    ),
)
HIDDEN_OF_A_DECODER = replace(HIDDEN_INT8, rows="decoder")
EXACT, HEAD_PIECES = Exact.of_head(head_of(), "int8", "positions", "/norm/Mul", padded=40)
FORMS = {
    "topk": {"logits": TOPK, "hidden": HIDDEN_INT8},
    "narrow": {"logits": NARROW, "hidden": HIDDEN_FLOAT16},
    "float16": {"logits": ALL_CLASSES},
    "hidden": {"hidden": HIDDEN_INT8},
    "embeddings": {"embeddings": EMBEDDINGS, "hidden": HIDDEN_INT8},
    "exact": {"exact": EXACT, "hidden": HIDDEN_FLOAT16},
}
"""Members of a manifest beside attention."""
ALONE: dict[str, dict[str, Any]] = {name: {"attention": None, **FORMS[name]} for name in FORMS}
"""The same without attention."""


def length_of(index: int) -> int:
    return 1 + index * 5 % MAX_LENGTH


def first_of(index: int) -> int:
    """Positions of padding in front, where the manifest has padding around."""
    return min(index % 3, length_of(index) - 1)


def key_of(index: int) -> str:
    return sample_key({"input_ids": np.arange(index, index + length_of(index))})


def job(num_samples: int = 7, samples_per_shard: int = 2, **changes: Any) -> Manifest:
    """A manifest; changes are members of it or of its attention, which is factored where factors are given."""
    kind: type[Maps] | type[Factors] = Factors if "factors" in changes else Maps
    attention: dict[str, Any] = {
        "num_student_heads": NUM_STUDENT_HEADS,
        "layers": (
            LayerPair(1, 2, "/encoder/2/Softmax", NUM_TEACHER_HEADS),
            LayerPair(2, 4, "/encoder/4/Softmax", NUM_TEACHER_HEADS),
        ),
        "plan": PLAN,
        "strategy": "shd",
        "alpha_rule": "least_squares",
        "support": "full",
    }
    attention |= {"codec": "sqrt8-row", "temperature": 1.0} if kind is Maps else {"codec": "int8"}
    members = {field.name for field in fields(Manifest)}
    others = [changes.pop(name, None) for name in ("logits", "hidden", "embeddings", "exact")]
    has_attention = changes.pop("attention", True) is not None
    attention |= {name: value for name, value in changes.items() if name not in members}
    forms = [kind(**attention) if has_attention else None, *others]
    manifest: dict[str, Any] = {
        "spec_version": "1.0",
        "created_by": "squeezing-heads test",
        "teacher": Teacher(sha256="ab" * 32, name="tiny", provider="CPUExecutionProvider", dtype="float32"),
        "forms": tuple(form for form in forms if form is not None),
        "inputs": SampleInputs(names=("input_ids",), mask=None),
        "dataset": Dataset(dataset_fingerprint(key_of(index) for index in range(num_samples)), num_samples),
        "shards": ShardPlan(samples_per_shard, seed=17, num_shards=-(-num_samples // samples_per_shard)),
    }
    return Manifest(**manifest | {name: value for name, value in changes.items() if name in members})


def rows_of(shape: tuple[int, ...], seed: int, *, causal: bool) -> NDArray[np.float32]:
    """Uneven rows that sum to one, with exact zeros where ``causal`` forbids the future."""
    cubes = generated(shape, seed) ** np.uint64(3)  # below 2^48, so sums of a few are exact in float64
    if causal:
        cubes = cubes * np.tri(shape[-1], dtype=np.uint64)
    return (cubes.astype(np.float64) / cubes.sum(axis=-1, keepdims=True).astype(np.float64)).astype(np.float32)


KINDS = {
    "kinds": (KindLayers("decoder", 2), KindLayers("cross", 2)),
    "num_student_layers": 4,
    "shapes": "own",
    "inputs": SampleInputs(("decoder_input_ids", "input_ids"), None, decoder=("decoder_input_ids",)),
}


def shapes_of(manifest: Manifest, index: int) -> tuple[tuple[int, int], ...]:
    """Rows and keys of each layer, where every record keeps its own shapes."""
    keys = 1 + index * 3 % 4
    form = manifest.find(Maps)
    own = form is not None and form.shapes == "own"
    return ((keys, keys), (keys, length_of(index))) if own else ()


def probs_of(manifest: Manifest, index: int, layer: int, length: int | None = None) -> NDArray[np.float32]:
    size = length or length_of(index)
    shapes = shapes_of(manifest, index)
    shape = shapes[manifest.attention.student_layers.index(layer)] if shapes else (size, size)
    return rows_of(
        (manifest.attention.num_student_heads, *shape),
        31 * index + layer,
        causal=manifest.attention.support == "causal",
    )


def factors_of(manifest: Manifest, index: int, column: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Queries and keys in small dyadic numbers, whose means float64 holds exactly."""
    form = manifest.attention
    assert isinstance(form, Factors)
    layer, heads = form.factors[column], (form.num_teacher_heads, form.factors[column].num_key_heads)
    counted = length_of(index) - padding_of(manifest, index)
    queries, keys = (
        8 * fractions((count, counted, layer.width), 4000 + 100 * index + 10 * column + place) - 4
        for place, count in enumerate(heads)
    )
    return queries, keys


def decoder_of(manifest: Manifest, index: int) -> int:
    """Positions of the second sequence, where a form has a row for each: as many as maps have rows."""
    return 1 + index * 3 % 4 if manifest.has_decoder_rows else 0


def record_of(manifest: Manifest, index: int, **changes: Any) -> SampleRecord:
    parts = parts_of(manifest, index)
    parts |= changes.pop("parts", {})
    record = SampleRecord(
        index=index,
        key=key_of(index),
        length=length_of(index),
        parts={name: part for name, part in parts.items() if part is not None},
        seed=None if manifest.inputs.seed is None else 3**33 + index,
        first=padding_of(manifest, index),
        shapes=shapes_of(manifest, index),
        decoder=decoder_of(manifest, index),
    )
    return replace(record, **changes)


def parts_of(manifest: Manifest, index: int) -> dict[str, Any]:
    """The parts of a record, of all its forms."""
    parts = {} if manifest.find(Attention) is None else attention_of(manifest, index)
    if manifest.logits is not None:
        parts["logits"] = manifest.logits.encode(logits_of(manifest, index))
    for layer in [] if manifest.hidden is None else manifest.hidden.teacher_layers:
        assert manifest.hidden is not None
        parts[f"H{layer:02d}"] = manifest.hidden.encode(hidden_of(manifest, index, layer), layer=layer)
    if manifest.embeddings is not None:
        parts["embedding"] = manifest.embeddings.encode(
            8 * fractions((1, manifest.embeddings.width), 8000 + index) - 4
        )
    if manifest.exact is not None:
        extent = Extent(length_of(index), padding_of(manifest, index), decoder=decoder_of(manifest, index))
        states = 8 * fractions((manifest.exact.num_rows(extent), manifest.exact.width), 9100 + index) - 4
        parts["last"] = manifest.exact.encode(states)
    return parts


def attention_of(manifest: Manifest, index: int) -> dict[str, Any]:
    """Codes, alphas and mixing of a record."""
    form = manifest.attention
    layers, heads = len(form.layers), (form.num_student_heads, form.num_teacher_heads)
    codes: list[Any]
    if isinstance(form, Factors):
        codes = [encode_factors(form.codec, *factors_of(manifest, index, column)) for column in range(layers)]
    else:
        codes = [encode(form.codec, probs_of(manifest, index, layer)) for layer in form.student_layers]
    alphas = fractions((layers, form.num_alphas), 1000 + index)
    return {
        **({"alphas": alphas} if alphas.size else {}),
        "mixing": fractions((layers, *heads), 2000 + index),
        **{f"L{layer:02d}": each for layer, each in zip(form.student_layers, codes, strict=True)},
    }


def padding_of(manifest: Manifest, index: int) -> int:
    """Positions of padding in front that a record leaves out."""
    form = manifest.find(Attention)
    around = form is None or (isinstance(form, Factors) and form.padding == "around")
    return first_of(index) if around else 0


def logits_of(manifest: Manifest, index: int) -> NDArray[np.float32]:
    """What a teacher gives: dyadic numbers up to 8, and -64 for classes that only pad the vocabulary."""
    form = manifest.logits
    assert form is not None
    extent = Extent(length_of(index), padding_of(manifest, index), decoder=decoder_of(manifest, index))
    logits = 16 * fractions((form.num_rows(extent), form.coded[0][1].width), 6000 + index) - 8
    logits[:, form.vocab_size :] = -64
    return logits


def hidden_of(manifest: Manifest, index: int, layer: int) -> NDArray[np.float32]:
    """Dyadic numbers up to 4."""
    assert manifest.hidden is not None
    (width,) = (each.width for each in manifest.hidden.layers if each.layer == layer)
    extent = Extent(length_of(index), padding_of(manifest, index), decoder=decoder_of(manifest, index))
    return 8 * fractions((manifest.hidden.num_rows(extent), width), 7000 + 100 * index + layer) - 4


def errors_of(manifest: Manifest) -> Errors:
    """As a writer measured them."""
    measured = MEASURED | {
        "logits": LogitsError(2.0**-13, 2.0**-11, 2.0**-8, 2.0**-3, 16),
        "hidden": HiddenError(2.0**-9, 2.0**-7, 16),
        "embeddings": HiddenError(2.0**-10, 2.0**-8, 2),
        "exact": HiddenError(2.0**-11, 2.0**-9, 8),
    }
    return Errors({form.SUBJECT: measured[form.SUBJECT] for form in manifest.forms})


def is_skipped(manifest: Manifest, index: int) -> bool:
    return manifest.on_error == "skip" and index % 3 == 1


def records_of(manifest: Manifest, shard: int) -> list[SampleRecord]:
    wanted = [index for index in manifest.shard_samples(shard) if not is_skipped(manifest, index)]
    return [record_of(manifest, index) for index in wanted]


def skipped_of(manifest: Manifest, shard: int) -> list[Skipped]:
    wanted = [index for index in manifest.shard_samples(shard) if is_skipped(manifest, index)]
    seeds = manifest.inputs.seed is not None
    return [Skipped(i, key_of(i), f"head {i} gave NaN", 3**33 + i if seeds else None) for i in wanted]


def write_shards(
    writer: CacheWriter, shards: Iterable[int], change: Callable[[SampleRecord], SampleRecord] | None = None
) -> None:
    for shard in shards:
        manifest = writer.manifest
        records = [change(record) if change else record for record in records_of(manifest, shard)]
        writer.write_shard(shard, records, errors_of(manifest), skipped_of(manifest, shard))


def write_cache(
    folder: Place, manifest: Manifest, change: Callable[[SampleRecord], SampleRecord] | None = None
) -> Place:
    """A sealed cache of the records that these makers make, each changed where that is asked for."""
    writer = CacheWriter(folder, manifest)
    for file in manifest.files:
        writer.write_file(file, HEAD_PIECES)
    write_shards(writer, writer.missing_shards(), change)
    writer.seal()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a cache but the lock, by its path."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def temporary_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.tmp"))


def read_everything(reader: CacheReader) -> dict[str, bytes]:
    """All samples of an open cache in one comparable form; also run in other processes."""
    records = [reader.read(key) for key in reader]
    return {record.key: b"".join([array.tobytes() for array in _decoded(reader, record)]) for record in records}


def _decoded(reader: CacheReader, record: SampleRecord) -> Iterator[NDArray[Any]]:
    for form in reader.manifest.forms:
        match form:
            case Attention():
                yield from (form.decode(record, layer) for layer in form.student_layers)
                yield from (record.parts[name] for name in ("alphas", "mixing") if name in record.parts)
            case Logits():
                decoded = form.decode(record)
                parts = (decoded,) if isinstance(decoded, np.ndarray) else decoded
                yield from (values for values in parts if isinstance(values, np.ndarray))
            case Hidden():
                yield from (form.decode(record, layer) for layer in form.teacher_layers)
            case Embeddings() | Exact():
                yield form.decode(record)
            case _:
                raise NotImplementedError(form)


def document(members: dict[str, Any]) -> bytes:
    """A document by the rules of the specification, without our code."""

    def spell(value: dict[str, Any]) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    body = {name: value for name, value in members.items() if name != "checksum"}
    return spell(body | {"checksum": xxhash.xxh3_128_hexdigest(spell(body))})
