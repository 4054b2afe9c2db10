"""What do the kernels take of a device? Registers, spills and shared memory of every variant, cross-compiled.

Needs Triton but no GPU. Shows which tiles fit; says nothing about time. Prints a table and writes
``results/kernel_resources.json``. Compiling all of them takes a quarter of an hour; what Triton has in its
cache is not compiled again.

    python -m benchmarks.kernel_resources [--capability 80 90] [--width 32 64 128 256] [--dtype bfloat16 float32]"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import result_path, save
from shd_torch.kernels.divergence import (
    DTYPES,
    MAX_FLOAT32_WIDTH,
    MAX_WIDTH,
    CodedOperands,
    FactoredOperands,
    Heads,
    Mask,
    Tile,
    choose_tile,
    constant,
    count_unrolled,
    make_heads,
    pad_width,
)

PROGRAMS: tuple[str, ...] = ("lse", "rows", "keys")

_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Resources:
    """What one compiled program takes.

    Attributes:
        registers: of a thread.
        spilled_bytes: of a thread, stores and loads that registers had no room for.
        shared_bytes: shared memory of a program.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Variant:
    """One way to compile a program.

    Attributes:
        program: of ``PROGRAMS``.
        width: head size, of student and teacher.
        dtype: of their queries and keys.
        members: teacher heads unrolled in the program; 0 for groups of different sizes, None for codes.
        atomic: dk in the same pass (``rows`` only).
        is_causal: causal attention.
    """

    program: str
    width: int
    dtype: torch.dtype = torch.bfloat16
    members: int | None = 2
    atomic: bool = False
    is_causal: bool = True

    @property
    def name(self) -> str:
        """For tables and test ids."""
        form = {None: "coded", 0: "looped"}.get(self.members, f"{self.members} members")
        words = [self.program, f"d={self.width}", str(self.dtype).removeprefix("torch.")]
        if self.program != "lse":
            words += [form, *["atomic"] * self.atomic]
        return " ".join(words)


def measure(variant: Variant, capability: int, tile: Tile | None = None) -> Resources:
    """Compile a variant for a device that need not be here.

    Args:
        variant: what to compile.
        capability: of the device, 80 for 8.0.
        tile: instead of the one that a launch would use.

    Returns:
        What the assembler says the program takes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from shd_torch.kernels import passes

    kernel = getattr(passes, f"{variant.program}_pass")
    tile = tile or choose_variant_tile(variant, capability)
    arguments = _example_arguments(variant) | {"ROWS": tile.rows, "KEYS": tile.keys}
    parts = _Specialised({}, {})
    signature = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        signature[parameter.name] = parts.specialise((index,), value, constant=parameter.is_constexpr)
    source = ASTSource(fn=kernel, signature=signature, constexprs=parts.constants, attrs=parts.attributes)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = _read_usage(compiled.asm["cubin"])
    return Resources(usage["REG"], usage["STACK"], compiled.metadata.shared)


def choose_variant_tile(variant: Variant, capability: int) -> Tile:
    """The tile that a launch would use."""
    row_bytes = pad_width(variant.width) * variant.dtype.itemsize
    is_float32 = variant.dtype == torch.float32
    return choose_tile(variant.program, row_bytes, variant.members, divmod(capability, 10), is_float32=is_float32)


@dataclass(frozen=True)
class _Specialised:
    """What Triton derives from arguments at a launch: their types, constants, and which are multiples of 16."""

    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]

    def specialise(self, path: tuple[int, ...], value: Any, *, constant: bool = False) -> Any:
        from triton.language import constexpr

        if constant or value is None or isinstance(value, constexpr) or (isinstance(value, int) and value == 1):
            self.constants[path] = value
            return "constexpr"
        if isinstance(value, tuple):
            parts = [self.specialise((*path, index), part) for index, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, Tensor) or value % 16 == 0:
            self.attributes[path] = [["tt.divisibility", 16]]
        return _POINTERS[value.dtype] if isinstance(value, Tensor) else "i32"


def _example_arguments(variant: Variant) -> dict[str, Any]:
    """A call on tensors without memory, of shapes that leave no dimension special."""
    batch, num_student_heads, num_teacher_heads, length = 2, 12, 24, 2048

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def heads(number: int) -> Heads:
        # (B, L, H, d) seen as (B, H, L, d), as models make them.
        tensors = [empty(batch, length, n, variant.width, dtype=variant.dtype) for n in (number, number // 2)]
        queries, keys = (x.transpose(1, 2) for x in tensors)
        return make_heads(queries, keys, 0.125)._replace(lse=empty(batch, number, length))

    student, teacher = heads(num_student_heads), heads(num_teacher_heads)
    rows = empty(batch, num_student_heads, length)
    mixing = empty(batch, num_student_heads, num_teacher_heads)[..., None].expand(-1, -1, -1, length)
    members = empty(num_student_heads, max(variant.members or 0, 2), dtype=torch.int32)
    factored = FactoredOperands(
        teacher,
        mixing,
        mixing.stride(),
        members,
        empty(num_student_heads, dtype=torch.int32),
        members.shape[1],
        rows,
        length,
        constant(variant.members or 0),
        constant(False),
    )
    samples = empty(batch, dtype=torch.int32)
    starts = empty(batch, num_student_heads, dtype=torch.int64)
    stored = (empty(1, dtype=torch.uint8), starts, samples, samples, rows, num_student_heads)
    coded = CodedOperands(*stored, constant(variant.is_causal), constant(True))
    return {
        "lse": rows,
        "model": student,
        "dq": empty(1),
        "dk": empty(1) if variant.atomic or variant.program == "keys" else None,
        "kl": rows,
        "student": student,
        "supervision": coded if variant.members is None else factored,
        "mask": Mask(None, None, length, length, constant(variant.is_causal)),
        "weights": rows,
        "peak": empty(),
        "factor": 0.125,
    }


def _read_usage(cubin: bytes) -> dict[str, int]:
    """Registers and stack of a thread; a program without a local array has a stack for its spills alone."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", report)}


RESULT = result_path(__file__)


def variants(width: int, dtype: torch.dtype) -> list[Variant]:
    """Every form of every program for one head size: groups of 1, 2 and 4 where they are unrolled, loops, codes."""
    is_float32 = dtype == torch.float32
    if width > (MAX_FLOAT32_WIDTH if is_float32 else MAX_WIDTH):
        return []
    sizes = (count_unrolled({size}, width * dtype.itemsize, is_float32=is_float32) for size in (1, 2, 4))
    forms: tuple[int | None, ...] = (*filter(None, sizes), 0, None)
    rows = [Variant("rows", width, dtype, members, atomic) for members in forms for atomic in (False, True)]
    return [Variant("lse", width, dtype), *rows, *(Variant("keys", width, dtype, members) for members in forms)]


def describe(variant: Variant) -> dict[str, Any]:
    """A variant's fields, for the report."""
    return asdict(variant) | {"dtype": str(variant.dtype).removeprefix("torch.")}


def main() -> None:
    import triton

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90], help="80 for compute capability 8.0")
    parser.add_argument("--width", type=int, nargs="+", default=[32, 64, 128, 256], help="head sizes")
    parser.add_argument(
        "--dtype",
        choices=[str(dtype).removeprefix("torch.") for dtype in DTYPES],
        nargs="+",
        default=["bfloat16", "float32"],
    )
    arguments = parser.parse_args()
    report: list[dict[str, Any]] = []
    heads = ("sm", 4), ("rows", 6), ("keys", 6), ("warps", 7), ("stages", 8), ("regs", 6), ("spill B", 9), ("KiB", 8)
    print(f"{'program':36}" + "".join(f"{name:>{size}}" for name, size in heads))
    for width, dtype in itertools.product(arguments.width, arguments.dtype):
        for variant in variants(width, getattr(torch, dtype)):
            for capability in arguments.capability:
                tile, taken = choose_variant_tile(variant, capability), measure(variant, capability)
                report.append(describe(variant) | {"capability": capability} | tile._asdict() | asdict(taken))
                print(
                    f"{variant.name:36}{capability:4}{tile.rows:6}{tile.keys:6}{tile.num_warps:7}{tile.num_stages:8}"
                    f"{taken.registers:6}{taken.spilled_bytes:9}{taken.shared_bytes / 1024:8.1f}",
                    flush=True,
                )
    save({"triton": triton.__version__, "programs": report}, RESULT)


if __name__ == "__main__":
    main()
