"""A student that starts as its squeezed teacher: ``shrink`` takes and gives a Hugging Face model.

``families`` alone knows names of modules; ``layer`` calls the algebra of ``shd_ref.shrink`` for one layer, in a
``basis`` of the stream, and ``student`` joins the layers. ``sizes`` holds what no stock configuration can express.
Imports ``maps``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shd_torch.shrink.folders import load_student as load_student
    from shd_torch.shrink.folders import load_teacher as load_teacher
    from shd_torch.shrink.gates import Ranking as Ranking
    from shd_torch.shrink.gates import choose_splits as choose_splits
    from shd_torch.shrink.gates import rank_layers as rank_layers
    from shd_torch.shrink.options import ShrinkOptions as ShrinkOptions
    from shd_torch.shrink.student import Shrunk as Shrunk
    from shd_torch.shrink.student import shrink as shrink

_NAMES_OF = {
    "folders": ("load_student", "load_teacher"),
    "gates": ("Ranking", "choose_splits", "rank_layers"),
    "options": ("ShrinkOptions",),
    "student": ("Shrunk", "shrink"),
}
_FILE_OF = {name: file for file, names in _NAMES_OF.items() for name in names}
__all__ = sorted(_FILE_OF)


def __getattr__(name: str) -> Any:
    """Load a name from its file when it is first used: commands look at folders before they import PyTorch."""
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)
