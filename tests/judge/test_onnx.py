"""The generated ONNX functions: what they lack, as backend tests for any backend, and mistakes in them are caught.

That they conform, but for what they lack, is judged in test_implementations.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed (extra 'teacher')")
pytest.importorskip("onnx_ir", reason="the package onnx_ir is not installed (extra 'teacher')")

from support.onnx_functions import OnnxAdapter  # noqa: E402  (after the skips)

from shd_ref.conformance import judge, judging  # noqa: E402  (after the skips)
from shd_ref.conformance.specification import agreement  # noqa: E402
from shd_ref.teacher.rewrite import function  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TESTS = sorted((ROOT / "specs" / "onnx" / "node").glob("test_*"))
OPERATIONS = ("squeeze_heads/core", "solve_alpha/core")


@pytest.fixture(params=["onnxruntime", "onnx.reference"])
def backend(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
    return name


# --- mistakes ---------------------------------------------------------------------------------------------------


def swapped(body: Any, *rest: Any) -> Any:
    """1 - alpha for p."""
    return FACTORS(body, *rest[:-1], body.op("Sub", body.const(1.0), rest[-1]))


def other_half(body: Any, *rest: Any) -> Any:
    """<w, u + w> in place of <u, u + w>, as numerator."""
    exchange = np.array([[-1, 0, 0], [1, 1, 0], [0, 0, 1]], np.float32)
    return body.op("MatMul", MOMENTS(body, *rest), body.const(exchange))


FACTORS, MOMENTS = function.factors_of_round, function._moments
MISTAKES = {"factors_of_round": swapped, "degenerate_threshold": lambda: 0.01, "_moments": other_half}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_function_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, name, MISTAKES[name])
    monkeypatch.setattr(judging, "KEPT_FINDINGS", 1)
    report = judge(OnnxAdapter("onnx.reference"), dtype="float32", only=OPERATIONS)
    failed = {result.operation for result in report.failures}
    # solve_alpha reads the alphas themselves, which a wrong use of them leaves right.
    assert failed >= ({"squeeze_heads"} if name == "factors_of_round" else {"squeeze_heads", "solve_alpha"})


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_value_outputs_that_cancel_leave_no_nan(size: float, backend: str) -> None:
    rng = np.random.default_rng(0)
    maps = rng.random((1000, 3, 5), dtype=np.float32)
    maps /= maps.sum(-1, keepdims=True)
    outputs = (size * rng.standard_normal((1000, 5, 4))).astype(np.float32)
    inputs = {
        "probs_p": maps,
        "probs_q": maps,
        "value_outputs_p": outputs,
        # Within a few roundings of the opposite, so that sums of their products have either sign (GRAM-7).
        "value_outputs_q": (-outputs * (1 + 2.0 ** rng.integers(-24, -18, (1000, 1, 1)))).astype(np.float32),
    }
    alpha = OnnxAdapter(backend).run_operation("solve_alpha", inputs, "float32")
    alpha = alpha["alpha"] if isinstance(alpha, dict) else alpha
    np.testing.assert_array_equal(alpha, 0.5)


# --- the backend tests ------------------------------------------------------------------------------------------


def load_tensors(test: Path, kind: str) -> dict[str, NDArray[Any]]:
    """Only what ONNX itself brings: another project's loader does the same."""
    files = sorted(test.glob(f"test_data_set_0/{kind}_*.pb"), key=lambda path: int(path.stem.split("_")[1]))
    tensors = [onnx.load_tensor(path) for path in files]
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.name)
def test_backends_pass_the_generated_tests(test: Path, backend: str) -> None:
    model = onnx.load(test / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    inputs, expected = load_tensors(test, "input"), load_tensors(test, "output")
    assert [value.name for value in model.graph.input] == list(inputs)
    assert [value.name for value in model.graph.output] == list(expected)
    if backend == "onnxruntime":
        import onnxruntime

        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    else:
        from onnx.reference import ReferenceEvaluator

        session = ReferenceEvaluator(model)
    for (name, wanted), got in zip(expected.items(), session.run(None, inputs), strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), name
        if wanted.dtype == np.int64:
            assert got == wanted, name
            continue
        atol, rtol = agreement("float32", "alpha" if name == "mixing" or name.startswith("alphas_") else name)
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol, err_msg=name)
        # The tolerances of ONNX's own runner, which knows nothing of ours.
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-7, err_msg=name)
