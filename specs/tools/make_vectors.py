"""Write ``specs/vectors/v1/<operation>.json``: inputs, and outputs that an independent oracle found.

The oracle follows ``specs/shd.md``, with ``--part kd`` ``specs/kd.md`` (``vectors/kd-v1``), and so for ``recipes``
and ``shrink``; it imports nothing but the standard library. Run without ``--out`` to write the files in place, or
with ``--out FOLDER`` to write them elsewhere. New cases are frozen with ``--freeze``: from then on an id stands for
its inputs and answer. A case is withdrawn (``withdrawn="why"`` where it is defined), never edited.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from book import dump, fingerprint
from cases import alpha, bounds, gradients, gram, loss, maps, mixing, plans, recipes, squeeze, tokens
from cases.full import add_full
from cases.kd import hidden, logits
from cases.shrink import heads, layers, predictor

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
CHAPTERS = (alpha, bounds, gradients, gram, loss, maps, mixing, plans, squeeze, tokens)


PARTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "shd": (CHAPTERS, "v1"),
    "kd": ((logits, hidden), "kd-v1"),
    "recipes": ((recipes,), "recipes-v1"),
    "shrink": ((heads, layers, predictor), "shrink-v1"),
}


def main() -> int:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, default="shd", help="of the specification")
    parser.add_argument("--out", type=Path, help="folder of the vector files, if not their own")
    parser.add_argument("--freeze", action="store_true", help="freeze the ids of new cases")
    arguments = parser.parse_args()
    chapters, version = PARTS[arguments.part]
    out = arguments.out or VECTORS / version
    out.mkdir(parents=True, exist_ok=True)
    fingerprints: dict[str, str] = {}
    for chapter in chapters:
        for make_book in chapter.BOOKS:
            book = make_book()
            add_full(book)
            (out / f"{book.operation}.json").write_text(dump(book.document()), encoding="utf-8")
            fingerprints |= {case["id"]: fingerprint(case) for case in book.cases}
    if arguments.freeze:
        return _freeze(VECTORS / f"frozen-{version}.json", fingerprints)
    return 0


def _freeze(path: Path, fingerprints: dict[str, str]) -> int:
    frozen = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    edited = [name for name, value in frozen.items() if fingerprints.get(name) != value]
    if edited:
        print(f"frozen cases must be withdrawn, not edited or removed: {', '.join(edited)}", file=sys.stderr)
        return 1
    path.write_text(json.dumps(frozen | fingerprints, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
