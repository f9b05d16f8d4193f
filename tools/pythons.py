"""Try other Pythons and the newest JAX, each in an environment that is thrown away: ``make test-pythons``.

Each cell is a Python and a version of JAX. precaudit is installed there from this folder. A quick part of the tests
runs, then ``trace tiny``, ``compare`` and ``gate``. A Python is looked for on PATH and below ``~/.pyenv``; one that is
not there is named. Prints the table of docs/limits.md; exit code 1 where a cell fails, 3 where one could not run.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
HERE = "here"  # the version of JAX in this environment
CELLS = (("3.12", HERE), ("3.12", "newest"), ("3.13", "newest"))
NEEDS = ("pytest>=8", "hypothesis>=6", "mpmath>=1.3")
TESTS = (
    "tests/numbers",
    "tests/schema",
    "tests/judging",
    "tests/interpreters/jaxpr/test_lifted_primitives.py",
)
COMMANDS = ("trace tiny --force -o {run}", "compare {run}", "gate {run}")
FAILED, ABSENT = "failed", "absent"
LAST = 15  # lines of what failed that are shown


@dataclass(frozen=True)
class Cell:
    """A Python and a JAX, and what was found: versions, what the tests and the commands said, seconds, the outcome."""

    python: str
    jax: str
    versions: str = ""
    tests: str = ""
    gate: str = ""
    seconds: float = 0.0
    outcome: str = ""


def interpreters(python: str) -> Iterator[str]:
    """Yield what may be Python 3.X: on PATH, then pyenv's."""
    if (found := shutil.which(f"python{python}")) is not None:
        yield found
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from (str(x) for x in sorted(home.glob(f"{python}.*/bin/python"), reverse=True))


def find_python(python: str) -> str | None:
    """Return an interpreter of a version that starts and is of it; None where there is none."""
    told = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in interpreters(python):
        if run_words([path, "-c", told]).stdout.strip() == python:
            return path
    return None


def run_words(words: Sequence[str], cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """Run a command and keep what it says."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, env=env)


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "nothing was printed")


def try_cell(python: str, jax: str, folder: Path) -> Cell:
    """Make an environment, run the tests and the commands in it, and say what came of it."""
    began, base = time.perf_counter(), find_python(python)
    if base is None:
        return Cell(python, jax, outcome=ABSENT, tests=f"python{python} is not on PATH, nor below pyenv's folder")
    place = folder / f"{python}-{jax}"
    own = str(place / "bin" / "python")
    asked = "jax" if jax == "newest" else f"jax=={version('jax') if jax == HERE else jax}"
    pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade-strategy", "eager"]
    source = ROOT.as_posix()
    for words in ([base, "-m", "venv", "--clear", str(place)], [*pip, "--upgrade", source, asked, *NEEDS]):
        if (said := run_words(words)).returncode:
            return _failed(python, jax, said, began, "tests")
    names = "import sys, jax, numpy; print(sys.version.split()[0], jax.__version__, numpy.__version__)"
    there = run_words([own, "-c", names], folder).stdout.split()
    versions = " · ".join(f"{name} {x}" for name, x in zip(("Python", "JAX", "NumPy"), there, strict=False))
    tested = run_words([own, "-m", "pytest", "-p", "no:cacheprovider", *TESTS])
    tests = re.sub(r" in [\d.]+s.*", "", last_line(tested.stdout))
    if tested.returncode:
        return _failed(python, jax, tested, began, "tests", versions)
    run = str(place / "run")
    for line in COMMANDS:
        words = [own, "-m", "precaudit", *line.format(run=run).split()]
        said = run_words(words, folder)  # not in the clone: what was installed runs
        if said.returncode:
            return _failed(python, jax, said, began, "gate", versions, tests)
    judged = last_line(said.stdout)
    return Cell(python, jax, versions, tests, judged, time.perf_counter() - began, "passed")


def _failed(
    python: str, jax: str, said: "subprocess.CompletedProcess[str]", began: float, where: str, *known: str
) -> Cell:
    """Return a cell that failed at the tests or the commands, whose last lines are printed."""
    text = (said.stdout + said.stderr).splitlines()
    print(f"{python}, JAX {jax}: {' '.join(map(str, said.args))}", *text[-LAST:], sep="\n  ", file=sys.stderr)
    versions, tests = (*known, "", "")[:2]
    why = last_line("\n".join(text))
    tests, judged = (why, "") if where == "tests" else (tests, why)
    return Cell(python, jax, versions, tests, judged, time.perf_counter() - began, FAILED)


def table(cells: Sequence[Cell]) -> str:
    """Return the cells as Markdown."""
    head = "| Python | JAX | versions | tests | `precaudit gate` | seconds | |\n|" + " --- |" * 7
    rows = (
        f"| {c.python} | {c.jax} | {c.versions} | {c.tests} | {c.gate} | {c.seconds:.0f} | {c.outcome} |" for c in cells
    )
    return "\n".join([head, *rows])


def main() -> int:
    """Try the cells that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="cells whose Python and JAX, 3.13 newest, hold this")
    asked = parser.parse_args().only
    chosen = [cell for cell in CELLS if asked in " ".join(cell)]
    if not chosen:
        parser.error(f"no cell holds {asked!r}: {', '.join(map(' '.join, CELLS))}")
    found = []
    for cell in chosen:
        with TemporaryDirectory(prefix="precaudit-pythons-") as name:
            found.append(try_cell(*cell, Path(name)))
    print(table(found))
    outcomes = {c.outcome for c in found}
    return 1 if FAILED in outcomes else 3 if ABSENT in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
