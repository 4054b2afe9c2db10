"""What ``shd`` prints with: paths, messages and what files say are shown as they are, never obeyed."""

from __future__ import annotations

import re
from typing import Any, Final

from rich.console import Console
from rich.text import Text

_UNPRINTABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and line feed, those that turn the direction of text, and lone surrogates."""


class PlainConsole(Console):
    """A console for which a string is a string: no markup, no emoji codes, and unprintable characters escaped.

    Colours are given as ``marked`` text.

    Args:
        stderr: print on the error stream.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text of a string, wherever it stands: by itself, in a table or as its title."""
        return super().render_str(_escape(text), **options)


def marked(word: str, style: str, rest: str = "") -> Text:
    """A word in a style, and what follows it."""
    return Text.assemble((_escape(word), style), _escape(rest))


def _escape(text: str) -> str:
    """Unprintable characters as Python spells them: they could rewrite what the terminal shows."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
