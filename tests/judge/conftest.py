"""What the judge's own tests share."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from shd_ref.conformance import judging


@pytest.fixture(scope="session", autouse=True)
def drawn_once() -> Iterator[None]:
    """Draws the sessions of an operation once for all implementations that are judged by them."""
    draw = judging.sessions_of

    @cache
    def kept(operation: str, dtype: str, seed: int, factors: Any, part: str, least: int) -> list[Any]:
        return list(draw(operation, dtype, seed, dict(factors), part, least))

    def sessions_of(operation: str, dtype: str, seed: int, factors: Any, part: str, least: int = 1) -> Iterator[Any]:
        return iter(kept(operation, dtype, seed, tuple(factors.items()), part, least))

    judging.sessions_of = sessions_of
    yield
    judging.sessions_of = draw
