"""Encoder (what keys of cross sites are made from, and sites beside it), decoder and cross attention of a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shd_ref.errors import ShdError, inputs_invalid
from shd_ref.teacher.graph.find import AttentionSite
from shd_ref.teacher.graph.inputs import InputSpec
from shd_ref.teacher.packages import onnx

DECODER_MASK: Final = "decoder_attention_mask"
"""The decoder's mask, where none is named."""


@dataclass(frozen=True)
class SiteKinds:
    """The kind of each site by number, none where there is no cross attention; ``own_keys`` are the decoder's own."""

    kinds: Mapping[int, str]
    own_keys: Collection[int] = ()
    decoder_inputs: tuple[str, ...] = ()
    decoder_mask: str | None = None

    def kind(self, site: AttentionSite) -> str | None:
        """The kind of a site; None where the graph has one alone."""
        return self.kinds.get(site.layer)

    def has_decoder_rows(self, site: AttentionSite) -> bool:
        """Whether the rows of its maps are the decoder's positions."""
        return self.kinds.get(site.layer) in ("decoder", "cross")


def find_kinds(
    model: onnx.ModelProto,
    sites: Sequence[AttentionSite],
    specs: Sequence[InputSpec] = (),
    decoder_mask: str | None = None,
) -> SiteKinds:
    """Tell the kinds of all sites of a graph apart."""
    readable = [site for site in sites if site.probs and site.values]
    crosses = [site for site in readable if site.cross]
    if not crosses:
        if decoder_mask is not None:
            raise _no_mask(decoder_mask, ())
        return SiteKinds({})
    upstream = _upstream_of(model)
    below = [upstream(site.values) for site in crosses]  # what keys and values of cross attention are made from
    encoder_tensors = frozenset().union(*below)
    cross_maps = {site.probs for site in crosses}
    sequences = [spec.name for spec in specs if len(spec.shape) > 1]
    # A mask that only the logits read belongs to the inputs that are as long by name.
    lengths = {spec.shape[1] for spec in specs if spec.name in encoder_tensors and len(spec.shape) > 1} - {None}
    others = [name for name in sequences if name not in encoder_tensors and not name.startswith("encoder_")]
    # A number may be both sequences' length by chance; a name is one of them.
    lengths -= {s.shape[1] for s in specs if s.name in others and s.part != "mask" and isinstance(s.shape[1], int)}
    masks = {spec.name for spec in specs if spec.part == "mask" and spec.shape[1] in lengths}
    decoder = tuple(sorted(n for n in others if n not in masks or n.startswith("decoder_")))
    kinds: dict[int, str] = {}
    for site in readable:
        made_of = upstream(site.probs)
        if site.cross:
            kinds[site.layer] = "cross"
        elif not cross_maps.isdisjoint(made_of):
            kinds[site.layer] = "decoder"
        else:
            # Beside the encoder, as another branch on its inputs; the decoder's rows may be learned queries.
            is_beside = made_of.isdisjoint(decoder) and not made_of.isdisjoint(sequences)
            kinds[site.layer] = "encoder" if site.probs in encoder_tensors or is_beside else "decoder"
    own_keys = {s.layer for s, tensors in zip(crosses, below, strict=True) if not cross_maps.isdisjoint(tensors)}
    decoder_masks = [s.name for s in specs if s.name in decoder and len(s.shape) == 2 and s.part == "mask"]
    if decoder_mask is None:
        decoder_mask = DECODER_MASK if DECODER_MASK in decoder_masks else None
    elif decoder_mask not in [s.name for s in specs if s.name in decoder and len(s.shape) == 2]:
        raise _no_mask(decoder_mask, decoder_masks)
    return SiteKinds(kinds, own_keys, decoder, decoder_mask)


def _no_mask(name: str, masks: Sequence[str]) -> ShdError:
    return inputs_invalid(
        f"decoder_mask must be a (B, L) input that the decoder's rows alone depend on, {list(masks)}; got {name!r}"
    )


def _upstream_of(model: onnx.ModelProto) -> Callable[[str], frozenset[str]]:
    """From a tensor to all that it is made from, itself included; what only gives it a size is left out."""
    nodes = [node for node in model.graph.node if node.op_type not in ("Shape", "Size")]
    sources = {name: node.input for node in nodes for name in node.output}

    def upstream(tensor: str) -> frozenset[str]:
        seen, queue = {tensor}, [tensor]
        while queue:
            new = {source for source in sources.get(queue.pop(), ()) if source} - seen
            seen |= new
            queue += new
        return frozenset(seen)

    return upstream
