"""How wrong is a student's gradient from sparse targets, for a byte? Ours against a renormalised top k.

Every form is a teacher's rows as they would be stored: coded, decoded, and given to ``kd_loss`` (forward KL). Against
the gradient from whole rows:

- ``logits``: relative error of the gradient of a token's logits, root mean square over tokens;
- ``body``: the same for the gradient of what the head reads, which is all that the student's body sees of it;
- ``batch``: relative error of the gradient of the head's weights, summed over all tokens.

A renormalised top k is charged twice: what a float16 takes for each value, and what DistillKit's codec takes (ids in
the fewest bits, 16-bit numbers for the exact values and for the terms of the curve that it fits to the others). Both
are given their probabilities without any rounding, which flatters the second most.

Vocabularies: 512, the trained teacher stories260K on its own samples; 32,000 and 151,936, seeded mixtures of a Zipf
distribution with directions of a context, of the entropy that is printed. A student is ``late`` (the teacher
disturbed a little) or ``early`` (a layer missing, or half of the context unknown).

Prints tables and writes ``results/kd_targets.json``. python -m benchmarks.kd_targets [--tokens 128]
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from support.binding.stories import load_stories  # the teacher's architecture, which tests use too
from torch import Tensor, nn

from benchmarks import STORIES, result_path, save
from shd_ref.cache.codecs.logits import RowCode
from shd_torch.kd import TopkTargets, kd_loss, kd_targets_topk

RESULT = result_path(__file__)
SYNTHETIC = (32000, 151936)
WIDTH = 64  # of the synthetic head
ROWS = 32  # at once
# head, bits of its values
CODES = ((4, 8), (8, 8), (16, 6), (16, 8), (32, 6), (32, 8), (50, 6), (50, 8), (50, 12), (128, 6), (128, 8))
CODES += ((128, 12),)
# k, exact values and terms: DistillKit's small budget and its recommendation
RIVALS = ((50, 1, 3), (128, 16, 6))


class Rows(NamedTuple):
    """Some tokens: the teacher's logits, what the student's head reads, and the head."""

    teacher: Tensor  # (R, V)
    hidden: Tensor  # (R, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None


def stories_rows(tokens: int, student: str) -> Iterator[Rows]:
    """The trained teacher on its own samples."""
    teacher = load_stories(STORIES / "stories260K.bin")
    pupil = copy.deepcopy(teacher)
    torch.manual_seed(0)
    with torch.no_grad():
        if student == "early":
            pupil.layers = nn.ModuleList(list(pupil.layers)[:-1])
        else:
            for parameter in pupil.layers.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.05)
        ids = torch.from_numpy(np.load(STORIES / "self_sampled_1024x256_uint16.npy").astype(np.int64))
        logits = teacher(ids[: math.ceil(tokens / 256)])
        kept: list[Tensor] = []
        pupil.norm.register_forward_hook(lambda module, given, made: kept.append(made))
        pupil(ids[: math.ceil(tokens / 256)])
    weight = pupil.embed.weight.detach().double()
    pairs = zip(logits.flatten(0, 1)[:tokens].split(ROWS), kept[0].flatten(0, 1)[:tokens].split(ROWS), strict=True)
    return (Rows(u.double(), h.double(), weight, None) for u, h in pairs)


def synthetic_rows(vocab_size: int, tokens: int, student: str) -> Iterator[Rows]:
    """Zipf's law plus what a context of ``WIDTH`` directions says; ids by frequency, as tokenizers learn them."""
    draw = torch.Generator().manual_seed(vocab_size)
    weight = torch.randn(vocab_size, WIDTH, generator=draw, dtype=torch.float64) * 3.4 / math.sqrt(WIDTH)
    bias = -torch.arange(1, vocab_size + 1, dtype=torch.float64).log()
    known = {"late": 0.95, "early": 0.6}[student]
    for start in range(0, tokens, ROWS):
        rows = min(ROWS, tokens - start)
        # Contexts differ in how much they say: some tokens are nearly certain, some are open.
        strength = 0.3 + 1.2 * torch.rand(rows, 1, generator=draw, dtype=torch.float64)
        context, other = torch.randn(2, rows, WIDTH, generator=draw, dtype=torch.float64)
        hidden = strength * (known * context + math.sqrt(1 - known**2) * other)
        yield Rows((strength * context) @ weight.T + bias, hidden, weight, bias)


def coded(teacher: Tensor, code: RowCode) -> TopkTargets:
    """A teacher's rows after they were stored."""
    topk = kd_targets_topk(teacher, code.head)
    got = code.decode(code.encode(*(field.numpy() for field in topk[:3])))
    return topk._replace(log_probs=torch.from_numpy(got.log_probs), log_tail=torch.from_numpy(got.log_tail))


def renormalised(teacher: Tensor, k: int) -> TopkTargets:
    """The top k as if there were nothing else."""
    topk = kd_targets_topk(teacher, k)
    return topk._replace(log_probs=topk.log_probs.log_softmax(-1), log_tail=torch.full_like(topk.log_tail, -math.inf))


def forms(vocab_size: int) -> dict[str, tuple[float, Any]]:
    """By name: bytes a token, and what makes the targets of rows."""
    bits = math.ceil(math.log2(vocab_size))
    made: dict[str, tuple[float, Any]] = {}
    for k, exact, terms in RIVALS:
        for name, size in (("float16", k * (bits + 16)), ("curve", k * bits + 16 * (exact + terms))):
            made[f"renormalised top {k}, {name}"] = (size / 8, partial(renormalised, k=k))
    for head, value_bits in CODES:
        code = RowCode(vocab_size, head, value_bits)
        made[f"top {head} + tail, {value_bits} bits"] = (code.row_bytes, partial(coded, code=code))
    return made


def gradient(targets: Any, rows: Rows) -> Tensor:
    """That of each token's logits."""
    logits = rows.hidden @ rows.weight.T + (0.0 if rows.bias is None else rows.bias)
    logits.requires_grad_()
    kd_loss(targets, logits, reduction="sum", check=False).backward()
    assert logits.grad is not None
    return logits.grad


def measure(vocab_size: int, tokens: int, student: str) -> dict[str, Any]:
    """Errors of every form, and what the rows are like."""
    source = stories_rows(tokens, student) if vocab_size == 512 else synthetic_rows(vocab_size, tokens, student)
    made = forms(vocab_size)
    squares = {name: np.zeros(2) for name in made}
    sums: dict[str, Any] = dict.fromkeys(made, 0.0)
    whole, exact_sum, entropy, divergence = np.zeros(2), 0.0, 0.0, 0.0
    for rows in source:
        exact = gradient(rows.teacher, rows)
        whole += [float(exact.square().sum()), float((exact @ rows.weight).square().sum())]
        exact_sum = exact_sum + exact.T @ rows.hidden
        log_p = rows.teacher.log_softmax(-1)
        entropy -= float((log_p.exp() * log_p).sum())
        logits = rows.hidden @ rows.weight.T + (0.0 if rows.bias is None else rows.bias)
        divergence += float(kd_loss(rows.teacher, logits, reduction="sum", check=False))
        for name, (_, make) in made.items():
            off = gradient(make(rows.teacher), rows) - exact
            squares[name] += [float(off.square().sum()), float((off @ rows.weight).square().sum())]
            sums[name] = sums[name] + off.T @ rows.hidden
    scale = float(torch.as_tensor(exact_sum).norm())
    return {
        "vocabulary": vocab_size,
        "student": student,
        "tokens": tokens,
        "entropy": entropy / tokens,
        "kl": divergence / tokens,
        "forms": {
            name: {
                "bytes": made[name][0],
                "logits": math.sqrt(squares[name][0] / whole[0]),
                "body": math.sqrt(squares[name][1] / whole[1]),
                "batch": float(sums[name].norm()) / scale,
            }
            for name in made
        },
    }


def show(found: dict[str, Any]) -> None:
    print(
        f"\nV = {found['vocabulary']}, {found['student']} student: {found['tokens']} tokens, "
        f"entropy {found['entropy']:.2f}, KL {found['kl']:.3f} nats"
    )
    print(f"{'form':<30}{'bytes':>6}{'logits':>9}{'body':>9}{'batch':>9}")
    for name, row in found["forms"].items():
        errors = "".join(f"{row[by]:>9.4f}" for by in ("logits", "body", "batch"))
        print(f"{name:<30}{row['bytes']:>6.0f}{errors}")
    for rival in [name for name in found["forms"] if name.startswith("renormalised")]:
        for by in ("body", "batch"):
            bound = found["forms"][rival][by]
            ours = [
                (row["bytes"], name)
                for name, row in found["forms"].items()
                if row[by] <= bound and not name.startswith("renormalised")
            ]
            said = "{:.0f} bytes ({})".format(*min(ours)) if ours else "none of ours"
            print(f"  no worse than {rival} by {by}: {said} against {found['forms'][rival]['bytes']:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    vocabularies = ([512] if STORIES.is_dir() else []) + [*SYNTHETIC]
    if len(vocabularies) == 2:
        print(f"without the real vocabulary: no folder {STORIES.name} in the shared data")
    results = []
    for vocab_size in vocabularies:
        for student in ("late", "early"):
            results.append(measure(vocab_size, arguments.tokens * (8 if vocab_size == 512 else 1), student))
            show(results[-1])
    document = {"machine": platform.machine(), "torch": torch.__version__, "results": results}
    save(document, RESULT)


if __name__ == "__main__":
    main()
