"""From a teacher and a target, such as "four times faster", to a student that is deployed; ``run.py`` comes first.

``samples.py`` reads and divides the data; ``task.py`` holds what a kind of model is judged by, ``measures.py`` its
figures; ``faithful.py`` compares the teacher with its own library. ``stages.py`` divides the minutes and keeps what
is finished. ``search.py`` chooses students in ``space.py``, ``students.py`` makes and trains them, ``static.py`` fits
a table to compare them with, and ``handover.py`` writes the best.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shd_torch.compress.options import CompressOptions as CompressOptions
    from shd_torch.compress.run import compress as compress

_FILE_OF = {"CompressOptions": "options", "compress": "run"}
__all__ = sorted(_FILE_OF)


def __getattr__(name: str) -> Any:
    """Load a name from its file when it is first used: options are shown without PyTorch."""
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)
