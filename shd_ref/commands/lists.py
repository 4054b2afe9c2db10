"""Command-line options that take a list: ``--student-heads 4 6 8`` as well as the option once a value."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperOption


class ListCommand(TyperCommand):
    """A command whose repeatable options also take several values after one mention.

    Values end where the option's type refuses the next word, so a path may follow a list of numbers.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Mention the option again before each further value, then parse as ever."""
        lists = {
            name: parameter
            for parameter in self.params
            if isinstance(parameter, TyperOption) and parameter.multiple
            for name in parameter.opts
        }
        spread: list[str] = []
        current, wants_first = None, False
        for word in args:
            if word in lists:
                current, wants_first = word, True
            elif wants_first:
                wants_first = False
            elif current is not None and _accepts(lists[current], word, ctx):
                spread.append(current)
            else:
                current = None
            spread.append(word)
        return super().parse_args(ctx, spread)


def _accepts(option: TyperOption, word: str, ctx: Any) -> bool:
    try:
        option.process_value(ctx, [word])
    except typer.BadParameter:
        return False
    return True
