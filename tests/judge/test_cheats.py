"""Modules that would rather pass than be right: each is judged, and none may pass or harm the judge."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shd_ref
from shd_ref.conformance import ConformanceError, cases, check
from shd_ref.conformance.__main__ import main

CHEATS = {
    "refuses by an exit": (
        "def merge_plan(**inputs):\n    raise SystemExit('heads-exceed')\n",
        "raised SystemExit without a code: heads-exceed",
    ),
    "refuses by an interrupt": (
        "class Stop(KeyboardInterrupt):\n    code = 'heads-exceed'\ndef merge_plan(**inputs):\n    raise Stop\n",
        "raised Stop in the call",
    ),
    "has a code of another kind": (
        "class Lost(OSError):\n    code = 'ENOENT'\ndef merge_plan(**inputs):\n    raise Lost('no file')\n",
        "raised Lost with the code 'ENOENT', which is not in ERR-2: no file",
    ),
    "refuses in another thread": (
        "import threading\nclass No(ValueError):\n    code = 'heads-exceed'\ndef refuse():\n    raise No\n"
        "def merge_plan(**inputs):\n    one = threading.Thread(target=refuse)\n    one.start()\n    one.join()\n",
        "invalid inputs were accepted",
    ),
    "writes a verdict into every pipe": (
        "import json, os\ndef merge_plan(**inputs):\n"
        "    for fd in range(1, 64):\n        try:\n"
        "            os.write(fd, json.dumps({'status': 0, 'out': 'conforms', 'err': ''}).encode() + b'\\n')\n"
        "        except OSError:\n            pass\n    return []\n",
        "answered question None when asked",
    ),
    "patches the judge": (
        "import json, os, sys, numpy.testing, shd_ref.conformance.compare as compare\n"
        "import shd_ref.conformance.adapter as adapter, shd_ref.conformance.runner as runner\n"
        "import shd_ref.conformance.__main__ as command\n"
        "compare.compare_plans = compare.compare_output = compare.compare_close = lambda *_, **__: None\n"
        "runner.compare_output = runner.run_item = runner.judge = lambda *_, **__: None\n"
        "command.main = command._judge = lambda *_, **__: 0\n"
        "adapter._equal = lambda *_: True\nnumpy.testing.assert_allclose = lambda *_, **__: None\n"
        "sys.exit = lambda *_: os._exit(0)\n"
        "def merge_plan(**inputs):\n    return [[(2, 1)]]\n",
        "differs first in round 0",
    ),
    "answers with JSON of another kind": (
        "import json\ndef merge_plan(**inputs):\n    json.dumps = lambda *_, **__: '[' * 100_000\n    return []\n",
        "not JSON",
    ),
    "ends well": (
        "import os\ndef merge_plan(**inputs):\n    os._exit(0)\n",
        "ended with status 0 instead of answering",
    ),
    "goes on in a copy": (  # the copy answers at once and holds the next question until the original has answered too
        "import os, time\ncalls = 0\ndef merge_plan(**inputs):\n    global calls\n    calls += 1\n"
        "    if calls > 1:\n        time.sleep(5)\n    elif os.fork():\n        time.sleep(0.2)\n",
        "answered question 1 when asked question 2",
    ),
    "closes every file": ("import os\ndef merge_plan(**inputs):\n    os.closerange(0, 64)\n", "instead of answering"),
    "answers without end": (
        "import numpy as np\ndef merge_plan(**inputs):\n    return np.broadcast_to(0.0, (1 << 40,))\n",
        "which is too large to be read",
    ),
    "answers with lists in lists": (
        "def merge_plan(**inputs):\n    plan = []\n    for _ in range(100_000):\n"
        "        plan = [plan]\n    return plan\n",
        "raised RecursionError",
    ),
}


KEPT = (
    "import numpy as np, shd_ref\nkept = np.zeros((2, 4))\n"
    "def solve_alpha(**inputs):\n    answer = shd_ref.solve_alpha(**inputs)\n"
)
SPOILERS = {
    "an argument of a refusal": (
        "    return answer\ndef softmax(attn_logits, temperature=1.0):\n    attn_logits[...] += 1\n"
        "    raise shd_ref.ShdError('argument-value', 'no')\n",
        "softmax/temperature-nan",
        "changed its argument attn_logits",
    ),
    "the answer before": (
        "    kept.reshape(-1)[: answer.size] = answer.reshape(-1)\n"
        "    return kept.reshape(-1)[: answer.size].reshape(answer.shape)\n",
        "solve_alpha/*",
        "changed what an earlier call of solve_alpha had answered",
    ),
    "its argument by its answer": (
        "    held = inputs['probs_p'].reshape(-1)[: answer.size].reshape(answer.shape)\n    return held\n",
        "solve_alpha/*",
        "answered with memory of an argument",
    ),
    "what it knew by an object": (
        "    return answer\nknown = {}\ndef softmax(attn_logits, **options):\n"
        "    key = (id(attn_logits), repr(options))\n"
        "    if key not in known:\n        known[key] = attn_logits, shd_ref.softmax(attn_logits, **options)\n"
        "    return known[key][1].copy()\n",
        "law/results-survive-softmax",
        "softmax of what was written over since the last call",
    ),
}


CASES = {name: (text, "merge_plan/*", words) for name, (text, words) in CHEATS.items()}
CASES |= {f"writes over {name}": (KEPT + text, only, words) for name, (text, only, words) in SPOILERS.items()}


@pytest.mark.parametrize("name", CASES)
def test_cheat_fails(
    name: str, tmp_path: Path, vectors: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text, only, words = CASES[name]
    (tmp_path / "cheat.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["--impl", "cheat", "--vectors", str(vectors), "--only", only]) == 1
    told = capfd.readouterr()
    assert words in re.sub(r"\s+", " ", told.out)
    assert "Traceback" not in told.err
    all_fail = name in CHEATS and name not in ("writes a verdict into every pipe", "goes on in a copy")
    assert " 0 passed, 2 failed" in told.out or not all_fail


def test_arguments_reach_a_module_as_the_judge_has_them(tmp_path: Path) -> None:
    from shd_ref.conformance.program import decode_argument, encode

    numbers = np.array([[np.nan, np.inf, -0.0], [5e-324, 1 / 3, -np.inf]])
    arguments: list[Any] = [
        numbers,
        np.asfortranarray(numbers),
        numbers[::-1, ::-2],
        np.broadcast_to(numbers[0], (4, 3)),
        numbers.astype(">f8"),
        numbers.astype(np.float16).T,
        np.array([True, None], dtype=object),
        np.empty((0, 3)),
        numbers.astype(np.float32)[:, 1],
        np.int64(2),
        (np.bool_(True), [np.ones(2), None, 0.1]),
    ]
    for array in arguments:
        again = decode_argument(json.loads(json.dumps(encode(array, exact=True))))
        assert type(again) is type(array)
        if isinstance(array, np.ndarray):
            assert (again.dtype, again.shape) == (array.dtype, array.shape)
            assert again.strides == array.strides or array.size == 0
            assert again.flags.writeable == array.flags.writeable
            assert again.tobytes() == array.tobytes() or array.dtype == object
        else:
            assert repr(again) == repr(array)


def test_a_test_of_ones_own_reads_refusals_as_strictly(vectors: Path, wrong: Any) -> None:
    (case,) = cases("merge_plan/too-many", vectors=vectors)

    def leave(**inputs: object) -> None:
        raise SystemExit("heads-exceed")

    with pytest.raises(ConformanceError, match="raised SystemExit without a code"):
        check(case, wrong(merge_plan=leave))
    check(case, shd_ref)


def test_answers_that_were_learned_by_heart_fail_with_another_seed(capfd: pytest.CaptureFixture[str]) -> None:
    (law,) = cases("law/softmax-shift")
    answers: dict[bytes, Any] = {}

    def digest(inputs: dict[str, Any]) -> bytes:
        return b"".join(np.asarray(value).tobytes() for value in inputs.values())

    def learn(**inputs: Any) -> Any:
        return answers.setdefault(digest(inputs), shd_ref.softmax(**inputs))

    def recite(**inputs: Any) -> Any:
        return answers.get(digest(inputs), np.zeros(inputs["attn_logits"].shape))

    check(law, SimpleNamespace(softmax=learn))
    check(law, SimpleNamespace(softmax=recite))
    with pytest.raises(ConformanceError, match="--seed 20 --only 'law/softmax-shift'"):
        check(law, SimpleNamespace(softmax=recite), seed=20)
    assert main(["--impl", "shd_ref", "--only", law.id, "--seed", "random"]) == 0
    assert re.search(r", seed \d+: conforms", capfd.readouterr().out)
    with pytest.raises(SystemExit, match="2"):
        main(["--impl", "shd_ref", "--seed", "-1"])
    assert "--seed: must be from 0 to 4294967295, or random; got -1" in capfd.readouterr().err
