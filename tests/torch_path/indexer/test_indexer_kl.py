"""``indexer_kl`` against the reference in tiles of all heights, and what the judge does not draw."""

from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import refusal

import shd_ref
from shd_torch import indexer_kl
from shd_torch.indexer import indexer_select
from shd_torch.supervision import Factored

B, H, KV, L, S, D = 2, 4, 2, 9, 9, 5
CAUSAL = np.tril(np.ones((L, S), dtype=bool))


def case(seed: int, *, blocks: int = 1, layers: int = 1, scorers: int = 4, outside: bool = False) -> dict[str, Any]:
    """Arguments of the reference, as arrays."""
    rng = np.random.default_rng(seed)
    num_blocks = -(-S // blocks)
    arguments: dict[str, Any] = {
        "queries": rng.normal(size=(B, scorers, L, 3)),
        "keys": rng.normal(size=(B, scorers // 2, num_blocks, 3)),
        "weights": rng.normal(size=(B, scorers, L)),
        "teacher_queries": [rng.normal(size=(B, H, L, D)) for _ in range(layers)],
        "teacher_keys": [rng.normal(size=(B, KV, S, D)) for _ in range(layers)],
        "teacher_scale": 0.7,
        "scale": 0.9,
        "block_size": blocks,
        "attn_mask": CAUSAL,
    }
    if outside:
        arguments["outside"] = [rng.normal(size=(B, H, L)) + 60.0 * layer for layer in range(layers)]
    return arguments


def run(given: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[float, list[np.ndarray]]:
    """Value and gradients of ``indexer_kl`` for arguments of the reference."""
    given = dict(given)
    is_causal = given.pop("attn_mask") is CAUSAL
    assert is_causal
    scale = given.pop("teacher_scale")
    to = {name: torch.tensor(given.pop(name)).to(dtype) for name in ("queries", "keys", "weights") if name in given}
    leaves = [tensor.requires_grad_() for tensor in to.values()]
    taught = [
        Factored.teacher(torch.tensor(q).to(dtype), torch.tensor(k).to(dtype), scale=scale, is_causal=True)
        for q, k in zip(given.pop("teacher_queries"), given.pop("teacher_keys"), strict=True)
    ]
    if "outside" in given:
        given["outside"] = [torch.tensor(rest).to(dtype) for rest in given["outside"]]
    for name in ("loss_mask", "segments"):
        if name in given:
            given[name] = torch.tensor(given[name])
    loss = indexer_kl(to.pop("queries"), to.pop("keys"), taught, **to, **given)
    loss.backward()
    return loss.item(), [leaf.grad.double().numpy() for leaf in leaves]


ROWS = np.arange(L)[None] < np.array([[7], [4]])
PACKED = np.array([[3] * 4 + [1] * 5, [0] * 2 + [5] * 7])
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"relu": False, "reduction": "rows"},
    {"top_k": 3, "reduction": "samples", "loss_mask": ROWS},
    {"top_k": 3, "restriction": "mask_first", "segments": PACKED, "reduction": "samples"},
    {"top_k": 2, "restriction": "unnormalised", "groups": 2},
    {"top_k": 2, "restriction": "student_all", "groups": 4, "reduction": "rows"},
    {"top_k": 50, "restriction": "mask_first", "loss_mask": ROWS & False},
    {"groups": 2, "segments": PACKED, "loss_mask": ROWS, "reduction": "samples", "relu": False},
)
MADE: tuple[dict[str, Any], ...] = (
    {},
    {"blocks": 2},
    {"blocks": 4, "outside": True},
    {"layers": 3, "outside": True},
    {"layers": 2, "blocks": 3},
)


@pytest.mark.parametrize("made", MADE, ids=str)
@pytest.mark.parametrize("number", range(len(OPTIONS)))
def test_value_and_gradients_are_the_references(
    number: int, made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several tiles a sample, and no two of one height; the judge draws samples of one tile.
    monkeypatch.setattr("shd_torch.indexer.request.tile_entries", lambda _: 300)
    arguments = {**case(number, **made), **OPTIONS[number]}
    value, gradients = run(arguments)
    assert value == pytest.approx(shd_ref.indexer_loss(**arguments), rel=1e-12, abs=1e-12)
    for got, right in zip(gradients, shd_ref.indexer_loss_gradient(**arguments), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-12, atol=1e-12)


def test_tiny_masses_keep_their_proportion() -> None:
    """Masses of 1e-30 and 2e-30 beside a window give 1/3 and 2/3, in float32 too."""
    one = torch.ones(1, 1, 1, 1)
    keys = torch.tensor([1e-30, 2e-30], dtype=torch.float64).log().float().reshape(1, 1, 2, 1)
    teacher = Factored.teacher(one, keys, scale=1.0)
    student = torch.tensor([1 / 3, 2 / 3]).log().reshape(1, 1, 2, 1)
    loss = indexer_kl(one, student, teacher, scale=1.0, relu=False, outside=torch.zeros(1, 1, 1))
    assert abs(loss.item()) < 1e-6
    both = shd_ref.indexer_target(one.numpy(), keys.double().numpy(), teacher_scale=1.0, outside=np.zeros((1, 1, 1)))
    np.testing.assert_allclose(both, [[[[1 / 3, 2 / 3]]]], rtol=1e-6)
    # Of several heads, the one that is not as far away decides, however far that is.
    keys = torch.tensor([[[[0.0], [0.0]], [[0.0], [3.0]]]])
    heads = Factored.teacher(torch.ones(1, 2, 1, 1), keys, scale=1.0)
    far = torch.tensor([[[900.0], [300.0]]])
    loss = indexer_kl(one, keys[:, 1:], heads, scale=1.0, relu=False, outside=far)
    assert abs(loss.item()) < 1e-6


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"restriction": "student_all", "blocks": 2}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_selection_keeps_its_proportions_however_faint(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Selected keys that hold 1e-70 and less of the mass, by head, layer and window, against the reference."""
    options = dict(options)
    blocks = options.pop("blocks", 1)
    arguments = {**case(41, blocks=blocks, layers=2, scorers=2), **options, "top_k": 2, "reduction": "rows"}
    queries = [np.ones((B, H, L, 1)) * layer for layer in (1.0, 2.0)]
    logits = np.array([160.0, 160.0, -3.0, 1.0, 0.5, -4.0, 2.0, 0.25, -1.0])  # exact in every dtype
    keys = [layer + logits[:, None] * np.ones((B, KV, S, 1)) for layer in (0.0, 4.0)]
    taught = {"teacher_queries": queries, "teacher_keys": keys, "teacher_scale": 1.0}
    outside = [np.arange(H)[None, :, None] * np.full((B, H, L), 50.0)] * 2
    scorer = {
        "queries": np.ones((B, 2, L, 1)),
        "keys": np.zeros((B, 1, -(-S // blocks), 1)),
        "weights": np.ones((B, 2, L)),
    }
    scorer["keys"][:, :, 2:, 0] = np.arange(1, scorer["keys"].shape[2] - 1)  # the first keys are never selected
    arguments |= {**taught, **scorer, "outside": outside, "scale": 0.5}
    value, gradients = run(arguments, dtype)
    assert value == pytest.approx(shd_ref.indexer_loss(**arguments), rel=1e-5)
    for got, right in zip(gradients, shd_ref.indexer_loss_gradient(**arguments), strict=True):
        np.testing.assert_allclose(
            got, right, rtol=1e-5, atol=max(1e-5, 4 * torch.finfo(dtype).eps) * np.abs(right).max()
        )


def test_row_mass_is_what_the_window_leaves() -> None:
    """A teacher that says what each row sums to is one whose log-sum-exp beside the keys is given."""
    arguments = case(50, outside=True)
    q, k = torch.tensor(arguments["teacher_queries"][0]), torch.tensor(arguments["teacher_keys"][0])
    outside = torch.tensor(arguments["outside"][0])
    keys = 0.7 * q @ k.mT.repeat_interleave(2, 1)
    total = keys.masked_fill(~torch.tensor(CAUSAL), -torch.inf).logsumexp(-1)
    mass = torch.sigmoid(total - outside)
    student = tuple(torch.tensor(arguments[name]) for name in ("queries", "keys"))
    taught = Factored.teacher(q, k, scale=0.7, is_causal=True)
    for more in ({}, {"top_k": 3, "restriction": "mask_first"}):
        weighed = Factored.teacher(q, k, scale=0.7, is_causal=True, row_mass=mass)
        right = indexer_kl(*student, taught, scale=0.9, outside=outside, **more)
        torch.testing.assert_close(indexer_kl(*student, weighed, scale=0.9, **more), right)


def test_a_padded_layer_of_a_factored_cache_is_a_teacher() -> None:
    """Its mixing plays no part, padded rows do not count, and padded keys are not attended to."""
    arguments = case(60)
    q, k = torch.tensor(arguments["teacher_queries"][0]), torch.tensor(arguments["teacher_keys"][0])
    present = torch.tensor(ROWS)
    mixing, groups = torch.tensor([[[0.3, 0.7, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]] * B), ((0, 1), (2, 3))
    masked = {"attn_mask": present[:, None, None], "row_mass": present[:, None].double().expand(-1, H, -1)}
    cached = Factored(q, k, mixing.double(), scale=0.7, is_causal=True, groups=groups, **masked)
    student = [torch.tensor(arguments[name]).requires_grad_() for name in ("queries", "keys")]
    for options in ({"reduction": "rows"}, {"reduction": "samples", "top_k": 3}):
        padded = indexer_kl(*student, cached, scale=0.9, **options)
        rows = [
            indexer_kl(
                *(one[b : b + 1, :, :n] for one in student),
                Factored.teacher(q[b : b + 1, :, :n], k[b : b + 1, :, :n], scale=0.7, is_causal=True),
                scale=0.9,
                top_k=options.get("top_k"),
            )
            for b, n in enumerate((7, 4))
        ]
        torch.testing.assert_close(padded, torch.stack(rows).sum() / (11 if options["reduction"] == "rows" else 2))


def test_ties_go_to_the_smaller_position() -> None:
    scores = torch.tensor([[[[2.0, 1.0, 2.0, 1.0, 1.0, 0.0]]]])
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert indexer_select(scores.to(dtype), 3).tolist() == [[[[True, True, True, False, False, False]]]]
    allowed = torch.tensor([True, False, True, True, True, True])
    assert indexer_select(scores, 4, allowed).tolist() == [[[[True, False, True, True, True, False]]]]
    assert indexer_select(scores, 9, allowed).tolist() == [[[allowed.tolist()]]]
    assert indexer_select(scores - 5.0, 1).sum().item() == 1


def test_second_derivatives_are_refused() -> None:
    q = torch.ones(1, 1, 2, 2, requires_grad=True)
    teacher = Factored.teacher(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))
    (gradient,) = torch.autograd.grad(
        indexer_kl(q, torch.randn(1, 1, 2, 2), teacher, scale=1.0), q, create_graph=True
    )
    with refusal("argument-value", "differentiated once"):
        gradient.sum().backward()


Q, K = torch.ones(1, 2, 3, 2), torch.ones(1, 1, 3, 2)
TEACHER = Factored.teacher(torch.ones(1, 2, 3, 2), torch.ones(1, 2, 3, 2))


def taught(**fields: Any) -> Factored:
    return Factored.teacher(TEACHER.queries, TEACHER.keys, **fields)


WEIGHED = {"teacher": taught(row_mass=torch.ones(1, 2, 3)), "outside": torch.zeros(1, 2, 3)}


@pytest.mark.parametrize(
    ("code", "words", "change"),
    [
        ("argument-value", "relu", {"relu": 1}),
        ("argument-value", "teacher must be a Factored", {"teacher": torch.ones(1, 2, 3, 3)}),
        ("argument-value", "row_mass", WEIGHED),
        ("argument-value", "layer 1", {"teacher": [TEACHER, taught(is_causal=True)]}),
        ("argument-shape", "equally long", {"outside": [None, None]}),
        ("argument-shape", "all heads", {"teacher": taught(attn_mask=torch.ones(2, 3, 3).bool())}),
        ("argument-dtype", "segments", {"segments": torch.ones(1, 3)}),
        ("argument-dtype", "loss_mask", {"loss_mask": torch.ones(1, 3)}),
        ("not-finite", "queries", {"queries": Q * torch.inf}),
        ("not-finite", "outside", {"outside": torch.full((1, 2, 3), torch.inf)}),
    ],
)
def test_what_does_not_fit_is_refused(code: str, words: str, change: dict[str, Any]) -> None:
    arguments = {"queries": Q, "keys": K, "teacher": TEACHER, "scale": 1.0, **change}
    with refusal(code, words):
        indexer_kl(**arguments)
