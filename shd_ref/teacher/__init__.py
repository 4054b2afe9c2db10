"""Teacher graphs: find their attention, squeeze it in the graph, run it offline; see ``docs/architecture.md``.

The names below are loaded when they are first used: the import by itself needs neither onnx nor onnxruntime.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shd_ref.teacher.graph.factors import find_factors as find_factors
    from shd_ref.teacher.graph.find import AttentionSite as AttentionSite
    from shd_ref.teacher.graph.find import find_kinds as find_kinds
    from shd_ref.teacher.graph.find import find_sites as find_sites
    from shd_ref.teacher.graph.find import projection_of as projection_of
    from shd_ref.teacher.graph.find import select_sites as select_sites
    from shd_ref.teacher.graph.inputs import InputSpec as InputSpec
    from shd_ref.teacher.graph.inputs import input_specs as input_specs
    from shd_ref.teacher.graph.targets import find_targets as find_targets
    from shd_ref.teacher.opening.load import load_teacher as load_teacher
    from shd_ref.teacher.opening.model import hash_teacher as hash_teacher
    from shd_ref.teacher.options import PrecomputeOptions as PrecomputeOptions
    from shd_ref.teacher.options import RunOptions as RunOptions
    from shd_ref.teacher.precompute.compare import compare_with_reference as compare_with_reference
    from shd_ref.teacher.precompute.engine import PrecomputeSummary as PrecomputeSummary
    from shd_ref.teacher.rewrite.function import MergeRule as MergeRule
    from shd_ref.teacher.rewrite.squeeze import SqueezedGraph as SqueezedGraph
    from shd_ref.teacher.rewrite.squeeze import squeeze_graph as squeeze_graph
    from shd_ref.teacher.run.inputs import ModelInputs as ModelInputs
    from shd_ref.teacher.sentence_folder import Pooling as Pooling
    from shd_ref.teacher.sentence_folder import read_pooling as read_pooling
    from shd_ref.teacher.session import open_session as open_session
    from shd_ref.teacher.sources import ArraySource as ArraySource
    from shd_ref.teacher.sources import IndexedSource as IndexedSource
    from shd_ref.teacher.sources import Row as Row
    from shd_ref.teacher.sources import Source as Source
    from shd_ref.teacher.sources import open_source as open_source
    from shd_ref.teacher.study.forecast import forecast_cache as forecast_cache
    from shd_ref.teacher.study.recheck import recheck_records as recheck_records

_ROOMS = {
    "graph.factors": ("find_factors",),
    "graph.find": ("AttentionSite", "find_kinds", "find_sites", "projection_of", "select_sites"),
    "graph.inputs": ("InputSpec", "input_specs"),
    "graph.targets": ("find_targets",),
    "opening.load": ("load_teacher",),
    "opening.model": ("hash_teacher",),
    "options": ("PrecomputeOptions", "RunOptions"),
    "precompute.compare": ("compare_with_reference",),
    "precompute.engine": ("PrecomputeSummary",),
    "rewrite.function": ("MergeRule",),
    "rewrite.squeeze": ("SqueezedGraph", "squeeze_graph"),
    "run.inputs": ("ModelInputs",),
    "session": ("open_session",),
    "sources": ("ArraySource", "IndexedSource", "Row", "Source", "open_source"),
    "sentence_folder": ("Pooling", "read_pooling"),
    "study.forecast": ("forecast_cache",),
    "study.recheck": ("recheck_records",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
__all__ = sorted(_ROOM_OF)


def __getattr__(name: str) -> Any:
    """Load a name from its room when it is first used."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    return value
