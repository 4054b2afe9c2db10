"""Records that do not fit their manifest: a table of forms and faults, each refused without a trace."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.makers import (
    ALL_CLASSES,
    ALONE,
    FACTORS,
    HIDDEN_INT8,
    KINDS,
    TOPK,
    contents,
    errors_of,
    factors_of,
    job,
    length_of,
    record_of,
)
from support.refusals import refusal

from shd_ref.cache import CacheWriter, SampleInputs, encode_factors

JOBS: dict[str, dict[str, Any]] = {
    "maps": {},
    "causal": {"support": "causal"},
    "own shapes": KINDS,
    "factors": {"codec": "int8", "factors": FACTORS},
    "around": {"codec": "int8", "factors": FACTORS, "padding": "around"},
    "topk": {"logits": TOPK},
    "float16": {"logits": ALL_CLASSES},
    "hidden": {"hidden": HIDDEN_INT8},
    "alone": ALONE["topk"],
    "seeds": {"inputs": SampleInputs(("input_ids",), None, "augmentation")},
}
LENGTH = length_of(1)
Fault = tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]


def say(code: str, **changes: Any) -> Fault:
    """Other members of the record."""
    return code, lambda _parts: changes


def part(code: str, name: str, change: Callable[[Any], Any]) -> Fault:
    """Another part; None leaves it out."""
    return code, lambda parts: {"parts": {name: change(parts.get(name))}}


def _mass_on_padding(codes: np.ndarray) -> np.ndarray:
    padded = np.pad(codes, ((0, 0), (0, 1), (0, 1)))
    padded[0, 0, -1] = 1
    return padded


def _number(value: float) -> Callable[[np.ndarray], np.ndarray]:
    """Rows of logits whose first number is another."""

    def change(codes: np.ndarray) -> np.ndarray:
        changed = codes.copy()
        changed[0, :2] = np.array([value], "<f2").view(np.uint8)
        return changed

    return change


def _rows(name: str) -> dict[str, Fault]:
    return {
        "left out": part("argument-shape", name, lambda codes: None),
        "a row too few": part("argument-shape", name, lambda codes: codes[:-1]),
        "a byte too few": part("argument-shape", name, lambda codes: codes[:, 1:]),
        "no array": part("argument-shape", name, lambda codes: codes.tolist()),
    }


NOT_A_NUMBER = part("not-finite", "logits", _number(np.nan))
FAULTS: dict[str, dict[str, Fault]] = {
    "maps": {
        "key": say("argument-value", key="../../../etc/passwd"),
        "length zero": say("argument-shape", length=0),
        "padding in front": say("argument-shape", first=1),
        "a layer too few": part("argument-shape", "L02", lambda codes: None),
        "a part too many": part("argument-shape", "logits", lambda _: np.zeros((LENGTH, 3), np.uint8)),
        "a head too many": part("argument-shape", "L01", lambda codes: np.repeat(codes, 2, axis=0)),
        "mass on padding": part("support-mismatch", "L01", _mass_on_padding),
        "code type": part("argument-dtype", "L01", lambda codes: codes.astype(np.int32)),
        "alphas not finite": part("not-finite", "alphas", lambda _: np.full((2, 2), np.nan, np.float32)),
        "mixing shape": part("argument-shape", "mixing", lambda _: np.zeros((2, 4, 2), np.float32)),
    },
    "causal": {"mass above the diagonal": part("support-mismatch", "L01", np.ones_like)},
    "own shapes": {
        f"shapes {shapes}": say("argument-shape", shapes=shapes)
        for shapes in ((), ((2, 2),), ((90, 2), (2, 2)), ((0, 1), (1, 1)))
    },
    "factors": {
        "a code of -128": part("argument-value", "L01", lambda f: replace(f, queries=np.full_like(f.queries, -128))),
        "negative steps": part("argument-value", "L01", lambda f: replace(f, query_steps=-f.query_steps)),
        "another codec": part("argument-shape", "L01", lambda _: _factors("float16")),
        "left out": part("argument-shape", "L01", lambda _: None),
        "no mixing": part("argument-shape", "mixing", lambda _: None),
        "padding in front": say("argument-shape", first=1),
    },
    "around": {"nothing but padding": say("argument-shape", first=LENGTH)},
    "topk": {
        **_rows("logits"),
        "not a number": NOT_A_NUMBER,
        "infinite": part("argument-value", "logits", _number(np.inf)),  # no NaN, and above 0
    },
    "float16": {"not a number": NOT_A_NUMBER, "infinite": part("not-finite", "logits", _number(np.inf))},
    "hidden": {
        **_rows("H11"),
        "not a number": part("not-finite", "H11", lambda codes: np.full_like(codes, 255)),
        "negative step": part("argument-value", "H11", lambda c: c | np.array([0, 0, 0, 128] + [0] * 7, np.uint8)),
        "a code of -128": part("argument-value", "H11", lambda c: np.hstack((c[:, :-1], c[:, -1:] * 0 + 128))),
    },
    "seeds": {f"seed {seed}": say("argument-value", seed=seed) for seed in (None, -1, 2**53)},
    "alone": {f"first {first}": say("argument-shape", first=first) for first in (-1, 2**40, 9)}
    | {"shapes": say("argument-shape", shapes=((1, 1),))},
}


def _job(form: str) -> Any:
    return job(num_samples=2, samples_per_shard=2, **JOBS[form])


def _factors(codec: str) -> Any:
    return encode_factors(codec, *factors_of(_job("factors"), 1, 0))


@pytest.mark.parametrize(("form", "fault"), [(form, fault) for form, faults in FAULTS.items() for fault in faults])
def test_records_that_do_not_fit_are_refused_without_a_trace(tmp_path: Path, form: str, fault: str) -> None:
    manifest, (code, change) = _job(form), FAULTS[form][fault]
    broken = record_of(manifest, 1, **change(dict(record_of(manifest, 1).parts)))
    writer = CacheWriter(tmp_path, manifest)
    before = contents(tmp_path)
    with refusal(code):
        writer.write_shard(0, [record_of(manifest, 0), broken], errors_of(manifest))
    assert contents(tmp_path) == before
