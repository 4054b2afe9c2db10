"""Options that come from annotations: every field is there, with its default, its rule and its name in errors."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

typer = pytest.importorskip("typer", reason="the commands need typer")

from typer.testing import CliRunner  # noqa: E402  (after the skip)

from shd_ref import ShdError  # noqa: E402  (after the skips)
from shd_ref.cli import load_app  # noqa: E402
from shd_ref.commands.derive import Failed, Without, add_command, option_of  # noqa: E402
from shd_ref.commands.terminal import console  # noqa: E402
from shd_ref.teacher import PrecomputeOptions, RunOptions  # noqa: E402  (after the skips)
from shd_ref.teacher.options import Shown  # noqa: E402  (after the skips)

ROOT = Path(__file__).resolve().parents[2]
WIDE = {"COLUMNS": "200", "TERM": "dumb"}


@dataclass(frozen=True)
class Cake:
    num_eggs: Annotated[int, Shown("How many eggs.", least=1)]
    sizes: Annotated[tuple[int, ...], Shown("Sizes.")] = (1, 2)
    flavours: Annotated[tuple[str, ...], Shown("Flavours.", choices=("nut", "plum"))] = ("nut",)
    glaze: Annotated[str, Shown("Glaze.", "What is on top", ("none", "sugar"))] = "none"
    heat: Annotated[float | None, Shown("Heat.")] = None
    recipe: str = "a secret"


def run(function: Any, *words: str, code: int = 0) -> str:
    app = typer.Typer()
    add_command(app, function, name="bake")
    result = CliRunner().invoke(app, list(words), env=WIDE)
    assert result.exit_code == code, result.output
    return str(result.output)


def bake(cake: Cake, quick: Annotated[bool, typer.Option("--quick")] = False) -> None:
    print(cake, quick)


@dataclass(frozen=True)
class Toppings:
    nuts: Annotated[tuple[int, ...], Shown("Nuts.")] = ()
    seeds: Annotated[tuple[int, ...] | None, Shown("Seeds.")] = None


def top(toppings: Toppings) -> None:
    print(toppings)


def test_a_list_that_is_not_given_has_its_default() -> None:
    assert run(top) == f"{Toppings()}\n"
    assert run(top, "--nuts", "1,2", "--seeds", "3") == f"{Toppings((1, 2), (3,))}\n"


def test_a_dataclass_stands_for_its_fields() -> None:
    assert run(bake, "--eggs", "3") == f"{Cake(3)} False\n"
    words = ("--eggs", "2", "--sizes", "4,6", "--flavours", "plum,nut", "--glaze", "sugar")
    assert run(bake, *words, "--heat", "2.5", "--quick") == f"{Cake(2, (4, 6), ('plum', 'nut'), 'sugar', 2.5)} True\n"
    page = run(bake, "--help")
    assert "recipe" not in page  # without a text it is no option
    assert page.index("--quick") < page.index("What is on top") < page.index("--glaze")
    assert "[default: 1,2]" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--eggs", "0"), "--eggs"),
        (("--glaze", "salt"), "--glaze"),
        ((), "--eggs"),
        (("--eggs", "1", "--recipe", "mine"), "--recipe"),
    ],
)
def test_words_that_typer_refuses(words: tuple[str, ...], said: str) -> None:
    assert said in run(bake, *words, code=2)


@pytest.mark.parametrize(
    "words", [("--sizes", "4 6"), ("--sizes", "4,"), ("--sizes", "0"), ("--sizes", ""), ("--flavours", "nut,")]
)
def test_lists_are_numbers_or_known_words_with_commas(words: tuple[str, ...]) -> None:
    assert f"error (argument-value): {words[0]} must be" in run(bake, "--eggs", "1", *words, code=1)


def test_part_of_a_dataclass_and_one_that_may_be_left_out() -> None:
    def several(
        cake: Annotated[partial[Cake], Without("num_eggs", "heat")], second: Annotated[Cake | None, Without("sizes")]
    ) -> None:
        raise AssertionError("these share names")

    def part(cake: Annotated[partial[Cake], Without("num_eggs", "heat")]) -> None:
        print(cake(num_eggs=5))

    def left_out(cake: Cake | None = None) -> None:
        print(cake)

    assert "--heat" not in run(part, "--help")
    assert run(part, "--glaze", "sugar") == f"{Cake(5, glaze='sugar')}\n"
    assert run(left_out) == "None\n"
    assert run(left_out, "--eggs", "1") == f"{Cake(1)}\n"
    assert "--heat must go with --eggs" in run(left_out, "--heat", "1", code=1)
    with pytest.raises(ValueError, match="duplicate parameter name"):
        run(several, "--help")


def test_an_option_that_nothing_would_read_is_refused() -> None:
    """It would be lost without a word."""

    def brew(
        cup: Annotated[str, Shown("Cup.", choices=("none", "tea", "milk"))] = "none",
        sugar: Annotated[int, Shown("Sugar.", needs="cup=tea|milk")] = 1,
        lid: Annotated[bool, typer.Option("--lid")] = False,
        colour: Annotated[str | None, Shown("Of the lid.", needs="lid")] = None,
    ) -> None:
        print(cup, sugar, colour)

    assert run(brew, "--cup", "milk", "--sugar", "2", "--lid", "--colour", "red") == "milk 2 red\n"
    assert "--sugar must go with --cup tea or milk; got 2 without it" in run(brew, "--sugar", "2", code=1)
    assert "--colour must go with --lid; got red without it" in run(brew, "--colour", "red", code=1)


@pytest.mark.parametrize(
    "words",
    [
        "precompute t --inputs d --out c --student-heads 2 --codec u4 --form factored",
        "precompute t --inputs d --out c --student-heads 2 --logits-top 4",
        "precompute t --inputs d --out c --student-heads 2 --matched-by similarity",
        "precompute t --inputs d --out c --student-heads 2 --hidden-codec int8",
        "verify c --records 9",
        "report c --samples 9",
        "export t --out o --beside b",
        "doctor t s --batch-size 4",
        "doctor t s --data d --beta 1",
    ],
)
def test_options_of_what_is_not_done(words: str) -> None:
    is_torch = words.startswith("doctor") or "--beside" in words
    if is_torch:
        pytest.importorskip("torch", reason="shd-torch needs the extra 'torch'")
    app = import_module("shd_torch.cli").load_app() if is_torch else load_app()
    result = CliRunner().invoke(app, words.split(), env=WIDE)
    assert (result.exit_code, "must go with" in result.output) == (1, True), result.output


def test_json_is_all_that_is_printed() -> None:
    def weigh(bad: Annotated[bool, typer.Option("--bad")] = False) -> dict[str, Any]:
        console.print("heavy")
        document = {"grams": np.float32(2), "path": Path("p"), "cake": Cake(1), "counts": np.arange(2)}
        if bad:
            raise Failed(document)
        return document

    assert run(weigh) == "heavy\n"
    said = run(weigh, "--json")
    cake = {"num_eggs": 1, "sizes": [1, 2], "flavours": ["nut"], "glaze": "none", "heat": None, "recipe": "a secret"}
    assert json.loads(said) == {"grams": 2.0, "path": "p", "cake": cake, "counts": [0, 1]}
    assert run(weigh, "--json", "--bad", code=1) == said
    assert run(weigh, "--bad", code=1) == "heavy\n"


def test_every_command_has_json_and_long_ones_quiet() -> None:
    pytest.importorskip("torch", reason="shd-torch needs the extra 'torch'")
    for command in (*load_app().registered_commands, *import_module("shd_torch.cli").load_app().registered_commands):
        assert command.callback is not None
        if command.name != "conformance":
            names = inspect.signature(command.callback).parameters
            short = {"inspect", "ls", "seal"}
            assert ("json" in names, "quiet" in names) == (True, command.name not in short), command.name


def test_an_error_names_the_option_of_its_argument() -> None:
    def fail(cake: Cake, where: Annotated[str, typer.Argument()]) -> None:
        raise ShdError("argument-value", f"{where} must be another; num_eggs must stay")

    eggs = "--eggs", "1"
    assert "(argument-value): --eggs must be another; num_eggs must stay" in run(
        fail, "num_eggs", "--eggs", "1", code=1
    )
    assert "(argument-value): where must be" in run(fail, "where", *eggs, code=1)
    assert "(argument-value): other must be" in run(fail, "other", *eggs, code=1)


def test_precompute_offers_every_option() -> None:
    page = CliRunner().invoke(load_app(), ["precompute", "--help-all"], env=WIDE).output
    for field in (*fields(PrecomputeOptions), *fields(RunOptions)):
        inner = field.name in ("plans", "alpha_rule")  # of experiments, in Python
        assert (f"{option_of(field.name)} " in page) != inner, field.name


@cache
def page_of(command: str) -> str:
    return CliRunner().invoke(load_app(), [command, "--help-all"], env=WIDE).output


@pytest.mark.parametrize("page", ["docs/teachers.md", "docs/clusters.md", "docs/object-stores.md"])
def test_options_that_pages_show_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^\s*(?:srun |- |RAY_ADDRESS=auto )?shd ([a-z]+ [^#\n]*)", text, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        name, *words = shlex.split(line)
        shown = page_of(name)
        for word in words:
            assert not word.startswith("--") or word in shown, line


@pytest.mark.parametrize("module", ["shd_ref.cli", "shd_torch.cli"])
def test_help_loads_nothing_heavy(module: str) -> None:
    if module == "shd_torch.cli":
        pytest.importorskip("torch", reason="shd-torch needs the extra 'torch'")
    code = f"""
import sys
from {module} import main
sys.argv = ["command", "--help"]
try:
    main()
except SystemExit:
    pass
print(sorted({{"torch", "transformers", "onnx", "onnxruntime", "pyarrow", "scipy"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.endswith("[]\n")
