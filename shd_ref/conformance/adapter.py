"""How the judge calls an implementation: NumPy arrays in and out, errors recognised by ``.code``.

An implementation is either a module (or object) with functions of the specification's names, or an adapter:
an object with one method ``run_operation``. ``specs/conformance.md`` shows both.
"""

from __future__ import annotations

import unittest
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import ModuleType
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shd_ref.conformance.specification import error_codes

Array: TypeAlias = NDArray[Any]

PLAIN = frozenset({int, bool, str, type(None)})  # types of values without parts
_LARGE = 1 << 24  # bytes from which on an answer is not kept to see whether it changes


class OwnDtype(np.ndarray[Any, np.dtype[Any]]):
    """A float array that a case gives in its own dtype, in place of the one under judgement (MIX-3).

    An adapter that turns arrays into others leaves such a one in its dtype.
    """


@runtime_checkable
class Adapter(Protocol):
    """An implementation behind one method, for those that need the dtype's name or other arrays."""

    def run_operation(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> Any:
        """Run one operation of ``specs/shd.md``.

        Args:
            operation: its name, such as ``"solve_alpha"``.
            inputs: the arguments by name. Float arrays are float64 for dtype float64, else float32 arrays
                that hold only numbers of that dtype; masks are boolean. An ``OwnDtype`` array keeps its dtype.
            dtype: ``float64``, ``float32``, ``float16`` or ``bfloat16``: what to compute in.

        Returns:
            The output; for several, a tuple in order, or a mapping or object with their names.

        Raises:
            NotImplementedError: this operation, option or dtype is missing.
            Exception: with a ``code`` of chapter ERR, where the inputs must be refused.
        """


OUTPUTS: dict[str, tuple[str, ...]] = {
    "align_tokens": ("probs", "dropped"),
    "compose_mixing": ("mixing",),
    "diagnose": ("plan", "unconstrained", "stochastic", "strategies"),
    "gram_tensor": ("gram",),
    "indexer_loss": ("loss",),
    "indexer_loss_gradient": ("dq", "dk", "dw"),
    "indexer_target": ("target",),
    "intersect_support": ("supervision", "dropped"),
    "layer_map": ("pairs",),
    "matched_plan": ("plan",),
    "merge_gram": ("gram",),
    "merge_plan": ("plan",),
    "mix_heads": ("probs",),
    "plan_groups": ("groups",),
    "shd_loss": ("loss",),
    "shd_loss_gradient": ("dz",),
    "shd_loss_gradient_qk": ("dq", "dk"),
    "soften": ("attn_probs",),
    "softmax": ("attn_probs",),
    "solve_alpha": ("alpha",),
    "solve_alpha_from_gram": ("alpha",),
    "squeeze_heads": ("probs", "mixing", "alphas", "residual", "num_clipped", "num_degenerate", "plan"),
    "value_outputs": ("value_outputs",),
}
"""The operations of ``specs/shd.md`` with the names of their results, in the order of a tuple that holds them."""


class Missing(unittest.SkipTest):
    """The implementation lacks an operation, an option or a dtype. Test runners report it as a skip."""


class RefusedError(Exception):
    """The implementation refused its inputs, with the error's code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"the error {code!r}: {message}")
        self.code = code


class BrokenError(Exception):
    """The implementation neither answered nor refused: it crashed, hung or changed its inputs."""

    def __init__(self, message: str, spec_id: str | None = None) -> None:
        super().__init__(message)
        self.spec_id = spec_id


@dataclass(frozen=True)
class Functions:
    """A module or object with functions of the operations' names, as an adapter."""

    functions: Any

    def run_operation(self, operation: str, inputs: Mapping[str, Any], dtype: str) -> Any:
        """Call the function with the inputs by name; the arrays carry the dtype."""
        function = getattr(self.functions, operation, None)
        if not callable(function):
            raise NotImplementedError(f"no function {operation}")
        return function(**inputs)


@dataclass
class Call:
    """One call that was made: what went in, and what came back."""

    operation: str
    inputs: Mapping[str, Any]
    answer: Any = None


@dataclass
class Subject:
    """The implementation under judgement at one dtype; remembers its calls for the report."""

    adapter: Adapter
    dtype: str
    calls: list[Call] = field(default_factory=list)
    _earlier: deque[tuple[str, list[Array], list[bytes]]] = field(default_factory=lambda: deque(maxlen=4))

    def run(self, operation: str, inputs: Mapping[str, Any]) -> Any:
        """One call; Missing, RefusedError or BrokenError say what the implementation did instead of answering."""
        call = Call(operation, copy_of(inputs))
        self.calls.append(call)
        try:
            call.answer = self.adapter.run_operation(operation, inputs, self.dtype)
        except NotImplementedError as error:
            raise Missing(f"{operation} is missing: {error}") from error
        except (BrokenError, Missing, KeyboardInterrupt):
            raise
        except BaseException as error:
            problem = _read_error(operation, error)
            own_arrays = not isinstance(self.adapter, Functions) and isinstance(error, TypeError | ValueError)
            if isinstance(problem, BrokenError) and own_arrays and not all(map(_is_plain, arrays_of(inputs))):
                problem = Missing(f"the adapter does not turn this array into its own: {error}")
            if isinstance(problem, RefusedError):
                self._check_memory(call, inputs)
            raise problem from error
        self._check_memory(call, inputs)
        return call.answer

    def _check_memory(self, call: Call, inputs: Mapping[str, Any]) -> None:
        """A caller's arrays are not changed, and what was answered stays as it was (MAP-8, NUM-9)."""
        if getattr(self.adapter, "remote", False):
            return  # it has none of these arrays
        changed = [name for name, value in inputs.items() if not _equal(value, call.inputs[name])]
        if changed:
            names = ", ".join(changed)
            raise BrokenError(f"changed its argument {names}: a caller's arrays are not its own", "MAP-8")
        for operation, arrays, before in self._earlier:
            if before != [array.tobytes() for array in arrays]:
                raise BrokenError(f"changed what an earlier call of {operation} had answered", "NUM-9")
        answered, arguments = arrays_of(call.answer), arrays_of(inputs)
        if any(np.may_share_memory(*pair) for pair in product(answered, arguments)):
            raise BrokenError("answered with memory of an argument: what a caller writes there changes both", "NUM-9")
        small = [array for array in answered if array.nbytes < _LARGE]
        self._earlier.append((call.operation, small, [array.tobytes() for array in small]))


def _read_error(operation: str, error: BaseException) -> Exception:
    """What an exception says: a refusal is an ``Exception`` with a code of chapter ERR, and nothing else is."""
    code = getattr(error, "code", None) if isinstance(error, Exception) else None
    if not isinstance(code, str) or not code:
        return BrokenError(f"raised {type(error).__name__} without a code: {error}")
    code = str.__str__(code)
    if code == "dependency-missing":
        return Missing(f"{operation} is missing: {error}")
    if code not in error_codes():
        return BrokenError(f"raised {type(error).__name__} with the code {code!r}, which is not in ERR-2: {error}")
    return RefusedError(code, str(error))


def _is_plain(array: Array) -> bool:
    """Numbers or truth values side by side in memory, in the machine's byte order: what any library can read."""
    return array.flags.carray and array.dtype.isnative and array.dtype.kind != "O"


def as_adapter(implementation: Any) -> Adapter:
    """The implementation itself if it is an adapter, else its functions as one."""
    return implementation if isinstance(implementation, Adapter) else Functions(implementation)


def take_output(answer: Any, name: str, outputs: Sequence[str]) -> Any:
    """One output of an answer: of a mapping, an object, a tuple in the order of ``outputs``, or the value itself.

    With dots a name is a path into a record (``strategies.shd.residual``).
    """
    first, *path = name.split(".")
    if isinstance(answer, Mapping) or _has_field(answer, first):
        value = _take_field(answer, first, first)
    elif len(outputs) == 1:
        value = answer
    elif isinstance(answer, tuple | list) and len(answer) == len(outputs):
        value = answer[list(outputs).index(first)]
    else:
        raise BrokenError(f"must answer with {', '.join(outputs)}; got {type(answer).__name__} without {first}")
    for step in path:
        value = _take_field(value, step, name)
    return value


def _take_field(value: Any, name: str, path: str) -> Any:
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        raise BrokenError(
            f"answered with {', '.join(map(str, value)) or 'nothing'}; the output {path} is not among them"
        )
    if _has_field(value, name):
        return getattr(value, name)
    raise BrokenError(f"must answer with {path}; got {type(value).__name__} without {name}")


def _has_field(value: Any, name: str) -> bool:
    # The attributes of arrays and lists are not outputs.
    return not isinstance(value, np.ndarray | np.generic | list) and hasattr(value, name)


def fields_of(value: Any) -> Mapping[str, Any]:
    """The named fields of a record: of a named tuple, a dataclass or a plain object; of anything else none."""
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if callable(value) or isinstance(value, ModuleType) or not hasattr(value, "__dict__"):
        return {}
    return {name: item for name, item in vars(value).items() if not name.startswith("_")}


def arrays_of(value: Any) -> list[Array]:
    """All arrays of an argument or an answer."""
    if isinstance(value, np.ndarray):
        return [value]
    if type(value) in PLAIN:
        return []
    if not isinstance(value, list | tuple):
        value = (value if isinstance(value, Mapping) else fields_of(value)).values()
    return [array for item in value for array in arrays_of(item)]


def copy_of(value: Any) -> Any:
    """A deep copy of arrays, lists and mappings."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list | tuple):
        return type(value)(copy_of(item) for item in value)
    if type(value) not in PLAIN and isinstance(value, Mapping):
        return {name: copy_of(item) for name, item in value.items()}
    return value


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        # A caller's array keeps its bits: NaN inputs of invalid cases are equal to themselves.
        return bool(left.shape == right.shape and left.tobytes() == right.tobytes())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, Mapping):
        return set(left) == set(right) and all(_equal(value, right[name]) for name, value in left.items())
    return bool(left is right or left == right or left != left)
