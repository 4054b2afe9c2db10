"""Makes the notebooks beside it from the scripts beside it, and runs them: ``python docs/notebooks/build.py``.

A line ``# %%`` begins a cell of code, ``# %% [markdown]`` one of text. Names choose, and ``--out`` is another folder.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = ("tour", "choosing", "compress")


def main() -> None:
    """Build those that are named, or all."""
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()
    for name in arguments.names:
        path = arguments.out / f"{name}.ipynb"
        nbformat.write(run(make(HERE / f"{name}.py")), path)
        print(path, f"{path.stat().st_size / 1000:.0f} kB")


def make(script: Path) -> Any:
    """The notebook of a script, not yet run."""
    from nbformat import v4

    cells = []
    for kind, text in re.findall(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", script.read_text("utf-8"), re.M | re.S):
        if kind:
            cells.append(v4.new_markdown_cell(re.sub(r"^# ?", "", text.strip(), flags=re.M)))
        else:
            cells.append(v4.new_code_cell(text.strip()))
    for i, cell in enumerate(cells):
        cell["id"] = f"cell-{i}"  # the same in every build
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def run(notebook: Any) -> Any:
    """Execute every cell; an exception in one is raised here."""
    from nbclient import NotebookClient
    from nbformat import v4

    notebook.cells.insert(0, v4.new_code_cell(QUIET))
    NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    del notebook.cells[0]
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = tidy(cell.outputs)
    return notebook


def tidy(outputs: list[Any]) -> list[Any]:
    """Without warnings and progress; lines that were printed one by one in one piece."""
    kept: list[Any] = []
    for output in outputs:
        if output.get("name") == "stderr":
            continue
        if kept and output.output_type == kept[-1].output_type == "stream":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


QUIET = """\
%matplotlib inline
import matplotlib.pyplot as plt
plt.rcParams.update({"figure.dpi": 80, "font.size": 9})
import matplotlib_inline.backend_inline as inline
inline.set_matplotlib_formats("png", pil_kwargs={"optimize": True}, bbox_inches="tight")
"""


if __name__ == "__main__":
    main()
