"""What a piece of code holds in memory at once."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """The most bytes that were alive at once, of what operations made; the tensors given were there before."""

    def __init__(self, *held: Tensor) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        actual = func(*args, **(kwargs or {}))
        for made in actual if isinstance(actual, list | tuple) else (actual,):
            storage = made.untyped_storage() if isinstance(made, Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.drop, storage._cdata, storage.nbytes())
        return actual

    def drop(self, name: int, size: int) -> None:
        self.known.discard(name)
        self.now -= size
