"""Options of a cache, a run and a measurement; apart from the code that runs a graph: commands need not load onnx.

Commands read these dataclasses as their options: a field is an option of its name, its line under ``Attributes`` the
text in ``--help``, and its annotation has the panel there, the choices, and the function that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Group, Parameter, Token

from shd_ref.attention import check_temperature
from shd_ref.cache import CODECS, FACTORED_CODECS
from shd_ref.cache.codecs.codecs import VECTOR_CODECS
from shd_ref.cache.codecs.factored import DEFAULT_FACTORED_CODEC
from shd_ref.cache.forms.attention import KINDS, TokenGroups
from shd_ref.errors import argument_value, need
from shd_ref.integers import check_option
from shd_ref.merging.matching import MATCHED_BY
from shd_ref.merging.mixing import STRATEGIES
from shd_ref.merging.plans import PLAN_KINDS, MergePlan
from shd_ref.teacher.sentence_folder import Pooling, read_pooling

CALIBRATION_SAMPLES: Final = 16
"""Enough for matched plans to settle: pairs are chosen by sums over all rows of all samples."""

CODECS_OF: Final = {"maps": ("codec", CODECS), "factored": ("factored_codec", FACTORED_CODECS)}
"""By form: the field of ``PrecomputeOptions`` that names its codec, and what that can be."""

FORMS: Final = tuple(CODECS_OF)
"""Forms of attention in records: merged maps, or the teacher's queries and keys."""

PAD_KEY: Final = "squeezing_heads.pad_token_id"
"""Of a graph's metadata: what its model takes for padding among token ids."""
NO_FORM: Final = "none"
"""The form of records without attention: logits, hidden states and embeddings alone."""

BY_CHARACTERS: Final = "weights:token_groups"
"""The groups of a student with another tokenizer, in the column that the source of texts then adds."""

LOGIT_FORMS: Final = ("none", "topk", "float16")
"""How the teacher's logits are stored: not at all, by top-k records, or whole."""

LAST: Final = -1
"""Among hidden states the one that the head reads, with which KD is exact; ``last`` on the command line."""

MATCHED: Final = "matched"
"""The plan that is chosen on the data."""

PLANS: Final = (*PLAN_KINDS, MATCHED)
"""Which heads merge, where a plan is chosen by name."""


def panel(title: str, place: int) -> Parameter:
    """Options under a heading of ``--help``; those without stand above all."""
    return Parameter(group=Group(title, sort_key=place))


MERGING: Final = panel("Merging", 1)
STORING: Final = panel("Storage", 2)
TARGETS: Final = panel("Logits, hidden states and embeddings", 3)
READING: Final = panel("Inputs", 4)
RUNNING: Final = panel("Running the teacher", 5)

UNASKED: Final = Parameter(parse=False)
"""A field that is no option."""

OPTIONS: Final = Parameter(name="*")
"""A dataclass whose fields are options by their own names."""

_LONGEST: Final = 16
"""Characters that choices may take in ``--help``, whose texts explain the longer ones."""


class Needs(str):
    """Another field, or ``field=value|value``, without which an option means nothing, so that it is refused."""


def read_by(reader: Callable[[str, str], Any], metavar: str) -> Parameter:
    """An option of one word, read by a function of the option's name and that word."""

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        return reader(tokens[-1].keyword or "", tokens[-1].value)

    return Parameter(converter=convert, n_tokens=1, accepts_keys=False, metavar=metavar)


def one_of(choices: Sequence[str]) -> Parameter:
    """An option of some words."""
    metavar = "|".join(choices)
    shown = Parameter(choices=choices, show_choices=False)
    return Parameter.combine(read_by(lambda _, text: text, metavar if len(metavar) <= _LONGEST else "WORD"), shown)


def at_least(least: int) -> Parameter:
    """An option of a whole number; cyclopts by itself rounds others."""

    def read(option: str, text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"{option} must be a whole number from {least}; got {text}")
        return int(text)

    return read_by(read, "N")


FROM_0: Final = at_least(0)
FROM_1: Final = at_least(1)


def read_list(option: str, text: str, *, kind: type = int, least: int = 1) -> tuple[Any, ...]:
    """The numbers of an option that takes several, such as ``4,6``; integers from ``least``."""
    parts = [word.strip() for word in text.split(",")]
    if kind is int:
        is_right = all(word.isdecimal() and int(word) >= least for word in parts)
        need(is_right, "argument-value", option, f"be numbers from {least}, separated by commas: 4,6", repr(text))
    try:
        return tuple(map(kind, parts))
    except ValueError:
        raise argument_value(f"{option} must be numbers, separated by commas: 4,6.5; got {text!r}") from None


INTEGERS: Final = read_by(read_list, "N,...")
FLOATS: Final = read_by(partial(read_list, kind=float), "X,...")


def _read_paths(_: str, text: str) -> tuple[Path, ...]:
    return (Path(text),) if Path(text).exists() else tuple(map(Path, text.split(",")))


PATHS: Final = read_by(_read_paths, "FILE,...")


def _read_layers(option: str, text: str) -> int | dict[str, int]:
    """A number of layers, or one for each kind."""
    parts = [word.strip().partition("=") for word in text.split(",")]
    numbers = {kind.strip(): number.strip() for kind, _, number in parts}
    if len(parts) == 1 and not parts[0][1]:
        numbers = {"": parts[0][0]}
    counts = {kind: int(number) if number.isdecimal() else 0 for kind, number in numbers.items()}
    known = counts.keys() <= set(KINDS) or counts.keys() == {""}
    rule = f"be a number from 1, or one for each kind ({', '.join(KINDS)}) such as encoder=2,decoder=3,cross=3"
    is_right = len(counts) == len(parts) and known and min(counts.values()) >= 1
    need(is_right, "argument-value", option, rule, repr(text), spec_id="LAYER-2")
    return counts.get("", counts)


def _read_pairs(option: str, text: str) -> tuple[tuple[int, int], ...]:
    try:
        pairs = [pair.split(":") for pair in text.split(",")]
        return tuple((int(student), int(teacher)) for student, teacher in pairs)
    except ValueError:
        message = f"{option} must be student:teacher pairs such as 0:3,1:7; got {text!r}"
        raise argument_value(message, "LAYER-4") from None


def _read_shards(option: str, text: str) -> tuple[int, int]:
    share, _, parts = text.partition("/")
    is_right = share.isdecimal() and parts.isdecimal() and int(share) < int(parts)
    need(is_right, "argument-value", option, "be i/n with 0 <= i < n, such as 0/4", repr(text))
    return int(share), int(parts)


LAST_WORD: Final = "last"
"""The word for ``LAST`` among hidden states."""


def _read_hidden(option: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    numbers = ",".join(word for word in words if word != LAST_WORD)
    return (read_list(option, numbers, least=0) if numbers else ()) + (LAST,) * (LAST_WORD in words)


def write_value(field: str, value: Any) -> str:
    """A value as its option is read again."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={number}" for key, number in value.items())
    if field == "hidden":
        return ",".join(LAST_WORD if layer == LAST else str(layer) for layer in value)
    if field == "shards":
        return "/".join(map(str, value))
    if isinstance(value, tuple):
        return ",".join(":".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value)
    return str(value)


_POOLING: Final = read_by(lambda _, text: Pooling.parse(text) or read_pooling(Path(text)), "POOLING")
_OF_ATTENTION: Final = (
    "num_student_heads num_student_layers layer_pairs sites strategy plan plans temperature factored_codec codec "
    "groups"
)


@OPTIONS
@dataclass(frozen=True)
class PrecomputeOptions:
    """What to make of the teacher, see ``shd_ref.squeeze_heads``.

    By default the student makes as many attention calls as the teacher has attention sites, or as were selected, and
    with ``layer_pairs`` it may make more than they name. A ``plan`` may also be explicit rounds, and ``plans`` in its
    place are rounds for every layer, in the order of the student's layers. The form ``"none"`` is for logits, hidden
    states and embeddings alone; the options of attention are then left alone. Maps in ``sqrt8-row`` are coded inside
    the graph, in other codecs on the host.

    Attributes:
        num_student_layers: Layers of the student. Default: as many as the teacher. Encoder-decoders: a number per
            kind, such as encoder=2,decoder=3,cross=3.
        layer_pairs: Layer pairs student:teacher, counted from 0, such as 0:3,1:7. Default: evenly spaced. Student
            layers may be omitted.
        sites: Attention sites by number or name, as listed by shd inspect: 0,2,4-7, encoder*, self, cross. Default:
            all.
        strategy: Weights of merged heads: shd (the paper's closed form), constant (1/2), hard (the better head),
            mean (of all heads).
        plan: Heads to merge: progressive (neighbours, in rounds, as in the paper), balanced (neighbouring groups),
            matched (best-fitting pairs on some samples, per layer).
        matched_by: Score for matched plans: residual (of the output) or similarity (of the maps).
        calibration_samples: Samples for choosing matched plans.
        temperature: Attention temperature of the stored maps, above 0.
        form: maps (merged), or factored: the teacher's queries and keys with the mixing weights, smaller for long
            samples, with a free temperature. shd plan compares them.
        factored_codec: Codec of queries and keys: int8 (1 byte per number) or float16 (2).
        codec: Codec of maps: sqrt8-row (1 byte per entry), u4 (1/2), float32 (4).
        groups: Pool the maps for a student with fewer tokens: patches:14x14:7x7 for larger patches, with :1 at the
            end for a class token; ids:COLUMN or weights:COLUMN, the groups of each sample's tokens.
        seed_column: Column of augmentation seeds, stored with the maps and reused in training.
        logits: Store the teacher's logits, for KD without a teacher: topk (the likeliest classes and the total mass
            of the others), float16 (complete rows, for classifiers).
        logits_top: Classes to keep per row with their probabilities; the rest is stored as one number.
        logits_bits: Bits per kept probability, 4 to 16.
        logits_temperature: Temperature of the stored probabilities, above 0; KD must then use it.
        logits_output: The graph output with the logits, if not 'logits'. For other teachers it is only needed if they
            have neither 'logits' nor a single possible output.
        vocab_size: Number of real classes if the teacher's vocabulary is padded; the others must have no mass.
        with_teachers: Another teacher with the same vocabulary: the mean of all logits is stored (BabyLlama). Repeat
            per teacher.
        hidden: Hidden states to store, such as 0,3,6: k is the input of block k, counted from 0; the number of blocks
            is the last block's output. For encoder-decoders: the decoder's blocks. last: what the head reads, and the
            head once, for exact KD over the whole vocabulary.
        hidden_codec: Codec of hidden states: int8 (one scale per token), float16 or float32.
        embeddings: Store an embedding of each text, pooled from the last hidden state as a sentence-transformers
            folder says (its path), or by mean, cls, max or last; with ,normalize divided by its norm.
        embeddings_codec: Codec of embeddings: float32, float16 or int8.
    """

    # Commands take several numbers of heads, and make one of these of each.
    num_student_heads: Annotated[int, UNASKED] = 0
    num_student_layers: Annotated[int | Mapping[str, int] | None, read_by(_read_layers, "N|KIND=N,...")] = None
    layer_pairs: Annotated[tuple[tuple[int, int], ...] | None, MERGING, read_by(_read_pairs, "S:T,...")] = None
    sites: Annotated[str | None, MERGING] = None
    strategy: Annotated[str, MERGING, one_of(STRATEGIES)] = "shd"
    plan: Annotated[str | MergePlan, MERGING, one_of(PLANS)] = "progressive"
    matched_by: Annotated[str, MERGING, one_of(MATCHED_BY), Needs("plan=matched")] = "residual"
    calibration_samples: Annotated[int, MERGING, FROM_1, Needs("plan=matched")] = CALIBRATION_SAMPLES
    plans: Annotated[tuple[MergePlan, ...] | None, UNASKED] = None
    temperature: Annotated[float, MERGING] = 1.0
    form: Annotated[str, STORING, one_of(FORMS)] = "maps"
    factored_codec: Annotated[str, STORING, one_of(FACTORED_CODECS), Needs("form=factored")] = DEFAULT_FACTORED_CODEC
    codec: Annotated[str, STORING, one_of(CODECS), Needs("form=maps")] = "sqrt8-row"
    groups: Annotated[str | None, STORING, Needs("form=maps")] = None
    seed_column: Annotated[str | None, STORING] = None

    logits: Annotated[str, TARGETS, one_of(LOGIT_FORMS)] = "none"
    logits_top: Annotated[int, TARGETS, FROM_1, Needs("logits=topk")] = 32
    logits_bits: Annotated[int, TARGETS, at_least(4), Needs("logits=topk")] = 8
    logits_temperature: Annotated[float, TARGETS] = 1.0
    logits_output: Annotated[str | None, TARGETS] = None
    vocab_size: Annotated[int | None, TARGETS, FROM_1] = None
    with_teachers: Annotated[tuple[Path, ...], TARGETS, Parameter(name="--with-teacher")] = ()
    hidden: Annotated[tuple[int, ...], TARGETS, read_by(_read_hidden, "K,...|last")] = ()
    hidden_codec: Annotated[str, TARGETS, one_of(VECTOR_CODECS), Needs("hidden")] = "float16"

    embeddings: Annotated[Pooling | None, TARGETS, _POOLING] = None
    embeddings_codec: Annotated[str, TARGETS, one_of(VECTOR_CODECS), Needs("embeddings")] = "float32"

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


@OPTIONS
@dataclass(frozen=True)
class RunOptions:
    """How to run the teacher, which changes nothing that a cache means.

    Two batches run at once where there are two threads or more; with one, no thread is started. With tiles no map of
    all heads exists, so memory is linear in the length; records are the same but for rounding.

    Attributes:
        mask: The graph's padding mask of 0 and 1, if not attention_mask.
        batch_size: Samples per teacher call.
        batch_tokens: Positions per teacher call, instead of --batch-size: more samples per call if they are short.
        samples_per_shard: Samples per shard. Default: about 256 MiB, at least 16 shards.
        seed: Seed for the order of samples in shards, and for choosing samples.
        provider: cpu, cuda, or an onnxruntime provider; no fallback to another.
        num_threads: Threads for the teacher. Default: one per core.
        tile: Query rows of attention that the teacher computes at once; 0 for whole maps. Default: whole while they
            are small, else as many rows as keep memory low.
        shards: Write only part i of n of the shards, i from 0 to n-1: n processes fill one folder, or one each for
            shd merge.
    """

    mask: Annotated[str | None, READING] = None
    batch_size: Annotated[int, RUNNING, FROM_1] = 16
    batch_tokens: Annotated[int | None, RUNNING, FROM_1] = None
    samples_per_shard: Annotated[int | None, STORING, FROM_1] = None
    seed: Annotated[int, RUNNING, FROM_0] = 0
    provider: Annotated[str, RUNNING] = "cpu"
    num_threads: Annotated[int | None, RUNNING, FROM_1] = None
    tile: Annotated[int | None, RUNNING, FROM_0] = None
    shards: Annotated[tuple[int, int], RUNNING, read_by(_read_shards, "i/n")] = (0, 1)


# Next to the classes that they extend: cyclopts reads the names in an annotation where the last class stands.


@OPTIONS
@dataclass(frozen=True)
class PlannedOptions(PrecomputeOptions):
    """Options of a cache, without those that a forecast recommends or never uses."""

    form: Annotated[str, UNASKED] = PrecomputeOptions.form
    factored_codec: Annotated[str, UNASKED] = PrecomputeOptions.factored_codec
    codec: Annotated[str, UNASKED] = PrecomputeOptions.codec
    seed_column: Annotated[str | None, UNASKED] = None


@OPTIONS
@dataclass(frozen=True)
class MeasuredRun(RunOptions):
    """A run that writes no shards."""

    samples_per_shard: Annotated[int | None, UNASKED] = None
    shards: Annotated[tuple[int, int], UNASKED] = (0, 1)


def check_options(options: PrecomputeOptions) -> None:
    """Refuse options that no teacher can meet."""
    check_merge(options)
    check_temperature(options.temperature)
    _check_form(options)
    _check_targets(options)


def check_merge(options: PrecomputeOptions) -> None:
    """Refuse what no graph can be squeezed by."""
    check_option("strategy", options.strategy, STRATEGIES, "MIX-2")
    check_option("codec", options.codec, CODECS, "CACHE-110")


def _check_form(options: PrecomputeOptions) -> None:
    check_option("form", options.form, (*FORMS, NO_FORM), "CACHE-140")
    if not options.has_attention:
        for name, value in options.attention_given.items():
            raise argument_value(f"{name} must be left out without attention; got {value!r}", "CACHE-160")
        is_any = options.logits != "none" or options.hidden or options.embeddings is not None
        rule = "be requested without attention, or embeddings"
        need(bool(is_any), "argument-value", "logits or hidden", rule, "none of them", spec_id="CACHE-160")
    if options.groups is not None:
        TokenGroups.parse(options.groups)
        rule, why = "be left out where maps are pooled", "theirs are the teacher's tokens"
        others = {"form": options.is_factored, "hidden": bool(options.hidden)}
        for name, is_given in others.items():
            need(not is_given, "argument-value", name, rule, getattr(options, name), remedy=why, spec_id="CACHE-131")
    if not options.is_factored:
        return
    check_option("codec", options.factored_codec, FACTORED_CODECS, "CACHE-142")
    why = "it is chosen with the loss; use --form maps for others"
    rule, temperature = "be 1 for factored records", options.temperature
    need(temperature == 1.0, "argument-value", "temperature", rule, temperature, remedy=why, spec_id="CACHE-153")


def _check_targets(options: PrecomputeOptions) -> None:
    check_option("logits", options.logits, LOGIT_FORMS, "CACHE-164")
    check_option("hidden_codec", options.hidden_codec, VECTOR_CODECS, "CACHE-177")
    check_option("embeddings_codec", options.embeddings_codec, VECTOR_CODECS, "CACHE-181")
    others, has_logits = ", ".join(map(str, options.with_teachers)), options.logits != "none"
    rule, got = "go with logits, whose mean is stored", f"{others} with logits 'none'"
    need(has_logits or not others, "argument-value", "with_teachers", rule, got, spec_id="CACHE-163")
    has_topk, temperature = options.logits == "topk", options.logits_temperature
    for name in ("logits_output", "vocab_size"):
        ok = has_logits or options.exact or getattr(options, name) is None
        rule = "go with logits, or hidden last"
        need(ok, "argument-value", name, rule, f"{getattr(options, name)!r} without them")
    got = f"{temperature:g} with logits {options.logits!r}"
    rule = "go with topk logits, whose records are bound to it"
    need(has_topk or temperature == 1, "argument-value", "logits_temperature", rule, got)
    is_temperature = 0 < temperature < math.inf
    need(is_temperature, "argument-value", "logits_temperature", "be finite and above 0", temperature)
    top = options.logits_top
    need(not has_topk or top >= 1, "argument-value", "logits_top", "be at least 1 for topk", top)
