import struct

import numpy as np
import pytest
import xxhash
from support.refusals import refusal

from shd_ref.cache import dataset_fingerprint, sample_key, trim_inputs, trim_sample

TOKENS = np.array([101, 7592, 102], dtype=np.int64)


def test_key_follows_the_specification() -> None:
    """CACHE-30 by hand."""
    image = np.array([[0.5, -1.0]], dtype=np.float32)
    by_hand = b"shd-sample-key-1\n"
    by_hand += struct.pack("<I", 9) + b"input_ids" + struct.pack("<I", 5) + b"int64" + struct.pack("<IQ", 1, 3)
    by_hand += struct.pack("<3q", 101, 7592, 102)
    by_hand += struct.pack("<I", 6) + b"pixels" + struct.pack("<I", 7) + b"float32" + struct.pack("<IQQ", 2, 1, 2)
    by_hand += struct.pack("<2f", 0.5, -1.0)
    assert sample_key({"pixels": image, "input_ids": TOKENS}) == xxhash.xxh3_128_hexdigest(by_hand)


def test_integer_width_and_byte_order_do_not_matter() -> None:
    values = np.array([1, 2, 100])
    assert len({sample_key({"x": values.astype(dtype)}) for dtype in ("int8", "uint16", "int64", ">i4")}) == 1


def test_float_width_and_memory_order_do_not_matter() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4) / 8
    expected = sample_key({"x": values})
    assert sample_key({"x": values.astype(np.float64)}) == expected
    assert sample_key({"x": values.astype(np.float16)}) == expected
    assert sample_key({"x": np.asfortranarray(values)}) == expected
    assert sample_key({"x": np.repeat(values, 2, axis=0)[::2]}) == expected


def test_content_matters() -> None:
    variants = [
        {"x": TOKENS},
        {"y": TOKENS},
        {"x": TOKENS[::-1]},
        {"x": TOKENS[None]},
        {"x": TOKENS.astype(np.float32)},
        {"x": TOKENS > 200},
        {"x": (TOKENS > 200).astype(np.int64)},
        {"x": TOKENS, "y": TOKENS},
        {"x": np.array(101)},
        {"x": np.array([], dtype=np.int64)},
    ]
    assert len({sample_key(inputs) for inputs in variants}) == len(variants)


@pytest.mark.parametrize(
    "inputs", [{}, {"x": np.array(["a"])}, {"x": np.array([1j])}, {"x": np.array([2**63], dtype=np.uint64)}]
)
def test_key_refuses(inputs: dict[str, np.ndarray]) -> None:
    with refusal("inputs-invalid"):
        sample_key(inputs)


def test_trailing_padding_does_not_change_a_key() -> None:
    padded = {"ids": np.array([5, 6, 7, 0, 0]), "mask": np.array([1, 1, 1, 0, 0]), "other": np.ones((2, 5))}
    trimmed, length = trim_sample(padded, "mask")
    assert length == 3
    assert {name: array.shape for name, array in trimmed.items()} == {"ids": (3,), "mask": (3,), "other": (2, 5)}
    longer = {name: np.pad(array, (0, 4)) if array.ndim == 1 else array for name, array in padded.items()}
    assert sample_key(trim_sample(longer, "mask")[0]) == sample_key(trimmed)


@pytest.mark.parametrize(
    ("mask", "message"),
    [(np.zeros(4), "at least one token"), (np.ones((1, 4)), r"must be \(L,\)"), (None, "must hold the mask 'mask'")],
)
def test_trim_refuses(mask: np.ndarray | None, message: str) -> None:
    inputs = {"ids": np.arange(4)} | ({} if mask is None else {"mask": mask})
    with refusal("inputs-invalid", message):
        trim_sample(inputs, "mask")


def test_each_sequence_is_cut_by_its_own_mask() -> None:
    """Also where both are padded to one length."""
    sample = {"ids": np.array([5, 6, 0, 0]), "mask": np.array([1, 1, 0, 0])}
    sample |= {"decoder_ids": np.array([7, 8, 9, 0]), "decoder_mask": np.array([1, 1, 1, 0])}
    names = ("decoder_ids", "decoder_mask")
    cut, *lengths = trim_inputs(sample, "mask", names, "decoder_mask")
    sizes = {"ids": 2, "mask": 2, "decoder_ids": 3, "decoder_mask": 3}
    assert {name: len(array) for name, array in cut.items()} == sizes
    assert lengths == [2, 3]
    longer = {name: np.append(array, np.zeros(5, np.int64)) for name, array in sample.items()}
    assert sample_key(trim_inputs(longer, "mask", names, "decoder_mask")[0]) == sample_key(cut)
    uncut, *lengths = trim_inputs(sample, "mask", names, None)
    assert len(uncut["decoder_ids"]) == 4
    assert lengths == [2, None]


def test_fingerprint_depends_on_order() -> None:
    keys = ["00" * 16, "ff" * 16]
    assert dataset_fingerprint(keys) == xxhash.xxh3_128_hexdigest(b"shd-dataset-1\n" + bytes(16) + b"\xff" * 16)
    assert dataset_fingerprint(keys) != dataset_fingerprint(reversed(keys))
