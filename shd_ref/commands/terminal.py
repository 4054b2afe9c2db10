"""What ``shd`` prints with: paths, messages and what files say are shown as they are, never obeyed."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from shd_ref.printable import printable


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
        return super().render_str(printable(text), **options)


def marked(word: str, style: str, rest: str = "") -> Text:
    """A word in a style, and what follows it."""
    return Text.assemble((printable(word), style), printable(rest))
