"""The process in which text is tokenised, with bounds: ``python tokenizing.py MEMORY_BYTES``.

The rules of a ``tokenizer.json`` may take any time and memory: SIGALRM and a limit end it. It answers lines of JSON.

transformers rebuilds many tokenizers by the rules of their class, and takes from ``tokenizer.json`` only words and
merges: where it is installed, each text must give the tokens that it gives.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from array import array
from pathlib import Path
from typing import Any


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # for what libraries print
    tokenizer: Any = None
    library: Any = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        arrays: list[array[int]] = []
        try:
            if "file" in request:
                tokenizer, answer = _load(**request)
            elif "folder" in request:
                library = _load_library(tokenizer, **request)
                answer = {}
            elif "limit" in request:
                # By the strategy of the tokenizer's file, and from the side given in its folder, or else in the file.
                truncation = (tokenizer.truncation or {}) | request["changes"]
                settings = {name: truncation[name] for name in ("strategy", "direction") if name in truncation}
                tokenizer.enable_truncation(request["limit"], **settings)
                answer = {}
            else:
                answer, arrays = _encode(tokenizer, request["texts"], library, with_spans=request["with_spans"])
        except BaseException as error:  # a panic of the library is no Exception
            answer = {"error": str(error) if isinstance(error, Exception) else "its rules fail on it"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer).encode() + b"\n" + b"".join(map(bytes, arrays)))
        answers.flush()


def _load(file: str, *, lower: bool, pairs: bool, **_: object) -> tuple[Any, dict[str, Any]]:
    from tokenizers import Tokenizer, normalizers

    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_padding()
    if lower:
        own_rules = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own_rules])
    limit = tokenizer.truncation and tokenizer.truncation["max_length"]
    return tokenizer, {"own": limit, "added": tokenizer.num_special_tokens_to_add(pairs)}


def _load_library(tokenizer: Any, folder: str, limit: int | None, *, lower: bool, **_: object) -> Any:
    """The tokens that transformers makes of texts; None where all rules give the same, or that is not known."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # it takes seconds, and more memory than there is
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return _follow_settings(tokenizer, folder)
    try:
        library: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception:  # of a folder without a model's config.json, or with custom code
        return None
    backends = (tokenizer, getattr(library, "backend_tokenizer", None))
    rules = [json.loads(backend.to_str()) for backend in backends if backend]
    same = [{key: value for key, value in rule.items() if key not in ("truncation", "padding")} for rule in rules]
    if same[1:] == same[:1] and not lower:
        return None
    cut: dict[str, Any] = {} if limit is None else {"truncation": True, "max_length": limit}

    def encode(texts: list[list[str]]) -> Any:
        columns = [[text.lower() if lower else text for text in column] for column in zip(*texts, strict=True)]
        return library(*columns, **cut)["input_ids"]

    return encode


def _follow_settings(tokenizer: Any, folder: str) -> None:
    """The one setting that fixes the result of transformers whatever its class."""
    file = Path(folder, "tokenizer_config.json")
    config = json.loads(file.read_bytes()) if file.exists() else {}
    rules = b"" if tokenizer.normalizer is None else tokenizer.normalizer.__getstate__()
    is_lower = b'"Lowercase"' in rules or b'"lowercase":true' in rules
    if config.get("do_lower_case", is_lower) is not is_lower:
        raise ValueError(f"it does not follow do_lower_case of {file.name}")


def _encode(
    tokenizer: Any, texts: list[list[str]], library: Any, *, with_spans: bool
) -> tuple[dict[str, Any], list[array[int]]]:
    """Ids, mask and types of texts, each in a list of one, or of pairs; and where each token begins and ends."""
    encodings = tokenizer.encode_batch([tuple(text) if len(text) > 1 else text[0] for text in texts])
    for number, (encoding, ids) in enumerate(zip(encodings, library(texts) if library else (), strict=False)):
        if encoding.ids != list(ids):
            return {"unlike": number, "ids": [encoding.ids[:8], ids[:8]]}, []
    names = "ids", "attention_mask", "type_ids"
    arrays = [array("q", getattr(encoding, name)) for encoding in encodings for name in names]
    if with_spans:
        sides = [[array("q", side) for side in zip(*encoding.offsets, strict=True)] for encoding in encodings]
        arrays = [row for number, spans in enumerate(sides) for row in (*arrays[3 * number : 3 * number + 3], *spans)]
    counts = [len(encoding.ids) for encoding in encodings]
    return {"counts": counts, "cut": [bool(encoding.overflowing) for encoding in encodings]}, arrays


if __name__ == "__main__":
    main()
