"""How many bytes does a gradient need? Codecs of the cache beside top-k, on merged maps of a pretrained encoder.

Heads of a MiniLM (12 -> 6, adjacent pairs by halves) on real text, and the same maps made causal. The gradient of
the KL with respect to a student's logits is ``A_student - A~``; the error is that of ``A~`` over its size, for a
student at a KL of about 0.03 nats. Top-k stores k values in float16 with their places in a byte each, and spreads
the rest evenly. The last columns are what top-k needs for the error of the codec, interpolated. Prints a table and
writes ``results/codec_rate.json``. python -m benchmarks.codec_rate [--texts 8] [--length 128]
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from benchmarks import SHARED, machine, minilm_folder, result_path, save
from shd_ref.cache import CODECS, codec_error, decode, encode, pack

RESULT = result_path(__file__)
TEXT = SHARED / "wikitext2" / "valid.txt"
KEPT = (4, 8, 16, 32, 48, 64, 96)
Maps = NDArray[np.float32]


def merged_maps(texts: int, length: int) -> Maps:
    """``(layers * texts * 6, L, L)`` merged maps."""
    folder = minilm_folder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    words = TEXT.read_text(encoding="utf-8").split()
    step = 2 * length
    batch = [" ".join(words[start : start + step]) for start in range(0, texts * step, step)]
    inputs = tokenizer(batch, return_tensors="pt", truncation=True, max_length=length, padding=True)
    with torch.no_grad():
        maps = torch.stack(model(**inputs, output_attentions=True).attentions)  # (layers, B, 12, L, L)
    return maps.unflatten(2, (6, 2)).mean(3).flatten(0, 2).numpy()


def near_student(maps: Maps) -> Maps:
    """A student whose maps differ by noise in its logits: a KL of about 0.03."""
    noise = np.random.default_rng(0).normal(0, 0.25, maps.shape).astype(np.float32)
    student = maps * np.exp(noise)
    return student / student.sum(-1, keepdims=True)


def top_k(maps: Maps, kept: int) -> Maps:
    """The largest entries of each row as float16, the rest spread evenly over the other allowed keys."""
    order = np.argsort(-maps, axis=-1, kind="stable")[..., :kept]
    values = np.take_along_axis(maps, order, -1).astype(np.float16).astype(np.float32)
    others = (maps > 0).astype(np.float32)
    np.put_along_axis(others, order, 0, -1)
    count = np.maximum(others.sum(-1, keepdims=True), 1)
    decoded = others * np.maximum(1 - values.sum(-1, keepdims=True), 1e-6) / count
    np.put_along_axis(decoded, order, values, -1)
    return decoded / decoded.sum(-1, keepdims=True)


def gradient_error(maps: Maps, decoded: Maps, student: Maps) -> float:
    return float(np.linalg.norm(decoded - maps) / np.linalg.norm(student - maps))


def measure(maps: Maps, support: str) -> list[dict[str, Any]]:
    student = near_student(maps)
    length = maps.shape[-1]
    allowed = length if support == "full" else (length + 1) / 2
    tops = []
    for kept in KEPT:
        decoded = top_k(maps, kept)
        entries = 3 * sum(min(kept, length if support == "full" else row + 1) for row in range(length)) / length
        tops.append((gradient_error(maps, decoded, student), entries, kept, codec_error(maps, decoded)))
    rows = [
        {"form": f"top-{kept}", "bytes_a_row": entries, "gradient_error": error, "kl": distortion.kl_mean}
        for error, entries, kept, distortion in tops
    ]
    errors, sizes = np.array([top[0] for top in tops]), np.array([top[1] for top in tops])
    for codec in CODECS:
        codes = encode(codec, maps)
        decoded = decode(codec, codes)
        error = gradient_error(maps, decoded, student)
        size = len(pack(codes, support, codec)) / (len(maps) * length)
        # Where top-k does not reach the error with the keys tried, it needs every key.
        equal = float(np.interp(-np.log(error + 1e-12), -np.log(errors), sizes, right=3 * allowed))
        rows.append(
            {
                "form": codec,
                "bytes_a_row": size,
                "gradient_error": error,
                "kl": codec_error(maps, decoded).kl_mean,
                "top_k_bytes_at_equal_error": equal,
                "top_k_over_codec": equal / size,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    arguments = parser.parse_args()
    full = merged_maps(arguments.texts, arguments.length)
    causal = np.tril(full)
    causal /= causal.sum(-1, keepdims=True)
    report: dict[str, Any] = {"machine": machine(1), "texts": arguments.texts, "length": arguments.length}
    for support, maps in (("full", full), ("causal", causal.astype(np.float32))):
        report[support] = measure(maps, support)
        titles = ("bytes a row", "gradient error", "KL", "top-k, same error", "ratio")
        print(f"\n{support}\n{'':12}" + "".join(f"{title:>{max(10, len(title) + 2)}}" for title in titles))
        for row in report[support]:
            equal = row.get("top_k_bytes_at_equal_error")
            more = "" if equal is None else f"{equal:19.0f}{row['top_k_over_codec']:10.1f}"
            print(f"{row['form']:12}{row['bytes_a_row']:13.0f}{row['gradient_error']:16.2%}{row['kl']:10.1e}{more}")
    save(report, RESULT)


if __name__ == "__main__":
    main()
