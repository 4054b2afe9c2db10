"""A static table: one vector a token, whose mean over a text is near the teacher's embedding, without any layer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from shd_ref.cache import CacheReader, sample_key
from shd_ref.errors import ShdError, need
from shd_ref.teacher.sentence_folder import MODULES, SETTINGS, Pooling, read_file
from shd_torch.compress.handover import judge_graphs
from shd_torch.compress.samples import Row, batches, length_of
from shd_torch.compress.stages import STATIC, Run
from shd_torch.compress.task import SentenceEncoder, Task, model_run, summarise

if TYPE_CHECKING:
    from shd_torch.compress.students import TrainingConfig

_MOST: Final = 100_000  # texts that the table is fitted to, which bounds its memory
_FREQUENT: Final = 1e-4  # of all tokens, a share above which a token says little (Arora et al., 2017: a of SIF)
_STEPS: Final = 60
_TOKENIZER: Final = "tokenizer.json"
_RARE: Final = 1.0
"""Added to the sum of squares of a token's weights in the texts: one text is no reason to give up its start."""
_PATIENCE: Final = 3  # steps without a gain on the samples for choices, after which the table would only overfit


def check_static(task: Task, teacher: Path) -> None:
    """Refuse a teacher that no table can be made of: ``argument-value``, ``read-failed``."""
    fits, remedy = isinstance(task, SentenceEncoder), "leave --static out, or give a folder with its modules.json"
    need(fits, "argument-value", "static", "go with a sentence-transformers encoder", f"a {task.NAME}", remedy=remedy)
    if _read_tokenizer(teacher) is None:
        rule = f"{teacher} must have a {_TOKENIZER}, for a static table"
        raise ShdError("read-failed", f"{rule}: save the tokenizer to the folder again, or leave --static out")


def judge_static(run: Run, config: TrainingConfig) -> dict[str, Any] | None:
    """The table's quality and bytes, once it is fitted and stored; None for teachers without one, and in a hurry."""
    task = run.task
    if not isinstance(task, SentenceEncoder) or (run.options.quick and not run.options.static):
        return None
    if (tokenizer := _read_tokenizer(run.teacher)) is None:
        return None
    folder = run.folder / STATIC

    def make() -> dict[str, Any]:
        run.progress(0, 0, "a static table is fitted")
        from tokenizers import Tokenizer

        added = Tokenizer.from_buffer(tokenizer).get_added_tokens_decoder()
        table = fit_table(run, task, config, {number for number, token in added.items() if token.special})
        _write_folder(folder, table, tokenizer, task.pooling.normalize, run.teacher)
        pooled = replace(task, pooling=Pooling("mean", task.pooling.normalize))
        graphs = {"float": folder / "onnx" / "model.onnx"}
        return judge_graphs(graphs, run.judge("held_out"), run.judges_by_file(), pooled)

    result: dict[str, Any] = run.find(STATIC, make, f"{STATIC}/**/*")
    return result


def _read_tokenizer(folder: Path) -> bytes | None:
    """The file that both libraries read; without it transformers makes a tokenizer of no words, and says nothing."""
    return read_file(folder, _TOKENIZER) if (folder / _TOKENIZER).exists() else None


@torch.no_grad()
def fit_table(run: Run, task: SentenceEncoder, config: TrainingConfig, special: set[int]) -> NDArray[np.float32]:
    """Vectors of all tokens ``(V, D)``, 0 for special ones.

    Least squares from means of tokens to the teacher's embeddings. It starts at the teacher's embedding of each token
    alone, rarer ones counting more, so that tokens that no text has mean something; conjugate gradients leave this
    start only as far as the texts ask for, as they stop where the samples for choices gain no more.
    """
    rows = config.rows[:_MOST]
    size = run.model.get_input_embeddings().num_embeddings
    is_text = np.ones(size, bool)
    is_text[[token for token in special if token < size]] = False
    means = _mean_tokens(rows, is_text)
    embeddings = _read_embeddings(config.cache, rows)
    share = np.asarray(means.sum(0)).ravel() / max(means.sum(), 1)
    longest = max(rows, key=length_of)  # the first may be an empty text
    table = _embed_tokens(run, task, longest, is_text) * (_FREQUENT / (_FREQUENT + share))[:, None].astype(np.float32)
    start = means @ table
    table *= (start * embeddings).sum() / max((start * start).sum(), 1e-30)
    judge, pooled = run.judge("choices"), replace(task, pooling=Pooling("mean", task.pooling.normalize))
    best: tuple[float, NDArray[np.float32]] = (np.inf, table)
    left = _PATIENCE
    residual = embeddings - means @ table
    # Frequent tokens would take all steps: each is scaled by how much the texts say of it.
    scale = 1 / np.sqrt(means.power(2).sum(0) + _RARE).astype(np.float32)[:, None]
    gradient = scale * (means.T @ residual)
    direction, square = gradient, (gradient * gradient).sum(0)
    for step in range(_STEPS):
        run.progress(step, _STEPS, "a static table is fitted")
        vectors = table  # of this step, for the judge
        loss = judge.measure(lambda batch: vectors[batch["input_ids"]], pooled).loss  # noqa: B023
        left = _PATIENCE if loss < best[0] else left - 1
        best = min(best, (loss, table), key=lambda pair: pair[0])
        if not left:
            break
        change = means @ (scale * direction)
        length = square / np.maximum((change * change).sum(0), 1e-30)
        table = table + length * scale * direction
        residual -= length * change
        gradient = scale * (means.T @ residual)
        previous, square = square, (gradient * gradient).sum(0)
        direction = gradient + square / np.maximum(previous, 1e-30) * direction
    return best[1]


def _mean_tokens(rows: Sequence[Row], is_text: NDArray[np.bool_]) -> Any:
    """A sparse matrix ``(N, V)`` that takes means over the tokens of each text."""
    from scipy.sparse import csr_array

    tokens = [ids[is_text[ids]] for ids in (row["input_ids"] for row in rows)]
    counts = np.array([len(ids) for ids in tokens])
    weights = np.repeat(1 / np.maximum(counts, 1), counts).astype(np.float32)
    ends = np.concatenate([[0], counts.cumsum()])
    return csr_array((weights, np.concatenate(tokens), ends), shape=(len(rows), len(is_text)))


def _read_embeddings(cache: Path, rows: Sequence[Row]) -> NDArray[np.float32]:
    reader = CacheReader(cache)
    keys = [sample_key(row) for row in rows]
    records = (reader.read(key, layers=(), logits=False, hidden=()) for key in keys)
    return np.stack([reader.decode_embedding(record) for record in records])


def _embed_tokens(run: Run, task: SentenceEncoder, row: Row, is_text: NDArray[np.bool_]) -> NDArray[np.float32]:
    """The teacher's embeddings of every token alone, between the special tokens that texts have."""
    first, *_, last = np.repeat(is_text[row["input_ids"]].nonzero()[0], 2)
    template = {name: np.concatenate([array[: first + 1], array[last + 1 :]]) for name, array in row.items()}

    def of_token(token: int) -> Row:
        return template | {
            "input_ids": np.where(np.arange(len(template["input_ids"])) == first, token, template["input_ids"])
        }

    tokens = is_text.nonzero()[0]
    singles = [of_token(int(token)) for token in tokens]
    summary = summarise(task, model_run(run.model), batches(singles, size=256))
    table = np.zeros((len(is_text), summary.shape[1]), np.float32)
    table[tokens] = summary.numpy()
    return table


def _write_folder(folder: Path, table: NDArray[np.float32], tokenizer: bytes, normalize: bool, teacher: Path) -> None:
    """As sentence-transformers loads it, and a graph from tokens to their vectors."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from safetensors.numpy import save_file

    (folder / "onnx").mkdir(parents=True, exist_ok=True)
    (folder / "1_Normalize").mkdir(exist_ok=True)
    save_file({"embedding.weight": table}, folder / "model.safetensors")
    (folder / _TOKENIZER).write_bytes(tokenizer)
    kinds = ["StaticEmbedding", "Normalize"][: 1 + normalize]
    modules: list[Mapping[str, object]] = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    if (teacher / SETTINGS).exists():  # with the prompt, whose tokens are among those of each text
        (folder / SETTINGS).write_bytes(read_file(teacher, SETTINGS))
    (folder / MODULES).write_text(json.dumps(modules, indent=1) + "\n", encoding="utf-8")
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"])],
        "static",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "length", table.shape[1]])],
        [numpy_helper.from_array(table, "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "onnx" / "model.onnx")
