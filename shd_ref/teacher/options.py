"""What to make of a teacher, how to run and measure it; apart from what runs a graph: commands need not load onnx."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Final

from shd_ref.attention import check_temperature
from shd_ref.cache import CODECS, DEFAULT_FACTORED_CODEC, FACTORED_CODECS, POOLINGS, VECTOR_CODECS
from shd_ref.cache.codecs.factored import check_factored_codec
from shd_ref.cache.documents.manifest import ON_ERROR
from shd_ref.errors import argument_value
from shd_ref.merging.alpha import ALPHA_PER, ALPHA_RULES, check_option
from shd_ref.merging.matching import MATCHED_BY
from shd_ref.merging.mixing import STRATEGIES
from shd_ref.merging.plans import PLAN_KINDS, MergePlan

CALIBRATION_SAMPLES: Final = 16
"""Enough for matched plans to settle: pairs are chosen by sums over all rows of all samples."""

CODECS_OF: Final = {"maps": ("codec", CODECS), "factored": ("factored_codec", FACTORED_CODECS)}
"""By form: the field of ``PrecomputeOptions`` that names its codec, and what that can be."""

FORMS: Final = tuple(CODECS_OF)
"""What records hold: merged maps, or the teacher's queries and keys."""

PAD_KEY: Final = "squeezing_heads.pad_token_id"
"""Of a graph's metadata: what its model takes for padding among token ids."""
NO_FORM: Final = "none"
"""The form of records without attention: logits, hidden states and embeddings alone."""

LOGIT_FORMS: Final = ("none", "topk", "float16")
"""How the teacher's logits are stored: not at all, by top-k records, or whole."""

LAST: Final = -1
"""Among hidden states the one that the head reads, with which KD is exact; ``last`` on the command line."""

MATCHED: Final = "matched"
"""The plan that is chosen on the data."""

PLANS: Final = (*PLAN_KINDS, MATCHED)
"""Which heads merge, where a plan is chosen by name."""


@dataclass(frozen=True)
class Shown:
    """How a command shows a field; ``needs`` a field, or ``field=value|value``, without which it means nothing."""

    help: str
    panel: str | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    metavar: str | None = None
    needs: str | None = None


MERGING: Final = "Merging"
STORING: Final = "Storage"
TARGETS: Final = "Logits, hidden states and embeddings"
READING: Final = "Inputs"
RUNNING: Final = "Running the teacher"
PANELS: Final = (MERGING, STORING, TARGETS, READING, RUNNING)
"""Headings of options in ``--help``, in this order."""

HELP: Final = {
    "num_student_layers": "Layers of the student. Default: as many as the teacher. Encoder-decoders: a number per"
    " kind, such as encoder=2,decoder=3,cross=3.",
    "layer_pairs": "Layer pairs student:teacher, counted from 0, such as 0:3,1:7. Default: evenly spaced. Student"
    " layers may be omitted.",
    "strategy": "Weights of merged heads: shd (the paper's closed form), constant (1/2), hard (the better head), "
    "mean (of all heads).",
    "plan": "Heads to merge: progressive (neighbours, in rounds, as in the paper), balanced (neighbouring "
    "groups), matched (best-fitting pairs on some samples, per layer).",
    "matched_by": "Score for matched plans: residual (of the output) or similarity (of the maps).",
    "form": "maps (merged), or factored: the teacher's queries and keys with the mixing weights, smaller for long"
    " samples, with a free temperature. shd plan compares them.",
    "factored_codec": "Codec of queries and keys: int8 (1 byte per number) or float16 (2).",
    "codec": "Codec of maps: sqrt8-row (1 byte per entry), u4 (1/2), float32 (4).",
    "logits": "Store the teacher's logits, for KD without a teacher: topk (the likeliest classes and the total "
    "mass of the others), float16 (complete rows, for classifiers).",
    "tile": "Query rows of attention that the teacher computes at once; 0 for whole maps. Default: whole while they"
    " are small, else as many rows as keep memory low.",
    "logits_top": "Classes to keep per row with their probabilities; the rest is stored as one number.",
    "logits_output": "The graph output with the logits, if not 'logits'. For other teachers it is only needed if "
    "they have neither 'logits' nor a single possible output.",
    "vocab_size": "Number of real classes if the teacher's vocabulary is padded; the others must have no mass.",
    "with_teachers": "Another teacher with the same vocabulary: the mean of all logits is stored (BabyLlama). "
    "Repeat per teacher.",
    "hidden": "Hidden states to store, such as 0,3,6: k is the input of block k, counted from 0; the number of "
    "blocks is the last block's output. For encoder-decoders: the decoder's blocks. last: what the head reads, and "
    "the head once, for exact KD over the whole vocabulary.",
    "hidden_codec": "Codec of hidden states: int8 (one scale per token), float16 or float32.",
    "embeddings": "Store an embedding of each text, pooled from the last hidden state as a sentence-transformers "
    "folder says (its path), or by mean, cls, max or last; with ,normalize divided by its norm.",
    "batch_tokens": "Positions per teacher call, instead of --batch-size: more samples per call if they are short.",
    "shards": "Write only part i of n of the shards, i from 0 to n-1: n processes fill one folder, or one each "
    "for shd merge.",
}
"""What longer options set, by field."""

SITES_HELP: Final = Shown(
    "Attention sites by number or name, as listed by shd inspect: 0,2,4-7, encoder*, self, cross. Default: all.",
    MERGING,
)
CALIBRATION_HELP: Final = Shown("Samples for choosing matched plans.", MERGING, least=1, needs="plan=matched")


_NORMALIZE: Final = ",normalize"


@dataclass(frozen=True)
class Pooling:
    """How the states of a text become its embedding (CACHE-182).

    Attributes:
        mode: ``"mean"``, ``"cls"`` (the first position), ``"max"`` or ``"last"`` (position), of those that count.
        normalize: whether the embedding is divided by its norm.

    Raises:
        ShdError: ``argument-value``.
    """

    mode: str
    normalize: bool = False

    def __post_init__(self) -> None:
        check_option("embeddings", self.mode, POOLINGS, "CACHE-182")

    def __str__(self) -> str:
        return self.mode + _NORMALIZE * self.normalize

    @classmethod
    def parse(cls, text: str) -> Pooling | None:
        """What ``str`` gives, read again; None for anything else."""
        mode = text.removesuffix(_NORMALIZE)
        return cls(mode, mode != text) if mode in POOLINGS else None


_OF_ATTENTION: Final = (
    "num_student_heads num_student_layers layer_pairs sites strategy plan plans alpha_rule alpha_per temperature "
    "factored_codec codec"
)


@dataclass(frozen=True)
class PrecomputeOptions:
    """What to make of the teacher, see ``shd_ref.squeeze_heads``; beyond what annotations say of fields:

    Attributes:
        num_student_layers: L_s, how many attention calls the student makes; by default as many as the teacher has
            attention sites, or as were selected. Where the graph has cross attention, a number for each kind
            (``encoder``, ``decoder``, ``cross``) that is to be taught.
        layer_pairs: zero-based. Without ``num_student_layers`` the student may make more calls than they name.
        plan: a kind, explicit rounds, or ``"matched"``: pairs chosen by ``matched_plan``, layer by layer, with the
            run's seed; ``plans`` in its place are rounds for every layer, in the order of the student's layers.
        alpha_rule: see ``shd_ref.solve_alpha``.
        form: also ``"none"``, for logits, hidden states and embeddings alone; the options of attention are then left
            alone.
        codec: ``sqrt8-row`` is coded inside the graph, the others on the host.
    """

    num_student_heads: Annotated[int, Shown("Heads of the student, at most the teacher's.", least=1)] = 0
    num_student_layers: Annotated[
        int | Mapping[str, int] | None, Shown(HELP["num_student_layers"], metavar="N|KIND=N,...")
    ] = None
    layer_pairs: Annotated[
        tuple[tuple[int, int], ...] | None, Shown(HELP["layer_pairs"], MERGING, metavar="S:T,...")
    ] = None
    sites: Annotated[str | None, SITES_HELP] = None
    strategy: Annotated[str, Shown(HELP["strategy"], MERGING, STRATEGIES)] = "shd"
    plan: Annotated[str | MergePlan, Shown(HELP["plan"], MERGING, PLANS)] = "progressive"
    matched_by: Annotated[str, Shown(HELP["matched_by"], MERGING, MATCHED_BY, needs="plan=matched")] = "residual"
    calibration_samples: Annotated[int, CALIBRATION_HELP] = CALIBRATION_SAMPLES
    plans: tuple[MergePlan, ...] | None = None
    alpha_rule: str = "least_squares"
    alpha_per: Annotated[str, Shown("One merge weight per map (the paper) or per query row.", MERGING, ALPHA_PER)] = (
        "map"
    )
    temperature: Annotated[float, Shown("Attention temperature of the stored maps, above 0.", MERGING)] = 1.0
    form: Annotated[str, Shown(HELP["form"], STORING, FORMS)] = "maps"
    factored_codec: Annotated[str, Shown(HELP["factored_codec"], STORING, FACTORED_CODECS, needs="form=factored")] = (
        DEFAULT_FACTORED_CODEC
    )
    codec: Annotated[str, Shown(HELP["codec"], STORING, CODECS, needs="form=maps")] = "sqrt8-row"
    on_error: Annotated[
        str, Shown("If a sample gives NaN: stop and name it, or skip and record it.", RUNNING, ON_ERROR)
    ] = "stop"
    seed_column: Annotated[
        str | None, Shown("Column of augmentation seeds, stored with the maps and reused in training.", STORING)
    ] = None

    logits: Annotated[str, Shown(HELP["logits"], TARGETS, LOGIT_FORMS)] = "none"
    logits_top: Annotated[int, Shown(HELP["logits_top"], TARGETS, least=1, needs="logits=topk")] = 32
    logits_bits: Annotated[
        int, Shown("Bits per kept probability, 4 to 16.", TARGETS, least=4, needs="logits=topk")
    ] = 8
    logits_temperature: Annotated[
        float, Shown("Temperature of the stored probabilities, above 0; KD must then use it.", TARGETS)
    ] = 1.0
    logits_output: Annotated[str | None, Shown(HELP["logits_output"], TARGETS)] = None
    vocab_size: Annotated[int | None, Shown(HELP["vocab_size"], TARGETS, least=1)] = None
    with_teachers: Annotated[tuple[Path, ...], Shown(HELP["with_teachers"], TARGETS, metavar="TEACHER.onnx")] = ()
    hidden: Annotated[tuple[int, ...], Shown(HELP["hidden"], TARGETS, metavar="K,...|last")] = ()
    hidden_codec: Annotated[str, Shown(HELP["hidden_codec"], TARGETS, VECTOR_CODECS, needs="hidden")] = "float16"

    embeddings: Annotated[Pooling | None, Shown(HELP["embeddings"], TARGETS, metavar="POOLING")] = None
    embeddings_codec: Annotated[
        str, Shown("Codec of embeddings: float32, float16 or int8.", TARGETS, VECTOR_CODECS, needs="embeddings")
    ] = "float32"

    @property
    def has_attention(self) -> bool:
        """Whether records hold attention, in some form."""
        return self.form != NO_FORM

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The hidden states by number."""
        return tuple(layer for layer in self.hidden if layer != LAST)

    @property
    def exact(self) -> bool:
        """Whether records hold the states that the head reads."""
        return LAST in self.hidden

    @property
    def is_factored(self) -> bool:
        """Whether records hold queries and keys."""
        return self.form == "factored"

    @property
    def stored_codec(self) -> str:
        """The codec of what records hold."""
        return str(getattr(self, CODECS_OF[self.form][0]))

    @property
    def attention_given(self) -> dict[str, object]:
        """The options of attention that were given: those that are not at their default."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name in _OF_ATTENTION.split() and getattr(self, field.name) != field.default
        }


@dataclass(frozen=True)
class RunOptions:
    """How to run the teacher, which changes nothing that a cache means; beyond what annotations say:

    Attributes:
        samples_per_shard: None for shards of about 256 MiB, and at least 16 of them.
        num_threads: None for one per core. ``precompute`` runs two batches at once where it has two threads or more,
            and starts no thread where it has one.
        tile: None to choose by length and heads; with tiles no map of all heads exists, so memory is linear in the
            length. Records are the same but for rounding.
        shards: ``(i, n)``: write part i of n of the shards, counted from 0, and leave the others to other processes.
    """

    mask: Annotated[str | None, Shown("The graph's padding mask of 0 and 1, if not attention_mask.", READING)] = None
    decoder_mask: Annotated[
        str | None, Shown("The same for a decoder with cross-attention, if not decoder_attention_mask.", READING)
    ] = None
    batch_size: Annotated[int, Shown("Samples per teacher call.", RUNNING, least=1)] = 16
    batch_tokens: Annotated[int | None, Shown(HELP["batch_tokens"], RUNNING, least=1)] = None
    samples_per_shard: Annotated[
        int | None, Shown("Samples per shard. Default: about 256 MiB, at least 16 shards.", STORING, least=1)
    ] = None
    seed: Annotated[
        int, Shown("Seed for the order of samples in shards, and for choosing samples.", RUNNING, least=0)
    ] = 0
    provider: Annotated[str, Shown("cpu, cuda, or an onnxruntime provider; no fallback to another.", RUNNING)] = "cpu"
    num_threads: Annotated[int | None, Shown("Threads for the teacher. Default: one per core.", RUNNING, least=1)] = (
        None
    )
    tile: Annotated[int | None, Shown(HELP["tile"], RUNNING, least=0)] = None
    shards: Annotated[tuple[int, int], Shown(HELP["shards"], RUNNING, metavar="i/n")] = (0, 1)


@dataclass(frozen=True)
class PlanOptions:
    """What a forecast measures, and what for.

    Attributes:
        max_error: mean total variation, in (0, 1]. The default is a convention: on 256 tokens ``sqrt8-row`` moves
            less than half of it, and ``u4`` several times as much.
    """

    samples: Annotated[int, Shown("Samples to run the teacher on.", least=1)] = 8
    read_bandwidth: Annotated[float, Shown("Read bandwidth per training device, in MB per second, above 0.")] = 500.0
    max_error: Annotated[float, Shown("Largest mean share of a row's probability that coding may move, above 0.")] = (
        0.01
    )
    fidelity_samples: Annotated[int, Shown("Samples to compare merge plans on; 0: none.", least=0)] = 32

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a training device can be fed."""
        return 1e6 * self.read_bandwidth

    def check(self) -> None:
        """Refuse what says nothing (``argument-value``)."""
        for name, least in (("samples", 1), ("fidelity_samples", 0)):
            value = getattr(self, name)
            if value < least:
                raise argument_value(f"{name} must be at least {least}; got {value}")
        if not 0 < self.read_bandwidth < float("inf"):
            raise argument_value(f"read_bandwidth must be above 0 MB a second; got {self.read_bandwidth}")
        if not 0 < self.max_error <= 1:
            raise argument_value(f"max_error must be above 0, at most 1; got {self.max_error}")


def check_options(options: PrecomputeOptions) -> None:
    """Refuse what no teacher can be asked for."""
    check_merge(options)
    check_option("on_error", options.on_error, ON_ERROR, "CACHE-51")
    check_temperature(options.temperature)
    _check_form(options)
    _check_targets(options)


def check_merge(options: PrecomputeOptions) -> None:
    """Refuse what no graph can be squeezed by."""
    check_option("strategy", options.strategy, STRATEGIES, "MIX-2")
    check_option("alpha_rule", options.alpha_rule, ALPHA_RULES, "ALPHA-4")
    check_option("alpha_per", options.alpha_per, ALPHA_PER, "ALPHA-9")
    check_option("codec", options.codec, CODECS, "CACHE-110")


def _check_form(options: PrecomputeOptions) -> None:
    check_option("form", options.form, (*FORMS, NO_FORM), "CACHE-140")
    if not options.has_attention:
        for name, value in options.attention_given.items():
            raise argument_value(f"{name} must be left out without attention; got {value!r}", "CACHE-160")
        if options.logits == "none" and not options.hidden and options.embeddings is None:
            rule = "logits or hidden must be requested without attention, or embeddings"
            raise argument_value(f"{rule}; got none of them", "CACHE-160")
    if not options.is_factored:
        return
    check_factored_codec(options.factored_codec)
    for name, value, only in (("alpha_per", options.alpha_per, "map"), ("temperature", options.temperature, 1.0)):
        if value != only:
            raise argument_value(
                f"{name} must be {only} for factored records; got {value}: the temperature is chosen with the loss, "
                "and one weight per map is stored; use --form maps for others",
                "CACHE-141",
            )


def _check_targets(options: PrecomputeOptions) -> None:
    check_option("logits", options.logits, LOGIT_FORMS, "CACHE-164")
    check_option("hidden_codec", options.hidden_codec, VECTOR_CODECS, "CACHE-177")
    check_option("embeddings_codec", options.embeddings_codec, VECTOR_CODECS, "CACHE-181")
    for name in ("logits_output", "vocab_size"):
        if options.logits == "none" and not options.exact and getattr(options, name) is not None:
            value = getattr(options, name)
            raise argument_value(f"{name} must go with logits, or hidden last; got {value!r} without them")
    temperature = options.logits_temperature
    if options.logits in ("none", "float16") and temperature != 1.0:
        raise argument_value(
            f"logits_temperature must go with topk logits, whose records are bound to it; got "
            f"{temperature:g} with logits {options.logits!r}"
        )
    if not 0 < temperature < math.inf:
        raise argument_value(f"logits_temperature must be finite and above 0; got {temperature}")
    if options.logits == "topk" and options.logits_top < 1:
        raise argument_value(f"logits_top must be at least 1 for topk; got {options.logits_top}")
