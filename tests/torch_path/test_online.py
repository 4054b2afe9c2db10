"""A live teacher against the reference, which squeezes its eager maps: fused attention, no maps, the same mixing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_path.architectures import ARCHITECTURES, make_inputs, make_model
from torch_path.twins import assert_agrees, to_float64

import shd_ref
from shd_torch import OnlineTeacher, capture_attention

# Of the output projection's parameter, in every attention that runs.
PROJECTIONS = {
    "distilbert": "out_lin.weight",
    "gpt2": "attn.c_proj.weight",
    "gpt_neox": "attention.dense.weight",
    "t5": "SelfAttention.o.weight",
    "bart": "self_attn.out_proj.weight",
    "whisper": "self_attn.out_proj.weight",
    "dit": "projection.weight",
    **dict.fromkeys(("vit", "deit"), "attention.o_proj.weight"),
    **dict.fromkeys(("bert", "roberta", "electra"), "attention.output.dense.weight"),
    **dict.fromkeys(("llama", "mistral", "qwen3", "gemma2"), "o_proj.weight"),
}


def projections_of(name: str, model: nn.Module) -> list[np.ndarray[Any, Any]]:
    found = [p for key, p in model.named_parameters() if key.endswith(PROJECTIONS[name])]
    return [to_float64(p if name == "gpt2" else p.mT) for p in found]


def maps_and_values(name: str) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """By the model's own eager attention."""
    with torch.no_grad():
        if name == "dit":
            model = make_model(name)
            with capture_attention(model, keep_values=True) as captured:
                model(**make_inputs(name))
            maps = list(captured.probs)
        else:
            model = make_model(name, "eager")
            with capture_attention(model, keep_values=True) as captured:
                maps = model(**make_inputs(name), output_attentions=True).attentions
    values = [call.value for call in captured.calls]
    return [to_float64(each) for each in maps], [to_float64(each) for each in values]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_the_squeeze_of_eager_maps(name: str) -> None:
    pytest.importorskip("transformers", reason="these are Hugging Face architectures")
    inputs = make_inputs(name)
    rows = None if "attention_mask" not in inputs else inputs["attention_mask"].bool().numpy()
    teacher = make_model(name, "eager" if name == "gemma2" else None)
    maps, values = maps_and_values(name)
    projections = projections_of(name, teacher)
    assert len(maps) == len(projections)
    online = OnlineTeacher(teacher, 3, len(maps))
    with torch.no_grad():
        expected_output = teacher(**inputs)
    for _ in range(2):  # the first batch is looked at, the second is not
        taught = online(**inputs)
        for layer, squeeze in enumerate(taught.squeezes):
            outputs = shd_ref.value_outputs(values[layer], projections[layer])
            expected = shd_ref.squeeze_heads(maps[layer], outputs, 3, query_mask=rows)
            assert squeeze.plan == expected.plan
            assert_agrees(squeeze.mixing, expected.mixing, "float32", "alpha")
            assert_agrees(squeeze.residual, expected.residual, "float32", "residual")
            merged, wanted = to_float64(squeeze.supervision.probs()), expected.probs
            if rows is not None:
                merged, wanted = (np.where(rows[:, None, :, None], each, 0) for each in (merged, wanted))
            np.testing.assert_allclose(merged, wanted, atol=1e-5)
    first = taught.output if isinstance(taught.output, Tensor) else taught.output[0]
    assert torch.equal(first, expected_output if isinstance(expected_output, Tensor) else expected_output[0])
