"""The dataset card of a sealed cache: a README.md with YAML in front, which a hub shows as its page (CACHE-180).

For people: no reader trusts it, and a cache is whole without it. Strings of a manifest are untrusted here too: YAML
quotes them, and the text escapes them.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shd_ref.cache.documents.manifest import FORMAT_VERSION
from shd_ref.cache.forms.attention import Attention
from shd_ref.cache.forms.form import NO_ATTENTION
from shd_ref.cache.listing import CacheListing, list_cache
from shd_ref.cache.storage.layout import CARD_NAME
from shd_ref.cache.storage.places import Folder, open_storage
from shd_ref.cache.storage.storage import write_errors
from shd_ref.errors import ShdError
from shd_ref.printable import printable

MOST_CHARACTERS: Final = 300
"""Of a string that a manifest gives."""

_SIZES: Final = {10**3: "n<1K", 10**4: "1K<n<10K", 10**5: "10K<n<100K", 10**6: "100K<n<1M", 10**7: "1M<n<10M"}
_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]#|~$!])")


def write_card(folder: Folder, *, replace: bool = False) -> Path | str:
    """Write the card beside the manifest.

    Args:
        folder: a sealed cache.
        replace: also where there is one, which may have been edited.

    Returns:
        Its path or address.

    Raises:
        ShdError: ``cache-incomplete`` for a cache that is not sealed; ``cache-corrupt`` for one that is damaged;
            ``cache-exists`` where there is a card; ``write-failed``.
    """
    card = make_card(list_cache(folder))
    storage = open_storage(folder)
    path = storage.locate(CARD_NAME)
    if storage.exists(CARD_NAME) and not replace:
        message = f"{path} is there, and may have been edited: keep it, or write it again with --replace"
        raise ShdError("cache-exists", message, "CACHE-180")
    with write_errors(path):
        storage.prepare()
        storage.remove_stale()
        storage.write_whole(CARD_NAME, card.encode())
    return path


def make_card(listing: CacheListing) -> str:
    """The text of the card, which follows from the cache alone: no date, no path.

    Raises:
        ShdError: ``cache-incomplete``, ``cache-corrupt``.
    """
    if listing.damaged:
        raise ShdError("cache-corrupt", f"the cache must be whole to be shared: {listing.damaged[0]}", "CACHE-180")
    if not listing.sealed:
        message = f"{listing.folder} must be sealed to be shared: write the missing shards, then shd seal"
        raise ShdError("cache-incomplete", message, "CACHE-180")
    manifest = listing.manifest
    front = "\n".join(_front_matter(listing))
    facts = "\n".join(f"| {_escape(name)} | {_escape(value)} |" for name, value in _facts(listing))
    forms = "\n".join("| " + " | ".join(map(_escape, row)) + " |" for row in _form_rows(listing))
    return f"""---
{front}
---

# What {_escape(manifest.teacher.name)} taught

A supervision cache: for every sample of a data set what a teacher gives, so that a student is trained without the
teacher in memory. Samples are found by a hash of their inputs. The inputs themselves are not in here.

| | |
|---|---|
{facts}

| form | what | codec | bytes | smaller than float32 | error |
|---|---|---|---|---|---|
{forms}

## Use

```python
from shd_ref.cache import CacheReader, sample_key  # pip install 'squeezing-heads[cache]'

reader = CacheReader("hf://datasets/USER/NAME")  # or a folder, or any address that fsspec reads
record = reader.read(sample_key({{"input": array}}))  # the inputs above, as the teacher saw them
```

`shd verify` checks every byte. The manifest, the receipts and the seal say what counts; this page is for people, and
is not checked.

## Licence

To be filled in, here and as `license` above: what the teacher and the data allow decides.
"""


def _front_matter(listing: CacheListing) -> Iterator[str]:
    manifest = listing.manifest
    yield "# license: fill in, such as cc-by-4.0"
    yield f"pretty_name: {_quote('What ' + manifest.teacher.name + ' taught')}"
    yield "tags:\n- knowledge-distillation\n- squeezing-heads"
    size = next((name for limit, name in _SIZES.items() if listing.samples < limit), "10M<n<100M")
    yield f"size_categories:\n- {size}"
    yield "viewer: false"
    yield "supervision_cache:"
    members = {
        "id": manifest.id,
        "format_version": FORMAT_VERSION,
        "spec_version": manifest.spec_version,
        "teacher": manifest.teacher.name,
        "teacher_sha256": manifest.teacher.sha256,
        "data_fingerprint": manifest.dataset.fingerprint,
    }
    others = () if manifest.logits is None else manifest.logits.with_teachers
    members |= {f"with_teacher_{number}_sha256": each.sha256 for number, each in enumerate(others, 1)}
    yield from (f"  {name}: {_quote(value)}" for name, value in members.items())
    numbers = {"samples": listing.samples, "skipped": listing.skipped, "positions": listing.positions}
    yield from (f"  {name}: {value}" for name, value in numbers.items())
    yield "  forms:"
    for form in manifest.forms:
        yield f"    {form.SUBJECT}:"
        yield f"      codec: {_quote(form.codec)}"
        yield f"      row_of: {_quote(form.unit)}"
        yield f"      bytes_a_row: {listing.bytes_a_row(form):.2f}"
        error = listing.errors.measured().get(form.SUBJECT)
        for name, value in {} if error is None else vars(error).items():
            yield f"      {name}: {value if isinstance(value, int) else f'{value:.4e}'}"


def _facts(listing: CacheListing) -> Iterator[tuple[str, str]]:
    manifest = listing.manifest
    teacher, attention = manifest.teacher, manifest.attention
    yield "teacher", f"{teacher.name}, {teacher.dtype}, {teacher.provider}"
    yield "teacher's SHA-256", teacher.sha256
    for other in () if manifest.logits is None else manifest.logits.with_teachers:
        yield f"with {other.name}, SHA-256", other.sha256
    skipped = f", {listing.skipped:,} skipped" if listing.skipped else ""
    yield "samples", f"{listing.samples:,}{skipped}; {listing.positions:,} positions"
    yield "inputs", ", ".join(manifest.inputs.names)
    yield "data fingerprint", manifest.dataset.fingerprint
    if attention is not NO_ATTENTION:
        heads = f"{attention.num_teacher_heads} to {attention.num_student_heads}"
        yield "heads", f"{heads}, strategy {attention.strategy}, alpha rule {attention.alpha_rule}"
        yield "layers", ", ".join(f"{each.student_layer} from {each.teacher_layer}" for each in attention.layers)
        yield "plan", _plan(attention)
    for form in manifest.forms:
        yield from form.describe()
    yield "compression", manifest.compression
    yield "shards", f"{len(listing.written):,}, {listing.shard_bytes:,} bytes"
    yield "written by", f"{manifest.created_by}, specification {manifest.spec_version}, format {FORMAT_VERSION}"
    yield "cache id", manifest.id


def _plan(attention: Attention) -> str:
    def spell(plan: tuple[tuple[tuple[int, int], ...], ...]) -> str:
        return "; ".join(" ".join(f"{p}+{q}" for p, q in one_round) for one_round in plan) or "none"

    if attention.plans is None:
        return spell(attention.plan)
    return " / ".join(spell(plan) for plan in attention.plans)


def _form_rows(listing: CacheListing) -> Iterator[list[str]]:
    measured = listing.errors.measured()
    for form in listing.manifest.forms:
        coded, plain = listing.coded_by_form[form.SUBJECT], listing.float32_by_form[form.SUBJECT]
        (_, what), (_, codec) = form.describe()
        each = f"{listing.bytes_a_row(form):.1f} a {form.unit}"
        error = measured[form.SUBJECT].describe() if form.SUBJECT in measured else "not measured"
        yield [form.SUBJECT, what, codec, each, f"{plain / max(coded, 1):.1f}x", error]


def _quote(text: str) -> str:
    """A string of YAML in ASCII: that of JSON, but for characters that JSON writes as two, and those of HTML."""
    quoted = json.dumps(printable(_cut(text)), ensure_ascii=False)
    return re.sub("[^\x00-\x7e]|[<>&]", lambda found: f"\\U{ord(found[0]):08x}", quoted)


def _escape(text: str) -> str:
    """Text that is no Markdown and no HTML, on one line."""
    return _MARKDOWN.sub(r"\\\1", html.escape(printable(" ".join(_cut(text).split())), quote=False))


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "..."
