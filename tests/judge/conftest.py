"""What the judge's own tests share."""

from collections.abc import Iterator
from itertools import tee
from typing import Any

import pytest

from shd_ref.conformance import judging


@pytest.fixture(scope="session", autouse=True)
def drawn_once() -> Iterator[None]:
    """Draws each session once for all implementations that are judged by it, and none before it is needed."""
    draw, streams = judging.sessions_of, dict[Any, Iterator[Any]]()

    def sessions_of(operation: str, dtype: str, seed: int, factors: Any, part: str, least: int = 1) -> Iterator[Any]:
        key = operation, dtype, seed, tuple(factors.items()), part, least
        drawn = streams.pop(key, None) or draw(operation, dtype, seed, factors, part, least)
        streams[key], sessions = tee(drawn)
        return sessions

    judging.sessions_of = sessions_of
    yield
    judging.sessions_of = draw
