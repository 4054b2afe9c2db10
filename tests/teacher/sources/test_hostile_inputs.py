"""Untrusted data files: for any headers, types and names, one error of ours."""

import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from support.attention_graphs import GraphBuilder
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.teacher import InputSpec, ModelInputs, input_specs, load_teacher, open_source
from shd_ref.teacher.graph.inputs import count_rows

SPECS = tuple(InputSpec(name, "int64", ("batch", "length")) for name in ("input_ids", "attention_mask"))


def refused(path: Path | str, code: str = "inputs-invalid") -> str:
    with refusal(code) as caught:
        ModelInputs(open_source(path), SPECS)
    return str(caught.value)


def npy(shape: Any = (2, 2), *, descr: Any = "<i8", header: Any = None, data: bytes = bytes(32)) -> bytes:
    """An array file with this header, honest or not."""
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}) if header is None else header
    text = header if isinstance(header, bytes) else header.encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def npz(path: Path, method: int, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


HEADERS = {
    "negative": npy((2, -2)),
    "larger than the file": npy((2, 3)),
    "terabytes": npy((2, 2**40)),
    "beyond any integer": npy((2, 2**70)),
    "more digits than Python reads": npy(header=f"{{'descr':'<i8','fortran_order':False,'shape':(2,{'9' * 5000})}}"),
    "no integers": npy((2.0, 2)),
    "truth values": npy((True, 2), data=bytes(16)),
    "no sample": npy((0, 2), data=b""),
    "no axis": npy((), data=bytes(8)),
    "objects": npy((2, 2), descr="|O"),
    "fields": npy((2,), descr=[("a", "<i8"), ("b", "<i8")]),
    "text": npy((2, 2), descr="<U2"),
    "no type": npy((2, 2), descr="zz"),
    "half a header": npy(header="{'descr'"),
    "nesting": npy(header="(" * 5000),
    "no magic": b"plain",
    "nothing": b"",
}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "compressed"])
@pytest.mark.parametrize("kind", HEADERS)
def test_headers_of_npz_members(tmp_path: Path, kind: str, method: int) -> None:
    honest = npy(data=np.ones((2, 2), "<i8").tobytes())
    ModelInputs(open_source(npz(tmp_path / "good.npz", method, input_ids=honest, attention_mask=honest)), SPECS)
    path = npz(tmp_path / "data.npz", method, input_ids=HEADERS[kind], attention_mask=honest)
    assert str(path) in refused(path)


def damaged_archives(folder: Path) -> Iterator[Path]:
    honest = npy(data=np.ones((2, 2), "<i8").tobytes())
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        good = npz(folder / "good.npz", method, input_ids=honest, attention_mask=honest).read_bytes()
        entry, local = good.index(b"PK\x01\x02"), good.index(b"PK\x03\x04")
        for name, place, value in (
            ("encrypted", entry + 8, 1),
            ("method", entry + 10, 99),
            ("name", entry + 46, 0xFF),
            ("local", local, 0),
        ):
            path = folder / f"{name}-{method}.npz"
            path.write_bytes(good[:place] + bytes([value]) + good[place + 1 :])
            yield path
    stream = bytearray((folder / "good.npz").read_bytes())
    stream[stream.index(b"PK\x03\x04") + 50 : stream.index(b"PK\x03\x04") + 70] = bytes(20)
    (folder / "stream.npz").write_bytes(stream)
    yield folder / "stream.npz"
    with zipfile.ZipFile(folder / "twice.npz", "w") as archive:
        for name in ("input_ids.npy", "input_ids", "attention_mask.npy"):
            archive.writestr(name, honest)
    yield folder / "twice.npz"


def test_damaged_archives(tmp_path: Path) -> None:
    for path in damaged_archives(tmp_path):
        assert str(path) in refused(path), path.name


def odd_columns() -> dict[str, Callable[[Any], Any]]:
    return {
        "struct": lambda pa: pa.array([{"a": 1}, {"a": 2}]),
        "map": lambda pa: pa.array([[("a", 1)], [("b", 2)]], type=pa.map_(pa.string(), pa.int64())),
        "lists of text": lambda pa: pa.array([["a"], ["b"]]),
        "null": lambda pa: pa.array([None, None]),
        "scalar": lambda pa: pa.array([1, 2]),
        "beyond int64": lambda pa: pa.array([[2**63 + 1], [2**64 - 1]], type=pa.list_(pa.uint64())),
        "ragged": lambda pa: pa.array([[[1, 2], [3]], [[1], [2]]]),
        "union": lambda pa: pa.UnionArray.from_sparse(
            pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])]
        ),
        "runs": lambda pa: pa.RunEndEncodedArray.from_arrays([2], [1]),
    }


@pytest.mark.parametrize("kind", odd_columns())
def test_columns_of_other_types(tmp_path: Path, kind: str) -> None:
    pa = pytest.importorskip("pyarrow", reason="Arrow needs the extra 'inputs'")
    parquet, ipc = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow.ipc")
    table = pa.table({"input_ids": odd_columns()[kind](pa), "attention_mask": pa.array([[1, 1], [1]])})
    with ipc.new_file(tmp_path / "data.arrow", table.schema) as file:
        file.write_table(table)
    assert "row 0" in refused(tmp_path / "data.arrow")
    try:
        parquet.write_table(table, tmp_path / "data.parquet")
    except pa.ArrowException:  # a type that Parquet lacks
        return
    refused(tmp_path / "data.parquet")


def test_lists_that_end_beyond_their_numbers(tmp_path: Path) -> None:
    """The library would end the process."""
    pa = pytest.importorskip("pyarrow", reason="Arrow needs the extra 'inputs'")
    ipc = pytest.importorskip("pyarrow.ipc")
    buffers = [None, pa.py_buffer(np.array([0, 10**6, 2], np.int32))]
    column = pa.Array.from_buffers(pa.list_(pa.int64()), 2, buffers, children=[pa.array([1, 2])])
    table = pa.table({"input_ids": column, "attention_mask": pa.array([[1, 1], [1]])})
    with ipc.new_file(tmp_path / "data.arrow", table.schema) as file:
        file.write_table(table)
    assert "must be readable Arrow files" in refused(tmp_path / "data.arrow")


LONG = "x" * 300
NAMES = ["a\0b", LONG, "/".join(["d" * 200] * 30), "\ud800"]


@pytest.mark.parametrize("name", NAMES, ids=["nul", "long", "deep", "no text"])
def test_paths_that_no_file_has(tmp_path: Path, name: str) -> None:
    pytest.importorskip("tokenizers", reason="text needs the extra 'inputs'")
    for suffix in ("", ".npz", ".jsonl", ".parquet", ".arrow"):
        refused(name + suffix)
    with refusal("graph-invalid"):
        load_teacher(name)
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n')
    with refusal("inputs-invalid", "must be a readable tokenizer"):
        open_source(tmp_path / "d.jsonl", tokenizer=name)


@pytest.mark.parametrize(
    ("listed", "code"),
    [
        ("a\0.arrow", "inputs-invalid"),
        (f"{LONG}.arrow", "inputs-invalid"),
        ("\ud800.arrow", "inputs-invalid"),
        ("../a.arrow", "path-unsafe"),
        (None, "path-unsafe"),
        (["a"], "path-unsafe"),
        *((state, "inputs-invalid") for state in (b"[]", b'{"_data_files": [5]}', b"[" * 100_000, b"\xff")),
    ],
    ids=lambda listed: repr(listed)[:20],
)
def test_file_names_in_a_data_set(tmp_path: Path, listed: Any, code: str) -> None:
    pytest.importorskip("pyarrow", reason="Arrow needs the extra 'inputs'")
    state = listed if isinstance(listed, bytes) else json.dumps({"_data_files": [{"filename": listed}]}).encode()
    (tmp_path / "state.json").write_bytes(state)
    message = refused(tmp_path, code)
    assert ("must list the files of a data set" in message) == isinstance(listed, bytes)


@pytest.mark.parametrize(
    "line",
    [
        '{"input_ids": [1e400], "attention_mask": [1]}',
        '{"input_ids": [18446744073709551615], "attention_mask": [1]}',
        '{"input_ids": [' + "9" * 5000 + '], "attention_mask": [1]}',
        '{"input_ids": ' + "[" * 900 + "1" + "]" * 900 + ', "attention_mask": [1]}',
        '{"input_ids": {"a": 1}, "attention_mask": [1]}',
        '{"input_ids": "\\ud800", "attention_mask": [1]}',
        '{"input_ids": [1, "a"], "attention_mask": [1]}',
        '{"input_ids": null, "attention_mask": [1]}',
        '{"' + LONG + '": 1}',
        '{"input_ids": [NaN], "attention_mask": [1]}',
        '{"input_ids": [1], "attention_mask": [1], "input_ids": [2]}',
        '{"input_ids": [1], "attention_mask": [1], "about": {"a": 1, "a": 1}}',
    ],
    ids=lambda line: line[:60],
)
def test_lines_of_numbers_that_are_none(tmp_path: Path, line: str) -> None:
    (tmp_path / "data.jsonl").write_text(line + "\n")
    refused(tmp_path / "data.jsonl")


def test_a_line_that_is_too_long(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"input_ids": [1], "attention_mask": [1]' + " " * 2**26 + "}\n")
    assert f"at most {2**26} bytes" in refused(tmp_path / "data.jsonl")


HOSTILE_RULES: dict[str, dict[str, Any]] = {
    "an expression that gives up": {"pre_tokenizer": ("(a|a|a|a)*$", "Split")},
    "an expression that takes long": {"pre_tokenizer": ("a*a*(?![ab])", "Split")},
    "a replacement that grows": {"normalizer": ("a", "Replace")},
    "an expression that is none": {"pre_tokenizer": ("(", "Split")},
}


@pytest.mark.parametrize("kind", HOSTILE_RULES)
def test_rules_of_a_tokenizer_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pytest.importorskip("tokenizers", reason="text needs the extra 'inputs'")
    monkeypatch.setattr("shd_ref.teacher.sources.text.SECONDS", 2.0)
    monkeypatch.setattr("shd_ref.teacher.sources.text._MEMORY", 2**29)
    rules: dict[str, Any] = {"version": "1.0", "added_tokens": []}
    for place, (pattern, rule) in HOSTILE_RULES[kind].items():
        one = {"type": rule, "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        several = dict.fromkeys(("normalizers", "pretokenizers"), [{**one, "content": "a" * 1000}] * 4)
        rules[place] = {"type": "Sequence", **several}
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules | {"model": model}))
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "a" * 3000 + "b"}) + "\n")
    with refusal("inputs-invalid") as caught:
        next(open_source(tmp_path / "d.jsonl", tokenizer=tmp_path).rows(["input_ids"]))
    assert ("needs more than" in str(caught.value)) == (kind.split()[-1] in ("long", "grows"))


def teacher_of_tables() -> onnx.ModelProto:
    """Tables of 9 and of 7 rows for tokens, and of 4 for the decoder's; places are clipped."""
    build = GraphBuilder()
    table = build.op("DequantizeLinear", np.ones((9, 3), np.int8), np.float32(0.5))
    flat = build.op("Reshape", build.op("Cast", "input_ids", to=TensorProto.INT32), [-1])
    build.op("Gather", table, flat, axis=0)
    build.op("Gather", np.ones((7, 2), np.float32), "input_ids")
    types = build.op("Constant", value=onnx.numpy_helper.from_array(np.ones((4, 2), np.float32)))
    build.op("Gather", types, "decoder_input_ids")
    build.op("Gather", np.ones((2, 5), np.float32), "decoder_input_ids", axis=1)
    places = build.op("Clip", "places", np.int64(0), np.int64(1))
    output = build.op("Gather", np.ones((2, 5), np.float32), places)
    names = ("input_ids", "decoder_input_ids", "places")
    return build.model({name: (TensorProto.INT64, ["batch", "length"]) for name in names}, [output])


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("input_ids", 6, None),
        ("input_ids", 7, "row 2: input_ids must be 0 to 6, as the teacher's table has 7 rows; got 7 at position 1"),
        ("input_ids", -100, "got -100 at position 1"),
        ("input_ids", -1, "got -1 at position 1"),
        ("decoder_input_ids", 4, "row 2: decoder_input_ids must be 0 to 3"),
        ("places", -1, None),
    ],
)
def test_numbers_of_rows_that_a_table_lacks(name: str, number: int, message: str | None) -> None:
    """ONNX counts negative ones from the end of the table, where PyTorch refuses them."""
    model = teacher_of_tables()
    data = {spec.name: np.ones((3, 4), np.int64) for spec in input_specs(model)}
    data[name][2, 1] = number
    with nullcontext() if message is None else pytest.raises(ShdError, match=message):
        ModelInputs(data, input_specs(model), rows=count_rows(model))


@pytest.mark.parametrize("masked", [False, True])
def test_a_sample_of_no_tokens_is_named(tmp_path: Path, masked: bool) -> None:
    rows = [{"input_ids": [1, 2], "attention_mask": [1, 1]}, {"input_ids": [], "attention_mask": []}]
    rows = rows if masked else [{"input_ids": row["input_ids"]} for row in rows]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = refused(tmp_path / "data.jsonl")
    assert "row 1: " in message
    assert "must hold at least one number; got none" in message
