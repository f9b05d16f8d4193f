"""One progress display: messages are whole lines above it, labels from the start, no estimate that is not one."""

import io
import os
import pty
import re
import subprocess
import sys
import time
import warnings

import pytest
from rich.console import Console

from precaudit.cli._options import say
from precaudit.cli._progress import display, progress_bar, remaining_time
from precaudit.progress import Progress
from precaudit.recording.tracing.trace import TraceOptions, trace
from precaudit.schema.prompts import Prompt
from precaudit.schema.selection import Selection
from tests.helpers.paths import FIXTURES

CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


def screen(text, rows=None):
    """Return the lines that a terminal shows after ``text``; ``rows``: as they are filled, every state of each."""
    lines, row, column = [""], 0, 0
    for count, act, back, down, printed in CONTROL.findall(text):
        if act == "A":
            row = max(0, row - int(count or 1))
        elif act == "K":
            lines[row] = ""
        elif back:
            column = 0
        elif down:
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif printed:
            lines[row] = lines[row][:column].ljust(column) + printed + lines[row][column + len(printed) :]
            column += len(printed)
            if rows is not None:
                rows.append(lines[row])
    return [line.rstrip() for line in lines if line.strip()]


def shown(width=100, **more):
    return Console(file=io.StringIO(), force_terminal=True, width=width, **more)


def test_what_is_said_meanwhile_is_on_lines_of_its_own():
    console = shown()
    with display(console, "loading JAX") as advance:
        for i in range(20):
            advance(i, 20, f"decode step {i}")
            say(f"note {i}: " + "long " * 30, err=True)
            time.sleep(0.01)
    told = [f"note {i}: " + ("long " * 30).strip() for i in range(20)]
    assert screen(console.file.getvalue()) == told, "whole, in order, and nothing of the bar is left"


def test_a_warning_of_python_is_above_the_bar():
    console = shown(stderr=True)
    with display(console, "loading"), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        warnings.warn("the weights hold NaN", stacklevel=1)
    assert screen(console.file.getvalue()) == ["warning: the weights hold NaN"]


def states(console):
    """Every state of every line that was shown."""
    rows = []
    screen(console.file.getvalue(), rows)
    return rows


def test_the_first_second_has_a_label_and_no_estimate():
    console = shown()
    with display(console, "loading JAX") as advance:
        time.sleep(0.15)
        advance(0, 900, "compiling prefill of 512 tokens")
        time.sleep(0.15)
        first = states(console)
        advance(300, 900, "prefill, a")
        time.sleep(0.15)
        advance(600, 900, "rescore, a")
        time.sleep(0.15)
    assert first[0].startswith("loading JAX")
    assert any("compiling prefill of 512 tokens" in row for row in first)
    assert all("left" not in row for row in first), "nothing is done: nothing is known"
    assert any("so far" in row for row in first)
    assert any("rescore, a" in row and "left here" in row for row in states(console))


def test_compiling_has_no_estimate():
    console = shown()
    with display(console, "loading") as advance:
        for i in range(4):
            advance(i, 9, "prefill")
            time.sleep(0.02)
        advance(4, 9, "fp32: compiling a decode step of 64 slots")
        time.sleep(0.25)
    rows = [row for row in states(console) if "compiling" in row and "so far" in row]
    assert rows
    assert not [row for row in rows if "left" in row]


def test_an_estimate_is_of_one_part_alone():
    """Layers of FP64 say nothing of how long layers of the emulated policy take."""
    console = shown()
    with display(console, "reading") as advance:
        for i in range(4):
            advance(i, 4, "FP64")
            time.sleep(0.06)
        before = len(states(console))
        advance(0, 4, "emulated policy")
        time.sleep(0.25)
    new = [row for row in states(console)[before:] if "emulated policy" in row]
    assert new
    assert not [row for row in new if "left" in row]


@pytest.mark.parametrize(
    ("so_far", "left", "text"),
    [(0.2, None, "0:00 so far"), (75.0, 5.4, "1:15 so far, 0:05 left here"), (7322, None, "2:02:02 so far")],
)
def test_times(so_far, left, text):
    assert remaining_time(so_far, left) == text


@pytest.mark.parametrize("width", [50, 60, 80])
def test_a_label_of_others_does_nothing_and_keeps_to_its_line(width):
    console = shown(width)
    with display(console, "reading") as advance:
        advance(1, 4, "prefill, [red]x[/red]\x1b[2J\n::error::" + "y" * 200)
        time.sleep(0.15)
        advance(2, 4, "rescore, " + "z" * 200)
        advance(3, 4, "rescore, " + "z" * 200)
        time.sleep(0.15)
    text = console.file.getvalue()
    assert any(re.search(r" 75% 0:00 so far, 0:0\d left here$", row) for row in states(console)), "times are never cut"
    assert "\x1b[2J" not in text
    assert "[red]" in text or width < 80
    assert screen(text) == []


def test_where_stderr_is_no_terminal_there_are_plain_lines_alone(capfd):
    with progress_bar() as advance:
        advance(1, 2, "prefill")
        say("note: \x1b[2J plain", err=True)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "note: \\x1b[2J plain\n")


SCRIPT = """
import sys, time, warnings
from precaudit.cli._options import say
from precaudit.cli._progress import progress_bar
with progress_bar("loading JAX") as advance:
    for i in range(6):
        advance(i, 6, f"decode step {i}")
        say(f"note {i}", err=True)
        if i == 3:
            warnings.warn("half way")
        time.sleep(0.05)
say("done")
"""


def test_on_a_terminal():
    """A process of its own on a pseudo-terminal: what is left on the screen is the messages."""
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=slave, stderr=slave, env=env)
    os.close(slave)
    data = b""
    while True:
        try:
            data += os.read(master, 4096)
        except OSError:  # the process has closed its end
            break
    assert process.wait() == 0
    os.close(master)
    left = screen(data.decode())
    assert [line for line in left if line.startswith(("note", "done"))] == [*(f"note {i}" for i in range(6)), "done"]
    assert sum("UserWarning: half way" in line for line in left) == 1
    assert not [line for line in left if "decode step" in line], left


@pytest.mark.turn  # 4 s
def test_a_trace_tells_what_it_does_before_it_does_it(tmp_path):
    told, said = [], []
    prompts = [Prompt(id="a", tokens=tuple(range(1, 6))), Prompt(id="b", tokens=(7, 8))]
    progress = Progress(said.append, lambda *x: told.append(x))
    select = Selection.parse(points="v,logits")
    trace(str(FIXTURES / "llama-gqa"), tmp_path / "run", prompts, select, TraceOptions(decode_steps=1), progress)
    whats = [what for _, _, what in told]
    assert whats[:3] == [
        "compiling prefill of 64 tokens, a", "compiling a decode step of 64 slots, a", "decode step 1 of 1, a",
    ]  # fmt: skip
    assert [w for w in whats if w.endswith(", b")] == [
        "prefill, b", "decode step 0 of 1, b", "decode step 1 of 1, b", "rescore, b",
    ]  # fmt: skip
    assert whats[-1] == "writing"
    done, total = [d for d, _, _ in told], {t for _, t, _ in told}
    assert total == {2 * (2 * 64 + 2)}, "tokens, padding among them"
    assert done == sorted(done)
    assert (done[0], done[1], done[-1]) == (0, 64, 260)
    assert not [line for line in said if "takes" in line]
