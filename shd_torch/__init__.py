"""Squeezing-Heads Distillation in PyTorch: what a training script needs, loaded when it is first used.

The import by itself loads nothing, not even PyTorch. Specialists' names are in their rooms: ``shd_torch.capture``,
``compress``, ``supervision``, ``kl``, ``indexer``, ``kd``, ``recipes``, ``live``, ``data``,
``training``, ``doctor``, ``export`` and ``deploy``. The mathematics on maps is ``shd_torch.maps``, under the names,
arguments and errors of ``shd_ref`` and written independently of it.
"""

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shd_ref.errors import ShdError as ShdError
    from shd_torch.capture import capture_attention as capture_attention
    from shd_torch.capture import record_query_key as record_query_key
    from shd_torch.data import SupervisedDataset as SupervisedDataset
    from shd_torch.data import SupervisedStream as SupervisedStream
    from shd_torch.data import read_texts as read_texts
    from shd_torch.export import export_student as export_student
    from shd_torch.export import export_teacher as export_teacher
    from shd_torch.indexer import indexer_kl as indexer_kl
    from shd_torch.kd import ExactTargets as ExactTargets
    from shd_torch.kd import TeacherHead as TeacherHead
    from shd_torch.kd import compare_embeddings as compare_embeddings
    from shd_torch.kd import embedding_loss as embedding_loss
    from shd_torch.kd import hidden_loss as hidden_loss
    from shd_torch.kd import kd_loss as kd_loss
    from shd_torch.kd import linear_kd_loss as linear_kd_loss
    from shd_torch.kd import pool_states as pool_states
    from shd_torch.kl import attention_kl as attention_kl
    from shd_torch.kl import explain_backend as explain_backend
    from shd_torch.live import OnlineTeacher as OnlineTeacher
    from shd_torch.live import layer_kls as layer_kls
    from shd_torch.shrink import load_student as load_student
    from shd_torch.training import BetaSchedule as BetaSchedule
    from shd_torch.training import EmbeddingLoss as EmbeddingLoss
    from shd_torch.training import EmbeddingTerm as EmbeddingTerm
    from shd_torch.training import HiddenTerm as HiddenTerm
    from shd_torch.training import KdTerm as KdTerm
    from shd_torch.training import batch_share as batch_share
    from shd_torch.training.trainer import SHDTrainer as SHDTrainer

_ROOMS = {
    "shd_ref.errors": ("ShdError",),
    "shd_torch.capture": ("capture_attention", "record_query_key"),
    "shd_torch.data": ("SupervisedDataset", "SupervisedStream", "read_texts"),
    "shd_torch.export": ("export_student", "export_teacher"),
    "shd_torch.indexer": ("indexer_kl",),
    "shd_torch.kd": (
        *("compare_embeddings", "embedding_loss", "pool_states"),
        *("ExactTargets", "TeacherHead", "hidden_loss", "kd_loss", "linear_kd_loss"),
    ),
    "shd_torch.kl": ("attention_kl", "explain_backend"),
    "shd_torch.shrink": ("load_student",),
    "shd_torch.live": ("OnlineTeacher", "layer_kls"),
    "shd_torch.training": (
        *("EmbeddingLoss", "EmbeddingTerm", "HiddenTerm", "KdTerm"),
        *("BetaSchedule", "batch_share"),
    ),
    "shd_torch.training.trainer": ("SHDTrainer",),  # the one that needs transformers
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
_MODULES = {module.name for module in iter_modules(__path__)}
# A star import, and all that walks the names of a module, must work without transformers.
__all__ = sorted(_ROOM_OF.keys() - {"SHDTrainer"})


def __getattr__(name: str) -> Any:
    """Load a room, or a name from its room, when it is first used; the mathematics from ``shd_torch.maps``."""
    if not name.startswith("_") and find_spec("torch") is None:
        raise ImportError("shd_torch needs PyTorch: pip install '.[torch]' (in a checkout)")
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    room = _ROOM_OF.get(name)
    if room is None and not name.startswith("_") and name in import_module("shd_torch.maps").__all__:
        room = "shd_torch.maps"
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(room), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})
