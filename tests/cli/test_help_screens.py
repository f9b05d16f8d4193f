"""What ``precaudit --help`` lists, and how fast."""

from collections import Counter

from click.testing import CliRunner

from precaudit.cli import cli
from precaudit.cli._groups import GROUPS


def test_every_command_is_in_one_group_with_one_line():
    names = Counter(name for its in GROUPS.values() for name in its)
    assert names == Counter(cli.list_commands(None))
    text = CliRunner().invoke(cli, ["--help"], terminal_width=80).output
    assert all(f"{title}:\n" in text for title in GROUPS)
    assert "Others" not in text
    lines = [line for line in text.splitlines() if line.split() and line.split()[0] in names]
    assert len(lines) == len(names)
    assert all(len(line) <= 80 and line.endswith(".") and not line.endswith("...") for line in lines)
