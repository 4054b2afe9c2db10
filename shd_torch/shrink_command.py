"""``shd-torch shrink``: a student's folder from a teacher's; PyTorch is imported when it runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray

from shd_ref.commands.program import Document, option_of, require_packages
from shd_ref.commands.terminal import console, print_remarks, show_progress
from shd_ref.errors import ShdError, need
from shd_ref.shrink.student import read_counts
from shd_ref.teacher.options import FROM_1, OPTIONS, one_of, read_by, read_list
from shd_ref.teacher.sentence_folder import find_pooling
from shd_ref.teacher.sources import KINDS, named_inputs, open_source
from shd_ref.teacher.sources.arrays import open_npz
from shd_torch.shrink.folders import check_files, new_folder

if TYPE_CHECKING:
    from shd_torch.shrink import Shrunk


def _read_count(option: str, text: str) -> int | tuple[int, ...]:
    """``--layers 3``, ``--layers 0,2,4``."""
    numbers = read_list(option, text, least=0)
    return numbers if "," in text else int(numbers[0])


COUNT = read_by(_read_count, "N|N,...")
LAYERS = read_by(partial(read_list, least=0), "N,...")


@OPTIONS
@dataclass(frozen=True)
class StudentSizes:
    """What is asked of a student, as the command line says it; one of them must be given.

    Attributes:
        heads: Query heads: 4, or of each student layer, 4,6,4. Default: the teacher's.
        layers: Number of layers, or a list of the teacher's: 3, or 0,2,4.
        hidden: Channels of the student's residual stream.
        neurons: Neurons per FFN: 768, or of each student layer, 512,768,768; the most important are kept.
        kv_heads: Key and value heads of the student.
        head_dim: Width of a head. BERT, RoBERTa, GPT-2: hidden / heads by default, which saves no time.
        drop_attention: Teacher layers that lose their attention block: 1,4.
        drop_activations: Teacher layers whose FFN loses its activation and becomes one linear map: 2,3.
        stack: encoder or decoder: which to shrink of a model with both.
    """

    heads: Annotated[int | tuple[int, ...] | None, COUNT] = None
    layers: Annotated[int | tuple[int, ...] | None, COUNT] = None
    hidden: Annotated[int | None, FROM_1] = None
    neurons: Annotated[int | tuple[int, ...] | None, COUNT] = None
    kv_heads: Annotated[int | None, FROM_1] = None
    head_dim: Annotated[int | None, FROM_1] = None
    drop_attention: Annotated[tuple[int, ...] | None, LAYERS] = None
    drop_activations: Annotated[tuple[int, ...] | None, LAYERS] = None
    stack: str | None = None

    def options(self) -> dict[str, Any]:
        """Keywords of ``shrink``."""
        options = {name: value for name, value in asdict(self).items() if value is not None}
        if not options.keys() - {"stack"}:
            names = ", ".join(option_of(name) for name in asdict(self) if name != "stack")
            raise ShdError("argument-value", f"one of {names} must be given; got none, which reproduces the teacher")
        return options


_UNCHANGED = StudentSizes()


def shrink(
    teacher: Path,
    /,
    *,
    data: Path,
    out: Path,
    sizes: StudentSizes = _UNCHANGED,
    plan: Annotated[str, one_of(("auto", "matched", "balanced", "progressive"))] = "auto",
    samples: Annotated[int, FROM_1] = 64,
    batch_size: Annotated[int, FROM_1] = 16,
    align: Annotated[bool, Parameter(negative="--no-align")] = True,
    ridge: float | None = None,
    max_length: Annotated[int | None, FROM_1] = None,
) -> Document:
    """Create a smaller student from the squeezed teacher, without training.

    shd-torch shrink teacher --heads 4 --layers 3 --hidden 48 --data tokens.npy --out student

    The student has the teacher's architecture and loads with the Auto classes, or with shd_torch.load_student if
    their configuration cannot express it: sizes by layer, heads of another length, dropped attention or activations.
    Its shrink.json records the changes and each layer's error relative to the teacher. If a run is stopped, the same
    command resumes it. See docs/shrink.md.

    Args:
        teacher: Folder of a Hugging Face model with safetensors.
        data: Calibration data: .npz of the model's inputs by name, .npy of token ids or pixels, or .jsonl with a
            column text, for the tokenizer in the teacher's folder.
        out: A new folder for the student.
        plan: Heads to merge: auto, matched, balanced or progressive.
        samples: Number of samples to use, from the start of the data.
        batch_size: Samples per batch.
        align: Refit matrices to the teacher's outputs, or use the closed form.
        ridge: Ridge towards the closed form for refitted matrices. Default: chosen on every fourth sample.
        max_length: Tokens to keep of a text. Default: as the tokenizer's folder says.
    """
    require_packages("torch", "transformers")
    options = sizes.options() | {"plan": plan, "align": align, "ridge": ridge, "batch_size": batch_size}
    check_files(teacher, "teacher")
    _check_heads(options.get("heads"), teacher)
    new_folder(out)
    inputs = read_inputs(data, samples, teacher, max_length=max_length)
    from shd_torch.export import hide_weight_bars
    from shd_torch.shrink import shrink as run

    hide_weight_bars()
    with show_progress("steps") as (on_step,):
        made = run(
            str(teacher),
            inputs,
            progress=lambda done, total, what: on_step(done, total, says=what),
            out=out,
            **options,
        )
    _say_what_was_made(made, out)
    has_stack = "stack" in made.report  # of which shrink.json cannot say the attention calls
    is_equal = isinstance(made.report["student"]["heads"], int)
    following = []
    if not has_stack:
        told: dict[str, Any] = {"has_equal_layers": is_equal, "max_length": max_length}
        following = following_commands(teacher, data, out, made.student, inputs, **told)
    for command in following:
        console.say(f"next: {command}")
    return made.report | {"path": out, "next": following}


def _check_heads(heads: int | Sequence[int] | None, teacher: Path) -> None:
    """Refuse more heads than the configuration says, where it says so under one of the usual names."""
    most, _ = read_counts(teacher)
    if heads is not None and most is not None and np.max(heads) > most:
        raise ShdError("heads-exceed", f"heads must lie in 1..{most}, the teacher's; got {heads}")


def vocabulary(
    model: Path,
    /,
    *,
    data: Path,
    out: Path,
    size: Annotated[int | None, FROM_1] = None,
    text_column: str | None = None,
) -> Document:
    """Cut a model's vocabulary to what texts use: fewer rows of embeddings, the same outputs on those texts.

    shd-torch vocabulary student --data train.jsonl --out smaller

    Special pieces and single characters or bytes stay, so every text can still be encoded; words that the texts do
    not use fall into smaller pieces. The new folder has its own token ids: cut the teacher before you make caches, or
    the student after its training. See docs/shrink.md.

    Args:
        model: Folder of a Hugging Face model of text, with a tokenizer.json.
        data: Texts as the model will get them: .jsonl, .parquet or a data set's folder.
        out: A new folder for the model.
        size: Pieces to keep at most, the most frequent ones. Default: all that the texts use.
        text_column: The column that holds the text. Default: text.
    """
    require_packages("torch", "transformers", "tokenizers")
    check_files(model, "model")
    with named_inputs("data"):
        open_source(data)
    new_folder(out)
    from shd_torch.export import hide_weight_bars
    from shd_torch.shrink.vocabulary import cut_vocabulary

    hide_weight_bars()
    with show_progress("texts") as (on_text,):
        report = cut_vocabulary(
            model,
            data,
            out,
            size=size,
            text_column=text_column,
            progress=lambda done, total, what: on_text(done, total, says=what),
        )
    console.say(f"vocabulary: {report['old_size']:,} -> {report['size']:,}")
    console.say(f"parameters: {report['old_parameters']:,} -> {report['parameters']:,}")
    if report["changed_texts"]:
        print_remarks(
            f"{report['changed_texts']} of {report['texts']} texts get other pieces; raise --size to keep them"
        )
    console.say(f"{out}: the model with new token ids, and vocabulary.json")
    return report | {"path": out}


def _say_what_was_made(made: Shrunk, out: Path) -> None:
    from shd_torch.shrink.custom import read_kind

    report = made.report
    for number, (source, layer) in enumerate(zip(report["sources"], report["layers"], strict=True)):
        title = f"layer {number} of {len(report['layers'])} from {source}"
        console.say(f"{title}: {layer['case']}, error {layer['layer_error']:.3f}")
    before, after = (report[name] for name in ("teacher", "student"))
    for name in ("parameters", "layers", "heads", "kv_heads", "head_dim", "hidden", "neurons"):
        size = ", ".join(map(str, after[name])) if isinstance(after[name], list | tuple) else f"{after[name]:,}"
        console.say(f"{name}: {before[name]:,} -> {size}")
    if not all(layer["exact"] or layer["case"] == "dropped" for layer in report["layers"]):
        console.say("heads were approximated in some layers: see shrink.json")
    print_remarks(*report["remarks"])
    ridges = [ridge for layer in report["layers"] for ridge in layer.get("ridges", {}).values()]
    if None in ridges:
        print_remarks(f"{ridges.count(None)} of {len(ridges)} matrices stay in closed form; more --samples may help")
    console.say(f"{out}: the student, and shrink.json")
    if read_kind(made.student.config.to_dict()) is not None:
        console.say(f"it only loads with shd_torch.load_student({str(out)!r}): its layers are not stock")


def following_commands(
    teacher: Path,
    data: Path,
    out: Path,
    student: Any,
    inputs: dict[str, NDArray[Any]],
    *,
    has_equal_layers: bool = True,
    max_length: int | None = None,
) -> list[str]:
    """The commands that make this student's cache: with maps where its layers have equal heads."""
    import torch

    from shd_torch.capture.outputs import read_logits

    graph, file = f"{teacher.resolve().name}.onnx", data
    lines = [] if Path(graph).exists() else [["shd-torch", "export", str(teacher), "--out", graph]]
    if data.suffix not in KINDS:  # an array without a name, which the graph's inputs are found by
        file, (name,) = Path(f"{data.stem}.npz"), inputs
        mask = ", attention_mask=np.ones(a.shape, np.int64)" * (name == "input_ids")
        code = f"import numpy as np; a = np.load({str(data)!r}); np.savez({str(file)!r}, {name}=a{mask})"
        lines.append(["python", "-c", code])
    with torch.no_grad():
        example = next(student.parameters())
        rows = {name: torch.as_tensor(array[:2]).to(example.device) for name, array in inputs.items()}
        floats = {name: array.to(example.dtype) for name, array in rows.items() if array.is_floating_point()}
        logits = read_logits(student(**rows | floats))
    words = ["shd", "precompute", graph, "--inputs", str(file)]
    words += ["--tokenizer", str(teacher)] * (data.suffix == ".jsonl")
    words += [] if max_length is None else ["--max-length", str(max_length)]
    if logits is None and find_pooling(teacher) is not None:  # a squeezed start has most of what maps would teach it
        words += ["--embeddings", str(teacher), "--no-attention"]
    elif logits is None and not has_equal_layers:
        return []  # neither maps, logits nor embeddings
    else:
        words += ["--student", str(out)] if has_equal_layers else ["--no-attention"]
        words += [] if logits is None else ["--logits", "float16" if logits.ndim == 2 else "topk"]
    return [shlex.join(line) for line in (*lines, [*words, "--out", "cache"])]


def read_inputs(
    path: Path, samples: int, tokenizer: Path | None = None, argument: str = "data", *, max_length: int | None = None
) -> dict[str, NDArray[Any]]:
    """The first samples of each array but ``labels``, by the name of the model's input; nothing in the file is run.

    A .npy of integers holds ``input_ids`` ``(N, L)``, one of floating point ``pixel_values`` ``(N, C, H, W)``; the
    texts of a .jsonl are tokenised by the tokenizer's folder and padded on the right.
    """
    is_known = path.suffix in (".npy", ".npz", ".jsonl")
    need(is_known, "read-failed", argument, "end in .npy, .npz or .jsonl", path)
    need(path.exists(), "read-failed", argument, "exist", path)
    if path.suffix == ".jsonl":
        return _tokenise(path, samples, tokenizer, argument, max_length)
    need(max_length is None, "argument-value", "max_length", "go with texts", f"{max_length} with {path}")
    if path.suffix == ".npz":
        with named_inputs(argument):
            source = open_npz(path)
        columns = [name for name in source.columns if name != "labels"]
        rows = list(islice(source.rows(columns), samples))
        loaded = {name: np.stack([row[name] for row in rows]) for name in columns}
    else:
        try:
            mapped = np.lib.format.open_memmap(path, mode="r")
        except (OSError, ValueError, OverflowError) as error:
            raise ShdError("read-failed", f"{argument} must be a readable .npy; got {path}: {error}") from error
        name = "input_ids" if mapped.dtype.kind in "iu" else "pixel_values"
        loaded = {name: np.array(np.atleast_1d(mapped)[:samples])}
    # torch has few unsigned integers, and no model takes any; a mask of True and False is one of ones and zeros.
    arrays = {name: array.astype(np.int64) if array.dtype.kind in "iub" else array for name, array in loaded.items()}
    wrong = [name for name, array in arrays.items() if array.ndim < 2 or array.dtype.kind not in "if"]
    if wrong or not arrays:
        rule = f"{argument} must hold the model's inputs, numbers of shape (N, ...) with two axes or more"
        got = f"{wrong[0]!r} of {arrays[wrong[0]].dtype} {arrays[wrong[0]].shape}" if wrong else "nothing"
        raise ShdError("argument-shape", f"{rule}, and nothing else; got {got}")
    return arrays


def _tokenise(
    path: Path, samples: int, tokenizer: Path | None, argument: str, max_length: int | None
) -> dict[str, NDArray[Any]]:
    names = "input_ids", "attention_mask"
    with named_inputs(argument):
        columns = open_source(path).columns
        got = f"the columns {', '.join(columns)} of {path}"
        need("text" in columns, "inputs-invalid", argument, "have a column text", got)
        rule = "be .npz or .npy where no model's folder has a tokenizer.json"
        need(tokenizer is not None, "argument-value", argument, rule, path)
        rows = list(islice(open_source(path, tokenizer=tokenizer, max_length=max_length).rows(names), samples))
    arrays = {name: np.zeros((len(rows), max(len(row[name]) for row in rows)), np.int64) for name in names}
    for number, row in enumerate(rows):
        for name in names:
            arrays[name][number, : len(row[name])] = row[name]
    return arrays
