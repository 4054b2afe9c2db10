"""What a clearing-out must not change, written down before it and compared after it.

``python tests/baseline.py write`` records public names and signatures, the help of every command, golden bytes,
published numbers, and results on fixed inputs; ``python tests/baseline.py`` prints everything that is different from
the record and not listed in ``REMOVED``, and exits with 1 where there is something.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
RTOL = 1e-9
"""Sums may be made in another order."""

ROOMS = (
    *(
        "shd_ref",
        "shd_ref.cache",
        "shd_ref.kd",
        "shd_ref.shrink",
        "shd_ref.teacher",
        "shd_ref.recipes",
        "shd_ref.conformance",
    ),
    *("shd_torch", "shd_torch.maps", "shd_torch.kd", "shd_torch.recipes", "shd_torch.rivals", "shd_torch.shrink"),
    *("shd_torch.capture", "shd_torch.supervision", "shd_torch.kl", "shd_torch.teacher", "shd_torch.data"),
    *("shd_torch.training", "shd_torch.doctor", "shd_torch.export"),
)
COMMANDS = (
    *(
        (*("shd",), *((name,) if name else ()))
        for name in ("", "inspect", "plan", "fidelity", "precompute", "verify")
    ),
    *(("shd", name) for name in ("report", "ls", "seal", "merge", "export", "linearize", "conformance", "card")),
    *(("shd-torch", *((name,) if name else ())) for name in ("", "export", "doctor", "shrink", "demo")),
)
FAMILIES = ("llama", "gpt2", "bert", "vit", "qwen3", "gemma", "deit", "dinov2", "mistral", "qwen2")

REMOVED: Mapping[str, str] = {
    r"names: shd_ref\.recipes": "NumPy twins of the recipes, for the judge alone",
    r"names: shd_ref\.kd\.(?!SampledTargets|TopkTargets)": "NumPy twins of the losses on logits, for the judge alone",
    r"names: shd_ref\.(shrink|conformance).*(fit_mixing|part)": "HEAD-21; optional parts of the judge",
    r"help: shd conformance": "--part",
    r"help: shd-torch shrink": "--fit-samples",
    r"names: shd_ref\.cache\.(make|write)_card|help: shd card": "a person writes a shared cache's page",
    r"help: shd: ": "the list of commands lacks card",
    r"names: shd_torch\.doctor\.(Diagnosis|diagnose|Probe)": "sinks, forecasts, inheritance: see shd plan",
    r"(help: shd (plan|fidelity|precompute): |names: shd_ref\.diagnose)": "the strategy simplex",
    r"published: docs/study\.md: lacks ": "the arm of simplex",
    r"bytes: v1: squeeze_heads/(full-|temperature-)?simplex": "the strategy simplex",
    r"bytes: v1: diagnose/(all-strategies|full-map|per-row|more-columns-than-keys)": "the strategy simplex",
    r"names: shd_ref\.cache\.(NO_ATTENTION|Errors|Manifest|NewRecord|StoredRecord|CacheReader|Receipt)": "forms",
    r"names: shd_ref\.cache\.(SampleRecord|CacheWriter\.write_shard)": "one record, to be written and as read",
    r"names: shd_ref\.cache\.(Part|Form|Row|ROWS|F32|U8)": "forms table",
    r"names: shd_ref\.cache\.(Maps|Factors|Attention|Logits|Hidden|CodecError)": "forms table",
    r"bytes: (kd|recipes|shrink)-v1: ": "goldens now, in tests/goldens",
    r"names: shd_torch(\.kl)?\.(attention_kl|explain_backend): ": "its keywords are those of KlKeywords",
    r"names: shd_torch\.(supervision|data)\.(Coded|Dense|Factored)": "inherited from Supervision and CachedBatch",
    r"names: shd_torch\.(doctor\.Wishes|rivals\.(Lesson|Seen|Rival))": "TeacherOutputs, ForwardPass and so on",
    r"names: shd_torch\.shrink\.shrink: ": "its keywords are fields of ShrinkOptions, still given by name",
}
"""Patterns of entries that go or change on purpose, and why."""


def signatures() -> Iterator[tuple[str, str]]:
    """Public names with their signatures; of classes their fields and methods too."""
    for room in ROOMS:
        try:
            module = importlib.import_module(room)
        except ModuleNotFoundError:
            continue
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if inspect.isclass(value):
                for member, text in _members(value):
                    yield f"{room}.{name}{member}", text
            elif callable(value):
                yield f"{room}.{name}", _signature(value)
            else:
                yield f"{room}.{name}", type(value).__name__


def _members(kind: type) -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(kind):
        yield "", ", ".join(f"{field.name}: {field.type}" for field in dataclasses.fields(kind))
    else:
        yield "", _signature(kind)
    for name, value in vars(kind).items():
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)):
            yield f".{name}", _signature(getattr(kind, name))
        elif isinstance(value, property):
            yield f".{name}", "property"


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return "?"


def helps() -> Iterator[tuple[str, str]]:
    """What every command says of itself at 80 columns."""
    shown = {**os.environ, "COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    modules = {"shd": "shd_ref.cli", "shd-torch": "shd_torch.cli"}
    for command, *words in COMMANDS:
        code = f"import sys; sys.argv[0] = {command!r}; from {modules[command]} import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, check=False, env=shown
        )
        yield " ".join([command, *words]), done.stdout


def golden_bytes() -> Iterator[tuple[str, str]]:
    """Digests of cache files, of every vector case of the method and of every golden of the rest."""
    for path in sorted((ROOT / "tests" / "cache" / "golden").rglob("*")):
        if path.is_file():
            yield str(path.relative_to(ROOT)), hashlib.sha256(path.read_bytes()).hexdigest()
    for folder in (ROOT / "specs" / "vectors", ROOT / "tests" / "goldens"):
        for path in sorted(folder.glob("*/*.json")):
            for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
                digest = hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()
                yield f"{path.parent.name}: {case['id']}", digest


def published() -> Iterator[tuple[str, Any]]:
    """Numbers with a decimal point on the pages, and the results that benchmarks keep."""
    for page in (
        "README.md",
        "docs/results.md",
        "docs/study.md",
        "docs/choose.md",
        "docs/shrink.md",
        "docs/doctor.md",
    ):
        numbers = Counter(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", (ROOT / page).read_text(encoding="utf-8")))
        yield page, dict(sorted(numbers.items()))
    for path in (*sorted((ROOT / "benchmarks").rglob("*.json")), ROOT / "docs" / "demo" / "results.json"):
        yield str(path.relative_to(ROOT)), hashlib.sha256(path.read_bytes()).hexdigest()


def results() -> Iterator[tuple[str, list[float]]]:
    """Losses, gradients, squeezes and shrunk students on fixed inputs in float64."""
    import torch

    from shd_ref import ShdError
    from shd_torch import attention_kl
    from shd_torch.maps import shd_loss, softmax, squeeze_heads
    from shd_torch.shrink import shrink
    from shd_torch.supervision import Dense

    random = np.random.default_rng(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.normal(size=shape))

    mask = torch.ones(2, 5, 5, dtype=torch.bool).tril()[:, None]
    loss_mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    probs, outputs = softmax(draw(2, 6, 5, 5), attn_mask=mask), draw(2, 6, 5, 3)
    for strategy in ("shd", "as_printed", "constant", "hard", "mean"):
        for alpha_per in ("map", "row"):
            options = {"alpha_rule": "as_printed"} if strategy == "as_printed" else {"strategy": strategy}
            made = squeeze_heads(
                probs, outputs, num_student_heads=4, query_mask=loss_mask, alpha_per=alpha_per, **options
            )
            yield (
                f"squeeze {strategy} {alpha_per}",
                [made.probs.sum().item(), made.probs.square().sum().item(), made.mixing.square().sum().item()],
            )
    supervision = probs[:, :2]
    for divergence in ("kl", "reverse_kl", "js", "mse"):
        z = draw(2, 2, 5, 5).requires_grad_()
        loss = shd_loss(supervision, z, attn_mask=mask, loss_mask=loss_mask, temperature=2.0, divergence=divergence)
        loss.backward()
        yield f"loss {divergence}", [loss.item(), z.grad.square().sum().item(), z.grad.flatten()[7].item()]
    for backend in ("dense", "sdpa"):
        q, k = draw(2, 2, 5, 4).requires_grad_(), draw(2, 1, 5, 4).requires_grad_()
        loss = attention_kl([q], [k], [Dense(supervision)], attn_mask=mask, loss_mask=loss_mask, backend=backend)
        loss.backward()
        yield f"attention_kl {backend}", [loss.item(), q.grad.square().sum().item(), k.grad.square().sum().item()]

    sys.path.insert(0, str(ROOT / "tests"))
    models = importlib.import_module("support.shrink.models")
    for family in FAMILIES:
        for options in ({"heads": 2}, {"heads": 2, "layers": 2, "neurons": 12}, {"hidden": 16}):
            name = f"shrink {family} {options}"
            try:
                student = shrink(models.make_teacher(family), models.make_data(family), **options).student
            except ShdError as error:
                yield f"{name} refused: {error.code}", []
                continue
            with torch.no_grad():
                logits = student(**models.make_data(family, seed=2)).logits
            yield name, [logits.sum().item(), logits.square().sum().item(), logits.flatten()[5].item()]


PARTS = {"names": signatures, "help": helps, "bytes": golden_bytes, "published": published, "results": results}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """One line for each entry that went or changed; new entries are no difference."""
    for name, before in old.items():
        after = new.get(name)
        if after is None:
            yield f"{name}: gone"
        elif isinstance(before, list):
            if not np.allclose(before, after, rtol=RTOL, atol=1e-12):
                yield f"{name}: {before} -> {after}"
        elif isinstance(before, dict):
            if missing := Counter(before) - Counter(after):
                yield f"{name}: lacks {', '.join(sorted(missing))}"
        elif before != after:
            yield (
                f"{name}: changed"
                if len(str(before)) > 200 or len(str(before)) == 64
                else f"{name}: {before} -> {after}"
            )


def main() -> int:
    """Write the record, or compare with it."""
    record = {part: dict(entries()) for part, entries in PARTS.items()}
    if sys.argv[1:] == ["write"]:
        RECORD.write_text(json.dumps(record, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
        print({part: len(entries) for part, entries in record.items()})
        return 0
    before = json.loads(RECORD.read_text(encoding="utf-8"))
    lines = [f"{part}: {line}" for part in PARTS for line in differences(before[part], record[part])]
    unexpected = [line for line in lines if not any(re.match(pattern, line) for pattern in REMOVED)]
    print("\n".join(unexpected) or "nothing changed that was not meant to", f"({len(lines)} differences)")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
