"""Shared by the tests of recipes."""

import pytest

for package in ("torch", "transformers"):
    pytest.importorskip(package, reason="recipes are PyTorch's, and some train Hugging Face students")
