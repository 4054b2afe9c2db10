"""A user's data joined with a cache by sample key.

A data set or a stream (``dataset.py``) gives pairs of a sample and its record; collated, they become the samples'
batch and the records in one buffer. Imports ``supervision`` and ``shd_ref.cache``.
"""

from shd_torch.data.dataset import SupervisedDataset, SupervisedStream, read_texts

__all__ = ["SupervisedDataset", "SupervisedStream", "read_texts"]
