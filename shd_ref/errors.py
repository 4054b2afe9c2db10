"""Errors (spec chapter ERR): one exception class, a closed list of codes. A code never changes."""

from __future__ import annotations

import importlib
import re
from functools import partial
from typing import Any, Final

ERROR_CODES: Final[dict[str, str]] = {
    # The meaning (every implementation raises these; ERR-2).
    "argument-value": "an option that is not in its list, or a number outside its range",
    "argument-shape": "arrays whose shapes do not fit together",
    "argument-dtype": "a mask that is not boolean, or an array that does not hold real numbers",
    "not-finite": "NaN or infinity where a finite number is needed",
    "not-a-distribution": "a negative probability, or a counted row that does not sum to one",
    "heads-exceed": "more student heads than teacher heads",
    "plan-invalid": "a merge plan that does not lead from the teacher's heads to the student's",
    "layers-invalid": "a layer map that does not fit the two models",
    "mixing-invalid": "mixing weights with a negative entry or that do not sum to one, or an alpha outside [0, 1]",
    "support-mismatch": "the teacher has mass where the student may not attend, or (`reverse_kl`) none where it may",
    # The tools (ERR-3).
    "dependency-missing": "an optional package that this call needs is not installed",
    "graph-invalid": "a file that is not a readable, safe ONNX model",
    "graph-unsupported": "an attention site that cannot be squeezed, or none found",
    "graph-mismatch": "the squeeze inside the graph differs from the reference",
    "provider-unavailable": "onnxruntime did not give the execution provider that was asked for",
    "inputs-invalid": "model inputs that do not fit the graph",
    "cache-exists": "the output folder holds something else",
    "cache-corrupt": "bytes that differ from their checksum, or a malformed cache file",
    "cache-incomplete": "a cache that is not sealed, or lacks a shard",
    "cache-mismatch": "a cache made from another teacher, plan, temperature or data set",
    "cache-version": "a cache written by a format this release does not read",
    "sample-missing": "a sample that the cache does not hold",
    "path-unsafe": "a path in a file that would leave its folder",
    "write-failed": "the disk or store refused a write; what was committed before it is intact",
    "read-failed": "a file or an object store that could not be reached, or refused to be read",
    "export-failed": "a PyTorch model that could not be exported, or whose graph differs from it",
    "capture-failed": "a student whose attention could not be captured",
    "shrink-unsupported": "a smaller student that no closed form gives, or that its configuration cannot say",
}
"""Closed list of codes with their meaning; specs/shd.md, chapter ERR, lists those of the operations."""


class ShdError(ValueError):
    """Every error this project raises on purpose (ERR-1).

    Args:
        code: a key of ``ERROR_CODES``; stable, for programs.
        message: for people: ``<argument> must <rule>; got <value>`` and what to do next.
        spec_id: the requirement that was broken, such as ``"PLAN-2"``; appended in brackets.
    """

    def __init__(self, code: str, message: str, spec_id: str | None = None) -> None:
        if code not in ERROR_CODES:
            raise KeyError(f"unknown error code {code!r}: add it to ERROR_CODES and to the spec")
        super().__init__(f"{message} [{spec_id}]" if spec_id else message)
        self.code = code
        self.spec_id = spec_id

    def __reduce__(self) -> tuple[type[ShdError], tuple[str, str, None], dict[str, str | None]]:
        # Errors cross process borders (data-loader workers): keep code and text.
        return type(self), (self.code, str(self), None), {"spec_id": self.spec_id}


def need(
    ok: bool, code: str, argument: str, rule: str, got: object, *, remedy: str = "", spec_id: str | None = None
) -> None:
    """Refuse unless ``ok``: ``<argument> must <rule>; got <got>: <remedy>``.

    The text is made in any case: a rule that is costly to word, that a type checker has to see, or in code that
    ``torch.compile`` follows (it makes no text of tensors) keeps its own ``if``.
    """
    if not ok:
        raise ShdError(code, f"{argument} must {rule}; got {got}" + (f": {remedy}" if remedy else ""), spec_id)


def import_package(name: str, message: str, spec_id: str | None = None) -> Any:
    """An optional module, imported by the call that needs it; ``dependency-missing`` with this message."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ShdError("dependency-missing", message, spec_id) from error


# The errors of codes that the tools raise the most.
argument_value: Final = partial(ShdError, "argument-value")
inputs_invalid: Final = partial(ShdError, "inputs-invalid")
graph_invalid: Final = partial(ShdError, "graph-invalid")
graph_unsupported: Final = partial(ShdError, "graph-unsupported")

_UNPRINTABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and line feed, those that turn the direction of text, and lone surrogates."""


def printable(text: str) -> str:
    """The text with unprintable characters as Python spells them: they could rewrite what a terminal shows."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)
