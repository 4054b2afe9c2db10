"""Caches of real encoder-decoders, with the mean logits of two teachers and hidden states: faults of every kind.

Each either gives what the undisturbed cache gives or is an error that names the file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.exported_models import trace
from support.makers import read_everything
from torch_path.models.test_encoder_decoders import MAKERS, make_arrays
from typer.testing import CliRunner

from shd_ref.cache import CacheReader, verify_cache
from shd_ref.commands.app import app
from shd_ref.errors import ShdError
from shd_torch import SupervisedDataset
from shd_torch.capture.outputs import read_hidden_states
from shd_torch.export import example_inputs

pytestmark = pytest.mark.slow  # every test stands on an export

LAYERS = {"first": 2, "second": 1}
COPIES = 2
"""Of the samples, each with other tokens."""


class Kept(NamedTuple):
    """What the teachers left."""

    model: Any
    folder: Path
    cache: Path
    arrays: dict[str, NDArray[Any]]

    def command(self, out: Path, **replaced: Path) -> list[str]:
        """``shd precompute`` of that cache, with other files where they are given."""
        files = {name: self.folder / f"{name}.onnx" for name in ("first", "second")}
        files |= {"data": self.folder / "data.npz", **replaced}
        options = ["--student-heads", "2", "--student-layers", "encoder=1,decoder=1,cross=1"]
        options += [
            "--logits",
            "topk",
            "--logits-top",
            "6",
            "--hidden",
            "0,1,2",
            "--with-teacher",
            str(files["second"]),
        ]
        options += ["--batch-size", "3", "--samples-per-shard", "2", "--threads", "1"]
        return ["precompute", str(files["first"]), "--inputs", str(files["data"]), "--out", str(out), *options]

    def verify(self, cache: Path, **replaced: Path) -> Any:
        """``shd verify`` against the teachers and the data."""
        files = {name: self.folder / f"{name}.onnx" for name in ("first", "second")}
        files |= {"data": self.folder / "data.npz", **replaced}
        given = ["--teacher", str(files["first"]), "--with-teacher", str(files["second"])]
        return CliRunner().invoke(app, ["verify", str(cache), *given, "--inputs", str(files["data"])])


def run_command(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


ONE = pytest.mark.parametrize("kept", ["bart"], indirect=True)
"""Faults of files and commands are the same for every architecture."""


@pytest.fixture(scope="module")
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp(request.param)
    models = {name: MAKERS[request.param](4, layers, seed=layers).eval() for name, layers in LAYERS.items()}
    for name, model in models.items():
        trace(model, example_inputs(model), folder / f"{name}.onnx")
    arrays = {name: np.tile(array, (COPIES, 1)) for name, array in make_arrays().items()}
    ids, tokens = arrays["decoder_input_ids"], np.random.default_rng(4)
    ids[ids > 0] = tokens.integers(3, 40, int((ids > 0).sum()))
    np.savez(folder / "data.npz", **arrays)
    made = Kept(models["first"], folder, folder / "cache", arrays)
    run_command(made.command(made.cache))
    return made


@pytest.mark.parametrize("kept", list(MAKERS), indirect=True)
def test_hidden_states_are_those_of_the_models_decoder(kept: Kept) -> None:
    """As Hugging Face counts them: T5's last one before the scale in front of its head."""
    tensors = {name: torch.from_numpy(array) for name, array in kept.arrays.items()}
    with torch.no_grad():
        output = kept.model(**tensors, output_hidden_states=True, use_cache=False)
    wanted = read_hidden_states(output, [0, 1, 2], "the model")
    samples = [
        {name: tensor[index] for name, tensor in tensors.items()} for index in range(len(tensors["input_ids"]))
    ]
    joined = SupervisedDataset(samples, kept.cache)
    _, supervision = joined.collate_with(lambda batch: batch)([joined[index] for index in range(len(samples))])
    mask = tensors["decoder_attention_mask"].bool()
    found = supervision.hidden_states(mask.shape[1])
    assert list(found) == [0, 1, 2]
    for layer, states in found.items():
        torch.testing.assert_close(states[mask], wanted[layer][mask], rtol=2e-3, atol=2e-3)


def damages(path: Path) -> Iterator[tuple[str, bytes]]:
    """The file with a bit flipped, and cut, at its ends and at random places."""
    data, moments = path.read_bytes(), np.random.default_rng(path.stat().st_size)
    for place in (0, len(data) - 1, *moments.integers(len(data), size=4).tolist()):
        bit = 1 << int(moments.integers(8))
        yield f"bit {bit} of byte {place}", data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]
    for size in (0, len(data) - 1, *moments.integers(len(data), size=2).tolist()):
        yield f"cut to {size} bytes", data[:size]


@ONE
def test_damaged_files_are_found_or_harmless(kept: Kept, tmp_path: Path) -> None:
    folder, wanted = shutil.copytree(kept.cache, tmp_path / "cache"), read_everything(CacheReader(kept.cache))
    refused = harmless = tried = 0
    for name in ("manifest.json", "SEALED.json", "receipts/000003.json", "shards/03/000003.safetensors"):
        path, pristine = folder / name, (folder / name).read_bytes()
        for what, data in damages(path):
            tried += 1
            path.write_bytes(data)
            assert name in {problem.path for problem in verify_cache(folder).problems}, (name, what)
            try:
                found = read_everything(CacheReader(folder))
            except ShdError as error:
                refused += name in str(error)
            else:
                harmless += 1  # a header, which a reader does not use
                assert found == wanted, (name, what)
        path.write_bytes(pristine)
    assert refused + harmless == tried
    assert refused > 30
    assert verify_cache(folder).ok


@ONE
def test_another_teacher_and_other_data_are_found_out(kept: Kept, tmp_path: Path) -> None:
    assert kept.verify(kept.cache).exit_code == 0
    model = MAKERS["bart"](4, 1, seed=9).eval()
    other = trace(model, example_inputs(model), tmp_path / "second.onnx")
    arrays = {name: array.copy() for name, array in kept.arrays.items()}
    arrays["decoder_input_ids"][:, 0] = 7
    np.savez(tmp_path / "data.npz", **arrays)
    for replaced in ({"second": other}, {"data": tmp_path / "data.npz"}):
        done = kept.verify(kept.cache, **replaced)
        assert done.exit_code == 1, done.output
        again = CliRunner().invoke(app, kept.command(kept.cache, **replaced))
        assert again.exit_code == 1, again.output
        assert "cache-mismatch" in again.output
    assert verify_cache(kept.cache).ok
