"""Samples kept in a temporary file, where their source can only be read from its beginning."""

from __future__ import annotations

import struct
import tempfile
import weakref
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shd_ref.cache.storage.storage import write_errors

_AXES: Final = struct.Struct("<B")


class Spool:
    """Samples appended one after another and read back by number.

    The file has no name and goes with its process, however that ends. It lies where Python puts temporary files
    (``TMPDIR``); 8 bytes a sample stay in memory.

    Args:
        dtypes: of the arrays of every sample, by name.
    """

    def __init__(self, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        self._dtypes = dict(dtypes)
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the spool lives)
        self._starts = array("q", [0])
        weakref.finalize(self, self._file.close)

    def append(self, sample: Mapping[str, NDArray[Any]]) -> None:
        """Keep one more sample.

        Raises:
            ShdError: ``write-failed``.
        """
        parts = []
        for name, dtype in self._dtypes.items():
            values = np.ascontiguousarray(sample[name], dtype)
            parts += [_AXES.pack(values.ndim), struct.pack(f"<{values.ndim}q", *values.shape), values.tobytes()]
        data = b"".join(parts)
        with write_errors(Path(tempfile.gettempdir())):
            self._file.write(data)
        self._starts.append(self._starts[-1] + len(data))

    def read(self, index: int) -> dict[str, NDArray[Any]]:
        """A sample by its number."""
        self._file.seek(self._starts[index])
        data = self._file.read(self._starts[index + 1] - self._starts[index])
        sample, position = {}, 0
        for name, dtype in self._dtypes.items():
            (axes,) = _AXES.unpack_from(data, position)
            shape: Sequence[int] = struct.unpack_from(f"<{axes}q", data, position + 1)
            start = position + 1 + 8 * axes
            count = int(np.prod(shape, dtype=np.int64))
            sample[name] = np.frombuffer(data, dtype, count, start).reshape(shape)
            position = start + count * dtype.itemsize
        return sample
