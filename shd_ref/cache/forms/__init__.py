"""The targets that a record can hold of a sample, each a class by which the manifest describes one.

``form.py`` has the interface of a form. ``attention.py`` has what maps and queries with keys share, ``rows.py``
all that is rows (logits, hidden states, embeddings), ``exact.py`` last states with the teacher's head. Here they
are listed and joined: a form from elsewhere is one class more in ``FORMS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from shd_ref.cache.forms.attention import Factors, Maps
from shd_ref.cache.forms.exact import Exact
from shd_ref.cache.forms.form import Extent, Form
from shd_ref.cache.forms.rows import Embeddings, Hidden, Logits
from shd_ref.errors import ShdError

_FormT = TypeVar("_FormT")

FORMS: list[type[Form]] = [Maps, Factors, Logits, Hidden, Embeddings, Exact]
"""In the order in which records hold them (CACHE-160). A form from elsewhere is appended before a cache is opened."""


def subjects() -> tuple[str, ...]:
    return tuple(dict.fromkeys(form.SUBJECT for form in FORMS))


def kind_of(subject: str, members: Any) -> type[Form]:
    """The class of a member of a manifest; where there are several its ``form`` tells; ValueError."""
    kinds = [form for form in FORMS if subject == form.SUBJECT]
    if len(kinds) == 1:
        return kinds[0]
    tags = {str(getattr(kind, "form", None)): kind for kind in kinds}
    tag = members.get("form") if isinstance(members, dict) else None
    if not isinstance(tag, str) or tag not in tags:
        raise ValueError(f"{subject} must be an object whose form is one of {', '.join(tags)}; got {str(tag)[:80]!r}")
    return tags[tag]


def error_kinds() -> dict[str, type]:
    """By subject what coding it costs, as receipts hold it."""
    return {form.SUBJECT: form.ERROR for form in FORMS}


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
            names = ", ".join(form.SUBJECT for form in self.forms)
            message = f"the cache must hold {name} for this; it holds {names}: precompute it with {name}"
            raise ShdError("argument-value", message, "CACHE-160")
        return form

    @property
    def attention(self) -> Maps | Factors:
        """How attention is stored; ``argument-value`` where it is not: ask ``find(Attention)`` first."""
        return self.find(Maps) or self.need(Factors, "attention")

    @property
    def logits(self) -> Logits | None:
        return self.find(Logits)

    @property
    def hidden(self) -> Hidden | None:
        return self.find(Hidden)

    @property
    def embeddings(self) -> Embeddings | None:
        return self.find(Embeddings)

    @property
    def exact(self) -> Exact | None:
        """How the states that the teacher's head reads are stored; None where they are not."""
        return self.find(Exact)

    def extent_of(self, sample: Extent) -> Extent:
        """The extent of a sample in its record: the fields that any of its forms uses."""
        stated = [form.stated for form in self.forms]
        return Extent(
            sample.length,
            sample.first if all("first" in names for names in stated) else 0,
            sample.shapes if any("shapes" in names for names in stated) else (),
            sample.decoder if any("decoder" in names for names in stated) else 0,
        )

    def extent_problems(self, extent: Extent) -> Iterator[str]:
        """Reasons why no record has this extent."""
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
