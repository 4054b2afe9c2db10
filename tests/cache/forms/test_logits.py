"""Rows of logits: what is stored of them, what that costs, what is refused (CACHE-160 to 171)."""

import contextlib
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.makers import (
    ALL_CLASSES,
    AVERAGED,
    HIDDEN_INT8,
    HIDDEN_LAYERS,
    KINDS,
    NARROW,
    TOPK,
    VOCABULARY,
    job,
    key_of,
)
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import Logits, SampleRecord
from shd_ref.cache.codecs.logits import pick_classes

"""The sum over the rest is made in single precision where logits are no better; it is stored in binary16."""
CODECS = {"topk": TOPK, "narrow": NARROW, "float16": ALL_CLASSES}


def rows_of(form: Logits, count: int = 9, seed: int = 3, spread: float = 3.0) -> NDArray[np.float32]:
    rows = spread * np.random.default_rng(seed).standard_normal((count, form.padded_vocab_size or form.vocab_size))
    rows[:, form.vocab_size :] = -64
    return rows.astype(np.float32)


def stored(form: Logits, codes: NDArray[np.uint8]) -> SampleRecord:
    """A record of so many positions, as a reader gives it."""
    length = len(codes) if form.rows == "positions" else 1
    return SampleRecord(0, key_of(0), length, {"logits": codes.reshape(-1)})


def test_the_largest_of_many_are_found_wherever_they_lie() -> None:
    """Blocks are looked at first; ties at the edge, in one block and across blocks, go to the lower ids."""
    rng = np.random.default_rng(2)
    for size, head in ((700, 1), (64 * 9, 8), (64 * 9 + 63, 8), (5000, 70)):
        logits = rng.integers(0, 40, (20, size)).astype(np.float32)
        picked = pick_classes(logits, head, 1.0)
        wanted = np.sort(np.argsort(-logits, axis=-1, kind="stable")[:, :head], axis=-1)
        np.testing.assert_array_equal(picked.head_ids, wanted)


@pytest.mark.parametrize("codec", CODECS)
def test_decoded_rows_are_within_the_stated_bound(codec: str) -> None:
    form = CODECS[codec]
    rows = rows_of(form)[: 9 if form.rows == "positions" else 1]
    codes = form.encode(rows)
    assert codes.shape == (len(rows), form.row_sizes[0])
    found = form.decode(stored(form, codes))
    kept = rows[:, :VOCABULARY].astype(np.float64)
    if isinstance(found, np.ndarray):
        np.testing.assert_allclose(found, kept, rtol=2.0**-11, atol=2.0**-25)
        error = form.measure(rows, codes)
        assert error.kl_max <= (2.0**-11 * np.abs(kept).max()) ** 2 / 2
        return
    log_p = kept / found.temperature
    log_p -= np.log(np.exp(log_p).sum(axis=-1, keepdims=True))
    exact = np.exp(np.take_along_axis(log_p, found.ids, -1))
    assert (np.abs(np.exp(found.log_probs) - exact) <= form.code.bound(codes)).all()
    assert (found.temperature, found.vocab_size) == (form.temperature, VOCABULARY)
    whole = np.exp(found.log_probs).sum(axis=-1) + np.exp(found.log_tail)
    np.testing.assert_allclose(whole, 1.0, rtol=1e-12)


@pytest.mark.parametrize("codec", CODECS)
def test_errors_are_measured_as_the_format_says(codec: str) -> None:
    form = CODECS[codec]
    rows = rows_of(form, 1)
    codes = form.encode(rows)
    found, error = form.decode(stored(form, codes)), form.measure(rows, codes)
    temperature = form.temperature or 1.0
    p = np.exp(rows[0, :VOCABULARY].astype(np.float64) / temperature)
    p /= p.sum()
    if isinstance(found, np.ndarray):
        said = np.exp(found[0].astype(np.float64))
        said /= said.sum()
        exact, coded = p, said
    else:
        head, tail = found.ids[0], codes[0, :2].view("<f2").astype(np.float64)[0]
        probs = np.exp(found.log_probs[0])
        exact = np.append(p[head], 1 - p[head].sum())
        coded = np.append(probs, np.exp(tail))
        said = np.full(VOCABULARY, np.exp(tail) / (VOCABULARY - form.head))
        said[head] = probs
    np.testing.assert_allclose(error.kl_mean, (exact * np.log(exact / coded)).sum(), rtol=1e-6)
    np.testing.assert_allclose(error.tv_mean, np.abs(exact - coded).sum() / 2, rtol=1e-9)
    np.testing.assert_allclose(error.gradient_mean, np.linalg.norm(said - p) / np.linalg.norm(p), rtol=1e-9)
    assert (error.kl_max, error.rows) == (error.kl_mean, 1)


COMPARED = CODECS | {"all kept": replace(TOPK, head=VOCABULARY)}


@pytest.mark.parametrize("codec", COMPARED)
def test_a_run_of_the_teacher_is_told_from_another(codec: str) -> None:
    """What coding may move is let pass, and with it what two runs differ by; nothing else is."""
    form = COMPARED[codec]
    rows = rows_of(form)[: 9 if form.rows == "positions" else 1]
    temperature = form.temperature or 1.0
    record = stored(form, form.encode(rows))
    moved, bound = form.compare(record, rows)
    assert moved.shape == bound.shape == (len(rows),)
    assert (moved <= bound).all()
    assert (bound < 0.2).all()

    def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
        p = np.exp(logits[:, :VOCABULARY].astype(np.float64) / temperature)
        return p / p.sum(axis=-1, keepdims=True)

    again = rows + (0.01 * np.random.default_rng(8).standard_normal(rows.shape)).astype(np.float32)
    between = np.abs(softmax(rows) - softmax(again)).sum(axis=-1) / 2
    assert (form.compare(record, again)[0] <= bound + between).all()
    for other in (rows_of(form, seed=4)[: len(rows)], -rows):
        found, limit = form.compare(record, other)
        assert (found > limit + 0.01).any()
    with pytest.raises(ShdError, match="rows must be"):
        form.compare(record, np.concatenate((rows, rows)))


@pytest.mark.parametrize("codec", ["topk", "narrow"])
def test_rows_that_do_not_count_are_rows_of_zeros_and_cost_nothing(codec: str) -> None:
    form = CODECS[codec]
    rows, counted = rows_of(form), np.ones(9, np.bool_)
    counted[[0, 5]] = False
    broken = rows.copy()
    broken[[0, 5]] = np.nan
    codes = form.encode(broken, counted)
    wanted = rows.copy()
    wanted[[0, 5]] = 0
    padded = wanted.copy()
    padded[:, VOCABULARY:] = rows[:, VOCABULARY:]
    np.testing.assert_array_equal(codes, form.encode(padded))
    error = form.measure(broken, codes, counted)
    assert error.rows == 7
    assert form.measure(broken, codes, np.zeros(9, np.bool_)).rows == 0
    with pytest.raises(ShdError, match="must be finite"):
        form.encode(broken)


def test_padding_of_the_vocabulary_is_cut_where_it_is_padding() -> None:
    rows = rows_of(TOPK)
    rows[:, VOCABULARY:] = -np.inf
    np.testing.assert_array_equal(TOPK.encode(rows), TOPK.encode(rows_of(TOPK)))
    rows[4, VOCABULARY] = 5
    with pytest.raises(
        ShdError, match=r"mass of at most 0\.001 in every row; got .* classes from 37 to 39"
    ) as caught:
        TOPK.encode(rows)
    assert (caught.value.code, caught.value.spec_id) == ("argument-value", "CACHE-168")
    rows[4, VOCABULARY] = np.nan
    with pytest.raises(ShdError, match="got nan"):
        TOPK.encode(rows)


WRONG_FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "too many classes": (TOPK, {"vocab_size": 2**24 + 1, "padded_vocab_size": None}),
    "absurd padding": (TOPK, {"padded_vocab_size": 2**53 - 1}),
    "no temperature": (TOPK, {"temperature": None}),
    "absurd head": (TOPK, {"head": 2**53 - 1}),
    "bits": (TOPK, {"value_bits": 17}),
    "a head of millions": (TOPK, {"vocab_size": 2**24, "padded_vocab_size": None, "head": 2**16 + 1}),
    "float16 with bits": (ALL_CLASSES, {"value_bits": 8}),
    "a teacher twice": (AVERAGED, {"with_teachers": AVERAGED.with_teachers[:1] * 2}),
    "another's padding below the vocabulary": (AVERAGED, {"vocab_size": 48, "padded_vocab_size": None}),
    "hidden rows": (HIDDEN_INT8, {"rows": "sample"}),
    "a layer twice": (HIDDEN_INT8, {"layers": (HIDDEN_LAYERS[0],) * 2}),
    "layer beyond all": (HIDDEN_LAYERS[0], {"layer": 1001}),
    "absurd width": (HIDDEN_LAYERS[0], {"width": 2**20 + 1}),
}


def test_the_first_teacher_is_not_averaged_with_itself() -> None:
    own = replace(AVERAGED.with_teachers[0], sha256=job().teacher.sha256)
    with refusal("argument-value", "other teachers than the first"):
        job(**KINDS, logits=replace(AVERAGED, with_teachers=(own,)))
    with pytest.raises(ShdError, match="64 hex digits"):
        replace(own, sha256="second.onnx")


@pytest.mark.parametrize("name", WRONG_FORMS)
def test_forms_that_make_no_sense(name: str) -> None:
    form, changes = WRONG_FORMS[name]
    with refusal("argument-value"):
        replace(form, **changes)


def put_half(codes: NDArray[np.uint8], value: float, place: int = 0) -> NDArray[np.uint8]:
    changed = codes.copy()
    changed[0, place : place + 2] = np.array([value], "<f2").view(np.uint8)
    return changed


@pytest.mark.parametrize("codec", ["topk", "narrow", "float16"])
def test_bytes_that_no_encoder_writes_are_refused_by_the_decoder(codec: str) -> None:
    form = CODECS[codec]
    codes = form.encode(rows_of(form, 1))
    wrong = {"not a number": put_half(codes, np.nan)}
    if codec != "float16":
        wrong |= {
            "above one": put_half(codes, 1.0),
            "no class": np.zeros_like(codes),
            "all": np.full_like(codes, 255),
        }
    for name, bad in wrong.items():
        with pytest.raises(ShdError) as caught:
            form.decode(stored(form, bad))
        assert caught.value.code == "cache-corrupt", name


def test_a_large_vocabulary_takes_little_memory() -> None:
    """Of 64 rows of 152,064 classes float64 copies would be 78 MB each."""
    form = replace(NARROW, vocab_size=152_064, head=64)
    rows = np.random.default_rng(0).standard_normal((64, form.vocab_size), np.float32)
    tracemalloc.start()
    codes = form.encode(rows)
    error = form.measure(rows, codes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert error.rows == 64
    assert peak < 150 * 2**20
    assert form.row_sizes[0] < 64 * 3.5 + 8


def test_a_forged_row_takes_little_memory() -> None:
    """The largest rows there are, as a frame of a few bytes could expand to them."""
    form = replace(NARROW, vocab_size=2**24, head=2**16, value_bits=16)
    rows = np.full((4, form.row_sizes[0]), 255, np.uint8)
    rows[:, :2] = 0
    tracemalloc.start()
    for use in (lambda: form.decode(stored(form, rows)), lambda: form.code.bound(rows[:1])):
        with contextlib.suppress(ShdError):
            use()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150 * 2**20
