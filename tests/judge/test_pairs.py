"""The table of pairs of options: in step with the vectors and laws, and without holes."""

from __future__ import annotations

import pytest
from judge.pairs import table
from judge.pairs.options import OPTIONS

from shd_ref.conformance import OUTPUTS, cases
from shd_ref.conformance.laws import LAWS

pytestmark = pytest.mark.slow  # every test stands on a run of all laws


@pytest.fixture(autouse=True)
def solvers() -> None:
    for library in ("networkx", "scipy"):
        pytest.importorskip(library, reason="the laws of searching operations need the extra 'oracles'")


def test_every_operation_has_its_options() -> None:
    assert set(OPTIONS) == set(OUTPUTS)
    for operation, options in OPTIONS.items():
        names = [option.name for option in options]
        assert len(set(names)) == len(names), operation


def test_values_are_those_of_the_table() -> None:
    for operation, pairs in table.checked().items():
        known = {(option.name, value) for option in OPTIONS[operation] for value in option.values}
        assert {value for pair in pairs for value in pair} <= known


def test_page_is_in_step() -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.render() == page, "write it again: cd tests && python -m judge.pairs.table"


@pytest.mark.parametrize("operation", OUTPUTS)
def test_no_pair_is_unchecked(operation: str) -> None:
    assert [table._words(operation, pair) for pair in table.unchecked(operation)] == []


def test_what_never_happens_does_not() -> None:
    for operation, pair in table.NEVER:
        assert pair in set(table.all_pairs(operation)), f"{operation} has no such pair: {pair}"
        assert pair not in table.checked()[operation], f"{operation} has it after all: {pair}"


def test_laws_that_show_nothing_right_are_laws() -> None:
    ids = {law.id for law in LAWS} | {item.id for item in cases("law/*")}
    assert {"law/inputs-unchanged", "law/equal-calls-agree"} <= table.NOTHING_RIGHT & ids
