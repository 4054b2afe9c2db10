"""Export: a PyTorch model as an ONNX graph, checked in onnxruntime; a teacher's attention is spelled out.

The tools that squeeze a teacher read its graph: they need each ``Softmax``, the values it meets and the output
projection. So Hugging Face models are exported with "eager" attention, and opsets that would fuse attention into
one operator are not offered for teachers. A trained student goes out with that operator.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import io
import logging
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shd_ref.errors import ShdError, import_package, need
from shd_ref.tolerances import load_tolerances
from shd_torch.capture.outputs import read_every_hidden_state

TEACHER_OPSET = 18  # below it torch.onnx has to convert down; from 23 on attention is one operator
FUSED_OPSETS = (24, 20)  # of students: attention as one operator, and where that fails, spelled out
_EXTERNAL_DATA_BYTES = 1 << 30  # a protobuf file ends at 2 GiB
_FUNCTION_DOMAIN = "squeezing_heads"
_CAUSE_LENGTH = 200  # of another library's message, which may have pages
_STATES = "last_hidden_state"  # by which precompute finds them
_REMEDY = (
    "take a model whose attention is plain in its graph (no windows or chunks that depend on sizes, no state space), "
    "name fewer axes as dynamic, teach with the model itself where it can be captured (shd_torch.OnlineTeacher), or "
    "write the graph by your own torch.onnx.export"
)


@dataclass(frozen=True)
class ExportReport:
    """What ``export_teacher`` or ``export_student`` wrote and how far it is from the model.

    Attributes:
        path: the ONNX file.
        data_path: the file of weights next to it, or None where they are inside.
        inputs: names and shapes of the graph's inputs; a dynamic axis is given by its name.
        output: name of the graph's output.
        opset: the ONNX opset.
        num_softmax: how many ``Softmax`` nodes it has: of a teacher at least one per attention layer.
        num_fused: how many ``Attention`` nodes it has: of a student one per attention layer, or none. Each is
            called through a function of the model, so that ``onnxruntime.quantization.quantize_dynamic`` keeps it.
        max_difference: largest absolute difference of the output; None where onnxruntime is missing.
        tolerance: what was allowed: the published tolerance of the dtype times ``max(1, largest output)``.
    """

    path: Path
    data_path: Path | None
    inputs: dict[str, tuple[int | str, ...]]
    output: str
    opset: int
    num_softmax: int
    num_fused: int
    max_difference: float | None
    tolerance: float | None


def export_teacher(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    with_states: bool = False,
) -> ExportReport:
    """Write a PyTorch teacher as ONNX with its attention maps in the graph, and check it.

    The model is exported in eval mode, without a key-value cache, and is not changed. The file gets its final name
    only after the check.

    Args:
        model: any module that ``torch.export`` can trace; its first output becomes the graph's only one.
        example_inputs: tensors by the names of the forward arguments, or in their order. Any sizes work that the
            model accepts, also when one shorter along every dynamic axis but the batch.
        path: where to write the graph; weights of a large model lie next to it, in ``<path>.0123456789abcdef.data``,
            named by their hash. An earlier graph stays whole until this one takes its name.
        dynamic: names of the axes that may vary, by input and axis, such as
            ``{"input_ids": {0: "batch", 1: "sequence"}}``; axes of one name share one size. Default: the first
            axis of every input is ``batch``, the second of two-dimensional integer inputs ``sequence``, or
            ``decoder_sequence`` where the input's name begins with ``decoder_``.

    Returns:
        The report; ``max_difference`` is None if onnxruntime is not installed.

    Raises:
        ShdError: ``export-failed`` where the model cannot be exported or its graph differs from it,
            ``argument-value``, ``argument-shape``, ``dependency-missing`` (onnx and onnxscript), ``write-failed``.
    """
    return _export(model, example_inputs, path, dynamic, TEACHER_OPSET, "eager", with_states=with_states)


def export_student(
    model: nn.Module, example_inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor], path: str | os.PathLike[str]
) -> ExportReport:
    """Write a trained model as ONNX with one fused operator for each attention, and check it.

    If the exporter or onnxruntime cannot fuse, attention is written as basic operators: ``num_fused`` is then 0.

    Args:
        model: as in ``export_teacher``; a Hugging Face model is exported with "sdpa" attention.
        example_inputs: as in ``export_teacher``.
        path: as in ``export_teacher``.

    Raises:
        ShdError: as ``export_teacher``.
    """
    fused, plain = FUSED_OPSETS
    try:
        return _export(model, example_inputs, path, None, fused, "sdpa")
    except ShdError as error:
        if error.code != "export-failed":
            raise
    return _export(model, example_inputs, path, None, plain, "sdpa")


def _export(
    model: nn.Module,
    example_inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    path: str | os.PathLike[str],
    dynamic: Mapping[str, Mapping[int, str]] | None,
    opset: int,
    attention: str,
    *,
    with_states: bool = False,
) -> ExportReport:
    for package in ("onnx", "onnxscript"):
        import_package(package, f"{package} must be installed to export: pip install '.[torch]' (in a checkout)")
    target = Path(path)
    inputs = _name_inputs(model, example_inputs)
    axes = _read_axes(inputs, dynamic)
    with _ready_for_export(model, attention), torch.no_grad():
        # torch.export takes an axis of size 0 or 1 for a constant.
        inputs = _resized(inputs, axes, lambda size, _: max(size, 2))
        wrapper = _Positional(model, tuple(inputs), with_states=with_states)
        wrapper.eval()
        try:
            output_name = _first_output(model(**inputs))[0]
        except Exception as error:  # a model may raise anything
            raise refuse(model, f"run on the example inputs {_shapes(inputs)}", error) from error
        program = _trace(wrapper, inputs, axes, output_name, opset)
        samples = [inputs, _resized(inputs, axes, lambda size, axis: size + 1 if axis == "batch" else size - 1)]
        expected = [_run_model(wrapper, sample) for sample in samples]
    _strip_metadata(program)
    config: Any = getattr(model, "config", None)
    if isinstance(getattr(config, "pad_token_id", None), int):
        from shd_ref.teacher.options import PAD_KEY
        from shd_torch.shrink.folders import padding_of

        program.model.metadata_props[PAD_KEY] = str(padding_of(config))
    if attention != "eager":  # a teacher's graph is read, not deployed
        _join_heads(program.model)
        _compute_first(program.model)
        _part_norms(program.model)
    num_fused = _wrap_attention(program.model)
    from shd_ref.teacher.opening.model import saving_graph

    tensors = (*model.parameters(), *model.buffers())
    large = sum(tensor.numel() * tensor.element_size() for tensor in tensors) > _EXTERNAL_DATA_BYTES
    try:
        with saving_graph(program.model, target, large=large) as (draft, data_path):
            max_difference, tolerance = _compare(draft, samples, expected)
    except ShdError:
        raise
    except Exception as error:  # onnx's and onnxruntime's exceptions share no base class
        raise refuse(model, "run in onnxruntime at another batch and length", error) from error
    return ExportReport(
        path=target,
        data_path=data_path,
        inputs={
            name: tuple(axes[name].get(axis, size) for axis, size in enumerate(tensor.shape))
            for name, tensor in inputs.items()
        },
        output=output_name,
        opset=opset,
        num_softmax=sum(node.op_type == "Softmax" for node in program.model.graph.all_nodes()),
        num_fused=num_fused,
        max_difference=max_difference,
        tolerance=tolerance,
    )


def load_hf_model(model: str | os.PathLike[str]) -> nn.Module:
    """A Hugging Face model with the head it was saved with, in float32 and eval mode.

    Args:
        model: a folder, which is read without any network access, or a hub id. Weights are read from safetensors
            alone, no code that it names is run, and links out of the folder are refused.

    Raises:
        ShdError: ``dependency-missing`` (transformers), ``read-failed`` for a hub id that is not found, and for a
            folder that lacks a weight of the model, or whose files are elsewhere.
    """
    remedy = "pip install '.[hf]' (in a checkout)"
    import_package("transformers", f"transformers must be installed to load a Hugging Face model: {remedy}")
    from shd_torch.shrink.folders import find_folder, is_custom, load_model, model_class, read_config

    folder = find_folder(model, "model")
    config = read_config(folder, "model")
    # Some classes are built for one implementation, and the export could not choose this one for them later.
    options = {} if is_custom(config) else {"attn_implementation": "eager"}
    return load_model(folder, model_class(config), dtype=torch.float32, **options)  # type: ignore[no-any-return]


def hide_weight_bars() -> None:
    """Leave out the bars that transformers, if installed, draws while it loads and writes weights, from now on."""
    with suppress(ImportError):  # what needs transformers says so itself
        quiet: Any = importlib.import_module("transformers.utils.logging")
        quiet.disable_progress_bar()


def example_inputs(model: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Inputs that a Hugging Face text or image model can be exported with; the second text is padded.

    Args:
        model: from ``load_hf_model``.
        names: inputs of a text model; default: ids, mask, and what else the tokenizer in its folder gives.

    Returns:
        ``input_ids`` and ``attention_mask`` ``(2, 8)``, for BERT and its like also ``token_type_ids``;
        ``pixel_values`` ``(2, channels, height, width)``, or
        ``input_features`` ``(2, bins, frames)``; of an encoder-decoder also ``decoder_input_ids`` and
        ``decoder_attention_mask`` ``(2, 6)``, so that both run in one forward pass.

    Raises:
        ShdError: ``export-failed`` for another kind of model.
    """
    config: Any = getattr(model, "config", None)
    main_input = getattr(model, "main_input_name", None)
    second: dict[str, Tensor] = {}
    if getattr(config, "is_encoder_decoder", False) is True:
        decoder_ids = torch.ones(2, 6, dtype=torch.int64)
        second = {"decoder_input_ids": decoder_ids, "decoder_attention_mask": torch.ones_like(decoder_ids)}
    if main_input == "input_ids":
        from shd_torch.shrink.folders import padding_of, text_inputs

        takes = inspect.signature(model.forward).parameters
        pad, mask = padding_of(config), torch.ones(2, 8, dtype=torch.int64)
        mask[1, 6:] = 0
        ids = torch.where(mask == 1, 2 if pad == 1 else 1, pad)
        folder = getattr(model, "name_or_path", None) or os.devnull  # in which no file is
        named = text_inputs(folder) if names is None else names
        inputs = {name: torch.zeros_like(ids) for name in named if name in takes}
        return inputs | {"input_ids": ids} | ({"attention_mask": mask} if "attention_mask" in inputs else {}) | second
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if main_input == "input_features" and second and bins and frames:
        # Whisper halves the frames before its encoder, and takes no fewer than it has positions for.
        return {"input_features": torch.zeros(2, bins, 2 * frames)} | second
    size = getattr(config, "image_size", None)
    if main_input == "pixel_values" and size is not None:
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.zeros(2, getattr(config, "num_channels", 3), height, width)} | second
    got = f"{type(model).__name__} with main input {main_input!r}"
    remedy = "call shd_torch.export_teacher with your own example inputs"
    raise ShdError("export-failed", f"model must be a Hugging Face text or image model; got {got}: {remedy}")


def refuse(
    model: nn.Module, stage: str, error: BaseException, remedy: str = _REMEDY, code: str = "export-failed"
) -> ShdError:
    """One sentence about an error of another library, by the first line of its first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    cause = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if "no padding token is defined" in cause:  # of heads that read the last token of each text
        stage = "know the token that pads texts"
        remedy = (
            "set pad_token_id in its config.json to the id of the tokenizer's pad_token, or to one that no text has"
        )
    # onnxruntime says where it failed among its own files and codes: what the user can know is the operator or input.
    if failed := re.search(r"while running (\w+) node|[Ii]nvalid dimensions for input: (\w+)", str(error)):
        operator, name = failed.groups()
        subject = f"an operator {operator}" if operator else f"the input {name}"
        cause = f"{subject} that keeps sizes of the example inputs"
    cause = cause if len(cause) <= _CAUSE_LENGTH else f"{cause[:_CAUSE_LENGTH]}..."
    return ShdError(code, f"{type(model).__name__} must {stage}; got {cause.rstrip('.:')}: {remedy}")


class _Positional(nn.Module):
    """The model behind positional arguments: ``**kwargs`` cannot be exported with dynamic axes."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], *, with_states: bool) -> None:
        super().__init__()
        self.model = model
        self.names = names
        self.keywords = {"output_hidden_states": True} if with_states else {}

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        output = self.model(**dict(zip(self.names, inputs, strict=True)), **self.keywords)
        states = read_every_hidden_state(output, type(self.model).__name__)[-1:] if self.keywords else ()
        return _first_output(output)[1], *states


def _first_output(output: Any) -> tuple[str, Tensor]:
    """The first tensor of a model's output, and the model's name for it, or else ``output``."""
    name = "output"
    while not isinstance(output, Tensor):
        if isinstance(output, Mapping):
            name, output = next(iter(output.items()))
        else:
            output = output[0]
    return name, output


def _name_inputs(
    model: nn.Module, example_inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The example inputs by the names of the forward's arguments, on the model's device."""
    if not isinstance(example_inputs, Mapping):
        tensors = [example_inputs] if isinstance(example_inputs, Tensor) else list(example_inputs)
        names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind <= p.KEYWORD_ONLY]
        rule = f"be at most the forward's {len(names)} arguments"
        need(len(tensors) <= len(names), "argument-shape", "example_inputs", rule, len(tensors))
        example_inputs = dict(zip(names, tensors, strict=False))
    if not example_inputs or not all(isinstance(t, Tensor) and t.ndim for t in example_inputs.values()):
        raise ShdError("argument-shape", "example_inputs must be at least one tensor, each with a batch axis")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return {name: tensor.to(device) for name, tensor in example_inputs.items()}


def _read_axes(
    inputs: Mapping[str, Tensor], dynamic: Mapping[str, Mapping[int, str]] | None
) -> dict[str, dict[int, str]]:
    if dynamic is None:
        named: dict[str, dict[int, str]] = {name: {0: "batch"} for name in inputs}
        for name, tensor in inputs.items():
            if tensor.ndim == 2 and not tensor.is_floating_point():
                # An encoder-decoder's two sequences need not be of one length.
                named[name][1] = "decoder_sequence" if name.startswith("decoder_") else "sequence"
        return named
    for name, named_axes in dynamic.items():
        is_there = name in inputs and all(0 <= axis < inputs[name].ndim for axis in named_axes)
        rule, got = f"name axes of {_shapes(inputs)}", f"{name!r}: {dict(named_axes)}"
        need(is_there, "argument-value", "dynamic", rule, got)
    return {name: dict(dynamic.get(name, {})) for name in inputs}


def _shapes(inputs: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in inputs.items()}


def _resized(
    inputs: Mapping[str, Tensor], axes: Mapping[str, Mapping[int, str]], resize: Callable[[int, str], int]
) -> dict[str, Tensor]:
    """The inputs with every dynamic axis cut or repeated to ``resize(size, axis name)``."""
    resized = {}
    for name, example in inputs.items():
        tensor = example
        for axis, axis_name in axes[name].items():
            size = max(1, resize(tensor.shape[axis], axis_name))
            index = torch.arange(size, device=tensor.device) % tensor.shape[axis]
            tensor = tensor.index_select(axis, index)
        resized[name] = tensor
    return resized


@contextmanager
def _ready_for_export(model: nn.Module, attention: str) -> Iterator[None]:
    """Eval mode, this attention, experts without loops, no cache; afterwards all as before, also after an error."""
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        # Hugging Face models are known by what they can do, so that transformers need not be installed.
        modules: list[Any] = [holder for holder in model.modules() if hasattr(holder, "set_attn_implementation")]
        configs = list({id(holder.config): holder.config for holder in modules}.values())
        for config in reversed(configs):  # undone in reverse: an outer configuration writes through to inner ones
            stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            if getattr(config, "_experts_implementation", None) is not None:
                stack.callback(setattr, config, "_experts_implementation", config._experts_implementation)
            if hasattr(config, "use_cache"):
                stack.callback(setattr, config, "use_cache", config.use_cache)
                config.use_cache = False
        for holder in modules:
            holder.set_attn_implementation(attention)
            # The others loop over the experts that were chosen, or need operators that ONNX lacks.
            if getattr(holder.config, "_experts_implementation", None) is not None:
                holder.set_experts_implementation("batched_mm")
        yield


def _trace(
    wrapper: _Positional,
    inputs: Mapping[str, Tensor],
    axes: Mapping[str, Mapping[int, str]],
    output_name: str,
    opset: int,
) -> Any:
    """The ``torch.onnx.ONNXProgram`` of the model, without the exporter's chatter."""
    dims = {name: torch.export.Dim(name) for name in {n for named in axes.values() for n in named.values()}}
    shapes = tuple({axis: dims[n] for axis, n in axes[name].items()} for name in inputs)
    disabled, collects = logging.root.manager.disable, gc.isenabled()
    try:
        logging.disable(logging.WARNING)  # of optional packages; a trace that fails also prints its graph
        gc.disable()  # millions of objects live until the trace ends: every look through them is for nothing
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            # Third-party code: torch's own deprecations, and a name shared by axes on purpose.
            warnings.filterwarnings("ignore", message=r".*LeafSpec.* is deprecated", category=FutureWarning)
            warnings.filterwarnings("ignore", message=r".*axis name: .* will not be used", category=UserWarning)
            return torch.onnx.export(
                wrapper,
                tuple(inputs.values()),
                input_names=list(inputs),
                output_names=[output_name, *([_STATES] if wrapper.keywords else [])],
                dynamic_shapes={"inputs": shapes},
                opset_version=opset,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the exporter passes on any error of its parts
        stage = "be traced by torch.export" if type(error).__name__ == "TorchExportError" else "be converted to ONNX"
        raise refuse(wrapper.model, stage, error) from error
    finally:
        logging.disable(disabled)
        if collects:
            gc.enable()


def _run_model(wrapper: _Positional, sample: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    try:
        outputs: tuple[Tensor, ...] = wrapper(*sample.values())
    except Exception as error:
        raise refuse(wrapper.model, f"accept every size of its dynamic axes, as {_shapes(sample)}", error) from error
    return outputs


def _strip_metadata(program: Any) -> None:
    """Drop the exporter's notes on every node: stack traces with paths of this machine, half of a small file.

    Also the declared shapes of weights, which the weights state themselves: ``quantize_dynamic`` transposes those of
    a ``Gemm`` and leaves what was declared.
    """
    for value in program.model.graph.initializers.values():
        value.shape, value.type = None, None
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()


def _join_heads(model: Any) -> None:
    """Let each attention take and give ``(batch, length, channels)``, as products do, where nothing is in between.

    The operator parts the heads itself: four transposes of all states go, a twentieth of the time of an encoder in
    int8. The numbers are the same.
    """
    import onnx_ir as ir

    def swap_before(value: Any) -> Any:
        """The node that swaps heads and positions to give the value."""
        node: Any = None if value is None else value.producer()
        is_one = node is not None and node.op_type == "Transpose"
        return node if is_one and list(node.attributes["perm"].as_ints()) == [0, 2, 1, 3] else None

    for node in list(model.graph):
        users = list(node.outputs[0].uses()) if node.op_type == "Attention" else []
        if len(users) != 1 or (after := swap_before(users[0].node.outputs[0])) is None:
            continue
        parts = [part for value in node.inputs[:3] if (part := swap_before(value)) is not None]
        splits = [split for part in parts if (split := part.inputs[0].producer()) and split.op_type == "Reshape"]
        heads = [part.outputs[0].shape[1] for part in parts]
        are_joined = all(isinstance(count, int) for count in heads) and all(
            split.inputs[0].shape is not None and len(split.inputs[0].shape) == 3 for split in splits
        )
        if len(splits) < 3 or not are_joined:
            continue
        for index, split in enumerate(splits):
            node.replace_input_with(index, split.inputs[0])
        node.attributes.add(ir.AttrInt64("q_num_heads", heads[0]))
        node.attributes.add(ir.AttrInt64("kv_num_heads", heads[1]))
        shape = after.outputs[0].shape
        node.outputs[0].shape = None  # which was by heads
        ir.convenience.replace_all_uses_with(after.outputs[0], node.outputs[0])
        model.graph.remove(after, safe=True)
        for use in list(node.outputs[0].uses()):  # joins what is joined now
            joined = use.node.outputs[0]
            has_shapes = use.node.op_type == "Reshape" and shape is not None and joined.shape is not None
            if has_shapes and len(joined.shape) == 3 and list(joined.shape)[:2] == list(shape)[:2]:
                node.outputs[0].shape = joined.shape
                ir.convenience.replace_all_uses_with(joined, node.outputs[0])
                model.graph.remove(use.node, safe=True)
        for unused in (*parts, *splits):
            if unused.graph is not None and not any(output.uses() for output in unused.outputs):
                model.graph.remove(unused, safe=True)


_FIRST = "first/"  # of names of what reads the first position
# Operators that compute each position from the same position of their inputs.
_BY_POSITION = ("Add", "Sub", "Mul", "Div", "Erf", "Gelu", "Tanh", "Relu", "Sigmoid", "LayerNormalization", "MatMul")


def _compute_first(model: Any) -> None:
    """Compute the first position alone of what follows the last keys and values, where the head reads no other.

    So do most encoders with a head: a sixth of the work goes where there are six layers. The numbers are the same.
    """
    import onnx_ir as ir

    graph, alone, slices = model.graph, {}, {}  # nodes that compute one position, and what they read of others

    def is_constant(value: Any, *ranks: int) -> bool:
        array = None if value.const_value is None or value.is_graph_input() else value.const_value.numpy()
        return array is not None and array.ndim in ranks

    def is_computed(value: Any, rank: int = 3) -> bool:
        return value.producer() is not None and value.shape is not None and len(value.shape) == rank

    def is_head(node: Any) -> bool:
        is_gather = node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 1
        is_first = is_gather and is_constant(node.inputs[1], 0) and node.inputs[1].const_value.numpy() == 0
        return is_first and is_computed(node.inputs[0])

    def reads_first(use: Any) -> bool:
        is_query = use.node.op_type != "Attention" or use.idx == 0
        return is_head(use.node) or (use.node in alone and is_query)

    def computes_by_position(node: Any) -> bool:
        if node.op_type == "MatMul":
            return is_computed(node.inputs[0]) and is_constant(node.inputs[1], 2)
        if node.op_type == "Attention":  # the mask is (batch, heads, queries, keys)
            is_joined = "q_num_heads" in node.attributes and not node.attributes.get_int("is_causal", 0)
            mask = node.inputs[3] if len(node.inputs) == 4 else None
            return is_joined and len(node.inputs) <= 4 and (mask is None or is_computed(mask, 4))
        return node.op_type in _BY_POSITION and all(is_constant(v, 0, 1) or is_computed(v) for v in node.inputs)

    def first_of(value: Any, axis: int) -> Any:
        if value not in slices:
            ends = [ir.Value(name=f"{_FIRST}{axis}/{end}", const_value=ir.tensor([end])) for end in (0, 1, axis)]
            operands = [graph.initializers.setdefault(end.name, end) for end in ends]
            node = ir.Node("", "Slice", [value, *operands], name=f"{_FIRST}{value.name}")
            slices[value] = node.outputs[0]
            slices[value].name = node.name
            graph.insert_after(value.producer(), node)
        return slices[value]

    for node in reversed(list(graph)):
        uses = [] if node.outputs[0].is_graph_output() else list(node.outputs[0].uses())
        if uses and len(node.outputs) == 1 and all(map(reads_first, uses)) and computes_by_position(node):
            alone[node] = [0, 3] if node.op_type == "Attention" else range(len(node.inputs))
    for node, indices in alone.items():
        for index in indices:
            value = node.inputs[index] if index < len(node.inputs) else None
            if value is not None and value.producer() not in (None, *alone):
                node.replace_input_with(index, first_of(value, 2 if index == 3 else 1))
    for node in alone:
        node.outputs[0].shape = None


def computes_first(graph: Path) -> bool:
    """Whether the last layer of a graph that was exported here computes the first position alone."""
    import onnx

    nodes = onnx.load(graph, load_external_data=False).graph.node
    return any(node.name.startswith(_FIRST) for node in nodes)


def _wrap_attention(model: Any) -> int:
    """Move each fused attention into a function of the model, which onnxruntime inlines; returns how many there are.

    ``quantize_dynamic`` selects operators by name, not by domain: it would turn the standard ``Attention`` into the
    quantized form of com.microsoft's operator of that name, which does not load. It leaves functions alone.
    """
    import onnx_ir as ir

    nodes = [node for node in model.graph.all_nodes() if node.op_type == "Attention"]
    for number, node in enumerate(nodes):
        inputs = [None if value is None else ir.Value(name=f"input_{i}") for i, value in enumerate(node.inputs)]
        inner = ir.Node("", "Attention", inputs, node.attributes.values(), num_outputs=len(node.outputs))
        for i, output in enumerate(inner.outputs):
            output.name = f"output_{i}"
        passed, opset = [value for value in inputs if value is not None], {"": model.opset_imports[""]}
        graph = ir.Graph(passed, inner.outputs, nodes=[inner], opset_imports=opset)
        function = ir.Function(_FUNCTION_DOMAIN, f"FusedAttention_{number}", graph=graph, attributes=())
        model.functions[function.identifier()] = function
        model.opset_imports[_FUNCTION_DOMAIN] = 1
        operands = [value for value in node.inputs if value is not None]
        call = ir.Node(_FUNCTION_DOMAIN, function.name, operands, num_outputs=len(node.outputs), name=node.name)
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], [call], node.outputs, call.outputs)
    return len(nodes)


def _part_norms(model: Any) -> None:
    """Write the addition before each norm as ``Sum``, so that onnxruntime computes the two one after the other.

    It would fuse ``Add`` and the norm into its own operator, which takes several times as long as both: a third
    of the time of an encoder in int8. The numbers are the same.
    """
    norms = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
    for node in model.graph.all_nodes():
        value = node.inputs[0] if node.op_type in norms else None
        if value is not None and (before := value.producer()) is not None and before.op_type == "Add":
            before.op_type = "Sum"


def _compare(
    path: Path, samples: Sequence[Mapping[str, Tensor]], expected: Sequence[tuple[Tensor, ...]]
) -> tuple[float | None, float | None]:
    """Run the graph on every sample; the largest difference and what was allowed, or None without onnxruntime."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None, None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised, and said in one sentence
    allowed = load_tolerances()["graph"]["probs"]
    relative = float(allowed.get(str(expected[0][0].dtype).removeprefix("torch."), allowed["float32"]))
    largest, tolerance = 0.0, relative
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    pairs = []
    for sample, outputs in zip(samples, expected, strict=True):
        results = session.run(None, {name: tensor.cpu().numpy() for name, tensor in sample.items()})
        pairs += [(sample, *pair) for pair in zip(results, outputs, strict=True)]
    for sample, result, output in pairs:
        reference = output.cpu().double()
        difference = float((torch.from_numpy(result).double() - reference).abs().max())
        bound = relative * max(1.0, float(reference.abs().max()))
        rule, got = f"give the model's output within {bound:.3g}", f"{difference:.3g} at {_shapes(sample)}"
        remedy = "something in the model depends on the sizes it was exported with"
        need(difference <= bound, "export-failed", "the graph", rule, f"a difference of {got}", remedy=remedy)
        largest, tolerance = max(largest, difference), max(tolerance, bound)
    return largest, tolerance
