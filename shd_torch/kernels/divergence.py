"""The divergence of rows and its gradients by Triton programs, and why a call cannot be served here.

Triton is imported when a kernel first runs, never with the package."""

from __future__ import annotations

import importlib.util
import math
import os
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shd_ref.cache import packed_size
from shd_torch.supervision.coded import Coded
from shd_torch.supervision.factored import Factored
from shd_torch.supervision.mask import AttentionRule

# How many rows and keys a program works on at a time, by device, head size and number of merged heads:
# ``benchmarks/kernel_resources.py`` compiles each entry and prints what it takes of registers and shared memory.
MIN_WIDTH = 16
MAX_WIDTH = 256
"""The smallest and the largest head that the matrix units are given; a smaller one is padded with zeros."""

MAX_FLOAT32_WIDTH = 128
"""The largest head in float32: a product in three parts holds both halves of its operands in registers."""

UNROLLED_BYTES = 1024
"""Groups of one size are unrolled while their members' rows take at most this; others are looped over."""


class Tile(NamedTuple):
    """The shape of a program: its tile, its warps, and how many loads are in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# By bytes of a padded row; the first that is large enough holds.
_AMPERE = {128: Tile(64, 32, 4, 2), 256: Tile(64, 32, 8, 2), 512: Tile(32, 32, 8, 1)}
_HOPPER = {128: Tile(64, 64, 8, 2), 256: Tile(64, 32, 8, 2), 512: Tile(32, 32, 8, 2)}
_LSE = {128: Tile(64, 64, 4, 3), 256: Tile(64, 64, 8, 2), 512: Tile(64, 32, 8, 2)}
# Each warp holds sixteen whole rows of an operand, twice: more rows, or wide heads in fewer warps, would spill.
_FLOAT32 = {256: Tile(16, 32, 4, 2), 512: Tile(16, 32, 8, 1)}
# The interpreter takes its time by the tile, not by the entry.
_HOST = Tile(64, 64, 1, 1)
MASS_TILE = Tile(16, 256, 4, 2)


def choose_tile(
    program: str, row_bytes: int, members: int | None, capability: tuple[int, int] | None, *, is_float32: bool
) -> Tile:
    """The tile of the program ``"lse"``, ``"rows"`` or ``"keys"`` on a device, or a host that interprets (None).

    ``row_bytes`` are of a padded row of queries, the larger of student's and teacher's; ``members`` are teacher heads
    that are unrolled, 0 for none, None for codes; ``is_float32``, whether student or teacher is.
    """
    if capability is None:
        return _HOST
    if is_float32:
        tiles = _FLOAT32
    elif program == "lse":
        tiles = _LSE
    else:
        # Wide asynchronous products are Hopper's and data centre Blackwell's.
        tiles = _HOPPER if capability[0] in (9, 10) else _AMPERE
        if members is None:
            row_bytes = max(row_bytes, 256)  # decoding narrow heads takes more registers than their products
        elif members > 2:
            row_bytes *= 2
    return tiles[min(size for size in tiles if size >= min(row_bytes, 512))]


def pad_width(width: int) -> int:
    """The next power of two, at least ``MIN_WIDTH``."""
    return max(1 << (width - 1).bit_length(), MIN_WIDTH)


def count_unrolled(group_sizes: set[int], row_bytes: int, *, is_float32: bool) -> int:
    """How many members to unroll: the size of all groups; 0 where they differ, are too large, or fill registers."""
    (size, *others) = group_sizes
    return size if not others and not is_float32 and size * row_bytes <= UNROLLED_BYTES else 0


class Heads(NamedTuple):
    """Queries and keys of one model."""

    queries: Tensor  # (B, H, L, d), the last axis contiguous
    keys: Tensor  # (B, H / group_size, S, d), the last axis contiguous
    query_strides: tuple[int, ...]  # of batch, head, row
    key_strides: tuple[int, ...]
    lse: Tensor | None  # (B, H, L), log-sum-exp of the scaled and tempered logits, to base 2
    num_heads: int
    group_size: int  # query heads that read one key head
    scale: float  # of the logits, over T, in units of log2
    width: Any  # d, as are the next two, known when the program is compiled
    padded: Any  # d as the matrix units take it
    precision: Any  # how float32 is multiplied


class Mask(NamedTuple):
    """Which keys a row may attend to."""

    key_mask: Tensor | None  # (B, S) uint8, 1 = may attend
    window: int | None
    num_rows: int  # L
    num_keys: int  # S
    is_causal: Any  # known when the program is compiled


class FactoredOperands(NamedTuple):
    """The supervision as the teacher's queries and keys with a mixing matrix."""

    teacher: Heads
    mixing: Tensor  # C rho (B, H_s, H_t, L), float32
    mixing_strides: tuple[int, ...]
    members: Tensor  # (H_s, max_members) int32, the teacher heads merged into each student head
    counts: Tensor  # (H_s,) int32, how many of them
    max_members: int
    masses: Tensor  # (B, H_s, L) float32, rho: what the mixing weights of a row sum to
    num_rows: int  # L
    unrolled: Any  # how many members are, 0 for none; this and the next are known when the program is compiled
    is_coded: Any


class CodedOperands(NamedTuple):
    """The supervision as stored codes of ``sqrt8-row``."""

    codes: Tensor  # uint8, one axis
    starts: Tensor  # (B, H_s) int64, where a map begins in it
    num_rows: Tensor  # (B,) int32, rows stored of each sample
    num_keys: Tensor  # (B,) int32
    masses: Tensor  # (B, H_s, L) float32, what the entries of a row sum to
    num_heads: int
    is_triangular: Any  # this and the next are known when the program is compiled
    is_coded: Any


class RowsKl(NamedTuple):
    """The kernels' results, in float32: multiply by the gradient from above before rounding."""

    kl: Tensor | None  # of each row (B, H_s, L) in nats, before its weight; 0 where it does not count
    dq: Tensor  # gradient of sum(row_weights * kl) with respect to the student's queries
    dk: Tensor  # the same with respect to its keys


CODEC = "sqrt8-row"
"""The codec that the kernels decode."""

DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)
MIN_CAPABILITY = (8, 0)

_LOG2_E = 1 / math.log(2)
_TRUE = ("1", "true", "on", "yes", "y")  # as Triton reads it


def unsupported_reason(*tensors: Tensor) -> str | None:
    """Obstacle and remedy, in a sentence, where the kernels cannot work on these queries and keys; else None."""
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace the kernels: call them outside of what it compiles"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed: pip install '.[triton]' (in a checkout; Linux only)"
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        return f"queries and keys must be on one device; got {', '.join(sorted(map(str, devices)))}"
    (device,) = devices
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            return f"queries and keys must be float16, bfloat16 or float32; got {tensor.dtype}"
        limit = MAX_FLOAT32_WIDTH if tensor.dtype == torch.float32 else MAX_WIDTH
        if not 1 <= tensor.shape[-1] <= limit:
            kind = str(tensor.dtype).removeprefix("torch.")
            return f"heads must have a size of 1 to {limit} in {kind}; got {tensor.shape[-1]}"
    if is_interpreted():
        # Triton's interpreter computes bfloat16 products wrongly, without a word.
        if any(tensor.dtype == torch.bfloat16 for tensor in tensors):
            return "Triton's interpreter computes bfloat16 wrongly: use float16 or float32, or a CUDA device"
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the kernels need a CUDA device, or the environment variable TRITON_INTERPRET=1; got {device}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        got = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"the kernels need a CUDA device of compute capability {'.'.join(map(str, MIN_CAPABILITY))}; got {got}"
    return None


def is_interpreted() -> bool:
    """Whether Triton runs programs on the host: ``TRITON_INTERPRET`` was set when the kernels were first imported."""
    if os.environ.get("TRITON_INTERPRET", "0").lower() not in _TRUE:
        return False  # known without importing Triton
    import triton

    from shd_torch.kernels import passes

    return not isinstance(passes.rows_pass, triton.JITFunction)


@torch.no_grad()
def kl_rows(
    student_q: Tensor,
    student_k: Tensor,
    supervision: Factored | Coded,
    row_weights: Tensor,
    rule: AttentionRule,
    *,
    temperature: float = 1.0,
    deterministic: bool = True,
    want_value: bool = True,
) -> RowsKl:
    """KL of the teacher's and the student's maps, row by row, and its gradients; no map is ever in memory.

    ``A~_h = sum_t C[h,t] softmax(teacher_scale q_t k_t^T / T)`` and ``dz = g (rho A_student - A~) / T`` (GRAD-1,
    GRAD-4, GRAD-5), with rho the row's sum of mixing weights. The divergence is that of LOSS-11: zero where
    ``A~ = rho A_student``. A row that may attend to nothing gives exactly 0.

    Of codes, code 0 is exactly zero, and a row is made to sum to one by what its codes sum to; one of zeros does not
    count. A row with a code on a key that the student may not attend to has an infinite divergence (LOSS-6) and no
    gradient. A mass other than one (attention sinks) comes in by ``row_weights`` (LOSS-11).

    The heads are float16, bfloat16 or float32, of student and teacher apart; ``row_weights`` g ``(B, H_s, L)`` are
    float32, and 0 where a row does not count. What the kernels read is checked before (``unsupported_reason`` here
    and of ``kl/triton.py``), and not again. With ``deterministic``, two passes give the same bits in every run;
    without, one pass adds up dk in any order. The value costs a logarithm an entry.
    """
    mask, factor = make_mask(rule, student_q, student_k), rule.scale_for(student_q.shape[3]) / temperature
    student = with_lse(make_heads(student_q, student_k, factor), mask)
    operands: FactoredOperands | CodedOperands
    if isinstance(supervision, Coded):
        operands = _decode(supervision, mask)
    else:
        operands = _factor(supervision, student, mask, temperature)
    return run_passes(
        student, operands, mask, row_weights, factor=factor, deterministic=deterministic, want_value=want_value
    )


def _factor(supervision: Factored, student: Heads, mask: Mask, temperature: float) -> FactoredOperands:
    """Queries and keys of the heads of the groups, and their mixing weights in every row."""
    teacher = make_heads(
        supervision.queries, supervision.keys, supervision.rule.scale_for(supervision.queries.shape[3]) / temperature
    )
    every_head = tuple(range(teacher.num_heads))
    groups = tuple(map(tuple, supervision.groups)) if supervision.groups else (every_head,) * supervision.num_heads
    members, counts, merged = _make_members(groups, teacher.num_heads, teacher.queries.device)
    mixing = supervision.mixing[..., None]
    if supervision.row_mass is not None:
        mixing = mixing * supervision.row_mass[:, None]
    mixing = mixing.float().expand(-1, -1, -1, mask.num_rows)
    unrolled = count_unrolled(
        {len(group) for group in groups},
        max(row_bytes(student), row_bytes(teacher)),
        is_float32=torch.float32 in (student.queries.dtype, teacher.queries.dtype),
    )
    return FactoredOperands(
        teacher=with_lse(teacher, mask),
        mixing=mixing,
        mixing_strides=mixing.stride(),
        members=members,
        counts=counts,
        max_members=members.shape[1],
        masses=torch.einsum("bhtl,ht->bhl", mixing, merged).contiguous(),
        num_rows=mask.num_rows,
        unrolled=constant(unrolled),
        is_coded=constant(False),
    )


@lru_cache(maxsize=64)
def _make_members(
    groups: tuple[tuple[int, ...], ...], num_teacher_heads: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """The groups on the device, as lists, their lengths, and ones and zeros: the same few in every step of a run."""
    width = max(max(map(len, groups)), 1)
    padded = [[*group, *[0] * (width - len(group))] for group in groups]
    counts = [len(group) for group in groups]
    merged = [[float(head in group) for head in range(num_teacher_heads)] for group in groups]
    return (
        torch.tensor(padded, dtype=torch.int32, device=device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor(merged, dtype=torch.float32, device=device),
    )


def _decode(supervision: Coded, mask: Mask) -> CodedOperands:
    """Where the codes of each head lie, and what rows sum to; that the buffer holds them is checked in ``Coded``."""
    batch, num_heads, num_rows, _ = supervision.shape
    key_lengths = supervision.lengths if supervision.key_lengths is None else supervision.key_lengths
    starts = []
    for start, *shape in zip(supervision.starts, supervision.lengths, key_lengths, strict=True):
        size = packed_size(supervision.codec, supervision.support, num_heads, *shape) // num_heads
        starts.append([start + head * size for head in range(num_heads)])
    device = supervision.device
    coded = CodedOperands(
        codes=supervision.buffer,
        starts=torch.tensor(starts, dtype=torch.int64, device=device),
        num_rows=torch.tensor(supervision.lengths, dtype=torch.int32, device=device),
        num_keys=torch.tensor(key_lengths, dtype=torch.int32, device=device),
        masses=torch.empty(batch, num_heads, num_rows, dtype=torch.float32, device=device),
        num_heads=num_heads,
        is_triangular=constant(supervision.support == "causal"),
        is_coded=constant(True),
    )
    fill_masses(coded, mask)
    return coded


def make_mask(rule: AttentionRule, queries: Tensor, keys: Tensor) -> Mask:
    key_mask = rule.attn_mask
    if key_mask is not None:
        key_mask = key_mask[:, 0, 0].expand(queries.shape[0], keys.shape[2]).contiguous().view(torch.uint8)
    return Mask(key_mask, rule.window, queries.shape[2], keys.shape[2], constant(rule.is_causal))


def make_heads(queries: Tensor, keys: Tensor, scale: float) -> Heads:
    """Queries and keys as the kernels read them, without a log-sum-exp; copied where heads are not contiguous."""
    queries, keys = (x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in (queries, keys))
    width = queries.shape[3]
    return Heads(
        queries=queries,
        keys=keys,
        query_strides=queries.stride()[:3],
        key_strides=keys.stride()[:3],
        lse=None,
        num_heads=queries.shape[1],
        group_size=queries.shape[1] // keys.shape[1],
        scale=scale * _LOG2_E,
        width=constant(width),
        padded=constant(pad_width(width)),
        # In three TF32 products, close to exact, unless PyTorch was told that one will do.
        precision=constant("tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"),
    )


def constant(value: Any) -> Any:
    import triton.language as tl

    return tl.constexpr(value)


def with_lse(heads: Heads, mask: Mask) -> Heads:
    """The heads with the log-sum-exp of every row, float32; -inf where a row may attend to nothing."""
    from shd_torch.kernels import passes

    lse = torch.empty(heads.queries.shape[:3], dtype=torch.float32, device=heads.queries.device)
    is_float32 = heads.queries.dtype == torch.float32
    tile = choose_tile("lse", row_bytes(heads), 0, _capability(lse), is_float32=is_float32)
    _launch(passes.lse_pass, lse, tile.rows, tile, lse, heads, mask)
    return heads._replace(lse=lse)


def fill_masses(coded: CodedOperands, mask: Mask) -> None:
    """Fill ``coded.masses``: what a row's entries sum to; NaN where one lies outside the student's mask."""
    from shd_torch.kernels import passes

    _launch(passes.mass_pass, coded.masses, MASS_TILE.rows, MASS_TILE, coded.masses, coded, mask)


def run_passes(
    student: Heads,
    supervision: FactoredOperands | CodedOperands,
    mask: Mask,
    row_weights: Tensor,
    *,
    factor: float,
    deterministic: bool,
    want_value: bool,
) -> RowsKl:
    """Launch the gradient's programs: rows and keys one after the other, or both in one with atomic additions."""
    from shd_torch.kernels import passes

    teacher, members = student, None
    if isinstance(supervision, FactoredOperands):
        teacher, members = supervision.teacher, supervision.unrolled.value
    options: tuple[Any, ...] = (max(row_bytes(student), row_bytes(teacher)), members, _capability(row_weights))
    is_float32 = torch.float32 in (student.queries.dtype, teacher.queries.dtype)
    fresh: dict[str, Any] = {"dtype": torch.float32, "device": student.queries.device}
    dq = torch.empty(student.queries.shape, **fresh)
    dk = (torch.empty if deterministic else torch.zeros)(student.keys.shape, **fresh)
    kl = torch.empty(student.queries.shape[:3], **fresh) if want_value else None
    weights = row_weights.detach().contiguous()
    shared = (student, supervision, mask, weights, weights.abs().amax(), factor)
    tile = choose_tile("rows", *options, is_float32=is_float32)
    _launch(passes.rows_pass, dq, tile.rows, tile, dq, None if deterministic else dk, kl, *shared)
    if deterministic:
        tile = choose_tile("keys", *options, is_float32=is_float32)
        _launch(passes.keys_pass, dk, tile.keys, tile, dk, *shared)
    return RowsKl(kl, dq, dk)


def row_bytes(heads: Heads) -> int:
    return int(heads.padded.value) * heads.queries.element_size()


def _launch(program: Any, result: Tensor, size: int, tile: Tile, *arguments: Any) -> None:
    """Run a program for every tile of ``size`` positions of a result ``(B, H, positions, ...)``."""
    options: dict[str, Any] = {"ROWS": tile.rows, "KEYS": tile.keys}
    if not is_interpreted():
        options |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    batch, heads, positions = result.shape[:3]
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device(result.device) if result.is_cuda else nullcontext():
        program[(-(-positions // size), batch * heads)](*arguments, **options)


def _capability(tensor: Tensor) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None
