"""What the site does beyond Markdown, as hooks of MkDocs: pages read the same in a checkout and here.

- The front page is ``README.md``.
- ``specs/*.md`` and ``examples/README.md`` are pages of the site, though they lie beside ``docs``.
- Links lead to other pages; those to other files of the checkout are their text alone, as the site has no address
  for them.
- Notebooks are pages, from their committed outputs.
- ``ALPHA-3`` in a page or a docstring is a link to that sentence of the specification.
- Links that leave the site are listed at the end of a build, and not fetched.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SPECS = sorted(f"specs/{path.name}" for path in (ROOT / "specs").glob("*.md"))
OUTSIDE = [*SPECS, "examples/README.md"]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"\[([^\[\]]*)\]\((?!\w+:|#|/)([^)\s#]+)([^)]*)\)")
SENTENCE = re.compile(r"^\s*- \*\*([A-Z]{1,10}-\d+)\b", re.MULTILINE)
NAMED = re.compile(r"<(a|pre|code|h[1-6])\b.*?</\1>|<[^>]+>|\b([A-Z]{1,10}-\d+)\b", re.DOTALL)
log = logging.getLogger("mkdocs.hooks")
external: set[str] = set()


def spec_ids() -> dict[str, str]:
    """Id of every numbered sentence -> the page that says it."""
    found: dict[str, str] = {}
    for name in SPECS:
        for sentence in SENTENCE.findall((ROOT / name).read_text(encoding="utf-8")):
            found.setdefault(sentence, name)
    return found


IDS = spec_ids()


def on_files(files: Any, config: Any) -> Any:
    """Add the specification, the list of examples and the notebooks."""
    from mkdocs.structure.files import File  # here, as tests read this file without MkDocs

    for name in OUTSIDE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    for name in NOTEBOOKS:
        text = (ROOT / "docs" / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
        files.append(File.generated(config, f"notebooks/{name}.md", content=notebook_page(json.loads(text))))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links between files of the repository into links between pages; the front page is README.md."""
    here = page.file.src_uri
    if here == "index.md":
        return relink((ROOT / "README.md").read_text(encoding="utf-8"), here, "")
    return relink(markdown, here, folder_of(here))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Give numbered sentences an anchor, and link to them wherever they are named."""
    external.update(re.findall(r'href="(https?://[^"]+)"', html))
    here = page.file.src_uri
    urls = {name: files.get_file_from_path(name).url_relative_to(page.file) for name in set(IDS.values()) - {here}}
    return link_ids(html, here, urls)


def on_post_build(config: Any) -> None:
    """List the links that leave the site."""
    log.info("%d links lead to other sites and were not fetched:\n%s", len(external), "\n".join(sorted(external)))


def folder_of(here: str) -> str:
    """The folder of the repository that a page of the site lies in."""
    return posixpath.dirname(here if here in OUTSIDE else f"docs/{here}")


def relink(markdown: str, here: str, folder: str) -> str:
    """Links of text that lies in ``folder`` of the repository, as the page ``here`` of the site has them."""

    def replace(match: re.Match[str]) -> str:
        text, target = match[1], posixpath.normpath(posixpath.join(folder, match[2]))
        path = ROOT / target
        if target.endswith(".ipynb"):
            target = target.removesuffix(".ipynb") + ".md"
        elif not path.exists() or (target.startswith("docs/") and path.is_file()):
            pass
        elif f"{target}/README.md" in OUTSIDE:
            target += "/README.md"
        elif target not in OUTSIDE:
            return text
        site = posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(here) or ".")
        return f"[{text}]({site}{match[3]})"

    return LINK.sub(replace, markdown)


def link_ids(html: str, here: str, urls: dict[str, str]) -> str:
    """Anchors for the sentences that the page ``here`` says, and links for all that it names outside of code."""
    said: set[str] = set()

    def anchor(match: re.Match[str]) -> str:
        sentence = match[1]
        if IDS.get(sentence) != here or sentence in said:
            return match[0]
        said.add(sentence)
        return f'<strong id="{sentence.lower()}">{sentence}'

    def link(match: re.Match[str]) -> str:
        sentence = match[2]
        if sentence not in IDS:
            return match[0]
        return f'<a class="sentence" href="{urls.get(IDS[sentence], "")}#{sentence.lower()}">{sentence}</a>'

    return NAMED.sub(link, re.sub(r"<strong>([A-Z]{1,10}-\d+)\b", anchor, html))


def notebook_page(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: its text, its code, and what the code gave."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(
                    f'<img alt="drawn by the code above" src="data:image/png;base64,{data["image/png"].strip()}">'
                )
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
