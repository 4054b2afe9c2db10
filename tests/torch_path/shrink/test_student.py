"""What a run of ``shrink`` does not depend on, and students whose layers no stock configuration can express."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import refusal
from support.shrink.models import logits_of, make_data, make_teacher

from shd_torch import load_student
from shd_torch.shrink import shrink


def merges_of(report: dict[str, Any]) -> list[Any]:
    return [(layer["groups"], layer["mixing"]) for layer in report["layers"]]


def test_half_precision_is_computed_with_in_float32(tmp_path: Path) -> None:
    teacher, data = make_teacher("llama").bfloat16(), make_data("llama")
    with refusal("argument-dtype", "float"):
        shrink(teacher, data, heads=2)
    teacher.save_pretrained(tmp_path / "teacher")
    made = shrink(tmp_path / "teacher", data, heads=2, hidden=20)
    assert {part.dtype for part in made.student.parameters()} == {torch.bfloat16}


def test_rows_that_do_not_count_change_nothing() -> None:
    teacher, data = make_teacher("llama"), make_data("llama")
    first = shrink(teacher, data, heads=2)
    data["input_ids"] = torch.where(data["attention_mask"].bool(), data["input_ids"], 7)
    second = shrink(teacher, data, heads=2)
    for one, two in zip(first.student.parameters(), second.student.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=1e-9, rtol=0.0)


def test_batches_change_nothing() -> None:
    teacher, data = make_teacher("gpt2"), make_data("gpt2")
    students = [shrink(teacher, data, heads=2, batch_size=size).student for size in (2, 6)]
    for one, two in zip(*(student.parameters() for student in students), strict=True):
        torch.testing.assert_close(one, two, atol=1e-8, rtol=0.0)


def test_teacher_is_left_as_it_was() -> None:
    teacher, data = make_teacher("llama").train(), make_data("llama")
    before = {name: part.clone() for name, part in teacher.state_dict().items()}
    implementation = teacher.config._attn_implementation
    shrink(teacher, data, heads=2, layers=2, hidden=20)
    assert teacher.training
    assert teacher.config._attn_implementation == implementation
    assert teacher.config.num_attention_heads == 4
    assert all(torch.equal(part, before[name]) for name, part in teacher.state_dict().items())


def test_maps_of_some_rows_at_a_time_say_what_whole_maps_say() -> None:
    """Of four long samples in one batch not all rows are looked at together; of one sample alone they are."""
    teacher = make_teacher("llama", layers=1, max_position_embeddings=1024)
    data = make_data("llama", samples=4, length=1024)
    tiled, whole = (shrink(teacher, data, heads=2, align=False, batch_size=size).report for size in (4, 1))
    for (groups, mixing), (wanted_groups, wanted) in zip(merges_of(tiled), merges_of(whole), strict=True):
        assert groups == wanted_groups
        np.testing.assert_allclose(mixing, wanted, rtol=0, atol=1e-12)


def test_students_share_statistics_of_the_teacher() -> None:
    """A student with statistics of an earlier one is that without; maps are read when one asks for them."""
    teacher, data = make_teacher("bart"), make_data("bart")
    studies: dict[int, Any] = {}
    for sizes in ({"neurons": 9}, {"heads": 2}, {"neurons": 8}):
        shared, alone = (shrink(teacher, data, stack="encoder", studies=kept, **sizes) for kept in (studies, None))
        for name, tensor in shared.student.state_dict().items():
            assert torch.equal(tensor, alone.student.state_dict()[name])
    assert all(statistics.with_maps for statistics in studies.values())


LOAD_IT = """
import sys, transformers
for name in ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "BertForMaskedLM"):
    try:
        getattr(transformers, name).from_pretrained(sys.argv[1])
    except (ValueError, RuntimeError) as error:
        print(name, "refused", str(error)[:140].replace(chr(10), " "))
    else:
        print(name, "loaded")
"""


@pytest.mark.slow
def test_plain_transformers_refuse_the_folder(tmp_path: Path) -> None:
    """The Auto classes by its kind, the stock class by the weights; neither gives random ones."""
    made = shrink(make_teacher("bert"), make_data("bert"), drop_attention=[1], drop_activations=[2], out=tmp_path)
    words = [sys.executable, "-c", LOAD_IT, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ})
    found = done.stdout.splitlines()
    assert [line.split()[1] for line in found] == ["refused"] * 4
    assert all("load it with shd_torch.load_student" in line for line in found[:3])
    # Here, where load_student has told transformers of the kind, the Auto classes load it.
    import transformers

    loaded = load_student(tmp_path)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert type(again) is type(loaded) is type(made.student)
    assert all(torch.equal(one, two) for one, two in zip(again.parameters(), loaded.parameters(), strict=True))
    assert type(transformers.AutoModel.from_pretrained(tmp_path)).__name__ == "CustomBertModel"
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(
        logits_of(load_student(tmp_path / "again"), make_data("bert")), logits_of(loaded, make_data("bert"))
    )
