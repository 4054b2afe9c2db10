"""Read a teacher's untrusted ONNX file: data files, custom operators, old and new operator sets."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from shd_ref.errors import graph_invalid
from shd_ref.teacher.opening.bounds import (
    check_folded,
    check_functions,
    check_growth,
    check_nodes,
    check_sizes,
    check_wiring,
)
from shd_ref.teacher.opening.einsum import rewrite_einsum
from shd_ref.teacher.opening.model import (
    INLINE_BYTES,
    all_nodes,
    check_external_data,
    data_folder,
    load_external_data,
)
from shd_ref.teacher.opening.operators import CONTRIB_DOMAIN, STANDARD_DOMAINS
from shd_ref.teacher.packages import DecodeError, onnx

MIN_OPSET: Final = 13
"""The oldest operator set that can be squeezed; ``load_teacher`` converts older graphs where ONNX can."""

_TARGET_OPSET: Final = 18
_EARLY: Final = frozenset({"LayerNormalization"})
_ASIDE: Final = "squeezing_heads.aside"
_KNOWN_DOMAINS: Final = frozenset({*STANDARD_DOMAINS, "ai.onnx.ml", CONTRIB_DOMAIN})


def load_teacher(path: str | Path, *, inline_bytes: int = INLINE_BYTES) -> onnx.ModelProto:
    """Read an ONNX model from a file that is not trusted, with its external data, local functions inlined.

    Graphs of old operator sets are converted where ONNX can; others come as they are, to be inspected at least. The
    standard operator Attention is replaced by the operators that define it, so that its map exists; Einsum is
    replaced by MatMul where it is a product, so that its axes are known. External data must lie in the file's folder
    or below. Models larger than ``inline_bytes`` with their data leave large tensors in their files, which
    onnxruntime maps: nothing above 2 GB is ever serialised.

    Raises:
        ShdError: ``graph-invalid`` for a file that cannot be read or parsed, that refers to data outside its
            folder, whose shapes are absurd, or that needs operators from a custom library.
    """
    file = Path(path)
    try:
        model = onnx.load(file, load_external_data=False)
    except (OSError, ValueError) as error:  # the latter for a name with NUL
        remedy = "shd-torch export FOLDER --out teacher.onnx makes one of a Hugging Face model"
        raise graph_invalid(f"teacher graph {file} must be a readable file: {error}: {remedy}") from error
    except DecodeError as error:
        raise graph_invalid(
            f"teacher graph {file} is not a complete ONNX file ({error}): copy or export it again"
        ) from error
    if not model.graph.node or not model.opset_import:
        raise graph_invalid(f"teacher graph {file} holds no ONNX graph: copy or export it again")
    size = check_external_data(model, file)
    check_wiring(model.graph, file)
    check_sizes(model, file)
    if model.functions:
        check_functions(model, file)
        try:
            model = onnx.inliner.inline_local_functions(model)
        except Exception as error:  # the inliner raises what its C++ throws
            raise graph_invalid(
                f"teacher graph {file} has functions that call one another wrongly: {error}"
            ) from error
    foreign = {node.domain for node in all_nodes(model.graph)} - _KNOWN_DOMAINS
    if foreign:
        raise graph_invalid(
            f"teacher graph {file} needs operators of {', '.join(sorted(foreign))}, and custom operator "
            "libraries are never loaded: re-export the model with standard operators"
        )
    check_nodes(model.graph, opset_version(model), file)
    check_growth(model, file)
    check_folded(model, file)
    load_external_data(model, file, everything=size < inline_bytes)
    model = _decompose_attention(_modernise(model))
    return model if old_opset_reason(model) else rewrite_einsum(model)


def old_opset_reason(model: onnx.ModelProto) -> str | None:
    """Why a graph's operator set cannot be squeezed; None where it is new enough."""
    opset = opset_version(model)
    if opset >= MIN_OPSET:
        return None
    return (
        f"model must use ONNX operator set {MIN_OPSET} or later; got {opset}, which ONNX cannot convert with these "
        "operators: re-export it with opset 18"
    )


def opset_version(model: onnx.ModelProto) -> int:
    """The version of the standard operators that a graph uses."""
    return max((entry.version for entry in model.opset_import if entry.domain in STANDARD_DOMAINS), default=0)


def _decompose_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """The operator Attention by its own definition; a provider may fuse it without ever forming the map."""
    if not any(node.op_type == "Attention" and node.domain in STANDARD_DOMAINS for node in all_nodes(model.graph)):
        return model
    try:
        return onnx.inliner.inline_selected_functions(model, [("", "Attention")], inline_schema_functions=True)
    except Exception:  # as above; ``find_sites`` then reports the operator as it is
        return model


def _modernise(model: onnx.ModelProto) -> onnx.ModelProto:
    if opset_version(model) >= MIN_OPSET or data_folder(model) is not None:  # nor can it convert what it cannot see
        return model
    # onnxruntime knew LayerNormalization before ONNX did, under the same name and with the same meaning: such nodes
    # are put out of the converter's sight, which has no rule for an operator of the future.
    opset, old = opset_version(model), onnx.ModelProto()
    old.CopyFrom(model)
    for node in all_nodes(old.graph):
        is_early = node.domain in STANDARD_DOMAINS and node.op_type in _EARLY
        if is_early and not onnx.defs.has(node.op_type, max_inclusive_version=opset):
            node.domain = _ASIDE
    old.opset_import.add(domain=_ASIDE, version=1)
    try:
        new = onnx.version_converter.convert_version(old, _TARGET_OPSET)
    except Exception:  # the converter raises what its C++ throws
        # An operator has no conversion. ``find_sites`` and ``squeeze_graph`` refuse the old graph, with the remedy.
        return model
    for node in all_nodes(new.graph):
        if node.domain == _ASIDE:
            node.domain = ""
    kept = [entry for entry in new.opset_import if entry.domain != _ASIDE]
    del new.opset_import[:]
    new.opset_import.extend(kept)
    return new
