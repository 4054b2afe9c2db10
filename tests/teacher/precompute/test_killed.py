"""``shd precompute``, of all forms, killed at several moments: the finished cache is always the undisturbed one."""

import random
import signal
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.attention_graphs import language_model
from support.makers import contents, read_everything
from support.started_processes import start_command
from support.two_sequences import encoder_decoder

from shd_ref import ShdError
from shd_ref.cache import CacheReader, verify_cache

NUM_SAMPLES = 60
LENGTH = 9
PATIENCE = 120.0


def committed(folder: Path) -> int:
    return len(list((folder / "receipts").glob("*.json")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "kills", "sequences"),
    [("--student-heads=2", 3, ("",)), ("--no-attention", 2, ("",)), ("--student-heads=2", 1, ("", "decoder_"))],
    ids=["maps", "no attention", "encoder-decoder in tiles"],
)
def test_a_killed_precompute_resumes_to_the_undisturbed_cache(
    attention: str, kills: int, sequences: tuple[str, ...], tmp_path: Path
) -> None:
    onnx.save(encoder_decoder() if "decoder_" in sequences else language_model(), tmp_path / "teacher.onnx")
    rng, moments, data = np.random.default_rng(0), random.Random(3), {}
    for name in sequences:
        mask = (np.arange(LENGTH) < rng.integers(2, LENGTH + 1, NUM_SAMPLES)[:, None]).astype(np.int64)
        data |= {f"{name}input_ids": rng.integers(0, 30, mask.shape), f"{name}attention_mask": mask}
    np.savez(tmp_path / "data.npz", **data)
    second = encoder_decoder(seed=1) if "decoder_" in sequences else language_model(num_layers=1)
    onnx.save(second, tmp_path / "second.onnx")

    def command(folder: Path) -> list[str]:
        teacher, inputs = str(tmp_path / "teacher.onnx"), str(tmp_path / "data.npz")
        # One batch at a time, or the next one while records are made: either goes on where the other was killed.
        options = ["--batch-size", "4", "--samples-per-shard", "1", "--threads", str(moments.choice((1, 2)))]
        hidden = "0,last" if attention == "--no-attention" else "0,1"
        options += ["--logits", "topk", "--logits-top", "4", "--hidden", hidden]
        options += ["--with-teacher", str(tmp_path / "second.onnx")]
        options += ["--tile", "4"] if "decoder_" in sequences else []
        return ["precompute", teacher, "--inputs", inputs, attention, "--out", str(folder), *options]

    def finish(folder: Path) -> None:
        process = start_command(command(folder))
        process.join(PATIENCE)
        assert process.exitcode == 0

    finish(tmp_path / "whole")
    killed, partial, folders = 0, 0, [tmp_path / "killed-0"]
    while killed < kills:
        folder = folders[-1]
        before = committed(folder)
        process = start_command(command(folder))
        deadline = time.monotonic() + PATIENCE
        # Every fourth dies anywhere on its way; the others soon after they committed something new.
        if killed % 4:
            while process.is_alive() and committed(folder) == before and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.02))
        else:
            time.sleep(moments.uniform(0, 1))
        process.kill()
        process.join(PATIENCE)
        if process.exitcode == 0:  # it was faster
            folders.append(tmp_path / f"killed-{len(folders)}")
            continue
        assert process.exitcode == -signal.SIGKILL
        killed += 1
        assert committed(folder) >= before
        if (folder / "manifest.json").exists() and not (folder / "SEALED.json").exists():
            with pytest.raises(ShdError, match=r"SEALED\.json must exist"):
                CacheReader(folder)
            partial += bool(read_everything(CacheReader(folder, allow_partial=True)))  # what is committed is whole
    assert partial >= kills // 2
    for folder in folders:
        finish(folder)
        assert verify_cache(folder).ok
        assert contents(folder) == contents(tmp_path / "whole")
