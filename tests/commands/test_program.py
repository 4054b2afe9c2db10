"""Options that come from annotations: every field is there, with its default, its rule and its name in errors."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest

pytest.importorskip("cyclopts", reason="the commands need cyclopts")

from support.commands import invoke

from shd_ref import ShdError
from shd_ref.commands.program import Failed, Program
from shd_ref.commands.terminal import console
from shd_ref.teacher.options import FROM_1, INTEGERS, OPTIONS, Needs, one_of, panel


@OPTIONS
@dataclass(frozen=True)
class Cake:
    """A cake.

    Attributes:
        num_eggs: How many eggs.
        sizes: Sizes.
        glaze: Glaze.
        heat: Heat.
    """

    num_eggs: Annotated[int, FROM_1]
    sizes: Annotated[tuple[int, ...], INTEGERS] = (1, 2)
    glaze: Annotated[str, panel("What is on top", 1), one_of(("none", "sugar"))] = "none"
    heat: float | None = None


def run(function: Any, *words: str, code: int = 0, **options: Any) -> str:
    program = Program("kitchen", "Cook.")
    program.add(function, name="cook", **options)
    result = invoke(program, ["cook", *words])
    assert result.exit_code == code, result.output
    return result.output


def bake(*, cake: Cake, quick: bool = False) -> None:
    print(cake, quick)


def test_a_dataclass_stands_for_its_fields() -> None:
    assert run(bake, "--eggs", "3") == f"{Cake(3)} False\n"
    words = ("--eggs", "2", "--sizes", "4,6", "--glaze", "sugar")
    assert run(bake, *words, "--heat", "2.5", "--quick") == f"{Cake(2, (4, 6), 'sugar', 2.5)} True\n"
    assert run(bake, *words, "--eggs", "3", "--sizes", "9") == f"{Cake(3, (9,), 'sugar')} False\n"
    page = run(bake, "--help")
    assert page.index("--quick") < page.index("What is on top") < page.index("--glaze")
    assert "[default: 1,2]" in page
    assert "False" not in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--eggs 0", "Invalid value for --eggs: --eggs must be a whole number from 1; got 0"),
        ("--eggs 1 --heat x", 'Invalid value for --heat: unable to convert "x" into float.'),
        ("--eggs 1 --glaze salt", 'Invalid value "salt" for --glaze. Choose from: "none", "sugar".'),
        ("--egs 3", 'Command "cook" parameter --eggs requires an argument. Did you mean --eggs instead of --egs?'),
        ("--eggs 1 --heet 3", "Unknown option: --heet. Did you mean --heat?"),
        ("--eggs 1 more", "Unused Tokens: ['more']."),
    ],
)
def test_words_that_are_no_command_line(words: str, said: str) -> None:
    code = 1 if "value" in said else 2  # a value that is refused, by whichever reader
    assert run(bake, *words.split(), code=code) == f"error: {said}\nkitchen cook --help says more\n"


@pytest.mark.parametrize("words", ["--sizes=4 6", "--sizes=4,", "--sizes=0", "--sizes="])
def test_lists_are_numbers_with_commas(words: str) -> None:
    option = words.partition("=")[0]
    assert f"error (argument-value): {option} must be" in run(bake, "--eggs", "1", words, code=1)


def test_an_option_that_nothing_would_read_is_refused() -> None:
    """It would be lost without a word."""

    def brew(
        *,
        cup: Annotated[str, one_of(("none", "tea", "milk"))] = "none",
        sugar: Annotated[int, Needs("cup=tea|milk")] = 1,
        lid: bool = False,
        colour: Annotated[str | None, Needs("lid")] = None,
    ) -> None:
        print(cup, sugar, colour)

    assert run(brew, "--cup", "milk", "--sugar", "2", "--lid", "--colour", "red") == "milk 2 red\n"
    assert "--sugar must go with --cup tea or milk; got 2 without it" in run(brew, "--sugar", "2", code=1)
    assert "--colour must go with --lid; got red without it" in run(brew, "--colour", "red", code=1)


def test_json_is_all_that_is_printed() -> None:
    def weigh(*, bad: bool = False) -> dict[str, Any]:
        console.print("heavy")
        document = {"grams": np.float32(2), "path": Path("p"), "cake": Cake(1), "counts": np.arange(2)}
        if bad:
            raise Failed(document)
        return document

    assert run(weigh) == "heavy\n"
    said = run(weigh, "--json")
    cake = {"num_eggs": 1, "sizes": [1, 2], "glaze": "none", "heat": None}
    assert json.loads(said) == {"grams": 2.0, "path": "p", "cake": cake, "counts": [0, 1]}
    assert run(weigh, "--json", "--bad", code=1) == said
    assert run(weigh, "--bad", code=1) == "heavy\n"


def test_an_error_names_the_option_of_its_argument() -> None:
    def fail(where: str, /, *, cake: Cake) -> None:
        raise ShdError("argument-value", f"{where} must be another; num_eggs must stay")

    eggs = "--eggs", "1"
    assert "(argument-value): --eggs must be another; num_eggs must stay" in run(fail, "num_eggs", *eggs, code=1)
    assert "(argument-value): where must be" in run(fail, "where", *eggs, code=1)
    assert "(argument-value): other must be" in run(fail, "other", *eggs, code=1)


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
