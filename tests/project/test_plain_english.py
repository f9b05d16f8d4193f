"""Pages are in plain English: short sentences, and words of the field."""

import ast
import re

import pytest

from precaudit.models.checkpoints import open_checkpoint
from precaudit.references.mutations.candidates import variants
from precaudit.schema.policies import load_policy
from tests.helpers.paths import FIXTURES, ROOT

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


OURS = r"textbooks?|honest(?:ly)?|made again|held (?:against|to)|drawn|draws?"


def test_pages_have_the_field_s_words():
    """Those of the table in docs/contributing.md that no sentence needs."""
    ours = re.compile(rf"\b({OURS})\b", re.I)
    for page in set(PAGES) - {"docs/contributing"}:
        found = [s for s in sentences((ROOT / f"{page}.md").read_text()) if ours.search(s)]
        assert not found, (page, found)


def texts(path):
    """Yield the texts that a module holds, its docstrings aside; what is filled in is {}."""
    tree = ast.parse(path.read_text())
    within = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            within |= {id(part) for part in node.values}
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    yield from (n.value for n in ast.walk(tree)
                if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in within)  # fmt: skip


# Where causes and what they say are written: what was computed in place of an operation, and what happened to a cache.
CAUSES = (
    "references/mutations", "references/alignment/conversions.py", "references/alignment/roles.py",
    "references/comparison/sketches.py", "diagnosis", "checks/gradients/causes.py", "checks/gradients/changes.py",
    "checks/gradients/lines.py", "checks/gradients/mistakes.py", "checks/rollouts/causes.py",
    "checks/rollouts/hypotheses.py", "checks/rollouts/engine_rounding.py", "checks/lint/rules",
)  # fmt: skip
OPTIONS = "diagnosis/bisection"  # its messages quote values of options: --good on --bad off
SIDE = "batch 3, padded left"


def modules(names):
    """Yield the modules that paths below the package name: folders whole."""
    for path in (ROOT / "precaudit" / name for name in names):
        yield from path.rglob("*.py") if path.is_dir() else [path]


def test_causes_have_the_field_s_words():
    """What diagnosis, gradcheck, rollout, align, same and lint call a cause, and what they say of it."""
    ours = re.compile(rf"\b({OURS}|made of|held|off|left|leaves|otherwise|lifted|tells|told|sees|seen)\b", re.I)
    own = [p for p in modules(CAUSES) if OPTIONS not in p.as_posix()]
    assert len(own) > 100
    found = [(p.name, text) for p in own for text in texts(p) if " " in text and ours.search(text)]
    assert {text for name, text in found if name not in ("left_f64.py", "elided_rounding.py")} == {SIDE}


def test_variants_are_found_where_texts_are():
    """The names that are made as an operation is tried are among the texts that were looked through."""
    model = open_checkpoint(str(FIXTURES / "gemma2-caps")).config
    names = {v.name for v in variants("attn_out", load_policy("bf16"), model, 0)}
    written = [re.compile(re.escape(text).replace(r"\{\}", ".+")) for p in modules(CAUSES[:1]) for text in texts(p)]
    assert names
    assert not [name for name in names if not any(pattern.fullmatch(name) for pattern in written)]


def test_messages_have_the_field_s_words():
    ours = re.compile(rf"\b({OURS})\b", re.I)
    every = (ROOT / "precaudit").rglob("*.py")
    assert not [(p.name, text) for p in every for text in texts(p) if " " in text and ours.search(text)]
