from __future__ import annotations

import numpy as np
import pytest
from support.makers import rows_of
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import CODECS, SUPPORTS, encode, pack, packed_size, unpack


@pytest.mark.parametrize("length", [1, 2, 7, 33])
@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("codec", CODECS)
def test_unpack_undoes_pack(codec: str, support: str, length: int) -> None:
    codes = encode(codec, rows_of((3, length, length), 1, causal=support == "causal"))
    blob = pack(codes, support, codec)
    assert blob.shape == (packed_size(codec, support, 3, length),)
    np.testing.assert_array_equal(unpack(blob, codec, support, 3, length), codes)


def test_causal_bytes_are_the_lower_triangle_row_by_row() -> None:
    codes = np.array([[[1, 0, 0], [2, 3, 0], [4, 5, 6]], [[7, 0, 0], [8, 9, 0], [10, 11, 12]]], dtype=np.uint8)
    assert pack(codes, "causal").tolist() == list(range(1, 13))


def test_half_byte_codes_fill_the_lower_half_first() -> None:
    codes = np.array([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]], dtype=np.uint8)
    assert pack(codes, "full", "u4").tolist() == [0x21, 0x43, 0x65, 0x87, 0x09]
    with pytest.raises(ShdError, match="at most 15; got 16"):
        pack(codes + np.uint8(7), "full", "u4")


def test_wide_codes_are_little_endian() -> None:
    codes = np.array([[[0x0102]]], dtype=np.uint16)
    assert pack(codes, "full").tolist() == [2, 1]
    assert pack(codes.astype(">u2"), "full").tolist() == [2, 1]


def test_strided_codes_pack_like_contiguous_ones() -> None:
    codes = encode("float32", rows_of((2, 6, 6), 2, causal=False))
    assert pack(codes[:, ::2, ::2], "full").tolist() == pack(codes[:, ::2, ::2].copy(), "full").tolist()


def test_causal_refuses_mass_in_the_future() -> None:
    codes = np.zeros((2, 3, 3), dtype=np.uint8)
    codes[1, 0, 2] = 9
    with refusal("support-mismatch", "got 9 at head 1, row 0, key 2"):
        pack(codes, "causal")


@pytest.mark.parametrize(("shape", "support"), [((2, 3), "full"), ((2, 3), "causal"), ((2, 3, 4), "causal")])
def test_pack_refuses_maps_that_do_not_fit_their_support(shape: tuple[int, ...], support: str) -> None:
    with pytest.raises(ShdError, match=r"must be \(H_s, n, n\)"):
        pack(np.zeros(shape, dtype=np.uint8), support)


def test_causal_maps_are_square() -> None:
    with refusal("argument-shape", "must be square; got 3 rows and 4 keys"):
        packed_size("sqrt8-row", "causal", 2, 3, 4)


@pytest.mark.parametrize("codec", ["float32", "sqrt8-row", "u4"])
@pytest.mark.parametrize("shape", [(1, 3, 5), (3, 5, 3), (1, 1, 7)])
def test_maps_with_other_keys_than_rows_are_packed_whole(codec: str, shape: tuple[int, int, int]) -> None:
    probs = np.random.default_rng(0).dirichlet(np.ones(shape[2]), shape[:2]).astype(np.float32)
    codes = encode(codec, probs)
    blob = pack(codes, "full", codec)
    assert len(blob) == packed_size(codec, "full", *shape)
    np.testing.assert_array_equal(unpack(blob, codec, "full", *shape), codes)


def test_unknown_support() -> None:
    with pytest.raises(ShdError, match="support must be one of full, causal; got 'window'"):
        packed_size("u4", "window", 1, 1)


@pytest.mark.parametrize(
    "blob", [np.zeros(8, np.uint8), np.zeros(10, np.uint8), np.zeros(9, np.int8), np.zeros((3, 3), np.uint8)]
)
def test_unpack_refuses_another_size(blob: np.ndarray) -> None:
    with pytest.raises(ShdError, match=r"blob must be \(9,\) uint8"):
        unpack(blob, "sqrt8-row", "full", 1, 3)
