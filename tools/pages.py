"""The outputs that README.md and docs show: run the commands of a page and write what they print (``make pages``).

A block of ``console`` is run, line after line that begins with ``$ ``, in a folder of the page's own that holds
examples/ and traces/baselines/; what stands below a command is what it printed to stdout. A block after
``<!-- file: NAME -->`` is written there first. ``<!-- slow: why -->`` on a page: its commands take more than seconds.
A line ``…`` in an output that was shortened by hand stands for any lines. Blocks of ``sh`` are not run; their commands
and options have to exist. Checked by tests/project/test_documentation_pages.py.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DESCRIPTION = ROOT / "docs" / "description.md"
BLOCK = re.compile(r"^(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"(?<!\w)[-−+]?\d[\d,.]*(?:e[-+]?\d+)?")
HASH = re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b")
LEFT_OUT = "\0"  # among words, where a line … stands
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^):]+)\)")


@dataclass(frozen=True)
class Step:
    """A command of a page and what it is said to print."""

    command: str
    output: str


def pages() -> list[Path]:
    """Return README.md and every page of docs."""
    return [ROOT / "README.md", *sorted(set((ROOT / "docs").glob("*.md")) - {DESCRIPTION})]


def is_slow(page: Path) -> bool:
    """Whether a page says that its commands take more than seconds."""
    return re.search(r"^<!-- slow: .* -->$", page.read_text(), re.M) is not None


def steps(block: str) -> list[Step]:
    """Return the commands of a console block, each with its output."""
    parts = re.split(r"^\$ ", block, flags=re.M)[1:]
    return [Step(*_parted(part)) for part in parts]


def _parted(part: str) -> tuple[str, str]:
    lines = part.splitlines()
    n = next(i for i, line in enumerate(lines, 1) if not line.endswith("\\"))
    return "\n".join(lines[:n]), "\n".join(lines[n:]).strip("\n")


def prepared(folder: Path) -> dict[str, str]:
    """Lay out the folder a page's commands run in; return their environment."""
    for name in ("examples", "traces/baselines"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    programs = folder / ".bin"
    programs.mkdir()
    for name, call in (("precaudit", "-m precaudit"), ("python", ""), ("pytest", "-m pytest -p no:cacheprovider")):
        script = programs / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {call} "$@"\n')
        script.chmod(0o755)
    changed = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"}
    return os.environ | changed | {"PYTHONIOENCODING": "utf-8", "PYTHONDONTWRITEBYTECODE": "1"}


def printed(command: str, folder: Path, env: dict[str, str]) -> str:
    """Return what a command prints; progress and notes on stderr are no part of it."""
    found = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if not found.stdout and found.returncode:
        raise RuntimeError(f"{command}: exit {found.returncode}\n{found.stderr}")
    text = found.stdout.replace(f"{ROOT}/", "").replace(str(folder), ".")
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def rerun(text: str) -> tuple[str, list[tuple[Step, str]]]:
    """Run a page's commands; return the page with what they print, and each step beside what it printed now."""
    found: list[tuple[Step, str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = prepared(folder)

        def run(block: re.Match[str]) -> str:
            if block["file"]:
                (folder / block["file"]).write_text(block["text"])
            if block["kind"] != "console":
                return block[0]
            lines = []
            for step in steps(block["text"]):
                now = printed(step.command, folder, env)
                found.append((step, now))
                lines += [f"$ {step.command}", *([now] if now else [])]
            return "```console\n" + "\n".join(lines) + "\n```"

        return BLOCK.sub(run, text), found


def same(shown: str, now: str) -> bool:
    """Whether two outputs say the same, numbers aside: all words, and of tables the heads and first columns."""
    pattern = re.escape(_words(shown)).replace(re.escape(f" {LEFT_OUT}"), "(?: .*)?")
    return re.fullmatch(pattern, _words(now)) is not None


def _words(text: str) -> str:
    """Return the words of an output without what a machine, a width or a last digit changes."""
    words: list[str] = []
    in_table = False
    for line in text.splitlines():
        if "──" in line:
            in_table = True
        elif not line.strip():
            in_table = False
        else:
            masked = [LEFT_OUT] if line.strip() == "…" else NUMBER.sub("#", HASH.sub("#", line)).split()
            words += masked[:1] if in_table else masked
    return " ".join(words)


def description(readme: str) -> str:
    """Return README.md for a package index, where its relative links and its picture lead nowhere: paths as text."""

    def told(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        named = target.endswith(words.strip("`"))
        return "" if picture else f"`{target}`" if named else f"{words}: `{target}`"

    without = re.sub(r"^<!--.*-->\n", "", LINK.sub(told, readme), flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", without)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", nargs="*", type=Path, help="pages to run [all]")
    for page in parser.parse_args().page or pages():
        text, found = rerun(page.read_text())
        page.write_text(text)
        print(f"{page}: {len(found)} commands, {sum(not same(s.output, now) for s, now in found)} say something else")
    DESCRIPTION.write_text(description((ROOT / "README.md").read_text()))


if __name__ == "__main__":
    main()
