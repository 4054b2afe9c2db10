"""What ``gpu_pass.py`` measures: the cases of each piece, by name. Nothing here reads files beside the checkout."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

ROOT = Path(__file__).resolve().parent.parent
TOP_K, BETA = 32, 0.02

Facts: TypeAlias = dict[str, Any]
Cases: TypeAlias = dict[str, Callable[[], Facts]]


@dataclass(frozen=True)
class Sizes:
    """What is measured; the student has ``heads`` of ``width``, ``members`` of its teacher's behind each."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    kernel_dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    kernel_length: int = 257
    lengths: tuple[int, ...] = (2048, 512, 8192)
    tokens: int = 16_384  # of a batch of the loss
    batch: int = 2  # of a step, at the first of the lengths
    layers: int = 12
    heads: int = 12
    teacher_heads: int = 16  # of the live teacher
    members: int = 2
    width: int = 64
    vocabulary: int = 32_000
    repeats: int = 20


GPU: Final = Sizes()
REHEARSAL: Final = Sizes("cpu", "float32", ("float16", "float32"), 33, (32, 16), 32, 1, 2, 2, 4, 2, 16, 50, 1)

FORMS: Final[dict[str, Facts]] = {
    "causal": {},
    "two passes": {"deterministic": True},
    "padding": {"padded": True},
    "window": {"window": 20},
    "grouped queries": {"ratio": 2},
    "width 128": {"width": 128},
    "16 heads to 6": {"merged": (16, 6)},
}
NOISE: Final = {"1": 0.78, "0.03": 0.134, "0.001": 0.0244}  # by the divergence a row, in nats, that it makes
LOSS_SCALE = 1024.0  # as a gradient scaler does: small gradients are no normal numbers in float16


def kernel_cases(sizes: Sizes) -> Cases:
    """Value and gradients of the kernels beside the float64 reference; of students near their teachers too."""
    names = [(dtype, form) for form in FORMS for dtype in sizes.kernel_dtypes]
    return {f"{dtype} {form}": partial(compare_kernels, sizes, dtype, **FORMS[form]) for dtype, form in names}


def compare_kernels(
    sizes: Sizes,
    dtype: str,
    *,
    width: int = 64,
    ratio: int = 1,
    merged: tuple[int, int] = (8, 4),
    padded: bool = False,
    window: int | None = None,
    deterministic: bool = False,
) -> Facts:
    """Errors by divergence; ``ratio`` query heads read one key head, in the student and in the teacher."""
    import numpy as np
    import torch

    import shd_ref
    from shd_ref.tolerances import load_tolerances
    from shd_torch import attention_kl
    from shd_torch.supervision import Factored

    torch.use_deterministic_algorithms(deterministic)
    length, (num_teacher_heads, num_heads) = sizes.kernel_length, merged
    groups = shd_ref.plan_groups(shd_ref.merge_plan(num_teacher_heads, num_heads), num_teacher_heads)
    owner = [next(h for h in range(num_heads) if t in groups[h]) for t in range(num_teacher_heads)]
    mixing = np.zeros((2, num_heads, num_teacher_heads), np.float32)
    for head, group in enumerate(groups):
        mixing[:, head, list(group)] = np.arange(1, len(group) + 1) / sum(range(1, len(group) + 1))
    keys = torch.ones(2, 1, 1, length, dtype=torch.bool)
    if padded:  # on the left, where the first rows may attend to nothing, and on the right
        keys[0, ..., : length // 6] = keys[1, ..., -length // 4 :] = False
    distance = np.arange(length)[:, None] - np.arange(length)
    allowed = (distance >= 0) & (distance < (window or length)) & keys.numpy()
    rule: Facts = {"is_causal": True, "window": window, "attn_mask": keys.to(sizes.device) if padded else None}
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    limits, allowance = load_tolerances()["kernels"], load_tolerances()["agreement"]["float32"]["loss"]["rtol"]
    found: Facts = {"passed": True}
    for name, size in NOISE.items():
        q, k = 1.5 * draw(2, num_heads, length, width), 1.5 * draw(2, num_heads // ratio, length, width)
        near = q[:, owner], k.repeat_interleave(ratio, 1)[:, owner[::ratio]]
        noisy = [x + 1.5 * size * draw(*x.shape) for x in near]
        heads = [x.to(sizes.device, getattr(torch, dtype)) for x in (q, k, *noisy)]
        q64, k64, teacher_q64, teacher_k64 = (x.double().cpu().numpy() for x in heads)
        scale, wide = width**-0.5, [x.repeat(ratio, 1) for x in (k64, teacher_k64)]
        teacher = shd_ref.softmax(scale * teacher_q64 @ wide[1].swapaxes(2, 3), allowed)
        maps = shd_ref.mix_heads(teacher, mixing.astype(np.float64))
        value = float(shd_ref.shd_loss(maps, scale * q64 @ wide[0].swapaxes(2, 3), attn_mask=allowed))
        wanted = shd_ref.shd_loss_gradient_qk(maps, q64, k64, scale=scale, attn_mask=allowed)
        leaves = [x.requires_grad_() for x in heads[:2]]
        taught = Factored(*heads[2:], torch.from_numpy(mixing).to(sizes.device), groups=groups, **rule)
        loss = attention_kl(*leaves, taught, backend="triton", beta=LOSS_SCALE, check=False, **rule)
        gradients = [each.double().cpu().numpy() / LOSS_SCALE for each in torch.autograd.grad(loss, leaves)]
        errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(gradients, wanted, strict=True)]
        # What rounds logits moves maps that differ by sqrt(2 KL) in that proportion.
        allowed_error = limits["gradient"][dtype] + limits["logits"] * (2 * value / num_heads) ** -0.5
        missed = abs(loss.item() / LOSS_SCALE - value)
        passed = max(errors) <= allowed_error and missed <= num_heads * limits["logits"] + allowance * value
        found["passed"] &= passed
        found[f"KL {name}"] = {"KL": value / num_heads, "loss": missed, "dq": errors[0], "dk": errors[1]}
        found[f"KL {name}"] |= {"allowed": allowed_error, "passed": passed}
    return found


def make_decoder(sizes: Sizes, heads: int, attention: str = "sdpa") -> Any:
    """A decoder of random weights on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=heads * sizes.width,
        intermediate_size=3 * heads * sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=heads,
        max_position_embeddings=sizes.lengths[0],
        attn_implementation=attention,
        use_cache=False,
    )
    with torch.device(sizes.device):
        return LlamaForCausalLM(config).to(getattr(torch, sizes.dtype))


def time_step(sizes: Sizes, student: Any, make_loss: Callable[[], Any]) -> Facts:
    """A whole step: loss, backward pass and optimizer."""
    import torch

    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)

    def run() -> None:
        make_loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return measure(sizes, run, max(1, sizes.repeats // 4))


def step_cases(sizes: Sizes) -> Cases:
    """A decoder's training step from the cache, whose batch is copied from page-locked memory in every step."""
    return {way: partial(cached_step, sizes, way) for way in ("KD", "KD + SHD triton", "KD + SHD sdpa", "KD + eager")}


def cached_step(sizes: Sizes, way: str) -> Facts:
    import torch

    from shd_ref.cache import packed_size
    from shd_torch import attention_kl, capture_attention, kd_loss
    from shd_torch.supervision import Coded
    from shd_torch.supervision.supervision import TopkTargets

    shape, (_, _, backend) = (sizes.batch, sizes.lengths[0]), way.rpartition(" ")
    student = make_decoder(sizes, sizes.heads, "eager" if backend == "eager" else "sdpa")
    tokens, ids = torch.randint(sizes.vocabulary, shape), torch.arange(TOP_K).expand(*shape, -1)
    log_probs = torch.full((*shape, TOP_K + 1), 1 / (TOP_K + 1)).log()
    size = packed_size("sqrt8-row", "causal", sizes.heads, shape[1])
    codes = torch.randint(1, 256, (sizes.layers * sizes.batch * size,), dtype=torch.uint8, device=sizes.device).cpu()
    host = [tokens, ids.contiguous(), log_probs, codes if backend != "KD" else codes[:1]]
    host = [each.pin_memory() for each in host] if sizes.device == "cuda" else host
    starts = [range(first, first + sizes.batch * size, size) for first in range(0, codes.numel(), sizes.batch * size)]

    def loss() -> Any:
        inputs, classes, likely, buffer = (each.to(sizes.device, non_blocking=True) for each in host)
        targets = TopkTargets(classes, likely[..., :-1], likely[..., -1], 1.0, sizes.vocabulary)
        if backend == "KD":
            return kd_loss(targets, student(inputs).logits, check=False)
        lengths = (shape[1],) * sizes.batch
        taught = [
            Coded(buffer, tuple(each), lengths, sizes.heads, "sqrt8-row", "causal", shape[1]) for each in starts
        ]
        if backend == "eager":
            output = student(inputs, output_attentions=True)
            pairs = zip(output.attentions, taught, strict=True)
            term = sum(eager_loss(maps, each.probs()) for maps, each in pairs)
        else:
            with capture_attention(student, layers=sizes.layers) as captured:
                output = student(inputs)
            heads = ([getattr(call, name) for call in captured.calls] for name in ("query", "key"))
            term = attention_kl(*heads, taught, is_causal=True, backend=backend, value="surrogate", check=False)
        return kd_loss(targets, output.logits, check=False) + BETA * term

    return time_step(sizes, student, loss)


def eager_loss(student_probs: Any, maps: Any) -> Any:
    """The loss as one writes it who has both maps ``(B, H_s, L, S)``."""
    import torch

    logs = student_probs.float().clamp_min(torch.finfo(torch.float32).tiny).log()
    return (torch.xlogy(maps, maps) - maps * logs).sum() / (maps.shape[0] * maps.shape[2])


def loss_cases(sizes: Sizes) -> Cases:
    """The loss alone with its gradients; last the kernels as replays of a graph, which leaves their launches out."""
    cases: Cases = {}
    for form in ("factored", "coded"):
        for length in sizes.lengths:
            for way in ("sdpa", "triton"):
                cases[f"{way} {form} {length}"] = partial(time_loss, sizes, way, form, length)
    for way in ("sdpa", "triton", "eager"):
        cases[f"{way}, batch 1"] = partial(time_loss, sizes, way, "factored", sizes.lengths[0], batch=1)
    if sizes.device == "cuda":
        for length in sizes.lengths:
            cases[f"triton graph {length}"] = partial(time_loss, sizes, "triton", "factored", length, graph=True)
    return cases


def time_loss(
    sizes: Sizes, way: str, form: str, length: int, *, batch: int | None = None, graph: bool = False
) -> Facts:
    import torch

    loss = make_loss(sizes, form, length, batch or max(1, sizes.tokens // length))
    run: Callable[[], Any] = partial(loss, way)
    if graph:
        for _ in range(3):
            run()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            run()
        run = recorded.replay
    return measure(sizes, run, sizes.repeats)


def make_loss(sizes: Sizes, form: str, length: int, batch: int) -> Callable[[str], tuple[Any, ...]]:
    """``loss(way)``: the value, or a surrogate for it, and the gradients of queries and keys, of one layer."""
    import torch

    from shd_ref.cache import packed_size
    from shd_torch import attention_kl
    from shd_torch.supervision import Coded, Factored

    def draw(heads: int) -> Any:
        return torch.randn(batch, heads, length, sizes.width, device=sizes.device, dtype=getattr(torch, sizes.dtype))

    heads, members = sizes.heads, sizes.members
    leaves = [draw(heads).requires_grad_() for _ in range(2)]
    if form == "coded":  # which codes costs nothing
        size = packed_size("sqrt8-row", "causal", heads, length)
        codes = torch.randint(1, 256, (batch * size,), device=sizes.device, dtype=torch.uint8)
        starts = tuple(range(0, batch * size, size))
        taught: Any = Coded(codes, starts, (length,) * batch, heads, "sqrt8-row", "causal", length)
    else:
        mixing = torch.eye(heads, device=sizes.device).repeat_interleave(members, 1).expand(batch, -1, -1) / members
        groups = tuple(tuple(range(head * members, (head + 1) * members)) for head in range(heads))
        taught = Factored(draw(heads * members), draw(heads * members), mixing, is_causal=True, groups=groups)

    def loss(way: str) -> tuple[Any, ...]:
        if way == "eager":
            mask = torch.ones(length, length, dtype=torch.bool, device=sizes.device).tril()
            logits = sizes.width**-0.5 * leaves[0] @ leaves[1].mT
            value = eager_loss(logits.masked_fill(~mask, -torch.inf).softmax(-1), taught.probs())
        else:
            value = attention_kl(*leaves, taught, is_causal=True, backend=way, value="surrogate", check=False)
        return value, *torch.autograd.grad(value, leaves)

    return loss


def find_threshold(cases: Mapping[str, Facts], lengths: tuple[int, ...]) -> int | None:
    """The least length from which on the kernels are faster than fused attention in both forms; None without any."""
    least = None
    for length in sorted(lengths, reverse=True):
        pairs = [
            [cases[f"{way} {form} {length}"]["ms"] for way in ("triton", "sdpa")] for form in ("factored", "coded")
        ]
        if not all(ours < theirs for ours, theirs in pairs):
            break
        least = length
    return least


def live_cases(sizes: Sizes) -> Cases:
    """A step beside a live teacher, whose logits teach in every case."""
    return {way: partial(live_step, sizes, way) for way in ("KD", "KD + SHD sdpa", "KD + SHD triton")}


def live_step(sizes: Sizes, way: str) -> Facts:
    import torch

    from shd_torch import OnlineTeacher, capture_attention, kd_loss, layer_kls

    model = make_decoder(sizes, sizes.teacher_heads).eval()
    student, teacher = make_decoder(sizes, sizes.heads), OnlineTeacher(model, sizes.heads, sizes.layers)
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.lengths[0]), device=sizes.device)

    def loss() -> Any:
        if way == "KD":
            with torch.no_grad():
                wanted = model(tokens).logits
            return kd_loss(wanted, student(tokens).logits, check=False)
        taught = teacher(tokens)
        with capture_attention(student, layers=taught.layers) as captured:
            logits = student(tokens).logits
        options: Facts = {"backend": way.rpartition(" ")[2], "value": "surrogate", "check": False, "beta": BETA}
        return kd_loss(taught.logits, logits, check=False) + sum(layer_kls(captured, taught, **options).values())

    return time_step(sizes, student, loss)


def measure(sizes: Sizes, run: Callable[[], Any], repeats: int) -> Facts:
    """Median of three: milliseconds of a run among ``repeats`` in a row, and those that the host took to launch it.

    Where the two are alike, launches were timed. ``gb`` is the peak of allocated memory, ``held_gb`` what was there.
    """
    import torch

    cuda, rounds = torch.cuda if sizes.device == "cuda" else None, []
    for _ in range(3 if cuda else 1):  # compiled and warm
        run()
    if cuda:
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
    held = cuda.memory_allocated() if cuda else 0
    for _ in range(3 if cuda else 1):
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        launched = time.perf_counter() - started
        if cuda:
            cuda.synchronize()
        rounds.append([1000 * seconds / repeats for seconds in (time.perf_counter() - started, launched)])
    ms, launch_ms = sorted(rounds)[len(rounds) // 2]
    memory = {"gb": cuda.max_memory_allocated() / 1e9, "held_gb": held / 1e9} if cuda else {}
    return {"passed": True, "ms": ms, "launch_ms": launch_ms, **memory}


def test_cases(sizes: Sizes) -> Cases:
    """The tests that need a CUDA device, the kernels' first; a rehearsal only collects them."""
    places = (
        "tests/torch_path/kernels",
        "tests/judge/test_implementations.py",
        "tests/torch_path/data/test_dataset.py",
    )
    return {place: partial(run_tests, sizes, place) for place in places}


def run_tests(sizes: Sizes, place: str) -> Facts:
    words = ["--collect-only"] if sizes.device == "cpu" else []
    if not words and importlib.util.find_spec("xdist"):
        words = ["-n", "8"]  # each compiles its own kernels
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *words, place]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    # Tests that were all skipped show nothing.
    ran = bool(lines) and re.search(r"[1-9]\d* passed|[1-9]\d*/\d+ tests collected", lines[-1]) is not None
    failed = [line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"passed": done.returncode == 0 and ran, "said": lines[-1:], "failed": failed}


class Piece(NamedTuple):
    """A process of the call."""

    seconds: float  # that it may take
    cases: Callable[[Sizes], Cases]


PIECES: Final[dict[str, Piece]] = {
    "kernels": Piece(90, kernel_cases),
    "step": Piece(90, step_cases),
    "loss": Piece(150, loss_cases),
    "live": Piece(60, live_cases),
    "tests": Piece(540, test_cases),
}
"""In the order of their value; the last has what is left."""
