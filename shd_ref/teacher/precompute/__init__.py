"""From a running teacher to a cache, in this order; ``engine.py`` tells it.

A folder that holds another job is refused. Of the first samples, ``compare.py`` holds the graph against the
reference. ``forms`` describe what a record holds, for the manifest, and show that a sample alone is what it is in
company. Then each batch runs once for all students, becomes records, and full shards are committed; the last one
seals the cache. ``ray_engine.py`` deals the shards to other processes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shd_ref.teacher.precompute.engine import PrecomputeJob as PrecomputeJob
    from shd_ref.teacher.precompute.engine import precompute as precompute
    from shd_ref.teacher.precompute.engine import students_of as students_of
    from shd_ref.teacher.precompute.ray_engine import RayEngine as RayEngine

__all__ = ["PrecomputeJob", "RayEngine", "precompute", "students_of"]


def __getattr__(name: str) -> Any:
    """Load a name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'ray_engine' if name == 'RayEngine' else 'engine'}"), name)
