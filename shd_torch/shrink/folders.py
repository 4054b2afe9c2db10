"""A teacher's folder, read without trust, and a student's folder, written whole or not at all.

At the end: what a sentence-transformers folder adds to its model. Commands look at folders before anything else, so
that PyTorch is imported by the functions that need it.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from shd_ref.cache.storage.documents import read_json
from shd_ref.cache.storage.drafts import drafting, output_path, part_folder, remove_finished
from shd_ref.errors import ShdError, inputs_invalid, need
from shd_ref.teacher.sentence_folder import MODULES, find_home, modules_after_model, parse_file, read_file, read_texts
from shd_ref.teacher.sources import TOO_LONG

HUB_SECONDS = 5.0
"""How long the hub may take to say that it is there."""

_HEAD = re.compile(r"For[A-Z]|HeadModel")
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_FETCHED: dict[str, Any] = {
    "allow_patterns": ["*.json", "*.safetensors"],
    # The same weights for other programs; folders of sentence-transformers begin with a number.
    "ignore_patterns": ["[!0-9]*/*", "consolidated*"],
}


def find_folder(source: str | os.PathLike[str], argument: str) -> Path:
    """A folder as it is; of a hub id its files, of which only JSON and safetensors are fetched.

    Without a network, or with ``HF_HUB_OFFLINE``, a hub id is found in the hub's cache. Errors name the ``argument``.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    message = f"{argument} must be a folder that save_pretrained wrote, or a hub id; got {str(source)!r}, "
    if folder.exists() or not _HUB_ID.fullmatch(str(source)):
        raise ShdError("read-failed", message + "which is no folder")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    is_reached = True
    try:
        HfApi().model_info(str(source), timeout=HUB_SECONDS)  # snapshot_download waits for an answer without a limit
    except HfHubHTTPError as error:
        reason = f"a folder that is not there, and the hub answers {error.response.status_code}"
        raise ShdError("read-failed", f"{message}{reason}: check the name, or log in (hf auth login)") from error
    except Exception:  # of the network, by whichever package makes the request
        is_reached = False
    try:
        return Path(snapshot_download(str(source), local_files_only=not is_reached, **_FETCHED))
    except Exception as error:  # of a file that is not in the cache, of a network that breaks down
        reason = "a folder that is not there, and the hub cannot be reached"
        advice = f"download it where there is a network (hf download {source}), and name the folder"
        raise ShdError("read-failed", f"{message}{reason}: {advice}") from error


def check_model(source: str, argument: str, *, or_graph: bool = False) -> None:
    """Refuse what is no model, as far as its folder says without PyTorch, which takes seconds to import."""
    if source.endswith(".onnx") and not or_graph:
        rule = f"{argument} must be the folder or hub id of a model; got the graph {source!r}"
        raise ShdError("read-failed", f"{rule}: shd inspect and shd precompute take graphs")
    if not source.endswith(".onnx"):
        check_files(find_folder(source, argument), argument)
    elif not Path(source).is_file():
        raise ShdError("read-failed", f"{argument} must be an .onnx file, a folder or a hub id; got {source!r}")


def load_teacher(source: str | os.PathLike[str], *, keeps_head: bool = False) -> Any:
    """A Hugging Face model of the class that its configuration names, in evaluation mode.

    Of a sentence-transformers folder it is the bare one, as for that library, unless ``keeps_head``.

    Args:
        source: a folder with ``config.json`` and safetensors. Nothing is downloaded, code named by the folder is not
            run, and files outside it are not read; links within a repository of the hub cache are followed.

    Raises:
        ShdError: ``read-failed``, ``shrink-unsupported``.
    """
    from shd_torch.shrink.families import check_config

    config = read_config(source, keeps_head=keeps_head)
    check_config(config)
    return load_weights(source, config)


def read_config(source: str | os.PathLike[str], argument: str = "teacher", *, keeps_head: bool = False) -> Any:
    """A folder's configuration, of any architecture of transformers or of a student with custom layers.

    The rules are those of ``load_teacher``.
    """
    from transformers import AutoConfig, PreTrainedConfig

    from shd_torch.shrink.families import FAMILIES, custom_family
    from shd_torch.shrink.sizes import PREFIX, check_dropped, custom_class, read_dropped, read_kind

    folder = Path(source)
    check_files(folder, argument)
    try:
        raw, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
        name = read_kind(raw)
        if name is None:
            config = AutoConfig.from_pretrained(folder, **_LOCAL)
            if not keeps_head and _HEAD.search(str(config.architectures)) and read_texts(folder).drops_head:
                config.architectures = None
            return config
    except Exception as error:  # transformers raises what it meets in a configuration
        message = f"{argument} must be a Hugging Face model; got {str(folder)!r}: {error}"
        raise ShdError("read-failed", message) from error
    stock = find_class(raw.get("architectures"), PREFIX)
    if stock is None or name not in FAMILIES or stock.config_class.model_type != name:
        rule = f"{str(folder)!r} must name a class of one of the families as its architecture"
        raise ShdError("read-failed", f"{rule}; got a {name} and {raw.get('architectures')}")
    try:
        config = custom_class(stock).config_class.from_dict(dict(raw))
        family = custom_family(name, config)
        check_dropped(read_dropped(config), family, config, range(getattr(config, family.sizes.layers)))
    except Exception as error:
        message = f"{str(folder)!r} must hold a student's configuration: {error}"
        raise ShdError("read-failed", message) from error
    return config


def count_positions(config: Any) -> int | None:
    """The longest text that a configuration has positions for; None where no table of positions ends it."""
    text = config.get_text_config()
    rows = getattr(text, "max_position_embeddings", None) or 0
    has_table = getattr(text, "rope_parameters", None) is None and getattr(text, "position_biased_input", True)
    if rows < 1 or not has_table:
        return None
    # RoBERTa and those built like it count positions from behind the number of padding.
    is_shifted = re.match(r"((xlm-)?roberta|camembert|mpnet)\b", text.model_type)
    return int(rows) - (text.pad_token_id + 1 if is_shifted else 0)


def check_positions(inputs: Mapping[str, Any], most: int | None) -> None:
    """Refuse token ids ``(N, L)`` of which a sample counts beyond so many positions: ``inputs-invalid``."""
    ids = np.asarray(inputs.get("input_ids", ()))
    if most is None or ids.ndim != 2 or ids.shape[1] <= most:
        return
    mask = np.asarray(inputs.get("attention_mask", np.ones_like(ids)))
    mask = mask if mask.shape == ids.shape else np.ones_like(ids)
    ends = (np.arange(1, ids.shape[1] + 1) * (mask != 0)).max(1)
    row = int(np.argmax(ends))
    if ends[row] > most:
        raise inputs_invalid(f"data, row {row}: {TOO_LONG.format(most=most, got=int(ends[row]))}")


def padding_of(config: Any) -> int:
    """The token id that a model takes for padding, or 0 where it looks for none."""
    pad = getattr(getattr(config, "get_text_config", lambda: config)(), "pad_token_id", None)
    return pad if isinstance(pad, int) and pad > 0 else 0


def forward_inputs(config: Any) -> list[str]:
    from transformers import AutoModel

    kind: Any = model_class(config)
    kind = AutoModel._model_mapping[type(config)] if kind is AutoModel else kind
    return list(inspect.signature(kind.forward).parameters)


def text_inputs(folder: str | Path) -> list[str]:
    """What the tokenizer in a folder, if any, gives a model: ids and mask, and what else its class names.

    The class is looked up, as no rules of a tokenizer.json may run here.
    """
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    settings: dict[str, Any] = {}
    for name in ("config.json", "tokenizer_config.json") if (Path(folder) / "tokenizer.json").is_file() else ():
        with suppress(OSError, ValueError, TypeError):
            settings |= read_json(Path(folder) / name)
    kind = settings.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(str(settings.get("model_type")))
    named = settings.get("model_input_names") or getattr(
        tokenizer_class_from_name(str(kind)), "model_input_names", []
    )
    return list(dict.fromkeys(("input_ids", "attention_mask", *map(str, named))))


def load_weights(source: str | os.PathLike[str], config: Any) -> Any:
    quantised = getattr(config, "quantization_config", None)  # it needs the code that quantised it
    kind = quantised.get("quant_method") if isinstance(quantised, Mapping) else type(quantised).__name__
    got, remedy = f"{str(source)!r} with a quantization_config ({kind})", "give the model it was made from"
    need(quantised is None, "shrink-unsupported", "the model", "not be quantised", got, remedy=remedy)
    return load_model(Path(source), model_class(config))


def is_custom(config: Any) -> bool:
    from shd_torch.shrink.sizes import read_kind

    return read_kind({"model_type": config.model_type}) is not None


def model_class(config: Any) -> Any:
    """The class that a configuration names, or that of the bare model."""
    from transformers import AutoModel

    from shd_torch.shrink.sizes import PREFIX, custom_class

    if is_custom(config):
        return custom_class(find_class(config.architectures, PREFIX))
    return find_class(getattr(config, "architectures", None)) or AutoModel


def load_student(source: str | os.PathLike[str]) -> Any:
    """Load a student made by ``shrink``, in evaluation mode.

    Args:
        source: any folder written by ``shrink``, including those that the Auto classes load; see ``load_teacher``.

    Raises:
        ShdError: ``read-failed`` for a folder without such a model, with a contradictory configuration, or with
            weights that do not match it: nothing is initialised at random. ``shrink-unsupported``.
    """
    from shd_torch.shrink.families import check_config

    config = read_config(source, "student")
    if not is_custom(config):
        check_config(config)
    return load_weights(source, config)


_LOCAL: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}


def find_class(architectures: object, prefix: str = "") -> Any:
    """The class of transformers that a configuration's ``architectures`` names first, after a prefix, or None."""
    import transformers

    names = [] if architectures is None else architectures
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ShdError("read-failed", f"architectures in config.json must be a list of classes; got {names!r}")
    first = names[0] if names else ""
    kind = getattr(transformers, first.removeprefix(prefix), None) if first.startswith(prefix) else None
    return kind if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) else None


def load_model(folder: Path, kind: Any, **options: Any) -> Any:
    """A model with every weight from the folder, in evaluation mode, or an error."""
    # The implementation is named because a configuration may name one that is downloaded. Pickled weights would run
    # what they hold.
    options = {"attn_implementation": implementation_of(kind), "use_safetensors": True} | _LOCAL | options
    try:
        loaded: Any = kind.from_pretrained(
            folder,
            **options,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
        )
    except Exception as error:  # and safetensors, for a file that is cut or of other shapes
        raise ShdError("read-failed", f"{str(folder)!r} must hold a model with safetensors: {error}") from error
    model, info = loaded
    missing = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if missing:
        rule = f"{str(folder)!r} must hold every weight of a {type(model).__name__}"
        got = f"{len(missing)} are missing or of other sizes, first {missing[0]}"
        remedy = "copy the model again"
        if all("pooler." in name for name in missing):  # of a model that was trained with another head
            code = f"from transformers import AutoModel as M; f = {json.dumps(str(folder))}"
            words = ["python", "-c", f"{code}; M.from_pretrained(f).save_pretrained(f)"]
            remedy = f"if nothing reads them, as with pooled means, add random ones with {shlex.join(words)}"
        raise ShdError("read-failed", f"{rule}; {got}: {remedy}")
    return model.eval()


def implementation_of(kind: Any) -> str:
    """The attention that a class of transformers is run with: ``sdpa`` where it has that."""
    return "sdpa" if getattr(kind, "_supports_sdpa", True) else "eager"


def check_files(folder: Path, argument: str = "model") -> list[Path]:
    """A model's files; none may lead out of the folder: by a link, an index of weights, or an adapter."""
    name = repr(str(folder))
    rule, remedy = "be a folder that save_pretrained wrote", "download the model first"
    need(folder.is_dir(), "read-failed", argument, rule, f"{name}, which is no folder", remedy=remedy)
    if (folder / "adapter_config.json").exists():
        message = f"{name} must hold a whole model; it holds an adapter: merge it and save the model"
        raise ShdError("read-failed", message)
    rule = "be a folder that save_pretrained wrote"
    need((folder / "config.json").exists(), "read-failed", argument, rule, f"{name}, which has no config.json")
    if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
        rule = f"{argument} must hold safetensors; got {name} with pickled weights, which can run code"
        raise ShdError("read-failed", f"{rule}: if you trust them, convert them with {_conversion(folder)}")
    home = find_home(folder)
    try:
        files = [
            file for file in folder.iterdir() if file.suffix in (".json", ".safetensors") or file.name in READERS
        ]
        indices = [read_json(file)["weight_map"] for file in files if file.name.endswith(".index.json")]
        shards = {folder / str(shard) for index in indices for shard in index.values()}
        present = [file for file in {*files, *shards} if file.is_file()]
        real = {file: Path(os.path.realpath(file)) for file in (*files, *shards)}  # a name may hold a NUL
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShdError("read-failed", f"{name} must hold readable files: {error!r:.200}") from error
    for file, place in real.items():
        if not place.is_relative_to(home):
            rule = f"{name} must hold its own files; {str(file)!r} lies elsewhere"
            raise ShdError("read-failed", f"{rule}: put the model's files, not links to them, into one folder")
    return present


def _conversion(folder: Path) -> str:
    """The command that writes the weights of a folder as safetensors next to the pickled ones."""
    try:
        names = read_json(folder / "config.json")["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        names = None
    # The name is the folder's: nothing else than a name may get into a command that somebody pastes.
    first = names[0] if isinstance(names, list) and names and str(names[0]).isidentifier() else "AutoModel"
    path = json.dumps(str(folder))
    code = f"from transformers import {first} as M; f = {path}; M.from_pretrained(f).save_pretrained(f)"
    return shlex.join(["python", "-c", code])


READERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Files that say how text or images become inputs; none holds code."""


def copy_readers(source: Path, target: Path) -> None:
    """Copy ``READERS`` from a folder that ``check_files`` let pass; a configuration that names code stays behind."""
    for name in READERS:
        if not (source / name).exists() or (target / name).exists():
            continue
        config = parse_file(source, name) if name.endswith("_config.json") else {}
        if not (isinstance(config, dict) and "auto_map" in config):
            (target / name).write_bytes(read_file(source, name))


def new_folder(out: str | os.PathLike[str]) -> Path:
    """A place where a folder can be put: found out before the work is done, not after."""
    folder = output_path(out)
    try:
        folder = Path(os.path.realpath(folder))
        problem = _find_problem(folder)
    except OSError as error:
        problem = str(error)
    if problem is not None:
        # Of a run that was killed when all was done.
        if (folder / "shrink.json").is_file() or (folder / "compress.json").is_file():
            remove_finished(part_folder(folder))
        raise ShdError("write-failed", f"out must be a new or empty folder; got {str(folder)!r}: {problem}")
    return folder


def _find_problem(folder: Path) -> str | None:
    if folder.is_symlink():
        return "it is a link to itself: name another"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return "it is taken: name another"
    if folder.is_mount():
        return "a mount point cannot be replaced: name a folder in it"
    parent = next(above for above in folder.parents if above.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} is not a folder that may be written: name another"
    return None


def save_student(
    student: Any, report: dict[str, Any], folder: Path, teacher: Path | None = None, modules: Mapping[str, bytes] = {}
) -> None:
    """The model, ``shrink.json``, the teacher's tokenizer and modules, in a draft renamed when whole."""
    home = part_folder(folder)
    try:
        with drafting(folder, home / "student") as draft:
            student.save_pretrained(draft)
            if teacher is not None:
                copy_readers(teacher, draft)
            for name, content in modules.items():
                (draft / name).parent.mkdir(exist_ok=True)
                (draft / name).write_bytes(content)
            (draft / "shrink.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    finally:
        with suppress(OSError):  # it holds what else the run has finished
            home.rmdir()


_SETTINGS: Final = re.compile(r"config_sentence_transformers\.json|sentence_\w+_config\.json")
_WIDTHS: Final = ("embedding_dimension", "word_embedding_dimension")
_FREE: Final = frozenset({"Pooling", "Normalize", "Dropout"})
_WIDE: Final = frozenset({"Dense", "LayerNorm"})


def read_modules(folder: Path, width: int, new_width: int) -> dict[str, bytes]:
    """Contents of the files that make the student a sentence-transformers folder, by name; none for other folders.

    A pooling module as wide as the teacher's hidden size, ``width``, is given the student's, ``new_width``. Weights
    are taken from safetensors only.

    Raises:
        ShdError: ``shrink-unsupported`` for a module that does not fit the student; ``read-failed``.
    """
    if not (folder / MODULES).exists():
        return {}
    names = [MODULES, *sorted(file.name for file in folder.iterdir() if _SETTINGS.fullmatch(file.name))]
    files = {name: read_file(folder, name) for name in names}
    for module in modules_after_model(folder):
        kind = module["type"].rpartition(".")[2]
        known = module["type"].startswith("sentence_transformers.") and kind in _FREE | _WIDE
        if not known or (kind in _WIDE and new_width != width):
            rule = f"modules of a sentence-transformers folder must be {', '.join(sorted(_FREE))}"
            rule += f", or with the teacher's hidden size {' and '.join(sorted(_WIDE))}"
            raise ShdError(
                "shrink-unsupported",
                f"{rule}; got {module['type']}: remove {MODULES} to make a student without modules",
            )
        files |= _read_module(folder, module["path"], width, new_width)
    return files


def _read_module(folder: Path, path: str, width: int, new_width: int) -> dict[str, bytes]:
    """Its configuration and its weights; a module without parameters and options has an empty folder, or none."""
    files: dict[str, bytes] = {}
    if (folder / path / "config.json").exists():
        config = parse_file(folder, f"{path}/config.json")
        if not isinstance(config, dict):
            raise ShdError("read-failed", f"{folder / path / 'config.json'} must hold a JSON object")
        resized = {name: new_width for name in _WIDTHS if config.get(name) == width != new_width}
        text = json.dumps(config | resized, indent=2)
        files[f"{path}/config.json"] = text.encode() if resized else read_file(folder, f"{path}/config.json")
    if (folder / path / "model.safetensors").exists():
        files[f"{path}/model.safetensors"] = read_file(folder, f"{path}/model.safetensors")
    elif (folder / path / "pytorch_model.bin").exists():
        message = f"{folder / path} must hold its weights as safetensors: save the SentenceTransformer again"
        raise ShdError("read-failed", message)
    return files
