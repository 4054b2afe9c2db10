"""A loader whose workers read a cache in an object store; see ``test_dataset``.

Runs in a separate process, since a fork of the tests' process takes along threads that other tests have started,
and locks that these may hold.
"""

from __future__ import annotations

import sys

import numpy as np
from torch.utils.data import DataLoader
from torch_path.data.test_dataset import NUM_SAMPLES, TokenData

from shd_torch import SupervisedDataset


def main(address: str, start: str) -> None:
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


if __name__ == "__main__":
    main(*sys.argv[1:])
