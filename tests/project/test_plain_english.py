"""Pages are in plain English: short sentences, and words of the field."""

import re

import pytest

from tests.helpers.paths import ROOT

MOST = 30  # words
PAGES = sorted({"README", "ARCHITECTURE", *(f"docs/{p.stem}" for p in (ROOT / "docs").glob("*.md"))})


def sentences(page):
    """Yield a page's sentences: code is one word, a cell of a table and an item of a list a text of its own."""
    text = re.sub(r"^ *```.*?^ *```$|^<!--.*?-->$|^ {4}\S.*$", "\n", page, flags=re.M | re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    for part in re.split(r"\n\s*\n|^#.*$|^\s*(?:[-*]|\d+\.) |(?<!\\)\||\n(?=\|)", text, flags=re.M):
        yield from (s for s in re.split(r"(?<=[.!?])[\"*)]*\s+", part) if s.strip())


def words(sentence):
    return len(re.findall(r"\S*\w\S*", sentence))


@pytest.mark.parametrize("page", PAGES)
def test_no_sentence_is_longer_than_thirty_words(page):
    text = (ROOT / f"{page}.md").read_text()
    longer = [(words(s), " ".join(s.split())) for s in sentences(text) if words(s) > MOST]
    assert not longer, "\n".join(f"{n}: {s}" for n, s in longer)


def test_sentences_and_words_are_counted():
    page = "# A heading\n\nOne two, `three four`. Five [six](seven.md)\neight!\n\n- nine\n- ten\n\n| a b | c |\n"
    assert [words(s) for s in sentences(page)] == [3, 3, 1, 1, 2, 1]
    assert [words(s) for s in sentences("```sh\nfour words in code\n```\n<!-- slow: why -->\n    make test\n")] == []


def test_pages_have_the_field_s_words():
    """Those of the table in docs/contributing.md that no sentence needs."""
    ours = re.compile(r"\b(textbooks?|honest(?:ly)?|made again|held (?:against|to)|drawn|draws?)\b", re.I)
    for page in set(PAGES) - {"docs/contributing", "docs/shadow"}:
        found = [s for s in sentences((ROOT / f"{page}.md").read_text()) if ours.search(s)]
        assert not found, (page, found)
