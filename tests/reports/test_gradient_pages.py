"""A gradcheck as Markdown and as a page: what stands in them, and that nothing of others acts there."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from precaudit.checks.gradients.check import gradcheck
from precaudit.cli import run
from precaudit.reports import pages
from precaudit.reports.gradients import cases_table, failures, gradient_report
from precaudit.reports.pages import SHOWN
from tests.helpers.hostile import BAD, HOSTILE, MARKDOWN, TAGS, Page, tables

X = np.random.default_rng(0).standard_normal(24).astype(np.float32)


def as_markdown(c):
    return pages.as_markdown(gradient_report(c))


def as_html(c):
    return pages.as_html(gradient_report(c))


def plain(x):
    return jnp.sin(x) * x


def narrow(x):
    return (jnp.sin(x).astype(jnp.bfloat16) * x.astype(jnp.bfloat16)).astype(jnp.float32)


@pytest.fixture(scope="module")
def honest():
    return gradcheck(plain, plain, (X,), name="mine")


@pytest.fixture(scope="module")
def mistaken():
    return gradcheck(narrow, plain, lambda seed: {"first": (X + seed,), BAD: (X * 2,)}, seeds=2, name=BAD)


@pytest.mark.turn  # 4 s
def test_the_markdown_has_the_verdict_and_tables(honest, mistaken):
    text = as_markdown(honest)
    assert text.startswith("### precaudit gradcheck: `mine`\n\n✓ ")
    distances, kinds = tables(text)
    assert [row[:2] for row in distances[1:]] == [[a, s] for a in ("out", "dx") for s in ("kernel", "reference")]
    _, kinds, wrong = tables(as_markdown(mistaken))
    assert kinds[1][0] == "ordinary"
    assert {row[2] for row in wrong[1:]} == {"kernel", "strict"}
    assert len(wrong) - 1 == min(SHOWN, sum(f.verdict.status != "pass" for f in mistaken.found))
    assert {row[3] for row in wrong[1:]} <= {"fail", "nonfinite"}
    assert "jax " in text


def test_a_long_table_says_what_it_leaves_out(mistaken):
    many = replace(mistaken, found=mistaken.found * 40)
    rows = len(failures(many).rows)
    assert rows > SHOWN
    assert f"… and {rows - SHOWN:,} more rows" in as_markdown(many)
    assert len(tables(as_markdown(many))[2]) == 1 + SHOWN


def test_the_page_is_whole_and_without_a_script(honest, mistaken):
    page = Page(as_html(honest))
    assert set(page.tags) <= TAGS
    assert "script" not in page.tags
    assert "✓" in page.said["text"]
    assert "What does not pass" not in page.said["text"]
    policy = next(v for k, v in page.attributes if k == "content" and "default-src" in v)
    assert "script-src 'none'" in policy
    assert not [v for k, v in page.attributes if k in ("src", "href") and v not in ("data:,", "#words")]
    page = Page(as_html(mistaken))
    assert "What does not pass" in page.said["text"]
    for row in cases_table(mistaken).rows:
        assert all(cell in page.said["text"] for cell in row[1:])
    assert "fail" in cases_table(mistaken).rows[0][1]


def test_text_of_others_acts_nowhere(mistaken):
    hostile = replace(mistaken, notes=(BAD, HOSTILE), conclusions=(BAD, *mistaken.conclusions), device=BAD)
    page = Page(as_html(hostile))
    assert set(page.tags) <= TAGS
    assert "script" not in page.tags
    assert not [k for k, _ in page.attributes if k.startswith("on")]
    assert page.said["text"].count("window.acted=1") > 4  # shown, as text
    shown = [t for t in MARKDOWN.parse(as_markdown(hostile)) if t.type in ("inline", "html_block")]
    assert not [t for t in shown if t.type == "html_block"]
    assert not {c.type for t in shown for c in t.children} & {"html_inline", "image", "link"}


def test_the_command_writes_both_whole(tmp_path, capsys):
    file = tmp_path / "k.py"
    file.write_text(
        "import jax.numpy as jnp, numpy as np\n"
        "def kernel(x): return jnp.sin(x)\n"
        "reference = kernel\n"
        "def inputs(seed): return (np.random.default_rng(seed).standard_normal(8).astype(np.float32),)\n"
    )
    out, page = tmp_path / "a" / "k.md", tmp_path / "k.html"
    call = ["gradcheck", f"{file}:kernel", "--seeds", "1", "--plain"]
    assert run([*call, "--markdown", str(out), "--html", str(page)]) == 0
    assert tables(out.read_text())
    assert Page(page.read_text()).tags["table"] == 2
    assert run([*call, "--html", str(tmp_path)]) == 2
    assert "directory" in capsys.readouterr().err
