"""Model inputs from every kind of file: the same rows, read row by row, refused in words that help."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.teacher import IndexedSource, InputSpec, ModelInputs, Row, Source, open_source

NUM_SAMPLES = 700  # more than two blocks of every reader
SPECS = (
    InputSpec("attention_mask", "int64", ("batch", "length")),
    InputSpec("input_ids", "int64", ("batch", "length")),
    InputSpec("pixels", "float32", ("batch", 2, 3)),
)
COLUMNS = ("attention_mask", "input_ids", "pixels")


def length_of(index: int) -> int:
    return 1 + index * 7 % 11


def ragged_rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "input_ids": rng.integers(1, 50, length_of(index)).tolist(),
            "pixels": rng.integers(0, 8, (2, 3)).astype(float).tolist(),
            "label": index,
        }
        for index in range(NUM_SAMPLES)
    ]


def padded_arrays(rows: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    ids, mask = np.zeros((2, len(rows), 12), dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row["input_ids"])] = row["input_ids"]
        mask[index, : len(row["input_ids"])] = 1
    pixels = np.array([row["pixels"] for row in rows], dtype=np.float32)
    return {"input_ids": ids, "attention_mask": mask, "pixels": pixels, "label": np.arange(len(rows))}


def save_parquet(rows: list[dict[str, Any]], path: Path) -> Path:
    pa = pytest.importorskip("pyarrow", reason="Parquet needs the extra 'inputs'")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
    return path


def save_parquet_folder(rows: list[dict[str, Any]], path: Path) -> Path:
    (path / "data").mkdir(parents=True)
    for number, start in enumerate(range(0, len(rows), 300)):
        save_parquet(rows[start : start + 300], path / "data" / f"train-{number:05d}.parquet")
    return path


def save_arrow(rows: list[dict[str, Any]], path: Path) -> Path:
    pa = pytest.importorskip("pyarrow", reason="Arrow needs the extra 'inputs'")
    pytest.importorskip("pyarrow.ipc")
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=64)
    return path


def save_dataset(rows: list[dict[str, Any]], path: Path) -> Path:
    datasets = pytest.importorskip("datasets", reason="what datasets saves needs datasets to save it")
    datasets.Dataset.from_list(rows).save_to_disk(str(path), num_shards=3)
    return path


def save_json_lines(rows: list[dict[str, Any]], path: Path) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def save_npz(rows: list[dict[str, Any]], path: Path) -> Path:
    """In Fortran's order or compressed, where the name says so."""
    arrays = padded_arrays(rows)
    if path.stem == "fortran":
        arrays = {name: np.asfortranarray(array) for name, array in arrays.items()}
    (np.savez_compressed if path.stem == "compressed" else np.savez)(path, **arrays)
    return path


SAVERS: dict[str, tuple[Callable[[list[dict[str, Any]], Path], Path], bool]] = {
    "data.npz": (save_npz, True),
    "fortran.npz": (save_npz, True),
    "compressed.npz": (save_npz, True),
    "data.parquet": (save_parquet, False),
    "parquet": (save_parquet_folder, False),
    "data.arrow": (save_arrow, True),
    "dataset": (save_dataset, True),
    "data.jsonl": (save_json_lines, False),
}


@pytest.mark.parametrize("name", SAVERS)
def test_every_kind_gives_the_same_samples(tmp_path: Path, name: str) -> None:
    rows = ragged_rows()
    save, indexed = SAVERS[name]
    source = open_source(save(rows, tmp_path / name))
    assert isinstance(source, IndexedSource) == indexed
    assert len(source) == NUM_SAMPLES
    seen: list[tuple[int, int]] = []
    inputs = ModelInputs(source, SPECS, on_read=lambda *counts: seen.append(counts))
    expected = ModelInputs(padded_arrays(rows), SPECS)
    assert seen[-1] == (NUM_SAMPLES, NUM_SAMPLES)
    assert inputs.ignored == expected.ignored == ("label",)
    np.testing.assert_array_equal(inputs.keys, expected.keys)
    assert inputs.lengths.tolist() == [length_of(index) for index in range(NUM_SAMPLES)]
    for index in (0, 5, NUM_SAMPLES - 1, 3):
        sample = inputs.sample(index)
        assert sorted(sample) == list(COLUMNS)
        assert sample["attention_mask"].tolist() == [1] * length_of(index)
        assert sample["input_ids"].tolist() == rows[index]["input_ids"]
        assert sample["pixels"].tolist() == rows[index]["pixels"]
    for one, two in zip(inputs.batches(range(40), 6), expected.batches(range(40), 6), strict=True):
        assert one.indices == two.indices
        for column in COLUMNS:
            np.testing.assert_array_equal(one.arrays[column], two.arrays[column])
            assert one.arrays[column].dtype == two.arrays[column].dtype


def test_text_becomes_what_the_tokenizer_makes_of_it(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="text needs the extra 'inputs'")
    words = {word: number for number, word in enumerate(["[UNK]", "the", "cat", "sat"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_padding(length=9)  # the file asks for padding; nothing is padded here
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["the cat sat", "the dog", *["cat"] * 600]
    save_json_lines([{"body": text, "pixels": [[1, 2, 3], [4, 5, 6.5]]} for text in texts], tmp_path / "data.jsonl")
    source = open_source(tmp_path / "data.jsonl", tokenizer=tmp_path, text_column="body")
    inputs = ModelInputs(source, SPECS)
    assert len(inputs) == 602
    assert inputs.sample(0)["input_ids"].tolist() == [1, 2, 3]
    assert inputs.sample(1)["input_ids"].tolist() == [1, 0]
    assert inputs.sample(601)["input_ids"].tolist() == [2]
    assert inputs.sample(1)["pixels"].tolist() == [[1, 2, 3], [4, 5, 6.5]]
    cut = open_source(
        tmp_path / "data.jsonl", tokenizer=tmp_path / "tokenizer.json", text_column="body", max_length=2
    )
    assert ModelInputs(cut, SPECS).lengths.tolist()[:3] == [2, 2, 1]
    for wrong, message in (
        ({"text_column": "text"}, "text_column must be one of body, pixels"),
        ({"text_column": "pixels"}, "row 0: pixels must be text"),
    ):
        with pytest.raises(ShdError, match=message):
            ModelInputs(open_source(tmp_path / "data.jsonl", tokenizer=tmp_path, **wrong), SPECS)
    (tmp_path / "tokenizer.json").write_text("{}")
    with refusal("inputs-invalid", r"must be a readable tokenizer\.json"):
        open_source(tmp_path / "data.jsonl", tokenizer=tmp_path, text_column="body")
    save_json_lines([{"input_ids": "the cat", "pixels": [[0.5] * 3] * 2}], tmp_path / "text.jsonl")
    with pytest.raises(ShdError, match="got text: give a tokenizer"):
        ModelInputs(open_source(tmp_path / "text.jsonl"), SPECS)


def save_tokenizer(folder: Path, *, own: int | None = None, model: Any = None) -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="text needs the extra 'inputs'")
    words = {word: number for number, word in enumerate(["[UNK]", "the", "cat", "[CLS]", "[SEP]"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    marks = [("[CLS]", 3), ("[SEP]", 4)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=marks)
    if own is not None:
        tokenizer.enable_truncation(own, direction="left")
    tokenizer.save(str(folder / "tokenizer.json"))
    if model is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": model}))
    return folder


TOKEN_SPECS = tuple(InputSpec(name, "int64", ("batch", "length")) for name in ("input_ids", "attention_mask"))


@pytest.mark.parametrize(
    ("own", "model", "given", "limit"),
    [
        (None, 4, None, 4),
        (4, 5, None, 5),  # as transformers, which leaves aside what the file says
        (None, 4, 6, 6),
        (None, None, None, None),
    ],
)
def test_texts_are_cut_to_what_the_model_takes(
    tmp_path: Path, own: int | None, model: Any, given: int | None, limit: int | None
) -> None:
    folder = save_tokenizer(tmp_path, own=own, model=model)
    texts = ["cat" + " the" * 7, "the", "cat the cat the", "the cat"]
    save_json_lines([{"text": text} for text in texts], tmp_path / "data.jsonl")
    source = open_source(tmp_path / "data.jsonl", tokenizer=folder, max_length=given)
    inputs = ModelInputs(source, TOKEN_SPECS)
    full = [10, 3, 6, 4]
    assert inputs.lengths.tolist() == [min(length, limit or length) for length in full]
    cut = sum(length > (limit or length) for length in full)
    assert (source.remark is None) == (cut == 0)
    if cut:
        assert str(source.remark).startswith(f"{cut} of 4 texts were cut to {limit} tokens, as ")
        assert ("max_length says" in str(source.remark)) == (given is not None)
        # The side is that of the tokenizer's file.
        assert (2 in inputs.sample(0)["input_ids"]) == (own is None)
    elif limit is None:
        assert ModelInputs(open_source(tmp_path / "data.jsonl", tokenizer=folder / "tokenizer.json"), TOKEN_SPECS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_max_length": -4}', "must be an integer from 1; got -4"),
        ('{"model_max_length": 2}', "max_length must be at least 3"),
        ("[]", "must hold a JSON object"),
        ("[" * 100_000, "must hold a JSON object"),
    ],
)
def test_settings_of_a_tokenizer_that_say_nothing_usable_are_refused(
    tmp_path: Path, config: str, message: str
) -> None:
    folder = save_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text(config)
    save_json_lines([{"text": "the cat"}], tmp_path / "data.jsonl")
    with pytest.raises(ShdError, match=message):
        open_source(tmp_path / "data.jsonl", tokenizer=folder)


@pytest.mark.parametrize("column", ["text", "body"])
def test_a_tokenizer_is_suggested_where_text_meets_tokens(tmp_path: Path, column: str) -> None:
    path = save_json_lines([{"label": 1, column: "the cat"}], tmp_path / "data.jsonl")
    remedy = rf"Column {column} holds text: give the teacher's tokenizer \(--tokenizer FOLDER\)"
    with pytest.raises(ShdError, match=remedy + (" with --text-column body" if column == "body" else "$")):
        ModelInputs(open_source(path), TOKEN_SPECS)
    images = (InputSpec("pixels", "float32", ("batch", 3, 4, 4)),)
    with pytest.raises(ShdError, match="missing pixels") as caught:
        ModelInputs(open_source(path), images)
    assert "holds text" not in str(caught.value)


def test_masks_are_made_only_where_nothing_is_padded(tmp_path: Path) -> None:
    arrays = padded_arrays(ragged_rows())
    del arrays["attention_mask"]
    with pytest.raises(ShdError, match="missing attention_mask"):
        ModelInputs(arrays, SPECS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input_ids": [1, 2], "pixels": [[1, 2, 3], [4, 5]]}', "row 1: pixels must be numbers"),
        ('{"input_ids": [1, null], "pixels": [[1.5, 2, 3], [4, 5, 6]]}', "row 1: input_ids must be numbers"),
        ('{"input_ids": [1, 2]}', "row 1: must hold pixels"),
        ('{"input_ids": [1.5], "pixels": [[1.5, 2, 3], [4, 5, 6]]}', "row 1: input_ids must be int64; got float64"),
        ('{"input_ids": 1, "pixels": [[1.5, 2, 3], [4, 5, 6]]}', r"row 1: input_ids must have 1 axes; got \(\)"),
        ('{"input_ids": [], "pixels": [[1.5, 2, 3], [4, 5, 6]]}', "row 1"),
        ("[1, 2]", "line 2 must be a JSON object"),
        ("{", "line 2 must be JSON"),
    ],
)
def test_json_lines_that_do_not_fit_are_named(tmp_path: Path, line: str, message: str) -> None:
    good = '{"input_ids": [1], "pixels": [[1.5, 2, 3], [4, 5, 6]]}'
    (tmp_path / "data.jsonl").write_text(f"{good}\n{line}\n")
    with refusal("inputs-invalid", message):
        ModelInputs(open_source(tmp_path / "data.jsonl"), SPECS)


def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Editors of Windows write one."""
    (tmp_path / "data.jsonl").write_text('{"text": "é"}\n{"text": "b"}\n', encoding="utf-8-sig")
    source = open_source(tmp_path / "data.jsonl")
    assert (source.columns, len(source)) == (("text",), 2)
    assert [row["text"] for row in source.rows(["text"])] == ["é", "b"]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("objects.npz", lambda path: np.savez(path, x=np.array([{"a": 1}], dtype=object))),
        ("text.npz", lambda path: path.write_text("not an archive")),
        ("uneven.npz", lambda path: np.savez(path, x=np.zeros(3), y=np.zeros(4))),
        ("empty.npz", lambda path: np.savez(path, x=np.zeros((0, 3)))),
        ("absent.npz", lambda path: None),
        ("text.parquet", lambda path: path.write_text("not one")),
        ("text.arrow", lambda path: path.write_text("not one")),
        ("empty.jsonl", lambda path: path.write_text("\n")),
        ("data.csv", lambda path: path.write_text("a,b\n")),
        ("folder", lambda path: path.mkdir()),
    ],
)
def test_files_that_are_not_what_they_should_be_are_named(
    tmp_path: Path, name: str, make: Callable[[Path], Any]
) -> None:
    if name.endswith(("parquet", "arrow")):
        pytest.importorskip("pyarrow")
    make(tmp_path / name)
    with refusal("inputs-invalid", name):
        open_source(tmp_path / name)


def test_a_data_set_with_splits_asks_which(tmp_path: Path) -> None:
    save_dataset(ragged_rows()[:4], tmp_path / "all" / "train")
    with pytest.raises(ShdError, match="hold the splits train: name one"):
        open_source(tmp_path / "all")


def test_what_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    arrays = padded_arrays(ragged_rows())
    np.savez(tmp_path / "data.npz", **arrays)
    inputs = ModelInputs(open_source(tmp_path / "data.npz"), SPECS)
    arrays["input_ids"][3, 0] += 1
    np.savez(tmp_path / "data.npz", **arrays)  # the same file, as another program would write it
    assert inputs.batch([2]).indices == (2,)
    with refusal("inputs-invalid", "row 3: it changed while it was read"):
        inputs.batch([3])


class Counted(Source):
    """Rows made on demand, so a data set of any size costs nothing but what the reader keeps."""

    name = "counted"
    columns = ("input_ids",)

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def rows(self, columns: Any) -> Any:
        return ({"input_ids": np.full(self.length, index)} for index in range(self.count))


def test_a_source_that_lies_about_its_size_is_refused() -> None:
    class Short(Counted):
        def rows(self, columns: Any) -> Any:
            return iter([Row(input_ids=np.ones(3, np.int64))] * (self.count + self.length))

    for more, message in ((1, "it grew"), (-1, "it ends after 4")):
        with pytest.raises(ShdError, match=message):
            ModelInputs(Short(5, more), (InputSpec("input_ids", "int64", ("batch", "length")),))


def test_memory_stays_flat_however_long_the_data() -> None:
    import tracemalloc

    specs = (SPECS[0], SPECS[1])
    peaks = []
    for count in (200, 1000):
        tracemalloc.start()
        inputs = ModelInputs(Counted(count, length=1000), specs)  # 16 kB a sample
        batch = inputs.batch([count - 1])
        peaks.append(tracemalloc.get_traced_memory()[1] - 32 * count)  # keys, lengths and places in the spool
        tracemalloc.stop()
        assert batch.arrays["input_ids"][0, 0] == count - 1
    assert peaks[1] < 1.3 * peaks[0] + 2**16
