"""Whether the teacher is what the model's own library makes of the user's texts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor, nn

from shd_ref.errors import ShdError
from shd_ref.teacher.sentence_folder import MODULES, PADS_FRONT
from shd_ref.tolerances import load_tolerances
from shd_torch.compress.samples import Row, inputs_of, pad
from shd_torch.compress.task import Reranker, SentenceEncoder, Task, model_run, summarise
from shd_torch.shrink.folders import padding_of

CHECKED: Final = 16
"""Texts, which run in one padded batch."""


def check_teacher(
    task: Task, model: Any, folder: Path, texts: list[tuple[str, ...]], rows: Sequence[Row], max_length: int | None
) -> str | None:
    """``shrink-unsupported`` where the library of a model makes something else of texts or pairs, which ``rows`` are.

    Returns a remark where it does so in a batch alone.
    """
    forward = model_run(model)
    output = summarise(task, forward, [pad(list(map(inputs_of, rows)), padding_of(model.config))])
    problem, library = "", "transformers"
    if isinstance(task, SentenceEncoder) or (isinstance(task, Reranker) and (folder / MODULES).exists()):
        library = "sentence-transformers"
        if find_spec("sentence_transformers") is None:
            return None
    try:
        for size in (len(texts), 1):
            if isinstance(task, SentenceEncoder):
                expected = _encode(folder, texts, max_length, size)
            elif library == "sentence-transformers":
                expected = _score(task, folder, texts, max_length, size)
            else:
                expected = summarise(task, forward, _tokenise(folder, texts, max_length, model, size))
            remark, problem = PADS_FRONT if problem else None, _compare(output, expected)
            if not problem:
                return remark
    except ShdError:  # our own word on what it gave
        raise
    except Exception as error:  # of another library
        cause = str(error).strip().partition("\n")[0]
        raise ShdError("read-failed", f"{folder} must run in its own library; got {cause}") from error
    rule = f"the teacher must give what {library} gives for the same texts; got {problem}"
    raise ShdError("shrink-unsupported", f"{rule}: tokenise them with it and give arrays (.npz), or set --max-length")


def _compare(output: Tensor, expected: Tensor) -> str:
    """How an output differs from the expected one beyond what rounding does; an empty text where it does not."""
    if output.shape != expected.shape:
        return "other tokens"
    worst, spread = _distances(output, expected).max(), _distances(output, output.roll(1, 0)).square().mean().sqrt()
    is_same = worst <= load_tolerances()["library"]["float32"] * spread
    return "" if is_same else f"a difference of {worst:.2g}, where other texts have {spread:.2g}"


def _distances(first: Tensor, second: Tensor) -> Tensor:
    """Root mean square of each row, ``(rows,)``."""
    return (first - second).reshape(len(first), -1).square().mean(-1).sqrt()


def _encode(folder: Path, texts: list[tuple[str, ...]], max_length: int | None, size: int) -> Tensor:
    """Embeddings by ``SentenceTransformer.encode``."""
    from sentence_transformers import SentenceTransformer

    precision = {"dtype": "float32"}  # as the teacher runs
    encoder = SentenceTransformer(str(folder), device="cpu", local_files_only=True, model_kwargs=precision)
    if max_length is not None:
        encoder.max_seq_length = max_length
    firsts = [text[0] for text in texts]
    return encoder.encode(firsts, batch_size=size, show_progress_bar=False, convert_to_tensor=True)


def _score(task: Task, folder: Path, texts: list[tuple[str, ...]], max_length: int | None, size: int) -> Tensor:
    """Scores by ``CrossEncoder.predict``, before its activation."""
    from sentence_transformers import CrossEncoder

    precision: Any = {"dtype": "float32"}
    encoder = CrossEncoder(
        str(folder), device="cpu", local_files_only=True, max_length=max_length, model_kwargs=precision
    )
    settings: Any = {"activation_fn": nn.Identity(), "convert_to_tensor": True, "show_progress_bar": False}
    return task.summarise(encoder.predict(texts, batch_size=size, **settings)[:, None], {})


def _tokenise(
    folder: Path, texts: list[tuple[str, ...]], max_length: int | None, model: Any, size: int
) -> Iterator[dict[str, Any]]:
    """Batches by the tokenizer of transformers, which read the same texts in a bounded process before."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    length = tokenizer.model_max_length if max_length is None else max_length
    truncation: dict[str, Any] = {"truncation": True, "max_length": length} if length < 10**18 else {}
    for start in range(0, len(texts), size):
        columns = map(list, zip(*texts[start : start + size], strict=True))
        batch = tokenizer(*columns, padding=tokenizer.pad_token is not None, **truncation)
        names = [name for name in batch if name in inspect.signature(model.forward).parameters]
        count = len(batch["input_ids"])
        yield pad([{name: np.array(batch[name][row]) for name in names} for row in range(count)])
