"""What a capture cannot see it says: layers of unwatched code, and tensors of unknown meaning."""

from typing import Any

import pytest
import torch
import transformers
from support.binding.architectures import SEQ2SEQ
from support.refusals import refusal
from torch import Tensor, nn
from torch.nn import functional as F

from shd_ref import ShdError
from shd_torch import capture_attention

SIZES: dict[str, Any] = SEQ2SEQ | {"encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 64}
T5: dict[str, Any] = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "pad_token_id": 0}
T5 |= {"num_layers": 2, "num_decoder_layers": 3, "decoder_start_token_id": 0}
SEEN = {"Bart": SIZES, "M2M100": SIZES, "T5": T5}
UNSEEN = {
    "BigBirdPegasus": {**SIZES, "block_size": 4, "num_random_blocks": 1},
    "PegasusX": {**SIZES, "block_size": 4, "num_global_tokens": 2},
}


def make_seq2seq(name: str, arguments: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**arguments)
    return getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="eager").eval()


def make_ids() -> dict[str, Tensor]:
    ids = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}


@pytest.mark.parametrize(("name", "layers"), [("Bart", None), ("M2M100", (2, 4, 6)), ("T5", (2, 4, 6))])
def test_encoder_decoders_are_numbered_from_their_encoder(name: str, layers: tuple[int, ...] | None) -> None:
    model = make_seq2seq(name, SEEN[name])
    with capture_attention(model, layers) as captured:
        output = model(**make_ids(), output_attentions=True)
    decoder = [maps for pair in zip(output.decoder_attentions, output.cross_attentions, strict=True) for maps in pair]
    every = [*output.encoder_attentions, *decoder]
    for probs, own in zip(captured.probs, every if layers is None else [every[i] for i in layers], strict=True):
        torch.testing.assert_close(probs, own, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "layers"), [("BigBirdPegasus", None), ("PegasusX", (0, 2))])
def test_an_encoder_that_cannot_be_seen_is_said_so(name: str, layers: tuple[int, ...] | None) -> None:
    model, inputs = make_seq2seq(name, UNSEEN[name]), make_ids()
    with pytest.raises(ShdError, match=r"encoder\.layers\.0.*layers=6") as error, capture_attention(model, layers):
        model(**inputs)
    assert error.value.code == "capture-failed"
    # Ways out: the count of calls, the decoder alone, and the encoder's outputs.
    with capture_attention(model, 6) as captured:
        output = model(**inputs, output_attentions=True)
    torch.testing.assert_close(captured.probs[1], output.cross_attentions[0], atol=1e-6, rtol=1e-5)
    with capture_attention(model.get_decoder(), layers) as captured:
        model(**inputs)
    assert len(captured.calls) == 6 if layers is None else 2
    encoded = model.get_encoder()(inputs["input_ids"])
    with capture_attention(model, layers) as captured:
        model(encoder_outputs=encoded, decoder_input_ids=inputs["decoder_input_ids"])
    assert captured.num_calls == 6


class OwnAttention(nn.Module):
    """Named after what it does."""


class Layer(nn.Module):
    """Attention through PyTorch's fused call, or by hand."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.attention = OwnAttention()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            return x + F.scaled_dot_product_attention(x, x, x)
        return x + (x @ x.mT).softmax(-1) @ x


class Stack(nn.Module):
    def __init__(self, *fused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(fused=each) for each in fused])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_layer_that_attends_by_hand_is_said_so() -> None:
    x = torch.randn(1, 2, 5, 4)
    student = Stack(True, True)
    with capture_attention(student) as captured:
        student(x)
    assert len(captured.calls) == 2
    student = Stack(False, True)
    with pytest.raises(ShdError, match="attention of every layer; got 1 calls"), capture_attention(student, (0,)):
        student(x)
    with capture_attention(student, 1) as captured:
        student(x)
    torch.testing.assert_close(captured.calls[0].query, student.layers[0](x))


def test_tensors_of_unknown_meaning_are_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_attention_heads=4, intermediate_size=48, num_hidden_layers=2
    )
    model = transformers.BertModel._from_config(config, attn_implementation="sdpa").eval()
    ids, sinks = torch.arange(3, 12)[None], torch.ones(4)
    with capture_attention(model) as captured:
        model(ids)
    assert len(captured.calls) == 2
    for arguments in (sinks, [sinks]):
        with refusal("capture-failed", "got 'attention_sinks'"), capture_attention(model):
            model(ids, attention_sinks=arguments)
