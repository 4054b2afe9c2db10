"""Where model inputs come from: files of several kinds, read row by row, so that memory stays flat.

``source.py`` is the interface; a new kind of data is a file here and a line in ``registry.py``. Imports none of the
other rooms.
"""

from shd_ref.teacher.sources.arrays import Arrays, ArraySource
from shd_ref.teacher.sources.registry import KINDS, open_source
from shd_ref.teacher.sources.source import IndexedSource, Row, Source

__all__ = ["KINDS", "ArraySource", "Arrays", "IndexedSource", "Row", "Source", "open_source"]
