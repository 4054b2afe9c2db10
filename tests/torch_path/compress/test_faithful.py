"""The teacher of ``compress`` is what the model's own library gives for the user's texts, or one sentence is."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.commands import invoke
from support.folders import MARKS, TEXTS, Settings, random_like, save_model, save_modules, save_tokenizer
from support.refusals import refusal

transformers: Any = pytest.importorskip("transformers", reason="teachers are Hugging Face models")
tokenizers: Any = pytest.importorskip("tokenizers", reason="texts need the extra 'inputs'")
pytest.importorskip("onnxruntime", reason="graphs are run")
pytest.importorskip("scipy", reason="compress needs scipy")

from shd_ref.cache import CacheReader, sample_key  # noqa: E402
from shd_ref.errors import ShdError  # noqa: E402
from shd_ref.teacher import PrecomputeOptions, RunOptions, open_source, read_pooling  # noqa: E402
from shd_ref.teacher.precompute.engine import precompute  # noqa: E402
from shd_ref.teacher.sentence_folder import PADS_FRONT, Pooling  # noqa: E402
from shd_ref.teacher.study.recheck import recheck_records  # noqa: E402
from shd_torch.cli import load_app  # noqa: E402
from shd_torch.compress import CompressOptions  # noqa: E402
from shd_torch.compress.run import _open_run, study_teacher  # noqa: E402
from shd_torch.compress.samples import Samples, pad, read_rows  # noqa: E402
from shd_torch.compress.space import Design  # noqa: E402
from shd_torch.compress.static import _embed_tokens, judge_static  # noqa: E402
from shd_torch.compress.students import _make, prepare_training  # noqa: E402
from shd_torch.compress.task import Decoder, Judge, find_task, graph_run, model_run  # noqa: E402
from shd_torch.export import example_inputs, export_teacher, load_hf_model  # noqa: E402
from shd_torch.shrink.folders import forward_inputs, load_teacher, padding_of, read_config  # noqa: E402

OPTIONS = CompressOptions(faster=(2.0,), batch=(1,), length=(8,))


MEAN = {"pooling_mode_mean_tokens": True}
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
PROMPT = {"prompts": {"query": "red fox "}, "default_prompt_name": "query"}
LLAMA = {"num_key_value_heads": 1}
CASED = {"do_lower_case": False}
MODELS: dict[str, tuple[str, Settings, str, Settings]] = {
    "a classifier of texts that end before their padding": (
        *("LlamaForSequenceClassification", LLAMA | {"pad_token_id": 5}),
        *("words", {"pad": 5}),
    ),
    "padding in front": (
        *("LlamaForSequenceClassification", LLAMA | {"pad_token_id": 3}),
        *("words", {"pad": 3, "padding_side": "left"}),
    ),
    "padding in front of absolute positions": (
        *("GPT2ForSequenceClassification", {"pad_token_id": 3}),
        *("words", {"pad": 3, "padding_side": "left"}),
    ),
    "texts that are cut in front": (
        *("GPT2ForSequenceClassification", {"pad_token_id": 3}),
        *("words", {"pad": 3, "model_max_length": 6, "truncation_side": "left"}),
    ),
    "no padding token": ("LlamaForSequenceClassification", LLAMA | {"pad_token_id": None}, "words", {"pad": None}),
    "a decoder without a padding token": ("LlamaForCausalLM", LLAMA | {"pad_token_id": None}, "words", {"pad": None}),
    "a head of masked tokens": ("BertForMaskedLM", {}, "bert", {}),
    "an encoder kept as a decoder": ("BertLMHeadModel", {}, "bert", {}),
    "positions that count padding, and a larger table": (
        *("RobertaModel", {"pad_token_id": 1, "vocab_size": 40}),
        *("words", {"pad": 1}),
    ),
    "a tokenizer with more inputs than the model": (
        *("DistilBertForSequenceClassification", {"hidden_dim": 32, "dim": 16, "n_layers": 2, "n_heads": 2}),
        *("bert", {}),
    ),
    "a file that was cut once": ("BertForSequenceClassification", {}, "bert", {"model_max_length": 9}),
    "short lower-case sentences": ("BertModel", {}, "bert", CASED),
    "sentences of a model kept in halves": ("BertModel", {}, "bert", {}),
    "sentences with a prompt": ("BertModel", {}, "bert", CASED),
    "a prompt that is not pooled": ("BertModel", {}, "bert", CASED),
    "sentences of a decoder with its head": (
        *("LlamaForCausalLM", LLAMA | {"pad_token_id": 4}),
        *("words", {"pad": 4, "padding_side": "left"}),
    ),
    "sentences with a head of masked tokens": ("BertForMaskedLM", {}, "bert", {}),
    "scores by a module": ("LlamaForCausalLM", LLAMA | {"pad_token_id": 3}, "words", {"pad": 3}),
    "a projection of sentences": ("BertModel", {}, "bert", {}),
    "states of another layer": ("BertModel", {}, "bert", {}),
    "tokens that the table lacks": ("BertModel", {"vocab_size": 20}, "bert", CASED),
}
"""Class and configuration of a model, kind and settings of its tokenizer; another case is a configuration."""
STATES = {"text": {"method": "forward", "method_output_name": ["hidden_states", 1]}}
SENTENCES: dict[str, tuple[tuple[str, ...], Settings]] = {
    "short lower-case sentences": (
        ("Normalize",),
        {"pooling": MEAN, "sentence_bert_config": {"max_seq_length": 7, "do_lower_case": True}},
    ),
    "sentences of a model kept in halves": ((), {"pooling": MEAN}),
    "sentences with a prompt": ((), {"pooling": MEAN, "config_sentence_transformers": PROMPT}),
    "a prompt that is not pooled": (
        (),
        {"pooling": MEAN | {"include_prompt": False}, "config_sentence_transformers": PROMPT},
    ),
    "sentences of a decoder with its head": (("Normalize",), {"pooling": LAST}),
    "sentences with a head of masked tokens": ((), {"pooling": MEAN}),
    "scores by a module": ((), {"pooling": {}, "sentence_bert_config": {"transformer_task": "text-generation"}}),
    "a projection of sentences": (("Dense",), {"pooling": MEAN}),
    "states of another layer": (
        (),
        {
            "pooling": MEAN,
            "sentence_bert_config": {"modality_config": STATES, "module_output_name": "token_embeddings"},
        },
    ),
}
"""Modules and files of sentence-transformers, of the cases that are its folders."""


def make_folder(folder: Path, case: str) -> None:
    """A teacher of one of these kinds."""
    default = ("BertForSequenceClassification", {} if case in MODELS else json.loads(case), "bert", {})
    name, changes, kind, settings = MODELS.get(case, default)
    save_model(folder, name, **{"num_hidden_layers": 1} | changes)
    save_tokenizer(folder, kind, **settings)
    modules, files = SENTENCES.get(case, ((), {}))
    if files:
        save_modules(folder, *modules, **files)
    match case:
        case "a file that was cut once":
            truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
            edit_json(folder / "tokenizer.json", truncation=truncation)
        case "sentences of a model kept in halves":
            transformers.BertModel.from_pretrained(folder).bfloat16().save_pretrained(folder)
        case "scores by a module":
            listed = (folder / "modules.json").read_text().replace("Pooling", "LogitScore")
            (folder / "modules.json").write_text(listed)


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_texts(folder: Path) -> Path:
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder / "data.jsonl"


def run_library(folder: Path) -> np.ndarray[Any, Any]:
    """All texts in one padded batch, as a user of the model would run them."""
    if (folder / "part_1").exists():
        library = pytest.importorskip("sentence_transformers", reason="its own folders")
        told: Any = {"device": "cpu", "local_files_only": True, "model_kwargs": {"dtype": "float32"}}
        encoder = library.SentenceTransformer(str(folder), **told)
        array: np.ndarray[Any, Any] = encoder.encode(TEXTS, batch_size=len(TEXTS), show_progress_bar=False)
        return array
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(TEXTS, padding=True, truncation=tokenizer.model_max_length < 1e18, return_tensors="pt")
    if "distilbert" in config.model_type:
        batch.pop("token_type_ids")
    with torch.no_grad():
        output = model(**batch)[0]
    return (output if output.ndim == 2 else output[batch["attention_mask"].bool()]).numpy()


def open_run(tmp_path: Path, case: str) -> Any:
    make_folder(tmp_path / "teacher", case)
    return _open_run(tmp_path / "teacher", write_texts(tmp_path), None, OPTIONS, tmp_path / "run", lambda *_: None)


EQUAL = (
    "a classifier of texts that end before their padding",
    "a decoder without a padding token",
    "positions that count padding, and a larger table",
    "a tokenizer with more inputs than the model",
    "a file that was cut once",
    "short lower-case sentences",
    "texts that are cut in front",
    "sentences with a prompt",
    "sentences of a decoder with its head",
)


def allowed(expected: np.ndarray[Any, Any]) -> float:
    return 2e-5 * max(1.0, float(np.abs(expected).max()))


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("case", EQUAL)
def test_the_teacher_is_that_of_its_library(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr("shd_torch.compress.run.divide", lambda rows, *_: read.extend(rows) or samples_of(rows))
    with open_run(tmp_path, case) as run:
        batch = pad(read, padding_of(run.model.config))
        output = torch.from_numpy(model_run(run.model)(batch))
        if isinstance(run.task, Decoder):
            got = output[torch.from_numpy(batch["attention_mask"]).bool()]
        else:
            got = run.task.summarise(output, {name: torch.from_numpy(array) for name, array in batch.items()})
    expected = run_library(tmp_path / "teacher")
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=allowed(expected))


@pytest.mark.filterwarnings("ignore")
def test_students_of_a_model_kept_in_halves_are_float32(tmp_path: Path) -> None:
    with open_run(tmp_path, "sentences of a model kept in halves") as run:
        row = {"design": asdict(Design((0,), (2,), (16,)))}
        student = _make(run, next(iter(OPTIONS.targets([1.0]))), 0, row).student
        assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore")
def test_a_static_table_is_the_one_that_sentence_transformers_loads(tmp_path: Path) -> None:
    """With the prompt of its teacher, whose answers are nearer to its own than to what it was fitted from."""
    library = pytest.importorskip("sentence_transformers", reason="it loads the folder")
    with open_run(tmp_path, "sentences with a prompt") as run:
        run.options = replace(run.options, static=True)
        config, is_text = prepare_training(run), np.arange(30) > len(MARKS) - 1
        assert judge_static(run, config) is not None
        judge, start = run.judge("choices"), _embed_tokens(run, run.task, config.rows[0], is_text)
        pooled = replace(run.task, pooling=Pooling("mean"))
        graph = graph_run(run.folder / "static" / "onnx" / "model.onnx")
        assert (
            judge.measure(graph, pooled).loss
            < 0.9 * judge.measure(lambda rows: start[rows["input_ids"]], pooled).loss
        )
        batch = pad(read_rows(tmp_path / "data.jsonl", tmp_path / "teacher", None), 0)
        mask = torch.from_numpy(batch["attention_mask"])
        expected = pooled.summarise(torch.from_numpy(graph(batch)), {"attention_mask": mask})
        encoder = library.SentenceTransformer(str(run.folder / "static"), device="cpu", local_files_only=True)
        got = torch.from_numpy(encoder.encode(TEXTS))
    cosines = torch.nn.functional.cosine_similarity(got, expected)
    assert float(cosines.min()) > 1 - allowed(expected.numpy())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "removed", "code", "rule"),
    [
        (
            "padding in front",
            "",
            "argument-value",
            "static must go with a sentence-transformers encoder; got a class",
        ),
        ("sentences with a prompt", "tokenizer*", "read-failed", "must have a tokenizer.json, for a static table"),
    ],
)
def test_no_static_table_is_said_before_anything_is_read(
    tmp_path: Path, case: str, removed: str, code: str, rule: str
) -> None:
    make_folder(tmp_path / "teacher", case)
    for file in (tmp_path / "teacher").glob(removed or "none"):
        file.unlink()
    options = replace(OPTIONS, static=True)
    opened = _open_run(tmp_path / "teacher", tmp_path / "no.jsonl", None, options, tmp_path / "run", lambda *_: None)
    with refusal(code, rule), opened:
        pass


def test_no_length_is_beyond_the_positions(tmp_path: Path) -> None:
    """Where a graph would fail long after; RoBERTa's positions begin behind the id of padding."""
    save_model(tmp_path / "teacher", "RobertaModel", max_position_embeddings=9, pad_token_id=1)
    save_tokenizer(tmp_path / "teacher", "words", pad=1)
    data = write_texts(tmp_path)
    for length, said in ((10, "length must be at most 7, .*; got 10"), (4, "row .* at most 7 .* --max-length 7$")):
        options = replace(OPTIONS, length=(4, length))
        opened = _open_run(tmp_path / "teacher", data, None, options, tmp_path / "run", lambda *_: None)
        with pytest.raises(ShdError, match=said), opened:
            pass


@pytest.mark.filterwarnings("ignore")
def test_commands_name_a_text_beyond_the_positions(tmp_path: Path) -> None:
    """With the option that cuts it, and the limit that is right."""
    save_model(tmp_path / "teacher", "RobertaModel", max_position_embeddings=12, pad_token_id=1)
    save_tokenizer(tmp_path / "teacher", "words", pad=1)
    data = write_texts(tmp_path)
    lengths = [len(text.split()) + 1 for text in TEXTS]
    row, got = lengths.index(max(lengths)), max(lengths)
    teacher = str(tmp_path / "teacher")
    shrinking = ["shrink", teacher, "--heads", "1", "--out", str(tmp_path / "student"), "--data", str(data)]
    for words in (["doctor", teacher, teacher, "--data", str(data)], shrinking):
        result = invoke(load_app(), words)
        message = " ".join(result.output.split())
        assert result.exit_code == 1
        assert f"data, row {row}: it must have at most 10 positions, the model's limit; got {got}: cut" in message
        assert message.endswith("--max-length 10")
    assert invoke(load_app(), [*shrinking, "--max-length", "10"]).exit_code == 0


def samples_of(rows: Any) -> Any:
    return Samples(rows, rows[:20], rows[:20], "none")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("no padding token", "set pad_token_id in its config.json"),
        ("a head of masked tokens", "got BertForMaskedLM: compress its base model"),
        ("an encoder kept as a decoder", "each token from those before it alone"),
        ("a prompt that is not pooled", "got include_prompt false"),
        (
            "sentences with a head of masked tokens",
            r"every weight of a BertModel.*random ones with .*save_pretrained",
        ),
        ("a projection of sentences", "must make embeddings by Pooling, and then Normalize or nothing"),
        ("states of another layer", "got modality_config: tokenise"),
        ("tokens that the table lacks", "with no id beyond its table"),
        ("scores by a module", "its scores or classes by the head of its model; got the module .*LogitScore"),
    ],
)
def test_other_teachers_are_refused_in_one_sentence(tmp_path: Path, case: str, said: str) -> None:
    with pytest.raises(ShdError, match=said) as caught, open_run(tmp_path, case):
        pass
    assert "\n" not in str(caught.value)


BESIDE: dict[str, Settings] = {
    "do_lower_case": {"do_lower_case": True},
    "a token of its own": {"extra_special_tokens": ["a"]},
    "a class with rules of its own": {"tokenizer_class": "Qwen2Tokenizer"},
    "what transformers ignores beside tokenizer.json": {"add_bos_token": True, "bos_token": "[CLS]"},
}


@pytest.mark.parametrize("case", BESIDE)
def test_tokens_are_those_of_all_files_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Or the remedy is what the message says; without transformers one setting tells."""
    folder = tmp_path / "teacher"
    save_model(folder, "BertForSequenceClassification" if case == "do_lower_case" else "LlamaForCausalLM")
    save_tokenizer(folder, "bert" if case == "do_lower_case" else "words", do_lower_case=False)
    edit_json(folder / "tokenizer_config.json", **BESIDE[case])
    data = write_texts(tmp_path)
    library = transformers.AutoTokenizer.from_pretrained(folder)
    if "ignores" not in case:
        with refusal("inputs-invalid", r"must give the tokens that AutoTokenizer gives.*save_pretrained\(FOLDER\)"):
            list(open_source(data, tokenizer=folder).rows(["input_ids"]))
        with monkeypatch.context() as patch:
            (tmp_path / "transformers.py").write_text("raise ImportError")
            patch.syspath_prepend(tmp_path)
            rows = open_source(data, tokenizer=folder).rows(["input_ids"])
            if case == "do_lower_case":
                with refusal("inputs-invalid", "must agree in all its files; it does not follow do_lower_case"):
                    next(rows)
            else:
                next(rows)
        library.save_pretrained(folder)
    rows = open_source(data, tokenizer=folder).rows(["input_ids"])
    assert [row["input_ids"].tolist() for row in rows] == library(TEXTS)["input_ids"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Teachers whose graphs depend on what they are fed beside tokens, and on what these are padded with."""
    paths = {}
    for case in ('{"initializer_range": 0.5}', EQUAL[0], "short lower-case sentences"):
        folder = tmp_path_factory.mktemp("teacher")
        make_folder(folder, case)
        model = load_hf_model(folder)
        export_teacher(model, example_inputs(model), folder / "teacher.onnx")
        paths[case] = folder
    return paths


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", [EQUAL[0], "short lower-case sentences"])
def test_the_cache_holds_what_the_library_gives(exported: Mapping[str, Path], tmp_path: Path, case: str) -> None:
    """By the two commands alone: shd-torch export, and shd precompute with the folder as its tokenizer."""
    folder = exported[case]
    sentences = (folder / "modules.json").exists()
    targets: dict[str, Any] = {"embeddings": read_pooling(folder)} if sentences else {"logits": "float16"}
    options = PrecomputeOptions(num_student_heads=0, form="none", **targets)
    source = open_source(write_texts(tmp_path), tokenizer=folder)
    precompute(folder / "teacher.onnx", source, tmp_path / "cache", options)
    reader = CacheReader(tmp_path / "cache")
    for row, vector in zip(source.rows(reader.manifest.inputs.names), run_library(folder), strict=True):
        record = reader.read(sample_key(row))
        stored = reader.decode_embedding(record) if sentences else reader.decode_logits(record)
        np.testing.assert_allclose(np.ravel(stored), vector, rtol=0, atol=2e-3 * max(1, np.abs(vector).max()))


@pytest.mark.filterwarnings("ignore")
def test_what_a_text_gives_alone_counts(tmp_path: Path) -> None:
    """Where the library's answer depends on the batch: every command takes the one of a text alone."""
    folder = tmp_path / "teacher"
    with open_run(tmp_path, "padding in front of absolute positions") as run:
        assert run.remarks == [PADS_FRONT]
        model = run.model
    export_teacher(model, example_inputs(model), folder / "teacher.onnx")
    source = open_source(tmp_path / "data.jsonl", tokenizer=folder)
    options = PrecomputeOptions(num_student_heads=0, form="none", logits="float16")
    precompute(folder / "teacher.onnx", source, tmp_path / "cache", options)
    reader = CacheReader(tmp_path / "cache")
    for row in source.rows(["input_ids", "attention_mask"]):
        with torch.no_grad():
            alone = model(**{name: torch.from_numpy(array)[None] for name, array in row.items()})[0].numpy()
        np.testing.assert_allclose(reader.decode_logits(reader.read(sample_key(row))), alone, atol=1e-2)


@pytest.mark.filterwarnings("ignore")
def test_pairs_of_texts_keep_their_types(exported: Mapping[str, Path], tmp_path: Path) -> None:
    """A table as a tokenizer makes it: its types reach the graph, or their loss is said."""
    folder = exported['{"initializer_range": 0.5}']
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = dict(tokenizer(TEXTS[:30], TEXTS[30:], padding=True, return_tensors="np"))
    model = load_hf_model(folder)
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(array) for name, array in batch.items()})[0].numpy()
    options = PrecomputeOptions(num_student_heads=0, form="none", logits="float16")
    precompute(folder / "teacher.onnx", batch | {"label": np.zeros(30)}, tmp_path / "cache", options)
    reader = CacheReader(tmp_path / "cache")
    for at, logits in enumerate(expected):
        row = {name: array[at][: batch["attention_mask"][at].sum()] for name, array in batch.items()}
        np.testing.assert_allclose(reader.decode_logits(reader.read(sample_key(row))), logits[None], atol=1e-2)
    export_teacher(model, example_inputs(model, ["attention_mask"]), tmp_path / "without.onnx")
    with refusal("inputs-invalid", "row 0: token_type_ids must be 0 where the graph does not take them"):
        precompute(tmp_path / "without.onnx", batch, tmp_path / "none", options)
    zeros = batch | {"token_type_ids": np.zeros_like(batch["input_ids"]), "label": np.zeros(30)}
    made = precompute(tmp_path / "without.onnx", zeros, tmp_path / "zeros", options)
    assert made.remark == "left out, as the graph does not take them: label"
    del zeros["token_type_ids"]
    made = precompute(folder / "teacher.onnx", zeros, tmp_path / "supplied", options)


@pytest.mark.parametrize("max_length", [None, 5])
def test_pairs_are_cut_as_their_library_cuts_them(tmp_path: Path, max_length: int | None) -> None:
    """From the end of the longer text, whatever the tokenizer's file once did."""
    save_tokenizer(tmp_path, "bert", model_max_length=12)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    truncation = {"direction": "Right", "max_length": 9, "strategy": "OnlySecond", "stride": 0}
    edit_json(tmp_path / "tokenizer.json", truncation=truncation)
    library = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = library(TEXTS, TEXTS[::-1], truncation=True, max_length=max_length)
    rows = [{"query": first, "text": second} for first, second in zip(TEXTS, TEXTS[::-1], strict=True)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns: dict[str, Any] = {"text_column": "query", "pair_column": "text"}
    source = open_source(tmp_path / "pairs.jsonl", tokenizer=tmp_path, max_length=max_length, **columns)
    for at, row in enumerate(source.rows(source.columns[:3])):
        assert {name: array.tolist() for name, array in row.items()} == {name: expected[name][at] for name in row}
    assert source.remark is not None
    with refusal("inputs-invalid", "pair_column must be one of query, text"):
        open_source(tmp_path / "pairs.jsonl", tokenizer=tmp_path, text_column="query", pair_column="answer")
    with refusal("argument-value", "max_length must be at least 4.*3 special tokens to every pair"):
        open_source(tmp_path / "pairs.jsonl", tokenizer=tmp_path, max_length=3, **columns)


@pytest.mark.filterwarnings("ignore")
def test_graphs_that_do_not_state_their_padding(exported: Mapping[str, Path], tmp_path: Path) -> None:
    """Of another exporter: what their head finds at the end of a text is then wrong in a batch, and right alone."""
    import onnx

    folder = exported[EQUAL[0]]
    graph = onnx.load(folder / "teacher.onnx")
    del graph.metadata_props[:]
    onnx.save(graph, tmp_path / "bare.onnx")
    options = PrecomputeOptions(num_student_heads=0, form="none", logits="float16")
    source = open_source(write_texts(tmp_path), tokenizer=folder)
    with refusal("graph-unsupported", "with their padding"):
        precompute(tmp_path / "bare.onnx", source, tmp_path / "cache", options)
    precompute(tmp_path / "bare.onnx", source, tmp_path / "cache", options, RunOptions(batch_size=1))
    assert recheck_records(tmp_path / "cache", tmp_path / "bare.onnx", source).records == 8


def test_what_a_model_without_a_head_lacks(exported: Mapping[str, Path], tmp_path: Path) -> None:
    folder = exported["short lower-case sentences"]
    options = PrecomputeOptions(num_student_heads=0, form="none", hidden=(-1,))
    with refusal("argument-value", "hidden must leave out last, which needs a head"):
        precompute(
            folder / "teacher.onnx", open_source(write_texts(tmp_path), tokenizer=folder), tmp_path / "cache", options
        )
    result = invoke(load_app(), ["export", str(folder / "teacher.onnx"), "--out", str(tmp_path / "t.onnx")])
    assert "must be the folder or hub id of a model; got the graph" in " ".join(result.output.split())


@pytest.mark.filterwarnings("ignore")
def test_a_graph_whose_quantisation_rounds_its_mask(exported: Mapping[str, Path], tmp_path: Path) -> None:
    """It attends to padding: the remedy is the message's, and what it makes is verified."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    folder, graph = exported['{"initializer_range": 0.5}'], tmp_path / "static.onnx"
    source = open_source(write_texts(tmp_path), tokenizer=folder)
    feeds = iter([{name: array[None] for name, array in row.items()} for row in source.rows(source.columns[:3])])

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Any:
            return next(feeds, None)

    quantize_static(str(folder / "teacher.onnx"), str(graph), Reader())
    options = PrecomputeOptions(num_student_heads=1)
    with refusal("support-mismatch", r"attends to padding, .*: run samples alone \(--batch-size 1\)"):
        precompute(graph, source, tmp_path / "batches", options)
    precompute(graph, source, tmp_path / "alone", options, RunOptions(batch_size=1, num_threads=2))
    assert recheck_records(tmp_path / "alone", graph, source).records == 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["a decoder without a padding token", "short lower-case sentences", "pixels"])
def test_no_measure_lets_a_random_student_pass(tmp_path: Path, case: str) -> None:
    if case == "pixels":
        save_model(tmp_path / "teacher", "ViTModel", image_size=8, patch_size=4)
        random = np.random.default_rng(0)
        rows = [{"pixel_values": random.standard_normal((3, 8, 8)).astype(np.float32)} for _ in range(60)]
    else:
        make_folder(tmp_path / "teacher", case)
        takes = forward_inputs(read_config(tmp_path / "teacher"))
        rows = read_rows(write_texts(tmp_path), tmp_path / "teacher", None, takes=takes)
    model = load_teacher(tmp_path / "teacher")
    task = find_task(tmp_path / "teacher", model.config)
    if isinstance(task, Decoder):  # texts that it expects
        start = torch.arange(60)[:, None] % 30
        texts = model.generate(start, max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=-1)
        rows = [{"input_ids": text.numpy(), "attention_mask": np.ones(11, np.int64)} for text in texts]
    judge = Judge(task, rows, model_run(model), padding_of(model.config))
    assert judge.measure(model_run(model)).value == pytest.approx(1, abs=1e-4)
    value = judge.measure(model_run(random_like(model))).value
    assert value < 0.8


@pytest.mark.filterwarnings("ignore")
def test_the_graph_of_a_teacher_takes_what_the_samples_hold(exported: Mapping[str, Path], tmp_path: Path) -> None:
    """Types of pairs among arrays; columns of other kinds are refused."""
    folder = exported['{"initializer_range": 0.5}']
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = dict(tokenizer(TEXTS, TEXTS[::-1], padding=True, return_tensors="np"))
    np.savez(tmp_path / "pairs.npz", **batch)
    options = replace(OPTIONS, int8=False)
    with _open_run(folder, tmp_path / "pairs.npz", None, options, tmp_path / "run", lambda *_: None) as run:
        paths = run.write_graphs(run.model, "teacher")
        assert run.judge("train").measure(graph_run(paths["float"])).value == 1
    np.savez(tmp_path / "priced.npz", **batch, score=np.zeros(60), price=np.zeros((60, 1)))
    with refusal("inputs-invalid", "data must hold inputs of the model, and labels; got price"):
        read_rows(tmp_path / "priced.npz", folder, None, takes=list(batch))


def test_a_teacher_that_is_not_its_graph_is_no_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = {"quality": {"float": {"value": 0.625}}, "bytes": {}}
    monkeypatch.setattr("shd_torch.compress.run.judge_graphs", lambda *_: judged)
    nothing: Any = {"progress": lambda *_: None, "judge": lambda _: None, "judges_by_file": lambda: {}}
    run: Any = SimpleNamespace(model=None, write_graphs=lambda *_: {}, price=lambda _: {}, **nothing)
    with refusal("export-failed", "quality of 0.999 or more of the teacher itself; got 0.6250"):
        study_teacher(run)
