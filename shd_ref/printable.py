"""Text from elsewhere, made safe to show in a terminal."""

from __future__ import annotations

import re
from typing import Final

_UNPRINTABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and line feed, those that turn the direction of text, and lone surrogates."""


def printable(text: str) -> str:
    """The text with unprintable characters as Python spells them: they could rewrite what a terminal shows."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)
