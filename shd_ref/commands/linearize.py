"""``shd linearize``: a teacher's graph without some of its activations, each such FFN as one matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from shd_ref.commands.derive import Document
from shd_ref.commands.options import TeacherPath
from shd_ref.commands.parse import read_list
from shd_ref.commands.terminal import console
from shd_ref.teacher.run.options import Shown


def linearize(
    teacher: TeacherPath,
    drop_activations: Annotated[
        str, Shown("Layers whose FFN loses its activation, numbered by attention site as in shd inspect: 3,4.")
    ],
    out: Annotated[Path, Shown("The graph to write, such as smaller.onnx.")],
) -> Document:
    """Drop activations of feed-forward layers, and merge the two matrices around each into one.

    shd linearize teacher.onnx --drop-activations 3,4 --out smaller.onnx

    The new graph equals the teacher with these activations replaced by the identity, and is smaller and faster. Gated
    feed-forward layers are rejected: without their activation they are not linear. See specs/shrink.md.
    """
    from shd_ref.teacher.opening.load import load_teacher
    from shd_ref.teacher.rewrite.linearize import linearize_graph, save_graph

    layers = read_list("--drop-activations", drop_activations, kind=int, least=0)
    made = linearize_graph(load_teacher(teacher), layers)
    save_graph(made.model, out, teacher)
    for layer, (reads, neurons, gives) in made.sizes.items():
        console.say(f"layer {layer}: {reads} -> {neurons} -> {gives} became {reads} -> {gives}")
    console.say(f"{out}: check its loss before you use it; it usually needs a short fine-tune")
    return {"path": out, "layers": made.sizes}
