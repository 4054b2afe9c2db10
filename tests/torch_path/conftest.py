"""Shared by the tests of the PyTorch binding; they skip, with the reason, where torch is not installed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the PyTorch binding needs torch")
# Many small problems: threads would only wait for each other.
torch.set_num_threads(1)
