"""Words of the glossary as lines of text, as wide as a terminal."""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from textwrap import wrap

from precaudit.schema.glossary import KEY, POINT, Term


def paragraphs(entry: Term, width: int | None) -> Iterator[str]:
    """Yield the lines of an entry; ``width`` None: every paragraph is one line."""
    yield from _wrap(f"{entry.title}: {_text(entry.meaning)}", width, "")
    for label, text in entry.items:
        yield from _wrap(f"{label}: {_text(text)}", width, "  ")
    if entry.also:
        yield from _wrap(f"Also called: {', '.join(entry.also)}", width, "  ")


def word_lines(entries: Iterable[Term], width: int | None) -> Iterator[str]:
    """Yield a line a word with the first sentence of its meaning: words, then points, then policy keys."""
    shown = list(entries)
    column = max(len(e.name if e.of in (POINT, KEY) else e.title) for e in shown) + 4
    for of, its in groupby(shown, key=lambda e: e.of if e.of in (POINT, KEY) else ""):
        yield f"{of.capitalize() or 'Word'}s (precaudit explain {'TERM' if not of else of.split()[-1].upper()})"
        for e in its:
            name = f"  {e.name if of else e.title}"
            yield from _wrap(f"{name:{column}}{_text(first_sentence(e.meaning))}", width, " " * column, hang=True)


def first_sentence(text: str) -> str:
    """Return a text up to its first full stop that ends a sentence."""
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0]


def _wrap(text: str, width: int | None, indent: str, hang: bool = False) -> list[str]:
    first = "" if hang else indent
    if width is None:
        return [first + text]
    return wrap(
        text,
        max(width, 20),
        initial_indent=first,
        subsequent_indent=indent if hang else first + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _text(markdown: str) -> str:
    """Return Markdown of the glossary as plain text: no backquotes, and links as their words."""
    return re.sub(r"\[([^\]]+)\]\(#[^)]*\)", r"\1", markdown).replace("`", "")
