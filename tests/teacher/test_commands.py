"""What the commands of ``shd`` refuse, before they do any work, and how they say it."""

import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.attention_graphs import token_samples, token_teacher
from support.commands import shd
from support.makers import contents

from shd_ref.commands.terminal import console, messages

make_tokens = partial(token_samples, 12, 6, seed=7)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a teacher, inputs and the cache of both."""
    folder = tmp_path_factory.mktemp("made")
    onnx.save(token_teacher(), folder / "t.onnx")
    np.savez(folder / "d.npz", **make_tokens())
    shd("precompute", *run_of(folder), "--out", folder / "c", "--samples-per-shard", "5")
    return folder


def run_of(folder: Path) -> tuple[str | Path, ...]:
    return folder / "t.onnx", "--inputs", folder / "d.npz", "--student-heads", "2"


@pytest.mark.parametrize("command", ["precompute", "plan", "verify", "report"])
def test_options_of_text_are_refused_without_a_tokenizer(made: Path, tmp_path: Path, command: str) -> None:
    """Numbers are not cut, so a run that seems to have cut them must not happen."""
    option = ("--max-length", "3")
    out = {"precompute": ("--out", tmp_path / "c"), "report": ("--out", tmp_path / "r.html")}.get(command, ())
    if command in ("verify", "report"):
        words: tuple[str | Path, ...] = (command, made / "c", *out, *option)
        assert f"{option[0]} must go with --inputs" in shd(*words, code=1)
        words = (*words, "--teacher", made / "t.onnx", "--inputs", made / "d.npz")
    else:
        words = (command, *run_of(made), *out, *option)
    refused = shd(*words, code=1)
    assert "error (argument-value): " in refused
    assert f"{option[0]} must be given with a tokenizer" in refused
    assert not any(tmp_path.iterdir())


def test_every_command_says_how_many_texts_it_cut(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="text needs the extra 'inputs'")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 3}')
    lines = ["the cat", "the cat sat there", "cat the cat the cat"]
    (tmp_path / "d.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    onnx.save(token_teacher(), tmp_path / "t.onnx")
    text = ("--inputs", tmp_path / "d.jsonl", "--tokenizer", tmp_path)
    said = f"2 of 3 texts were cut to 3 tokens, as {tmp_path} says (--max-length sets another number)"
    both = ("--student-heads", "2,1", "--out", tmp_path / "both")
    assert shd("precompute", tmp_path / "t.onnx", *text, *both).count(said) == 1
    again = (tmp_path / "both/heads-2", "--teacher", tmp_path / "t.onnx", *text)
    assert said in shd("verify", *again)
    assert said in shd("report", *again, "--out", tmp_path / "r.html")
    assert said in shd("plan", tmp_path / "t.onnx", *text, "--student-heads", "2")


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("c/new/report.html", "argument-value"),
        ("link/report.html", "argument-value"),
        ("absent/report.html", "write-failed"),
        ("twin", "write-failed"),
        ("s3://bucket/x", "argument-value"),
        ("", "argument-value"),
    ],
)
def test_a_page_is_written_nowhere_in_a_cache(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: str
) -> None:
    """Also through a link, into another cache of the same job, and to no address."""
    monkeypatch.chdir(tmp_path)
    for name in ("c", "twin"):
        shutil.copytree(made / "c", name)
    Path("link").symlink_to("c", target_is_directory=True)
    before = contents(tmp_path)
    assert f"error ({code}): " in shd("report", "c", "--out", place, code=1)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--temperature", "0"), "(argument-value): --temperature must be a finite number above 0"),
        (("--provider", "Nope"), "(provider-unavailable): "),
        (("--threads", str(2**40)), "(argument-value): --threads must be 1 to 1024"),
        (("--seed", str(2**53)), f"(argument-value): --seed must be 0 to {2**53 - 1}"),
        (("--samples-per-shard", str(2**62)), "(argument-value): --samples-per-shard must be 1 to"),
        (("--out", "file"), "(cache-exists): "),
        (("--out", "file/c"), "(write-failed): "),
        (("--out", "foreign"), "(cache-exists): "),
        (("--out", "nope://b/x"), "(argument-value): "),
        (("--out", "s3://"), "(argument-value): a cache's address must name a bucket"),
    ],
)
def test_what_the_command_line_tells_is_refused_before_the_inputs_are_read(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    """They may be terabytes, and are read from beginning to end: at the end of these is an error."""
    monkeypatch.chdir(tmp_path)
    Path("foreign").mkdir()
    for name in ("file", "foreign/thesis.txt"):
        Path(name).write_text("dear")
    row = '{"input_ids": [1, 2], "attention_mask": [1, 1]}\n'
    Path("broken.jsonl").write_text(12 * row + "{")
    before = contents(tmp_path)
    asked = (made / "t.onnx", "--inputs", "broken.jsonl", "--student-heads", "2")
    assert said in shd("precompute", *asked, "--out", "new", *words, code=1)
    assert contents(tmp_path) == before


def test_tables_fit_a_terminal(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 columns, without a word cut short; commands and errors are single lines, so that they can be copied."""
    monkeypatch.chdir(made)
    for terminal in (console, messages):
        monkeypatch.setattr(terminal, "width", 80)
    words = "t.onnx", "--inputs", "d.npz", "--student-heads", "2"
    cache = str(tmp_path / "part")
    for command in (
        ("inspect", "t.onnx"),
        ("plan", *words, "--plan", "balanced", "--strategy", "hard", "--logits", "topk", "--hidden", "last"),
        ("precompute", *words, "--out", cache, "--samples-per-shard", "5", "--shards", "0/3"),
        ("ls", cache),
        *((name, "--help") for name in ("inspect", "plan", "precompute", "verify", "report", "merge")),
    ):
        for line in shd(*command).splitlines():
            assert len(line) <= 80 or line.startswith(("next: ", "  shd ")), line
            assert "…" not in line, line
    assert "2 of 3 shards are missing" in shd("ls", cache)


HOSTILE = "x[/b][red]:smile:\x1b[31m"
SHOWN = r"x[/b][red]:smile:\x1b[31m"


def test_what_names_say_is_shown_and_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets, colons and control characters in paths, in a graph's names and in a manifest."""
    monkeypatch.chdir(tmp_path)
    model = token_teacher()
    for node in model.graph.node:
        node.name += HOSTILE
    teacher, inputs, cache = f"{HOSTILE}.onnx", f"{HOSTILE}.npz", f"c{HOSTILE}"
    for folder in ("x[", f"foreign{HOSTILE}"):
        Path(folder).mkdir(parents=True)
    Path(f"foreign{HOSTILE}", "thesis.txt").write_text("dear")
    onnx.save(model, teacher)
    np.savez(inputs, **make_tokens())
    run = teacher, "--inputs", inputs, "--student-heads", "2"
    printed = [
        shd("inspect", teacher),
        shd("precompute", *run, "--out", cache, "--samples-per-shard", "5", "--sites", "0"),
        shd("plan", *run, "--samples", "2"),
        shd("ls", cache),
        shd("report", cache, "--out", f"{HOSTILE}.html"),
        shd("precompute", *run, "--out", f"foreign{HOSTILE}", code=1),
        shd("plan", f"absent{HOSTILE}", *run[1:], code=1),
        shd("plan", *run, "--sites", HOSTILE, code=1),
        shd("merge", cache, "--out", f"foreign{HOSTILE}", code=1),
        shd("ls", f"absent{HOSTILE}", code=1),
        shd("verify", f"absent{HOSTILE}", code=1),
        shd("report", f"absent{HOSTILE}", code=1),
    ]
    assert "same: 8 records" in shd("verify", cache, "--teacher", teacher, "--inputs", inputs)
    assert "take: maps sqrt8-row" in shd("plan", *run)
    next((tmp_path / cache / "shards").rglob("*.safetensors")).write_bytes(b"")
    printed += [shd("verify", cache, code=1)]
    for number, output in enumerate(printed):
        assert SHOWN in output.replace("\n", ""), (number, output)  # long paths are wrapped
        assert "\x1b" not in output, (number, output)


def test_a_mask_of_other_numbers_is_refused(made: Path, tmp_path: Path) -> None:
    """Token ids would pass for a mask wherever they are not 0."""
    refused = shd("precompute", *run_of(made), "--mask", "input_ids", "--out", tmp_path / "c", code=1)
    assert "error (inputs-invalid): " in refused
    assert re.search(
        r"input_ids must hold 0 and 1 alone, as it is the attention mask; got \d+: name another", refused
    )
    tokens = make_tokens()
    tokens["attention_mask"][3, 0] = -1
    np.savez(tmp_path / "d.npz", **tokens)
    words = "precompute", made / "t.onnx", "--inputs", tmp_path / "d.npz", "--student-heads", "2"
    assert "attention_mask must hold 0 and 1 alone" in shd(*words, "--out", tmp_path / "c", code=1)
    assert not (tmp_path / "c").exists()


def test_a_folder_of_caches_is_named_with_its_caches(made: Path, tmp_path: Path) -> None:
    """Several numbers of student heads make a cache each, and the next command names all of them."""
    out = tmp_path / "many"
    output = shd("precompute", *run_of(made)[:-1], "1,2", "--out", out)
    for heads in (1, 2):
        assert f"next: shd verify {out}/heads-{heads} --teacher" in output
        assert f"4 -> {heads}" in shd("ls", out / f"heads-{heads}")
    for words in (("ls", out), ("verify", out), ("report", out)):
        assert "is not a cache, but holds some: name one of heads-1, heads-2" in shd(*words, code=1)
    assert "is not a cache [CACHE-1]" in shd("ls", tmp_path, code=1)


def test_nothing_is_no_name_of_the_current_folder(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        ("precompute", *run_of(made), "--out", ""),
        ("merge", made / "c", "--out", ""),
        ("merge", made / "c", "", "--out", "d"),
        *((command, "") for command in ("ls", "verify", "report")),
    ):
        assert "Must be a folder or an address." in shd(*words, code=1)
    assert not any(tmp_path.iterdir())
