"""The table of forms. All code iterates over a manifest's forms and their rows; only ``Held`` names subjects.

Makers, decoders and terms lie in rooms that this one may not import, so rows name them, ``"module:name"``.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

from shd_ref.cache.forms.embeddings import Embeddings
from shd_ref.cache.forms.exact import Exact
from shd_ref.cache.forms.factors import Factors
from shd_ref.cache.forms.form import Extent, Form
from shd_ref.cache.forms.hidden import Hidden
from shd_ref.cache.forms.logits import Logits
from shd_ref.cache.forms.maps import Maps
from shd_ref.errors import ShdError

_FormT = TypeVar("_FormT")


class Row(NamedTuple):
    """A form of supervision.

    Attributes:
        form: the class that a manifest's member becomes; of several with one subject the member ``form`` decides.
        maker: subclass of ``Maker``: how records of it are made of a teacher's outputs, measured and compared.
        decoder: function that decodes a batch of it where the student trains: of rows ``(form, rows, spread)``, see
            ``CachedBatch.read``; of attention ``(records, manifest, layers, buffer)`` to the batch.
        term: subclass of ``RowsTerm``: what ``SHDTrainer`` learns from it; of attention ``layer_kls``.
    """

    form: type[Form]
    maker: str | type
    decoder: str | Callable[..., Any]
    term: str | Callable[..., Any]


_MAKERS, _READ = "shd_ref.teacher.precompute.forms", "shd_torch.supervision"
_KLS, _TERMS = "shd_torch.teacher.online:layer_kls", "shd_torch.training.terms"
ROWS: list[Row] = [
    Row(Maps, f"{_MAKERS}.attention:MapsMaker", "shd_torch.data.batches:pack_maps", _KLS),
    Row(Factors, f"{_MAKERS}.factors:FactorsMaker", f"{_READ}.factored_codes:pack_factored", _KLS),
    Row(Logits, f"{_MAKERS}.rows:LogitsMaker", f"{_READ}.stored_rows:decode_logits", f"{_TERMS}:KdTerm"),
    Row(Hidden, f"{_MAKERS}.rows:HiddenMaker", f"{_READ}.stored_rows:decode_hidden", f"{_TERMS}:HiddenTerm"),
    Row(
        Embeddings,
        f"{_MAKERS}.embeddings:EmbeddingsMaker",
        f"{_READ}.stored_rows:decode_embeddings",
        "shd_torch.training.embeddings:EmbeddingTerm",
    ),
    Row(Exact, f"{_MAKERS}.exact:ExactMaker", f"{_READ}.stored_rows:decode_exact", f"{_TERMS}:exact_term"),
]
"""In the order in which records hold them (CACHE-160). A form from elsewhere is appended before a cache is opened."""


def row_of(form: Form) -> Row:
    """The row of a form."""
    return next(row for row in ROWS if row.form is type(form))


def load(reference: str | Callable[..., Any]) -> Any:
    """What a row names."""
    if not isinstance(reference, str):
        return reference
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def subjects() -> dict[str, Any]:
    """By subject the type hint of its member in a manifest: a class, or a union that the member ``form`` decides."""
    names = dict.fromkeys(row.form.SUBJECT for row in ROWS)
    return {
        name: functools.reduce(operator.or_, [row.form for row in ROWS if name == row.form.SUBJECT]) for name in names
    }


def error_kinds() -> dict[str, type]:
    """By subject what coding it costs, as receipts hold it."""
    return {row.form.SUBJECT: row.form.ERROR for row in ROWS}


class Held:
    """The forms that records hold together; base of the manifest."""

    forms: tuple[Form, ...]

    def find(self, kind: Callable[..., _FormT]) -> _FormT | None:
        """The form of this class, or of a subclass, if records hold one; the class may be abstract."""
        return cast("_FormT | None", next((form for form in self.forms if isinstance(form, cast(type, kind))), None))

    def need(self, kind: Callable[..., _FormT], name: str) -> _FormT:
        """The same, where there must be one: ``argument-value``."""
        form = self.find(kind)
        if form is None:
            held = ", ".join(form.SUBJECT for form in self.forms)
            message = f"the cache must hold {name} for this; it holds {held}: precompute it with {name}"
            raise ShdError("argument-value", message, "CACHE-160")
        return form

    @property
    def attention(self) -> Maps | Factors:
        """How attention is stored; ``argument-value`` where it is not: ask ``find(Attention)`` first."""
        return self.find(Maps) or self.need(Factors, "attention")

    @property
    def logits(self) -> Logits | None:
        """How the teacher's logits are stored; None where they are not."""
        return self.find(Logits)

    @property
    def hidden(self) -> Hidden | None:
        """The same of its hidden states."""
        return self.find(Hidden)

    @property
    def embeddings(self) -> Embeddings | None:
        """The same of its texts' embeddings."""
        return self.find(Embeddings)

    @property
    def exact(self) -> Exact | None:
        """How the states that the teacher's head reads are stored; None where they are not."""
        return self.find(Exact)

    def extent_of(self, sample: Extent) -> Extent:
        """The extent that a record states of a sample: what any of its forms has a use for."""
        stated = [form.stated for form in self.forms]
        return Extent(
            sample.length,
            sample.first if all("first" in names for names in stated) else 0,
            sample.shapes if any("shapes" in names for names in stated) else (),
            sample.decoder if any("decoder" in names for names in stated) else 0,
        )

    def extent_problems(self, extent: Extent) -> Iterator[str]:
        """What keeps a record from being of this extent."""
        if not 0 <= extent.first < max(extent.length, 1):
            yield f"first must be 0, or below length {extent.length}; got {extent.first}"
        elif extent != self.extent_of(extent):
            yield f"first, shapes and decoder must be left out where no form has a use for them; got {extent}"
        for form in self.forms:
            yield from form.extent_problems(extent)


class Forms(Held):
    """Forms before there is a manifest."""

    def __init__(self, *forms: Form) -> None:
        self.forms = forms
