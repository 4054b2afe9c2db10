"""What the package says of itself: no address that is not its own, Pythons that are run, extras."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_no_address_is_invented_for_the_project() -> None:
    """On no package index, in no public repository: anyone could register what a text names."""
    named = re.compile(r"(github\.com/|github\.io|readthedocs|pypi\.org/project/|pip install )['\"]?squeezing-heads")
    suffixes = (".py", ".md", ".toml", ".yml", ".cff")
    folders = ("shd_ref", "shd_torch", "docs", "examples", "specs", "benchmarks")
    files = [*ROOT.glob("*.*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    assert [path for path in files if path.suffix in suffixes and named.search(path.read_text("utf-8"))] == []


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
