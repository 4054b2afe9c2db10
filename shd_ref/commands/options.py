"""Options that several subcommands of ``shd`` share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shd_ref.cache.documents.members import KINDS
from shd_ref.errors import ShdError


class Strategy(StrEnum):
    """Merging strategies that run inside the graph."""

    shd = "shd"
    constant = "constant"
    hard = "hard"
    mean = "mean"
    simplex = "simplex"


class Codec(StrEnum):
    """How maps are stored."""

    sqrt8_row = "sqrt8-row"
    sqrt8_abs = "sqrt8-abs"
    u4 = "u4"
    bf16 = "bf16"
    float32 = "float32"


class Form(StrEnum):
    """What records hold."""

    maps = "maps"
    factored = "factored"


class FactoredCodec(StrEnum):
    """How queries and keys are stored."""

    int8 = "int8"
    float16 = "float16"


class Compression(StrEnum):
    """What is done to stored blobs."""

    none = "none"
    zstd = "zstd"


class OnError(StrEnum):
    """What is done about a sample on which the teacher fails."""

    stop = "stop"
    skip = "skip"


class Plan(StrEnum):
    """Which heads merge."""

    progressive = "progressive"
    balanced = "balanced"
    matched = "matched"


class MatchedBy(StrEnum):
    """What matched plans are chosen by."""

    residual = "residual"
    similarity = "similarity"


class Engine(StrEnum):
    """What runs the teacher."""

    local = "local"
    ray = "ray"


class AlphaPer(StrEnum):
    """How many merge weights."""

    map = "map"
    row = "row"


def refuse_nothing(value: Any) -> Any:
    """A callback of options: an empty place would mean the current folder."""
    if value == "" or (isinstance(value, list) and "" in value):
        raise typer.BadParameter("must be a folder or an address; got nothing")
    return value


CacheArgument = Annotated[
    str,
    typer.Argument(
        help="The cache: a folder, or an address such as s3://bucket/cache.",
        metavar="CACHE",
        callback=refuse_nothing,
    ),
]
TeacherPath = Annotated[Path, typer.Argument(help="The teacher as an ONNX graph.", metavar="TEACHER.onnx")]
InputsPath = Annotated[
    Path,
    typer.Option(
        help="Model inputs: .npz, .safetensors, .parquet, .arrow or .jsonl, with one column per graph input; or a "
        "folder of Parquet or Arrow files, such as save_to_disk of Hugging Face datasets writes."
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        help="Where the inputs are text: tokenizer.json, or the folder that holds it; of a folder also the "
        "model_max_length of tokenizer_config.json counts."
    ),
]
TextOption = Annotated[
    str | None, typer.Option(help="Column of the text; default: text. Only with --tokenizer.", show_default=False)
]
MaxLengthOption = Annotated[
    int | None,
    typer.Option(help="Tokens to keep of a text; default: as the tokenizer says. Only with --tokenizer.", min=1),
]
Provider = Annotated[str, typer.Option(help="cpu, cuda, or an onnxruntime provider name. Never falls back silently.")]
StudentHeads = Annotated[int, typer.Option(help="Heads of the student, at most the teacher's.", min=1)]
HeadsOfStudents = Annotated[
    str,
    typer.Option(
        help="Heads of the student, at most the teacher's; several numbers (4,6) make a cache each in one pass.",
        metavar="INTEGER[,INTEGER...]",
    ),
]
StudentLayers = Annotated[
    str | None,
    typer.Option(
        help="Layers of the student; default: as many as the teacher has. Of an encoder-decoder, calls of each kind "
        "that is taught, such as encoder=2,decoder=3,cross=3.",
        metavar="INTEGER|KIND=INTEGER,...",
    ),
]
LayerPairs = Annotated[
    str | None,
    typer.Option(help="Explicit layer pairs student:teacher, zero-based, such as 0:3,1:7. Holes are allowed."),
]
SitesOption = Annotated[
    str | None,
    typer.Option(
        help="Attention sites, as shd inspect numbers and names them: 0,2,4-7, names, patterns such as encoder*, "
        "self or cross; default: all.",
        metavar="SITES",
    ),
]
StrategyOption = Annotated[Strategy, typer.Option(help="How maps are merged.")]
PlanOption = Annotated[
    Plan,
    typer.Option(
        help="Which heads merge: adjacent pairs by rounds (the paper), balanced groups, or the pairs that fit best "
        "on a sample of the data, layer by layer."
    ),
]
MatchedByOption = Annotated[
    MatchedBy, typer.Option(help="What --plan matched goes by: error of the attention output, or distance of maps.")
]
CalibrationSamples = Annotated[int, typer.Option(help="How many samples plans are matched on.", min=1)]
AlphaPerOption = Annotated[AlphaPer, typer.Option(help="One merge weight per map (the paper), or per query row.")]
Temperature = Annotated[float, typer.Option(help="Attention temperature of the stored maps, above 0.")]
MaskOption = Annotated[
    str | None, typer.Option(help="Attention-mask input of 0 and 1, if not called attention_mask.")
]
DecoderMaskOption = Annotated[
    str | None,
    typer.Option(help="Mask of an encoder-decoder's decoder rows, if not called decoder_attention_mask."),
]
BatchSize = Annotated[int, typer.Option(help="Samples per teacher call.", min=1)]
BatchTokens = Annotated[
    int | None,
    typer.Option(help="Positions per teacher call, in place of --batch-size: short samples fill it too.", min=1),
]
Shards = Annotated[
    str | None,
    typer.Option(
        help="Only part i of n of the shards, i from 0 to n-1, for n processes on any machines, which write one "
        "folder, or one each for shd merge.",
        metavar="i/n",
    ),
]
Threads = Annotated[int | None, typer.Option(help="Threads of onnxruntime.", min=1)]


def parse_heads(text: str) -> list[int]:
    """``--student-heads`` as numbers; ``argument-value`` for what is none."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ShdError("argument-value", f"--student-heads must be numbers from 1 such as 4 or 4,6; got {text!r}")
    return [int(part) for part in parts]


def parse_student_layers(text: str | None) -> int | dict[str, int] | None:
    """``--student-layers`` as a number, or one for each kind; ``argument-value`` for what is neither."""
    if text is None:
        return None
    parts = [part.strip().partition("=") for part in text.split(",")]
    numbers = {kind.strip(): number.strip() for kind, _, number in parts}
    if len(parts) == 1 and not parts[0][1]:
        numbers = {"": parts[0][0]}
    counts = {kind: int(number) if number.isdecimal() else 0 for kind, number in numbers.items()}
    known = counts.keys() <= set(KINDS) or counts.keys() == {""}
    if len(counts) != len(parts) or not known or min(counts.values()) < 1:
        raise ShdError(
            "argument-value",
            f"--student-layers must be a number from 1, or one for each kind ({', '.join(KINDS)}) such as "
            f"encoder=2,decoder=3,cross=3; got {text!r}",
            "LAYER-2",
        )
    return counts.get("", counts)


def parse_shards(text: str | None) -> tuple[int, int]:
    """``--shards`` as part and parts; ``argument-value`` for what is none."""
    if text is None:
        return (0, 1)
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise ShdError("argument-value", f"--shards must be i/n with 0 <= i < n, such as 0/4; got {text!r}")
    return int(part), int(parts)


def parse_layer_pairs(text: str | None) -> tuple[tuple[int, int], ...] | None:
    """``--layers`` as pairs; ``argument-value`` for what is none."""
    if text is None:
        return None
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((int(student), int(teacher)) for student, teacher in pairs)
    except ValueError:
        raise ShdError(
            "argument-value", f"--layers must be student:teacher pairs such as 0:3,1:7; got {text!r}", "LAYER-4"
        ) from None


def check_teacher_options(
    teacher: Path | None,
    inputs: Path | None,
    tokenizer: Path | None = None,
    text_column: str | None = None,
    max_length: int | None = None,
) -> None:
    """Where the teacher is run on request only: refuse options about a run that was not asked for.

    Raises:
        ShdError: ``argument-value``.
    """
    if (teacher is None) != (inputs is None):
        raise ShdError("argument-value", "--teacher and --inputs must be given together; got one of them")
    about_text = {"--tokenizer": tokenizer, "--text-column": text_column, "--max-length": max_length}
    for option, value in about_text.items():
        if inputs is None and value is not None:
            raise ShdError("argument-value", f"{option} must be given with --inputs alone; got {value} without")


def words_of_inputs(
    inputs: str | Path, tokenizer: Path | None = None, text_column: str | None = None, max_length: int | None = None
) -> list[str]:
    """The part of a command line that names the same inputs again, so that the next command can be shown."""
    words = ["--inputs", str(inputs)]
    words += [] if tokenizer is None else ["--tokenizer", str(tokenizer)]
    words += [] if text_column is None else ["--text-column", text_column]
    return words + ([] if max_length is None else ["--max-length", str(max_length)])
