"""What a test expects of a refusal."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shd_ref import ShdError


@contextmanager
def refusal(code: str, message: str | None = None) -> Iterator[pytest.ExceptionInfo[ShdError]]:
    """A ``ShdError`` of this code, whose message the pattern is found in."""
    with pytest.raises(ShdError, match=message) as caught:
        yield caught
    assert caught.value.code == code, caught.value
