"""The packages of the extra ``teacher``, imported in one place: one that is missing is an error with the remedy."""

from shd_ref.errors import ShdError

try:
    import onnx
    import onnx.external_data_helper
    import onnx.inliner
    import onnx.reference
    import onnx.shape_inference
    import onnx.version_converter
    import onnx_ir as ir
    from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
except ImportError as error:
    raise ShdError(
        "dependency-missing",
        f"shd_ref.teacher needs the package {error.name}: pip install '.[teacher]' (in a checkout)",
    ) from error

__all__ = ["DecodeError", "Message", "ir", "onnx"]
