"""README.md and docs: what they show is printed, what they name is there, and what a package index gets of them."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import pages
from tools.pages import ROOT, Step, same, steps

PAGES = pages.pages()
QUICK = [page for page in PAGES if not pages.is_slow(page)]
SLOW = [page for page in PAGES if pages.is_slow(page)]


def name(page):
    return page.stem if isinstance(page, Path) else page


def prints_what_it_shows(page):
    _, found = pages.rerun(page.read_text())
    for step, now in found:
        assert same(step.output, now), f"{page.name}: make pages\n$ {step.command}\n{step.output}\n--- now\n{now}"
    return found


@pytest.mark.parametrize("page", QUICK, ids=name)
def test_pages_show_what_is_printed(page):
    prints_what_it_shows(page)


@pytest.mark.slow  # 30 s to 3 min a page, SmolLM2 5: they trace, compare and diagnose
@pytest.mark.parametrize("page", SLOW, ids=name)
def test_slow_pages_show_what_is_printed(page):
    assert prints_what_it_shows(page)


def test_both_kinds_of_page_have_commands():
    assert {page.name for page in SLOW} >= {"README.md", "tutorial.md", "inference.md", "kernels.md"}
    assert {page.name for page in QUICK} >= {"models.md", "contributing.md"}


def test_numbers_may_differ_and_words_may_not():
    shown = "verdicts: 14 fail, 1708 pass\n2.88e-01 off at attn_out (a.py:41), -27 % (± 3)"
    assert same(shown, "verdicts: 9 fail, 1,713 pass\n1e-3 off at attn_out (a.py:7), 3.5 % (± 12)")
    assert same(shown, shown.replace("\n", " "))  # wrapped otherwise
    assert same("SHA-256 73ff653c08ff…", "SHA-256 e3b0c44298fc…")
    assert not same(shown, shown.replace("fail", "missing"))
    assert not same(shown, shown.replace("attn_out", "attn_proj"))
    assert not same(shown, shown.split("\n")[0])
    assert not same("in float16", "in float32")  # a name's digits are its own
    assert not same("", shown)
    assert not same(shown, "")


def test_of_tables_the_head_and_the_first_column_count():
    shown = " layer   largest at\n ──────────\n  0   q s1_fact d1\n  q   1\n\nAll well"
    assert same(shown, " layer   largest at\n ─────\n  0   k s2_code d0\n  q   2\n\nAll well")
    assert not same(shown, shown.replace("largest", "smallest"))
    assert not same(shown, shown.replace("  q   1\n", ""))
    assert not same(shown, shown.replace("All well", "Not well"))


def test_a_shortened_output_leaves_lines_out_where_it_says():
    assert same("one\n…\nfour", "one\ntwo\nthree\nfour")
    assert not same("one\n…\nfour", "one\ntwo\nthree")
    assert not same("one\nfour", "one\ntwo\nfour")
    assert same("one\n…", "one\ntwo")
    assert not same("one\n…", "two")
    table = "head\n────\n  0   q d1\n{}  9   k d2\n\nend"
    assert same(table.format("  …\n"), table.format("  1   v d3\n  2   v d4\n"))
    assert not same(table.format("  …\n"), table.format("").replace("end", "no end"))
    assert not same("a … b", "a c b")  # one within a line stands for itself


def test_commands_and_outputs_are_told_apart():
    assert steps("$ a \\\n  b\nout\n\nmore\n$ c\n") == [Step("a \\\n  b", "out\n\nmore"), Step("c", "")]
    page = "<!-- file: x.txt -->\n```text\nheld\n```\n```console\n$ cat x.txt\nstale\n$ echo 1; exit 3\n```\n"
    text, found = pages.rerun(page)
    assert "$ cat x.txt\nheld\n$ echo 1; exit 3\n1\n```" in text
    assert [same(step.output, now) for step, now in found] == [False, False]
    assert pages.rerun(text)[0] == text
    with pytest.raises(RuntimeError, match="no-such-command"):
        pages.rerun("```console\n$ no-such-command\n```\n")


def shell_lines(text):
    """Yield the commands of a page: of its blocks, and of its indented lines."""
    for block in pages.BLOCK.finditer(text):
        if block["kind"] == "sh":
            yield from block["text"].splitlines()
        if block["kind"] == "console":
            yield from (step.command for step in steps(block["text"]))
    yield from re.findall(r"^ {4}((?:precaudit|make) .*)$", pages.BLOCK.sub("", text), re.M)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_exist(page):
    from precaudit.cli import cli

    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    text = page.read_text()
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in targets, target
    for line in shell_lines(text):
        called = re.split(r"\s#|[|;>]", line)[0].split()
        if called[:1] == ["make"]:
            assert called[1] in targets, line
        if called[:1] == ["precaudit"] and "2>&1" not in line:  # what is shown to be refused
            command = cli.get_command(None, called[1])
            assert command is not None, line
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in called if re.match(r"--?[a-z]", word)} <= known, line


def questions():
    """Return the rows of README.md's table: the command of a question, and the line that it prints."""
    table = (ROOT / "README.md").read_text().split("<!-- questions -->")[1].split("<!-- end of questions -->")[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[2:4]] for row in table.strip().splitlines()[2:]]


def test_what_the_table_of_questions_prints_stands_on_a_page():
    """Numbers aside, as the pages themselves are checked."""
    blocks = [b["text"] for page in PAGES for b in pages.BLOCK.finditer(page.read_text()) if b["kind"] == "console"]
    outputs = [" ".join(pages.NUMBER.sub("#", step.output).split()) for block in blocks for step in steps(block)]
    assert len(questions()) >= 10
    for command, prints in questions():
        shown = " ".join(pages.NUMBER.sub("#", re.search(r"`(.*)`", prints)[1].replace("\\|", "|")).split())
        assert any(shown in output for output in outputs), (command, shown)


def test_the_commands_of_the_table_of_questions_exist():
    from precaudit.cli import cli

    for cell, _ in questions():
        called = re.search(r"`precaudit ([^`]*)`", cell)[1].split(" -- ")[0].split()
        command = cli.get_command(None, called[0])
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in called if re.match(r"--?[a-z]", word)} <= known, cell


def anchors(page):
    """Return the anchors of a page's headings, as MyST and code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", pages.BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "ARCHITECTURE.md"], ids=name)
def test_links_and_pictures_resolve(page):
    text = re.sub(r"`[^`\n]*`", "", pages.BLOCK.sub("", page.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if ":" in target:
            continue
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


def test_the_index_holds_every_page():
    held = {line for block in re.findall(r"```\{toctree\}\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.S)
            for line in block.splitlines() if line and not line.startswith(":")}  # fmt: skip
    assert held == {page.stem for page in PAGES[1:]} - {"index"}


def test_the_readme_fits_three_screens():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 90
    assert "docs/report.png" in text
    assert {target.name for target in ROOT.glob("examples/*.ipynb")} == set(re.findall(r"examples/(\w+\.ipynb)", text))


def test_a_package_index_gets_no_link_that_leads_nowhere():
    told = pages.DESCRIPTION.read_text()
    assert told == pages.description((ROOT / "README.md").read_text()), "make pages"
    assert not [target for target in re.findall(r"\]\(([^)]+)\)", told) if ":" not in target]
    assert "reading: `docs/reading.md`" in told
    assert pages.description("a [b](https://c.org/d) ![p](q.png) [e.md](e.md)") == "a [b](https://c.org/d)  `e.md`"


@pytest.mark.slow  # 15 s
def test_the_site_shows_every_public_name(tmp_path):
    import precaudit

    call = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", ROOT / "docs", tmp_path / "site"]
    made = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "site" / "python.html").read_text()
    assert not [public for public in precaudit.__all__ if not re.search(rf'id="precaudit\.([\w.]+\.)?{public}"', text)]


def test_every_public_name_says_what_it_is():
    import precaudit

    for public in precaudit.__all__:
        assert (getattr(precaudit, public).__doc__ or "").strip(), public


@pytest.mark.slow  # 1 min: pip fetches what builds the package
def test_the_archives_hold_the_package_and_no_test_data(tmp_path):
    source = tmp_path / "source"
    kept = ["precaudit", "docs", "examples", "tests", "refs", "benchmarks", "exams", "tools"]
    for folder in kept:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for file in (
        "setup.cfg",
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
    ):
        shutil.copy(ROOT / file, source / file)
    subprocess.run([sys.executable, "-m", "build", "--outdir", tmp_path / "dist", source], check=True, cwd=tmp_path)
    made = sorted((tmp_path / "dist").iterdir())
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *made], check=True)
    wheel, archive = sorted(made, key=lambda path: path.suffix, reverse=True)
    with zipfile.ZipFile(wheel) as held:
        names = held.namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"precaudit"}
    assert {"precaudit/py.typed", "precaudit/bundled/tiny/model.safetensors"} <= set(names)
    with tarfile.open(archive) as held:
        inside = {n.partition("/")[2] for n in held.getnames()}
    assert {"docs/tutorial.md", "examples/own_decoder.py", "CHANGELOG.md"} <= inside
    assert not {n for n in inside if n.split("/")[0] in ("tests", "refs", "traces", "benchmarks", "exams", "tools")}
    assert archive.stat().st_size < 6e6
