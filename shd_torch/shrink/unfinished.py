"""Finished pieces of a run, in a folder next to its output: the same run, started again, resumes there."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shd_ref.cache.storage.documents import read_json
from shd_ref.cache.storage.drafts import DraftFolder, hash_file, hash_files, put
from shd_ref.cache.storage.storage import write_errors
from shd_ref.errors import ShdError
from shd_ref.teacher.sentence_folder import MODULES, modules_after_model
from shd_torch.shrink.folders import check_files

HEAD = "run.json"
_SUFFIX = ".safetensors"
_DRAFT = ".draft"


class Unfinished(DraftFolder):
    """Pieces of a run, a file each, which takes its name when all of it is on the disk.

    The folder is new, or left by a run with the same key: what the pieces depend on. As a context manager it removes
    the folder when the block ends; after an error only where nothing was finished.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        super().__init__(folder)
        try:
            self._check(json.loads(json.dumps(dict(key), default=str)))
        except BaseException:
            self.close(remove=False)
            raise

    def _check(self, key: dict[str, Any]) -> None:
        head = self.folder / HEAD
        if not head.exists():
            self._put(HEAD, lambda draft: draft.write_text(json.dumps(key, indent=1) + "\n", encoding="utf-8"))
            return
        try:
            stored = read_json(head)
            other = [name for name, value in key.items() if stored[name] != value]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise self._unreadable(error) from error
        if other:
            rule = f"out must be new, or that of an unfinished run with the same {other[0]}"
            got = f"{stored[other[0]]} in {self.folder}, and now {key[other[0]]}"
            message = f"{rule}; got {got}: remove that folder, or name another out"
            raise ShdError("argument-value", message)

    def __exit__(self, *error: object) -> None:
        self.close(remove=error[0] is None or not any(self.folder.glob(f"*{_SUFFIX}")))

    def put(self, name: str, tensors: Mapping[str, Tensor], notes: Any = None, files: str = "") -> None:
        """Keep a piece: tensors by name, of any device, and notes as JSON can hold them.

        ``files`` is a pattern of others in the folder that belong to it; they are found damaged with it.
        """
        from safetensors.torch import save_file

        copies: dict[str, Tensor] = {}
        addresses = set()
        for key, tensor in tensors.items():
            address = tensor.untyped_storage().data_ptr()  # tied tensors share memory, which the format refuses
            copies[key] = tensor.detach().to("cpu", copy=address in addresses).contiguous()
            addresses.add(address)
        with write_errors(self.folder):
            hashes = hash_files(self.folder, files) if files else {}
        metadata = {"notes": json.dumps(notes), "pattern": files, "files": json.dumps(hashes)}
        metadata["sha256"] = _hash_tensors(copies, *metadata.values())
        self._put(name + _SUFFIX, lambda draft: save_file(copies, draft, metadata))

    def get(self, name: str) -> tuple[dict[str, Tensor], Any] | None:
        """A piece, its tensors on the CPU; None where it is not finished, ``read-failed`` where it is damaged."""
        from safetensors import SafetensorError, safe_open

        path = self.folder / (name + _SUFFIX)
        if not path.exists() or path.is_symlink():
            return None
        try:
            with safe_open(path, "pt") as file:
                names, metadata = file.keys(), file.metadata()
                tensors = {name: file.get_tensor(name) for name in names}
            pattern = metadata["pattern"]
            if metadata["sha256"] != _hash_tensors(tensors, metadata["notes"], pattern, metadata["files"]):
                raise ValueError(f"a damaged {path.name}")
            if pattern and hash_files(self.folder, pattern) != json.loads(metadata["files"]):
                raise ValueError(f"damaged files {pattern}")
            return tensors, json.loads(metadata["notes"])
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise self._unreadable(error) from error

    def require(self, name: str) -> tuple[dict[str, Tensor], Any]:
        """A piece that must be there since another is."""
        piece = self.get(name)
        if piece is None:
            raise self._unreadable(FileNotFoundError(name + _SUFFIX))
        return piece

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Pieces that do not fit what is made of them are an error that says so."""
        try:
            yield
        except (KeyError, TypeError, RuntimeError) as error:
            raise self._unreadable(error) from error

    def drop(self, name: str) -> None:
        with write_errors(self.folder):
            (self.folder / (name + _SUFFIX)).unlink(missing_ok=True)

    def _put(self, name: str, write: Any) -> None:
        file = self.folder / name
        draft = file.with_name(name + _DRAFT)
        with write_errors(file):
            draft.unlink(missing_ok=True)
            write(draft)
            put(draft, file)

    def _unreadable(self, error: Exception) -> ShdError:
        rule = f"{self.folder} must hold what an unfinished run of this version left"
        message = f"{rule}; got {error!r}: remove it, and the run begins at its start"
        return ShdError("read-failed", message)


def run_key(teacher: nn.Module | str | os.PathLike[str], options: Mapping[str, Any], **data: Any) -> dict[str, Any]:
    """All that pieces depend on: hashes of the teacher and of each set of data, the options, and the software."""
    versions = {name: version(name) for name in ("torch", "transformers", "squeezing-heads")}
    tensors = {name: {key: torch.as_tensor(array) for key, array in arrays.items()} for name, arrays in data.items()}
    return {
        "teacher": _hash_model(teacher) if isinstance(teacher, nn.Module) else _hash_folder(Path(teacher)),
        **{name: _hash_tensors(inputs) for name, inputs in tensors.items()},
        "options": dict(options),
        "versions": versions | {"machine": platform.machine()},
    }


def _hash_folder(folder: Path) -> str:
    """Of all that is read of it: the model with its shards, the tokenizer, and a sentence encoder's modules."""
    files = set(check_files(folder))
    for module in modules_after_model(folder) if (folder / MODULES).exists() else ():
        files |= {file for file in (folder / module["path"]).glob("*") if file.is_file()}
    try:
        hashes = [(str(file.relative_to(folder)), hash_file(file)) for file in sorted(files)]
    except OSError as error:
        raise ShdError("read-failed", f"{str(folder)!r} must hold readable files: {error}") from error
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def _hash_model(model: Any) -> str:
    example = next(model.parameters())
    kind = [type(model).__name__, str(example.device), model.config.to_dict()]
    return _hash_tensors(model.state_dict(), json.dumps(kind, sort_keys=True, default=str))


def _hash_tensors(tensors: Mapping[str, Tensor], *texts: str) -> str:
    digest = hashlib.sha256(json.dumps(texts).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
