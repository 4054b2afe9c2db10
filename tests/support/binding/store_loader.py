"""A loader whose workers read an object store, in a process without the threads and locks of other tests."""

import os

import numpy as np
from torch.utils.data import DataLoader

from shd_torch import SupervisedDataset


def read_store(address: str, start: str, environment: dict[str, str]) -> None:
    """Read all records through a worker that ``start`` makes, and compare."""
    from torch_path.data.test_dataset import NUM_SAMPLES, TokenData

    os.environ |= environment  # the address and keys of the store
    joined = SupervisedDataset(TokenData(), address, layers=[2])
    reader = joined.cache
    expected = [reader.decode(reader.read(key), 2) for key in joined.keys]  # connections are open before the fork
    loader = DataLoader(joined, 1, num_workers=1, collate_fn=joined.collate, multiprocessing_context=start)
    seen = []
    for sample, supervision in loader:
        index = int(sample["number"])
        seen.append(index)
        np.testing.assert_allclose(supervision.decode()[0][0].numpy(), expected[index], rtol=1e-6)
    assert seen == list(range(NUM_SAMPLES)), seen
