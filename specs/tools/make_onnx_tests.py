"""Write ``specs/onnx``: the generated squeeze functions as ONNX backend tests, for any ONNX backend.

    python specs/tools/make_onnx_tests.py [folder]

The models are ours; what they must answer is not. Inputs and outputs are the vectors of ``squeeze_heads``, which the
oracle in exact arithmetic wrote (``make_vectors.py``). The same vectors give the same bytes.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SPECS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SPECS.parent), str(SPECS / "tools")]  # run from a checkout, the package need not be installed

from onnx import GraphProto, ModelProto, numpy_helper  # noqa: E402
from onnx_functions import GraphCall, make_call  # noqa: E402

from shd_ref.conformance.vectors import Case, decode_expected, read_cases  # noqa: E402
from shd_ref.teacher.opening.load import MIN_OPSET  # noqa: E402

VECTORS = SPECS / "vectors" / "v1" / "squeeze_heads.json"
FOLDER = SPECS / "onnx"


def main(folder: Path = FOLDER) -> None:
    """Write every test below ``folder``, in place of what was there."""
    node = folder / "node"
    if node.exists():
        shutil.rmtree(node)
    tests = list(make_tests())
    for name, model, inputs, outputs in tests:
        data = node / name / "test_data_set_0"
        data.mkdir(parents=True)
        (node / name / "model.onnx").write_bytes(model.SerializeToString(deterministic=True))
        for kind, arrays in (("input", inputs), ("output", outputs)):
            for number, (tensor_name, array) in enumerate(arrays.items()):
                tensor = numpy_helper.from_array(array, tensor_name)
                (data / f"{kind}_{number}.pb").write_bytes(tensor.SerializeToString(deterministic=True))
    size = sum(path.stat().st_size for path in node.rglob("*") if path.is_file())
    print(f"{len(tests)} tests, {size / 1024:.0f} KiB, in {node}")


def make_tests() -> Iterator[tuple[str, ModelProto, dict[str, NDArray[Any]], dict[str, NDArray[Any]]]]:
    """Name, model, inputs and outputs of each test, in the order of the vectors."""
    for case in read_cases(VECTORS):
        call = _call_of(case)
        if call is None:
            continue
        # The oldest operator set that the functions can be written in is the one that most backends know.
        model = call.build_model(opset=MIN_OPSET)
        expected = _expected(case)
        _keep_outputs(model.graph, expected)
        outputs = {output.name: expected[output.name] for output in model.graph.output}
        yield f"test_{case.id.replace('/', '_').replace('-', '_')}", model, call.feeds, outputs


def _call_of(case: Case) -> GraphCall | None:
    """The case as a graph, where its outputs are known in full, well-conditioned, and within the functions' reach."""
    partial = any(isinstance(item, dict) and "at" in item for item in _flatten(case.expected.values()))
    if case.codes or "float32" not in case.dtypes or partial:
        return None
    if "near-degenerate" in case.flags:  # alphas that are as good may differ
        return None
    try:
        return make_call(**case.make_inputs("float32"))
    except NotImplementedError:
        return None


def _expected(case: Case) -> dict[str, NDArray[Any]]:
    """The outputs that the case compares, by the model's names for them, in its dtypes."""
    values = {name: decode_expected(value) for name, value in case.expected.items()}
    values.update((f"alphas_{number}", alphas) for number, alphas in enumerate(values.pop("alphas", ())))
    values.pop("plan", None)  # the plan is the model itself
    return {
        name: np.asarray(value, dtype=np.int64 if name in ("num_clipped", "num_degenerate") else np.float32)
        for name, value in values.items()
    }


def _keep_outputs(graph: GraphProto, names: Collection[str]) -> None:
    """Drop the other outputs, and the nodes that nothing else needs."""
    outputs = [output for output in graph.output if output.name in names]
    needed, nodes = {output.name for output in outputs}, []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(node.input)
            nodes.append(node)
    del graph.output[:], graph.node[:]
    graph.output.extend(outputs)
    graph.node.extend(reversed(nodes))


def _flatten(values: Any) -> Iterator[Any]:
    for value in values:
        yield from _flatten(value) if isinstance(value, list) else [value]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
