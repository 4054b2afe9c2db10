"""docs/masked-language-models.md runs as written: masks from seeds, a cache of them, a student that sees the same."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.refusals import refusal

torch = pytest.importorskip("torch", reason="the page trains in PyTorch")
pytest.importorskip("onnxruntime", reason="precompute runs the teacher in onnxruntime")
pytest.importorskip("onnxscript", reason="export needs onnxscript")

from support.shrink.models import make_teacher  # noqa: E402  (after the skips)

from shd_torch import SupervisedDataset, export_teacher  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "masked-language-models.md").read_text(encoding="utf-8")
MASKING, TRAINING = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(COMMAND,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
VOCABULARY, MASK, FIRST_WORD, LENGTH = 31, 4, 5, 12


@pytest.mark.slow
def test_page_trains_on_the_masks_that_the_teacher_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.commands import shd

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    ones = np.ones(LENGTH, dtype=np.int64)
    texts = [{"input_ids": rng.integers(FIRST_WORD, VOCABULARY, LENGTH), "attention_mask": ones} for _ in range(4)]
    example = {name: torch.from_numpy(np.stack([text[name] for text in texts[:2]])) for name in texts[0]}
    export_teacher(make_teacher("bert", layers=1).float(), example, "teacher.onnx")

    student = make_teacher("bert", heads=2, layers=1).float()
    names: dict[str, Any] = {
        **{"texts": texts, "VOCABULARY": VOCABULARY, "MASK": MASK, "FIRST_WORD": FIRST_WORD},
        **{"student": student, "optimizer": torch.optim.SGD(student.parameters(), 0.1)},
    }
    exec(compile(MASKING, "masked-language-models.md", "exec"), names)
    shd(*shlex.split(COMMAND)[1:])
    before = [weight.clone() for weight in student.parameters()]
    exec(compile(TRAINING, "masked-language-models.md", "exec"), names)
    assert any(not torch.equal(old, new) for old, new in zip(before, student.parameters(), strict=True))
    sample, _record = names["joined"][5]
    assert (sample["labels"] != -100).any()
    assert (sample["input_ids"] == MASK).any() or (sample["labels"] == sample["input_ids"]).any()

    def other_masks(text: Any, seed: int) -> Any:
        return names["mask_tokens"](text, seed + 1)

    with refusal("sample-missing"):
        SupervisedDataset(names["repeated"], "cache", augment=other_masks)
