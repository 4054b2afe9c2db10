"""Sixteen architectures, their hidden states and logits: exported, understood and squeezed as the model has them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.attention_graphs import run_session
from support.binding.architectures import ARCHITECTURES, ENCODERS_INSIDE, GROUPED, HEADS, make_inputs, make_model
from support.exported_models import trace

from shd_ref.teacher import (
    PrecomputeOptions,
    compare_with_reference,
    find_sites,
    find_targets,
    load_teacher,
    open_session,
    squeeze_graph,
)
from shd_ref.teacher.graph.targets import LOGITS, hidden_role
from shd_torch import export_teacher
from shd_torch.export import load_hf_model

COPIES = ("roberta", "electra", "deit")
"""With the attention of BERT or ViT."""

OFTEN = ("t5",)
"""By the newer exporter, which takes five times as long, in every run.

It has its spellings, with GPT-2 in ``test_export.py``, Llama, whose graph is squeezed and compared in
``test_commands.py``, and BERT in the tests of ``compress``.
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_newer"),
    [pytest.param(name, name in OFTEN, marks=[pytest.mark.nightly] * (name in COPIES)) for name in ARCHITECTURES]
    + [
        pytest.param(name, True, marks=pytest.mark.nightly)
        for name in ARCHITECTURES
        if name not in (*OFTEN, *COPIES, "distilbert", "mistral")
    ],
)
def test_exported_found_and_squeezed(name: str, is_newer: bool, tmp_path: Path) -> None:
    model = make_model(name)
    if name not in (*ENCODERS_INSIDE, "dit"):
        model.save_pretrained(tmp_path / "folder")
        model = load_hf_model(tmp_path / "folder").eval()
    export = export_teacher if is_newer else trace
    export(model, make_inputs(name), tmp_path / "teacher.onnx")
    teacher = load_teacher(tmp_path / "teacher.onnx")
    names = [value.name for value in teacher.graph.input]
    inputs = {key: value for key, value in make_inputs(name, batch=3, length=7, seed=1).items() if key in names}
    feeds = {key: value.numpy() for key, value in inputs.items()}

    # The graph is the model, at another batch and length than the exporter saw.
    output = run_session(open_session(teacher.SerializeToString(), num_threads=1), feeds)
    with torch.no_grad():
        result = model(**make_inputs(name, batch=3, length=7, seed=1))
    expected = result if isinstance(result, torch.Tensor) else next(iter(result.values()))
    np.testing.assert_allclose(next(iter(output.values())), expected.numpy(), atol=2e-5, rtol=1e-4)

    sites = find_sites(teacher)
    assert len(sites) == (2 if name in ("gemma2", "gpt2") else 1)
    for site in sites:
        assert site.supported, site.reason
        kv_heads = 2 if name in GROUPED else HEADS
        assert (site.num_heads, site.num_kv_heads, site.d_k, site.d_v) == (HEADS, kv_heads, 8, 8)
        assert site.d_model == 32
        assert site.cross is False

    targets = find_targets(teacher, sites, PrecomputeOptions())
    states = hidden_states_of(model, inputs)
    if states:
        has_logits = "logits" in {value.name for value in teacher.graph.output}
        options = PrecomputeOptions(logits="topk" if has_logits else "none", hidden=tuple(range(len(sites) + 1)))
        targets = find_targets(teacher, sites, options)
        assert len(set(targets.names) - {LOGITS}) == len(states) == len(sites) + 1

    mask = feeds.get("attention_mask")
    squeezed = squeeze_graph(
        teacher,
        tuple(enumerate(sites)),
        PrecomputeOptions(2),
        row_mask_input=None if mask is None else "attention_mask",
        check_outputs=True,
        targets=targets,
    )
    outputs = run_session(open_session(squeezed.model.SerializeToString(), num_threads=1), feeds)
    # Raises above the published tolerances, also where rows do not sum to one.
    compare_with_reference(squeezed, outputs, query_mask=None if mask is None else mask.astype(bool))
    named = {hidden_role(layer): state for layer, state in enumerate(states)} | {LOGITS: expected.numpy()}
    for role, tensor in squeezed.targets.names.items():
        np.testing.assert_allclose(outputs[tensor], named[role], atol=2e-5, rtol=1e-4, err_msg=role)


def hidden_states_of(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """As the model itself returns them, the last one after its final norm; none where it cannot."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return []
    with torch.no_grad():
        outputs = model(**inputs, output_hidden_states=True)
    last = getattr(outputs, "last_hidden_state", outputs.hidden_states[-1])  # that of a ViT's list is before the norm
    return [states.numpy() for states in (*outputs.hidden_states[:-1], last)]
