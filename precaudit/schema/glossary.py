"""The words of precaudit: sections of bundled/glossary.md, points from their rows, values of policy keys."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

from precaudit.errors import UserError, nearest
from precaudit.schema.graphs.decoder import CACHES, POINTS, parts_of
from precaudit.schema.graphs.point import Point
from precaudit.schema.policies import ARITHMETIC, WORDS, Policy

AXES = {
    "T": "positions",
    "D": "width",
    "H": "query heads",
    "G": "key/value heads",
    "K": "head dimension",
    "S": "key positions",
    "F": "MLP width",
    "E": "all experts",
    "V": "vocabulary",
}
KEY, POINT, HEADING = "policy key", "point", "heading"
TEXT = 3  # words from which on a term is taken for a text, of which the words are looked up
_HEADING = re.compile(r"^## (?P<name>[^(\n]+?)(?: \((?P<of>[^)\n]+)\))?$", re.MULTILINE)
_ITEM = re.compile(r"^- \*\*(?P<label>[^*]+):\*\* ", re.MULTILINE)


@dataclass(frozen=True)
class Term:
    """A word: what it means, and items such as (Formula, …) and (Example, …), as Markdown without line breaks.

    ``of``: which of several meanings of one name; ``also``: other names.
    """

    name: str
    of: str
    meaning: str
    items: tuple[tuple[str, str], ...] = ()
    also: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Its heading."""
        return f"{self.name} ({self.of})" if self.of else self.name


@cache
def terms() -> tuple[Term, ...]:
    """Return every word: sections of the glossary in its order, points in program order, policy keys."""
    text = (resources.files("precaudit.bundled") / "glossary.md").read_text(encoding="utf-8")
    heads = list(_HEADING.finditer(text))
    ends = [*(h.start() for h in heads[1:]), len(text)]
    found = [_section(h["name"], h["of"] or "", text[h.end() : end]) for h, end in zip(heads, ends, strict=True)]
    keys = [e for e in found if e.of == KEY]
    return (*(e for e in found if e.of != KEY), *(_point(p) for p in POINTS.values()), *keys)


def look_up(term: str) -> tuple[Term, ...]:
    """Return every meaning of a word, whatever its case, spaces or hyphens; raises UserError that names the nearest."""
    found = (*terms_by_name().get(lookup_key(term), ()), *headings().get(lookup_key(term), ()))
    if not found and (":" in term or len(term.split()) >= TEXT):
        found = words_in(term)
    if not found:
        raise UserError(f"no word {term!r}{_near(term.strip().casefold())}")
    return found


def words_in(text: str) -> tuple[Term, ...]:
    """Return the words of a printed line that the glossary has, in their order, the longest where several begin."""
    given = re.findall(r"[^\s,;:()\[\]]+", text)
    found: list[Term] = []
    i = 0
    while i < len(given):
        spans = (n for n in range(min(4, len(given) - i), 0, -1) if _word(" ".join(given[i : i + n])))
        n = next(spans, 0)
        found += _word(" ".join(given[i : i + n])) if n else ()
        i += max(n, 1)
    return tuple(dict.fromkeys(found))


def _word(text: str) -> tuple[Term, ...]:
    """Return the meanings of a word or of its singular."""
    known, key = terms_by_name(), lookup_key(text.rstrip("."))
    return known.get(key) or known.get(key.removesuffix("s")) or ()


@cache
def headings() -> dict[str, tuple[Term, ...]]:
    """Return {heading of a table or a section that is no word: its meaning}."""
    text = (resources.files("precaudit.bundled") / "headings.md").read_text(encoding="utf-8")
    _, *rest = _ITEM.split(text)
    found: dict[str, tuple[Term, ...]] = {}
    for name, meaning in zip(rest[::2], rest[1::2], strict=True):
        found[lookup_key(name)] = (*found.get(lookup_key(name), ()), Term(name, HEADING, _one_line(meaning)))
    return found


@cache
def terms_by_name() -> dict[str, tuple[Term, ...]]:
    """Return {word: its meanings}: a meaning of that very name goes before one that is also called so."""
    found: dict[str, tuple[Term, ...]] = {}
    for also in (False, True):
        for entry in terms():
            for name in dict.fromkeys(lookup_key(x) for x in (entry.also if also else (entry.name, entry.title))):
                found[name] = tuple(dict.fromkeys((*found.get(name, ()), entry)))
    return found


def lookup_key(term: str) -> str:
    """Return a word as it is looked up: small letters, hyphens and underscores as spaces."""
    return re.sub(r"[\s_-]+", " ", term.strip().casefold())


def _near(term: str) -> str:
    """Return a hint at the nearest word; where none is close, at the list."""
    hint = nearest(term, (name for e in terms() for name in (e.name, *e.also)))
    return hint if hint.startswith("; did") else "; all words: precaudit explain"


def _section(name: str, of: str, body: str) -> Term:
    """Read a section: a paragraph, then items ``- **Label:** text``."""
    head, *rest = _ITEM.split(body)
    items = {label: _one_line(text) for label, text in zip(rest[::2], rest[1::2], strict=True)}
    also = tuple(re.findall(r"`([^`]+)`", items.pop("Also", "")))
    told = _values(name) if of == KEY else ()
    return Term(name, of, _one_line(head), (*items.items(), *told), also)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _values(key: str) -> tuple[tuple[str, str], ...]:
    """Return what a policy key may be, what it is by default, and the points that it decides."""
    stored = [p.name for p in POINTS.values() if p.format == key]
    inside = [p.name for p in POINTS.values() if p.arithmetic == key]
    found = [
        ("Values", ", ".join(WORDS.get(key, ARITHMETIC))),
        ("Default", f"{getattr(Policy(), key)} (policy {Policy().name})"),
        ("Points stored in it", ", ".join(stored)),
        ("Points computed with it", ", ".join(inside)),
        ("Example", f"`precaudit trace tiny --set {key}={WORDS.get(key, ARITHMETIC)[0]}`"),
    ]
    return tuple((label, text) for label, text in found if text)


def _point(p: Point) -> Term:
    """Say of a point what its row says."""
    return Term(p.name, POINT, f"{p.text}.", tuple(_row(p)))


def _row(p: Point) -> Iterator[tuple[str, str]]:
    """Yield what a point's row says, as items."""
    where = "of every layer" if p.per_layer else "after the layers"
    only = f", {p.only} models only" if p.only else ""
    yield "Axes", f"{', '.join(f'{a} {AXES[a]}' for a in p.axes)}; {where}{only}"
    if p.inputs:
        experts = f"; in a mixture of experts {', '.join(p.with_experts)}" if p.with_experts is not None else ""
        caches = [CACHES[name] for name in p.inputs if name in CACHES and p.reads_keys]
        decode = f"; in decode {', '.join(caches)}" if caches else ""
        yield "Holds the rows of" if p.state else "Reads", f"{', '.join(p.inputs)}{experts}{decode}"
    if p.handed is not None:
        yield "Equals", f"{p.handed} of the layer before, bit for bit"
    yield "Stored in", f"the format of policy key {p.format} ({getattr(Policy(), p.format)} in {Policy().name})"
    if p.within is not None:
        yield "Part of", p.within
    if parts := parts_of(p.name):
        yield "Parts", ", ".join(reversed(parts))
    judged = "state: bit for bit against the rows that were written" if p.state else "local and forward error"
    yield "Judged by", "state: the handover" if p.handed is not None else judged
    yield "Example", f"`precaudit trace tiny --points {p.name} -o runs/a`"
