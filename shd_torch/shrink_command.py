"""``shd-torch shrink``: a student's folder from a teacher's; PyTorch is imported when it runs."""

from __future__ import annotations

import shlex
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.commands.program import Document, option_of, require_packages
from shd_ref.commands.terminal import console, print_remarks, show_progress
from shd_ref.errors import ShdError, need
from shd_ref.shrink.student import read_counts
from shd_ref.teacher.options import FROM_1
from shd_ref.teacher.sentence_folder import find_pooling
from shd_ref.teacher.sources import KINDS, named_inputs, open_source
from shd_torch.compress.samples import PAIR_COLUMN, TEXTS, Columns, open_rows, pad
from shd_torch.shrink.folders import check_files, forward_inputs, model_class, new_folder, read_config
from shd_torch.shrink.options import ShrinkOptions

if TYPE_CHECKING:
    from shd_torch.shrink import Shrunk

SIZES: Final = ["heads", "layers", "hidden", "neurons", "kv_heads", "head_dim", "drop_attention", "drop_activations"]
"""Options of which a student needs one."""


def shrink(
    teacher: Path,
    /,
    *,
    data: Path,
    out: Path,
    options: ShrinkOptions | None = None,
    samples: Annotated[int, FROM_1] = 64,
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
        data: Calibration data: arrays of the model's inputs by name or texts (a column text), in any file that shd
            precompute reads; .npy of token ids or pixels too.
        out: A new folder for the student.
        samples: Number of samples to use, from the start of the data.
        max_length: Tokens to keep of a text. Default: as the tokenizer's folder says.
    """
    require_packages("torch", "transformers")
    options = options or ShrinkOptions()
    is_any = any(getattr(options, name) not in (None, ()) for name in SIZES)
    rule = f"one of {', '.join(map(option_of, SIZES))}"
    need(is_any, "argument-value", rule, "be given", "none, which reproduces the teacher")
    check_files(teacher, "teacher")
    most, _ = read_counts(teacher)  # where the configuration says it under one of the usual names
    if options.heads is not None and most is not None and np.max(options.heads) > most:
        raise ShdError("heads-exceed", f"heads must lie in 1..{most}, the teacher's; got {options.heads}")
    new_folder(out)
    inputs = read_inputs(data, samples, teacher, max_length=max_length, as_model=True)
    from shd_torch.export import hide_weight_bars
    from shd_torch.shrink import shrink as run

    hide_weight_bars()
    with show_progress("steps") as (on_step,):
        shrunk = run(
            str(teacher), inputs, options, out=out, progress=lambda done, total, what: on_step(done, total, says=what)
        )
    _say_what_was_made(shrunk, out)
    has_stack = "stack" in shrunk.report  # of which shrink.json cannot say the attention calls
    is_equal = isinstance(shrunk.report["student"]["heads"], int)
    following = []
    if not has_stack:
        settings: dict[str, Any] = {"has_equal_layers": is_equal, "max_length": max_length}
        following = following_commands(teacher, data, out, shrunk.student, inputs, **settings)
    for command in following:
        console.say(f"next: {command}")
    return shrunk.report | {"path": out, "next": following}


def _say_what_was_made(shrunk: Shrunk, out: Path) -> None:
    from shd_torch.shrink.sizes import read_kind

    report = shrunk.report
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
    if read_kind(shrunk.student.config.to_dict()) is not None:
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
    has_pairs = logits is not None and logits.ndim == 2 and data.suffix in KINDS
    words += ["--pair-column", PAIR_COLUMN] * (has_pairs and PAIR_COLUMN in open_source(data).columns)
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
    path: Path,
    samples: int,
    tokenizer: Path | None = None,
    argument: str = "data",
    *,
    max_length: int | None = None,
    as_model: bool = False,
) -> dict[str, NDArray[Any]]:
    """The first samples of each array but ``labels``, by the name of the model's input; nothing in the file is run.

    A .npy of integers holds ``input_ids`` ``(N, L)``, one of floating point ``pixel_values`` ``(N, C, H, W)``; texts
    are tokenised by the tokenizer's folder and padded on the right: ``as_model``, with all inputs of the model there,
    which has a head for classes or scores where pairs are read as pairs.
    """
    with named_inputs(argument):
        has_texts = path.suffix != ".npy" and "text" in open_source(path).columns
    rule = "be .npz or .npy where no model's folder has a tokenizer.json"
    need(tokenizer is not None or not has_texts, "argument-value", argument, rule, path)
    takes, columns = [], TEXTS
    if as_model and has_texts and tokenizer is not None:
        config = read_config(tokenizer, "model")
        takes, columns = forward_inputs(config), Columns(reads_pairs="Classification" in model_class(config).__name__)
    with named_inputs(argument):
        (source,), names = open_rows(path, tokenizer or Path(), max_length, argument, takes, columns)
        rows = [{name: np.asarray(row[name]) for name in names} for row in islice(source.rows(names), samples)]
    # torch has few unsigned integers, and no model takes any; a mask of True and False is one of ones and zeros.
    return {name: part.astype(np.int64) if part.dtype.kind in "iub" else part for name, part in pad(rows).items()}
