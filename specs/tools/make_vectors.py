"""Write ``specs/vectors/v1/<operation>.json``: inputs, and outputs that an independent oracle found.

The oracle follows ``specs/shd.md`` and imports nothing but the standard library. Run without ``--out`` to write the
files in place, or with ``--out FOLDER`` to write them elsewhere. New cases are frozen with ``--freeze``: from then on
an id stands for its inputs and answer. A case is withdrawn (``withdrawn="why"`` where it is defined), never edited.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from book import dump, fingerprint
from cases import alpha, bounds, gradients, gram, indexers, loss, maps, mixing, plans, squeeze, tokens
from cases.full import add_full

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
CHAPTERS = (alpha, bounds, gradients, gram, indexers, loss, maps, mixing, plans, squeeze, tokens)


def main() -> int:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the vector files, if not their own")
    parser.add_argument("--freeze", action="store_true", help="freeze the ids of new cases")
    arguments = parser.parse_args()
    out = arguments.out or VECTORS / "v1"
    out.mkdir(parents=True, exist_ok=True)
    fingerprints: dict[str, str] = {}
    for chapter in CHAPTERS:
        for make_book in chapter.BOOKS:
            book = make_book()
            add_full(book)
            (out / f"{book.operation}.json").write_text(dump(book.document()), encoding="utf-8")
            fingerprints |= {case["id"]: fingerprint(case) for case in book.cases}
    if arguments.freeze:
        return _freeze(VECTORS / "frozen-v1.json", fingerprints)
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
