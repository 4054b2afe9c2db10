from collections.abc import Callable

import numpy as np
import pytest
from support.makers import rows_of

from shd_ref import ShdError
from shd_ref.cache import encode, pack, packed_size, unpack


def test_half_byte_codes_fill_the_lower_half_first() -> None:
    codes = np.array([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]], dtype=np.uint8)
    assert pack(codes, "full", "u4").tolist() == [0x21, 0x43, 0x65, 0x87, 0x09]


def test_strided_codes_pack_like_contiguous_ones() -> None:
    codes = encode("float32", rows_of((2, 6, 6), 2, causal=False))
    assert pack(codes[:, ::2, ::2], "full").tolist() == pack(codes[:, ::2, ::2].copy(), "full").tolist()


NINE = np.full((2, 3, 3), 9, np.uint8)
BLOBS = (np.zeros(8, np.uint8), np.zeros(10, np.uint8), np.zeros(9, np.int8), NINE[0])
REFUSED: list[tuple[str, Callable[[], object]]] = [
    (r"must be \(H_s, n, n\)", lambda: pack(NINE[:, :2], "causal")),
    ("got 9 at head 0, row 0, key 1", lambda: pack(NINE, "causal")),
    ("at most 15; got 16", lambda: pack(NINE + np.uint8(7), "full", "u4")),
    ("must be square; got 3 rows and 4 keys", lambda: packed_size("sqrt8-row", "causal", 2, 3, 4)),
    *((r"blob must be \(9,\) uint8", lambda blob=blob: unpack(blob, "sqrt8-row", "full", 1, 3)) for blob in BLOBS),
]


@pytest.mark.parametrize(("rule", "use"), REFUSED)
def test_what_cannot_be_packed_or_unpacked(rule: str, use: Callable[[], object]) -> None:
    with pytest.raises(ShdError, match=rule):
        use()
