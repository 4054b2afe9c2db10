"""A user's data joined with a cache by sample key: a map-style data set and a stream. Imports ``supervision``."""

from shd_torch.data.dataset import CodedSupervision, SupervisedDataset, check_cache
from shd_torch.data.stream import SupervisedStream

__all__ = [
    "CodedSupervision",
    "SupervisedDataset",
    "SupervisedStream",
    "check_cache",
]
