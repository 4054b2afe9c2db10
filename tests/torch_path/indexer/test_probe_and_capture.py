"""What a selection keeps, against whole maps; scorers of live models, against transformers' own selection."""

import importlib
from typing import Any

import pytest
import torch
from support.refusals import refusal
from torch.overrides import TorchFunctionMode

import shd_ref
from shd_torch import indexer_kl
from shd_torch.indexer import ScorerCall, capture_indexers, indexer_scores, indexer_select, probe_indexer
from shd_torch.supervision import Factored

CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril()


def inputs(batch: int = 3) -> tuple[Any, ...]:
    torch.manual_seed(1)
    queries, keys = torch.randn(batch, 2, 8, 3), torch.randn(batch, 1, 8, 3)
    return queries, keys, torch.randn(batch, 4, 8, 5), torch.randn(batch, 2, 8, 5)


def test_kept_mass_is_that_of_whole_maps() -> None:
    queries, keys, q, k = inputs()
    teacher = Factored.teacher(q, k, scale=0.5, is_causal=True)
    mass = probe_indexer(queries, keys, teacher, top_k=2, scale=1.0)
    target = torch.tensor(shd_ref.indexer_target(q, k, teacher_scale=0.5, attn_mask=CAUSAL.numpy()))[:, 0]
    chosen = indexer_select(indexer_scores(queries, keys, scale=1.0), 2, CAUSAL)[:, 0]
    torch.testing.assert_close(mass.kept.double(), (target * chosen).sum(-1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mass.best.double(), target.topk(2).values.sum(-1), atol=1e-5, rtol=1e-5)
    assert (mass.best >= mass.kept - 1e-6).all()
    spans = mass.spans(2)
    assert [(span.first, span.last) for span in spans] == [(0, 3), (4, 7)]
    means = mass.kept[:, 4:].mean(1).numpy()
    assert spans[1].kept == pytest.approx(means.mean(), abs=1e-6)
    assert spans[1].kept_interval == pytest.approx(1.96 * means.std(ddof=1) / 3**0.5, rel=1e-5)


def test_a_scorer_that_knows_the_teacher_keeps_the_best() -> None:
    *_, q, k = inputs()
    teacher = Factored.teacher(q[:, :1], k[:, :1], scale=1.0, is_causal=True)
    mass = probe_indexer(q[:, :1], k[:, :1], teacher, top_k=3, scale=1.0, relu=False)
    torch.testing.assert_close(mass.kept, mass.best)
    with refusal("argument-value", "top_k"):
        probe_indexer(q, k, teacher, top_k=0, scale=1.0)


class Scorer(torch.nn.Linear):
    """Two heads and a key from the same projection."""


def test_a_scorer_is_captured_by_its_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Scorer(4, 9))

    def read(module: Any, hidden: Any) -> ScorerCall:
        parts = torch.nn.functional.linear(hidden, module.weight).unflatten(-1, (3, 3)).transpose(1, 2)
        return ScorerCall(parts[:, :2], parts[:, 2:], None, 1.0)

    with refusal("argument-value", "read must be given"), capture_indexers(model, ["1"]):
        pass
    with refusal("argument-value", "no scorer"), capture_indexers(model):
        pass
    *_, q, k = inputs(2)
    with capture_indexers(model, ["1"], read) as calls:
        model(torch.randn(2, 8, 4))
    indexer_kl(**calls["1"]._asdict(), teacher=Factored.teacher(q, k, is_causal=True)).backward()
    assert model[1].weight.grad.abs().sum() > 0
    assert model[0].weight.grad is None
    assert not model[1]._forward_pre_hooks


def test_a_known_class_of_another_version_is_refused() -> None:
    model = torch.nn.Sequential(type("DeepseekV32Indexer", (torch.nn.Identity,), {})())
    with refusal("argument-value", "this version's DeepseekV32Indexer"), capture_indexers(model):
        model(torch.ones(1, 2))


SMALL: dict[str, Any] = (
    {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    | {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "vocab_size": 40}
    | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "index_n_heads": 2, "index_head_dim": 8}
    | {"index_topk": 4, "n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    | {"topk_group": 1, "first_k_dense_replace": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
)
COMPRESSED = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
KINDS: dict[str, dict[str, Any]] = {
    "axk2.AXK2": {},
    "deepseek_v32.DeepseekV32": {},
    "deepseek_v4.DeepseekV4": {
        "num_key_value_heads": 1,
        "layer_types": ["compressed_sparse_attention"],
        "compress_rates": COMPRESSED,
    },
    "dots3_note.Dots3NoteText": {},
    "glm5_next.Glm5NextText": {"qk_rope_head_dim": 0, "index_kpool": 2, "layer_types": ["full_attention"]},
    "glm_moe_dsa.GlmMoeDsa": {},
    "hy_v4.HYV4": {},
    "minimax_m3_vl.MiniMaxM3VLText": {
        "num_key_value_heads": 2,
        "layer_types": ["minimax_m3_sparse"],
        "index_block_size": 2,
    },
    "mistral_large4.MistralLarge4Text": {},
}


class FirstTopK(TorchFunctionMode):
    """The scores that a model selects from first: those of its first layer's scorer."""

    scores: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk and self.scores is None:
            self.scores = args[0].clone()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_own_scorers_compute_what_is_captured(kind: str, dtype: torch.dtype) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    package, prefix = kind.split(".")
    folder = f"transformers.models.{package}"
    modeling = pytest.importorskip(f"{folder}.modeling_{package}", reason="transformers has no such model yet")
    configuration = importlib.import_module(f"{folder}.configuration_{package}")
    config = getattr(configuration, f"{prefix}Config")(**{**SMALL, **KINDS[kind]})
    torch.manual_seed(2)
    model = getattr(modeling, f"{prefix}Model")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model = model.to(dtype)
    with capture_indexers(model) as calls, FirstTopK() as own, torch.no_grad():
        model(torch.randint(3, 40, (2, 8)))
    ((name, call),) = calls.items()
    scores = indexer_scores(**call._asdict())
    right = own.scores if own.scores.ndim == 4 else own.scores[:, None]
    if scores.shape != right.shape:  # the best key of each block
        scores = scores.masked_fill(~CAUSAL, -torch.inf).unflatten(-1, (4, 2)).amax(-1)
    may = (right > -1e30) & (right < torch.inf)
    torch.testing.assert_close(scores[may], right[may])
    scores[may].square().sum().backward()
    for title, parameter in model.named_parameters():
        assert (parameter.grad is not None) == title.startswith(name), title
