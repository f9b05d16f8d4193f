"""The example of a decoder written twice, with edits."""

from collections.abc import Iterable
from pathlib import Path

from precaudit import Program
from precaudit.recording.programs.loading import load_program
from tests.helpers.paths import EXAMPLES

TWO_WAYS = EXAMPLES / "two_ways.py"
Edit = tuple[str, str]


def edited_program(path: Path, edits: Iterable[Edit], name: str) -> Program:
    """Return a Program of the example with edits written to a file."""
    text = TWO_WAYS.read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)
    return load_program(f"{path}:{name}")
