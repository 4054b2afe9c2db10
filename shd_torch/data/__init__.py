"""A user's data joined with a cache by sample key. Start with ``dataset.py``.

Imports ``supervision`` and ``shd_ref.cache``.
"""

from shd_torch.data.dataset import SupervisedDataset, check_cache, read_texts
from shd_torch.data.stream import SupervisedStream
from shd_torch.supervision.cached import CodedSupervision

__all__ = ["CodedSupervision", "SupervisedDataset", "SupervisedStream", "check_cache", "read_texts"]
