"""The site says every public name; that its links lead somewhere, MkDocs says."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = [path.stem for path in sorted((ROOT / "docs" / "api").glob("*.md"))]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_on_its_page(module: str) -> None:
    needed = "xxhash" if module == "shd_ref.cache" else "torch" if module.startswith("shd_torch") else "numpy"
    pytest.importorskip(needed, reason=f"{module} needs it")
    page = (ROOT / "docs" / "api" / f"{module}.md").read_text(encoding="utf-8")
    said = re.findall(rf"^::: {re.escape(module)}\.(?:\w+\.)?(\w+)$", page, re.MULTILINE)
    assert len(said) == len(set(said)), "a name is there twice"
    public = set(importlib.import_module(module).__all__)
    missing, gone = public - set(said), {name for name in set(said) - public if module != "shd_torch"}
    assert not missing, f"docs/api/{module}.md lacks a line such as '::: {module}.{min(missing)}'"
    assert not gone, f"docs/api/{module}.md names what {module} does not offer"
