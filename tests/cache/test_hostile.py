"""Caches that someone made to break the tools: every tool answers with one error, in bounded memory."""

import json
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.commands import shd
from support.makers import (
    ALONE,
    EXACT,
    FORMS,
    MEASURED,
    document,
    job,
    key_of,
    probs_of,
    read_everything,
    write_cache,
)

from shd_ref import ShdError
from shd_ref.cache import (
    CacheReader,
    CacheWriter,
    Manifest,
    SampleRecord,
    encode,
    list_cache,
    merge_caches,
    verify_cache,
)

DOCUMENTS = ("manifest.json", "receipts/000001.json", "SEALED.json")
NUMBERS = (0, 1, 7, 2**31, 2**53 - 1, 2**53, 10**30, -1, 0.0, 0.5, -1.5, 1e308, True)
TEXTS = ("", "x" * 5000, "../../x", "\0", "a\ud800b", "causal", "skip", "row", "float32")
VALUES: tuple[Any, ...] = (*NUMBERS, *TEXTS, None, [], {}, [[]], [0] * 50, {"": 0}, [[1, 2, "0" * 16]])
SOUND: list[dict[str, Any]] = [
    {},
    FORMS["topk"],
    {"support": "causal", "codec": "u4"},
    ALONE["narrow"],
    FORMS["exact"],
]


def uses(folder: Path, out: Path) -> dict[str, Callable[[], object]]:
    return {
        "verify": lambda: verify_cache(folder),
        "list": lambda: list_cache(folder).to_json(),
        "read": lambda: read_everything(CacheReader(folder, allow_partial=True)),
        "merge": lambda: merge_caches([folder], out / "merged"),
        "seal": lambda: CacheWriter(folder, Manifest.read(folder)).seal(),
    }


def check_uses(folder: Path, out: Path, what: str) -> dict[str, str]:
    """Every use of a cache works or raises a ``ShdError``; the codes."""
    codes = {}
    for name, use in uses(folder, out).items():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        try:
            result = use()
        except ShdError as error:
            codes[name] = error.code
        except BaseException as error:
            raise AssertionError(f"{what}: {name} raised {type(error).__name__}: {error}") from error
        else:
            codes[name] = "ok" if name != "verify" or not result.problems else result.problems[0].code
    return codes


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to every member, inner ones too."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


def put(members: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    place: Any = members
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value


def reseal(folder: Path) -> None:
    """Checksums and ids as they follow from the documents, so that what is forged is looked at."""
    import hashlib

    manifest = document(json.loads((folder / "manifest.json").read_bytes()))
    (folder / "manifest.json").write_bytes(manifest)
    seal = json.loads((folder / "SEALED.json").read_bytes())
    seal["manifest"] = hashlib.sha256(manifest).hexdigest()
    for path in sorted((folder / "receipts").glob("*.json")):
        receipt = json.loads(path.read_bytes())
        receipt["manifest"] = seal["manifest"]
        path.write_bytes(document(receipt))
        if isinstance(seal.get("receipts"), list) and int(path.stem) < len(seal["receipts"]):
            seal["receipts"][int(path.stem)] = json.loads(path.read_bytes())["checksum"]
    (folder / "SEALED.json").write_bytes(document(seal))


@pytest.mark.parametrize("changes", SOUND)
@pytest.mark.parametrize("name", DOCUMENTS)
def test_forged_members_of_documents_are_one_error(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    pristine = write_cache(tmp_path / "pristine", job(**changes))
    folder, random, refused = tmp_path / "cache", Random(5), 0
    original = json.loads((pristine / name).read_bytes())
    paths = [path for path in leaves(original) if path != ("checksum",)]
    paths = random.sample(paths, min(len(paths), 8))
    for path in paths:
        for value in random.sample(VALUES, 2):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(pristine, folder)
            members = json.loads((pristine / name).read_bytes())
            put(members, path, value)
            try:
                (folder / name).write_bytes(document(members))
                reseal(folder)
            except (TypeError, KeyError, AttributeError):  # no document any more
                continue
            codes = check_uses(folder, tmp_path / "out", f"{name} {path} = {str(value)[:40]!r}")
            refused += codes["read"] != "ok"
    assert refused > len(paths) // 3


GARBAGE = {
    "empty": b"",
    "text": b"no document\n",
    "zeros": bytes(4096),
    "deep": b"[" * 200_000 + b"]" * 200_000,
    "digits": b'{"format_version":' + b"9" * 5000 + b"}\n",
    "twice": b'{"format_version":"1","format_version":"1"}\n',
    "nan": b'{"temperature":NaN}\n',
    "list": b"[]\n",
    "bytes": bytes(range(256)),
    "utf-16": '{"a":1}'.encode("utf-16"),
    "bom": b'\xef\xbb\xbf{"a":1}\n',
}


@pytest.mark.parametrize(
    ("name", "garbage"), [(DOCUMENTS[number % 3], garbage) for number, garbage in enumerate(GARBAGE)]
)
def test_garbage_in_place_of_a_document_is_one_error(tmp_path: Path, name: str, garbage: str) -> None:
    folder = write_cache(tmp_path / "cache", job())
    (folder / name).write_bytes(GARBAGE[garbage])
    codes = check_uses(folder, tmp_path / "out", f"{name}: {garbage}")
    assert codes["verify"] == codes["read"] == "cache-corrupt"


@pytest.mark.parametrize("name", [*DOCUMENTS, "shards/01/000001.safetensors", EXACT.files[0].name])
def test_files_cut_or_changed_at_any_byte_are_one_error(tmp_path: Path, name: str) -> None:
    """Lengths and bytes all over the files of a tiny cache; all uses at some, reading and verifying at all."""
    pristine = write_cache(tmp_path / "pristine", job(num_samples=2, samples_per_shard=1, **FORMS["exact"]))
    folder = shutil.copytree(pristine, tmp_path / "cache")
    whole = (pristine / name).read_bytes()
    wrong = [whole[:length] for length in range(len(whole))]
    wrong += [
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in range(len(whole))
    ]
    wrong += [whole + b"\0", whole + whole]
    for number, data in list(enumerate(wrong))[:: max(1, len(wrong) // 60)]:
        (folder / name).write_bytes(data)
        if number % 10 == 0:
            codes = check_uses(shutil.copytree(folder, tmp_path / f"{number}"), tmp_path / "out", f"{name} {number}")
            assert codes["verify"] != "ok"
            continue
        report = verify_cache(folder)
        assert report.problems, f"{name} {number}"
        try:
            reader = CacheReader(folder)
            read_everything(reader)
            reader.read_head()
        except ShdError as error:
            refusal = error.code
        else:
            refusal = ""
        # A reader looks at no header.
        assert refusal or "header" in report.problems[0].message


@pytest.mark.parametrize("command", ["ls", "report", "merge"])
def test_commands_say_one_line(tmp_path: Path, command: str) -> None:
    """An empty folder, none, a file, and a cache with a document of garbage."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    folders = [tmp_path / "empty", tmp_path / "none", tmp_path / "file", write_cache(tmp_path / "cache", job())]
    (folders[-1] / "manifest.json").write_bytes(GARBAGE["deep"])
    for folder in folders:
        out = [] if command == "ls" else ["--out", tmp_path / "out"]
        said = shd(command, folder, *out, code=1)
        assert sum("cache-" in line for line in said.splitlines()) == 1, said
        assert not (tmp_path / "out").exists()


def large_cache(folder: Path, length: int) -> Path:
    """One record with blobs of many megabytes."""
    manifest = job(num_samples=1, samples_per_shard=1)
    codes = [np.tile(encode("sqrt8-row", probs_of(manifest, 0, 1, 64)), (1, length // 64, length // 64))] * 2
    parts = {"alphas": np.zeros((2, manifest.attention.num_alphas), np.float32)}
    parts |= dict(zip(("L01", "L02"), codes, strict=True)) | {"mixing": np.zeros((2, 2, 4), np.float32)}
    writer = CacheWriter(folder, replace(manifest, dataset=manifest.dataset))
    writer.write_shard(0, [SampleRecord(0, key_of(0), length, parts)], MEASURED)
    writer.seal()
    return folder


def test_verifying_takes_the_same_memory_for_any_blob(tmp_path: Path) -> None:
    folder = large_cache(tmp_path / "cache", 64 * 64)
    blob = 2 * 4096**2
    read = 2**23  # at once
    assert blob > 3 * read
    tracemalloc.start()
    report = verify_cache(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.ok
    assert peak < 2 * read + 2**20
