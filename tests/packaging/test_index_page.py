"""What the package index shows: links that lead somewhere from there, and Pythons that are run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = "https://github.com/squeezing-heads/squeezing-heads"


def test_no_link_of_the_page_is_relative() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    relative = re.compile(r"(?:\]\(|src=\"|srcset=\")(?!https?://|#)([^)\"]+)")
    wanted = relative.findall(page)
    assert wanted
    for each in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(each["pattern"], each["replacement"], page)
    assert not relative.findall(page)
    for target in wanted:
        kind = "raw.githubusercontent" if target.endswith((".png", ".svg")) else "github"
        base = REPOSITORY.replace("github", kind) + ("/blob" if kind == "github" else "")
        assert f"{base}/v$HFPR_VERSION/{target}" in page


def test_the_classifiers_name_the_pythons_that_are_run() -> None:
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["project"]["classifiers"]))
    (run,) = re.findall(r"@nox.session\(python=(\[.*\])\)\ndef wheels", (ROOT / "noxfile.py").read_text("utf-8"))
    assert named == re.findall(r"3\.\d+", run)
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"


def test_the_extra_without_a_gpu_is_all_without_what_a_gpu_uses() -> None:
    extras = PROJECT["project"]["optional-dependencies"]

    def asked(extra: str) -> set[str]:
        found: set[str] = set()
        for requirement in extras[extra]:
            if inner := re.match(r"squeezing-heads\[(.*)\]", requirement):
                found |= {each for name in inner[1].split(",") for each in asked(name)}
            else:
                found.add(requirement.split(";")[0])
        return found

    gpu = {each for each in asked("all") if each.startswith(("onnxruntime-gpu", "triton"))}
    assert len(gpu) == 2
    assert asked("cpu") == asked("all") - gpu
