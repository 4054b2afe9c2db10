import json
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from support.makers import ALONE, KINDS, OTHER_PLAN, PLAN, TOPK, document, job, key_of
from support.refusals import refusal

from shd_ref import ShdError
from shd_ref.cache import (
    Dataset,
    Factors,
    KindLayers,
    LayerPair,
    Manifest,
    Maps,
    Matching,
    SampleInputs,
    ShardPlan,
    Teacher,
)


def members_of(manifest: Manifest) -> dict[str, Any]:
    members: dict[str, Any] = json.loads(manifest.to_bytes())
    return members


def test_bytes_are_what_the_specification_says() -> None:
    manifest = job()
    assert document(members_of(manifest)) == manifest.to_bytes()


def test_differences_name_members_and_not_whole_lists() -> None:
    layers = job().attention.layers
    other = job(layers=tuple(replace(layer, teacher_layer=layer.teacher_layer + 1) for layer in layers))
    first, second = (f"attention.layers[{number}].teacher_layer: {2 + 2 * number} -> " for number in (0, 1))
    assert job().differences(other) == [first + "3", second + "5"]
    fewer = job().differences(job(layers=layers[:1]))
    assert "attention.layers[1].num_teacher_heads: 4 -> None" in fewer
    several = job(logits=TOPK).differences(job(**ALONE["topk"]))
    assert "attention.codec: 'sqrt8-row' -> None" in several
    assert several[-1] == "18 more"


def test_names_may_hold_any_character() -> None:
    layer = LayerPair(0, 0, 'a"b\\c\n\x7f\u00e9\U0001f40d\ud800', 4)
    manifest = job(layers=(layer,))
    assert manifest.to_bytes().isascii()
    assert Manifest.from_bytes(manifest.to_bytes()).attention.layers[0].site == layer.site


def test_shards_hold_every_sample_once_in_the_specified_order() -> None:
    manifest = job(num_samples=103, samples_per_shard=10)
    by_hand = sorted(range(103), key=lambda i: (xxhash.xxh3_64_intdigest(struct.pack("<Q", i), 17), i))
    dealt = [manifest.shard_samples(shard) for shard in range(11)]
    assert [index for shard in dealt for index in shard] == by_hand
    assert [len(shard) for shard in dealt] == [10] * 10 + [3]
    with refusal("argument-value", "shard must be 0 to 10"):
        manifest.shard_samples(11)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"on_error": "ignore"}, "on_error must be one of"),
        ({"num_student_heads": 5}, "num_student_heads must be 1 to num_teacher_heads=4; got 5"),
        ({"layers": (LayerPair(2, 2, "a", 4), LayerPair(1, 1, "b", 4))}, "student layers must ascend"),
        ({"layers": (LayerPair(1, 2, "a", 4), LayerPair(2, 1, "b", 8))}, "num_teacher_heads must agree"),
        ({"plan": (((0, 4),),)}, "plan positions must be below 4"),
        ({"plan": (), "plans": (PLAN, PLAN)}, "plans must not all be equal"),
        ({"plan": (), "plans": (PLAN, (((0, 1),),))}, "plans must have one number of pairs"),
        ({"plans": (PLAN, OTHER_PLAN)}, "plan must be empty"),
        ({"alpha_per": "row"}, "alpha_per must be map"),
        ({"temperature": 0.0}, "temperature must be finite and above 0; got 0.0"),
        ({"codec": "zip"}, "codec must be one of"),
        ({"num_student_layers": 2}, "num_student_layers must be 3 to 1000; got 2"),
        (KINDS | {"kinds": KINDS["kinds"][::-1]}, "kinds must be some of .* in this order"),
        (KINDS | {"num_student_layers": 5}, "num_student_layers must be 4, the sum of all kinds"),
        (KINDS | {"support": "causal"}, "shapes must be length for causal support"),
        ({"shards": ShardPlan(2, 17, 5)}, "num_shards must be 4; got 5"),
    ],
)
def test_constructor_refuses(changes: dict[str, Any], rule: str) -> None:
    with refusal("argument-value", rule):
        job(**changes)


@pytest.mark.parametrize(
    ("part", "arguments"),
    [
        (Teacher, ("ab" * 31, "n", "p", "d")),
        (LayerPair, (1000, 0, "s", 4)),
        (Matching, ("residual", 2**53, 0)),
        (SampleInputs, (("b", "a"), None)),
        (SampleInputs, (("a",), "mask")),
        (SampleInputs, (("a", "b"), None, None, ("b",), "a")),
        (KindLayers, ("sideways", 1)),
        (Dataset, ("no key", 1)),
        (ShardPlan, (1, 0, 10**6 + 1)),
    ],
)
def test_parts_refuse(part: type, arguments: tuple[Any, ...]) -> None:
    with refusal("argument-value"):
        part(*arguments)


ATTENTION_MEMBERS = {field.name for kind in (Maps, Factors) for field in fields(kind)}
HOSTILE: dict[str, dict[str, Any]] = {
    "no form": {"attention": {}},
    "unknown form": {"form": "pixels"},
    "members of another form": {"form": "factored"},
    "unknown member": {"extra": 1},
    "string for a number": {"num_student_heads": "2"},
    "integer for a real": {"temperature": 1},
    "beyond 2^53": {"shards": {"samples_per_shard": 2**53, "seed": 0, "num_shards": 1}},
    "unknown inner member": {"dataset": {"fingerprint": key_of(0), "num_samples": 7, "path": "../../etc/passwd"}},
    "plans that are there with their default": {"plans": None},
    "triple for a pair": {"plan": [[[0, 1, 2]]]},
    **{f"logits are {value}": {"logits": value} for value in (None, [], {"codec": "topk"})},
    "unknown codec": {"codec": "pickle"},
    "version is no string": {"format_version": 1},
}


def changed(members: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Members of a manifest or of its attention in the place of others."""
    inner = {name: value for name, value in changes.items() if name in ATTENTION_MEMBERS}
    outer = {name: value for name, value in changes.items() if name not in ATTENTION_MEMBERS}
    return members | {"attention": members["attention"] | inner} | outer


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused(name: str) -> None:
    with refusal("cache-corrupt", "manifest"):
        Manifest.from_bytes(document(changed(members_of(job()), HOSTILE[name])))


def test_every_member_is_required() -> None:
    for member in (*members_of(job()), *members_of(job())["attention"]):
        members = members_of(job())
        (members if member in members else members["attention"]).pop(member)
        data = document(members)
        if member == "checksum":
            data = json.dumps(members, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        with refusal("cache-corrupt"):
            Manifest.from_bytes(data)


@pytest.mark.parametrize(
    "respelled",
    [
        lambda data: data[:-1],
        lambda data: data.replace(b":", b": ", 1),
        lambda data: data.replace(b"tiny", b"t\\u0069ny"),
        lambda data: data.replace(b":1.0}", b":1.00}"),
    ],
    ids=range(4),
)
def test_another_spelling_of_the_same_content_is_refused(respelled: Any) -> None:
    data = respelled(job().to_bytes())
    assert data != job().to_bytes()
    with refusal("cache-corrupt", "canonical form"):
        Manifest.from_bytes(data)


def test_newer_format_says_what_to_do() -> None:
    members = members_of(job()) | {"format_version": "2", "something_new": [1]}
    with refusal("cache-version", "got '2': install a release"):
        Manifest.from_bytes(document(members))


def test_optional_member_is_left_out_where_it_is_the_default() -> None:
    assert "on_error" not in members_of(job())
    assert not {"plans", "matching", "shapes", "kinds"} & members_of(job())["attention"].keys()
    assert "seed" not in members_of(job())["inputs"]
    with refusal("cache-corrupt", "on_error is unknown, or must be left out where it has its default"):
        Manifest.from_bytes(document(members_of(job()) | {"on_error": "stop"}))


def test_absurdly_large_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ShdError, match="at most 268435456 bytes"):
        Manifest.read(tmp_path)
