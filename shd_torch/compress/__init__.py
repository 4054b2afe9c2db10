"""From a teacher and a wish, such as "four times faster", to a student that is deployed; ``run.py`` is the way in.

``samples.py`` reads the data, ``task.py`` knows what a model is for and how good it is, ``space.py`` what may be cut,
``costs.py`` what parts cost, ``worth.py`` what they are worth, ``candidates.py`` chooses,
``students.py`` and ``training.py`` train, and ``handover.py`` writes the result.
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
