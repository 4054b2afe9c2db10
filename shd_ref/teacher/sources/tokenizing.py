"""The process in which text is tokenised, with bounds: ``python tokenizing.py MEMORY_BYTES``.

The rules of a ``tokenizer.json`` may take any time and memory: SIGALRM and a limit end it. It answers lines of JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from array import array
from typing import Any


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
    tokenizer: Any = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        arrays: list[array[int]] = []
        try:
            if "file" in request:
                tokenizer, answer = _load(request["file"], lower=request["lower"])
            elif "limit" in request:
                # By the strategy of the tokenizer's file, and from the side that its folder says, or else the file.
                kept = (tokenizer.truncation or {}) | request["side"]
                told = {name: kept[name] for name in ("strategy", "direction") if name in kept}
                tokenizer.enable_truncation(request["limit"], **told)
                answer = {}
            else:
                answer, arrays = _encode(tokenizer, request["texts"])
        except BaseException as error:  # a panic of the library is no Exception
            answer = {"error": str(error) if isinstance(error, Exception) else "its rules fail on it"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + b"".join(map(bytes, arrays)))
        sys.stdout.buffer.flush()


def _load(file: str, *, lower: bool) -> tuple[Any, dict[str, Any]]:
    from tokenizers import Tokenizer, normalizers

    tokenizer = Tokenizer.from_file(file)
    tokenizer.no_padding()
    if lower:
        own_rules = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own_rules])
    own = tokenizer.truncation and tokenizer.truncation["max_length"]
    return tokenizer, {"own": own, "added": tokenizer.num_special_tokens_to_add(False)}


def _encode(tokenizer: Any, texts: list[str]) -> tuple[dict[str, Any], list[array[int]]]:
    encodings = tokenizer.encode_batch(texts)
    names = "ids", "attention_mask", "type_ids"
    arrays = [array("q", getattr(encoding, name)) for encoding in encodings for name in names]
    counts = [len(encoding.ids) for encoding in encodings]
    return {"counts": counts, "cut": [bool(encoding.overflowing) for encoding in encodings]}, arrays


if __name__ == "__main__":
    main()
