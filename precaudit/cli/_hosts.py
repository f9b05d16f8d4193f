"""The same command on several processes: a parent without JAX, which says in a line why its child was ended."""

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import IO, Any

import click

from precaudit.cli import _options
from precaudit.errors import UserError
from precaudit.mirrors import leave_to_others
from precaudit.recording.runs.hosts import STATUS

NAMES = ("coordinator", "processes", "process", "wait")
ADDRESS = re.compile(r"[^:\s]+:[1-9][0-9]{0,4}")
NOISE = re.compile(r"[EWIF]\d{4} |\s+@\s+0x|\*\*\* ")  # of C++ libraries
OURS = re.compile(r"precaudit: |Traceback |warning: |note: ")


def hosts_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of several processes to a command, which is then run as one of them."""

    @wraps(function)
    def command(*args: Any, **given: Any) -> Any:
        coordinator, processes, process, wait = (given.pop(name) for name in NAMES)
        if coordinator is None:
            if processes is not None or process is not None:
                raise UserError("--processes and --process need --coordinator HOST:PORT, or auto")
            return _together(function, args, given)
        _check(coordinator, processes, process, wait)
        if STATUS not in os.environ:
            return _in_child(coordinator, processes, process, wait)
        from precaudit.recording.runs.hosts import hosts_here, join

        status = int(os.environ[STATUS])
        _keep_stdout()
        join(coordinator, processes, process, wait)
        hosts = hosts_here()
        os.write(status, b"joined")
        _options.SILENT = not hosts.first
        return _together(function, args, given)

    how = (
        click.option(
            "--coordinator",
            metavar="HOST:PORT",
            help="Of several processes (jax.distributed): where the first listens; auto: of a cluster.",
        ),
        click.option("--processes", type=int, metavar="N", help="How many processes run this same command."),
        click.option("--process", type=int, metavar="I", help="Which of them this is: 0 to N-1; 0 writes the tables."),
        click.option(
            "--wait",
            type=float,
            default=300,
            show_default=True,
            metavar="SECONDS",
            help="How long a process waits for the others.",
        ),
    )
    for option in reversed(how):
        command = option(command)
    return command


def _keep_stdout() -> None:
    """Have C++ libraries print into nothing, and Python where it did."""
    own = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    sys.stdout = own


def _together(function: Callable[..., Any], args: Any, given: dict[str, Any]) -> Any:
    from precaudit.recording.runs.hosts import common_facts, failing_together, hosts_here

    with failing_together():
        if (hosts := hosts_here()).several:
            hosts.agree("the start", common_facts(_options_given(given)))
        return function(*args, **given)


def _options_given(given: dict[str, Any]) -> dict[str, str]:
    """Return a command's parameters by name; of a file that it names, with its hash."""
    said = {}
    for p in click.get_current_context().command.params:
        if p.name in given:
            value = str(given[p.name])
            said[p.opts[0] if p.opts[0].startswith("-") else p.human_readable_name] = value
            path = Path(value.partition(".py:")[0] + ".py" if ".py:" in value else value)
            if path.is_file():
                said[f"the bytes of {path}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return said


def _check(coordinator: str, processes: int | None, process: int | None, wait: float) -> None:
    if wait < 1:
        raise UserError(f"--wait {wait:g}: at least 1 second")
    if coordinator == "auto":
        if processes is not None or process is not None:
            raise UserError("--coordinator auto has the cluster say them: leave out --processes and --process")
        return
    if not ADDRESS.fullmatch(coordinator) or int(coordinator.rpartition(":")[2]) > 65535:
        raise UserError(f"--coordinator {coordinator}: write HOST:PORT, such as node0:8476, or auto")
    if processes is None or process is None:
        raise UserError("--coordinator HOST:PORT needs --processes N and --process I")
    if not 0 <= process < processes or processes > 1 << 16:
        raise UserError(f"--process {process}: of {processes} processes they are numbered 0 to {processes - 1}")


def _in_child(coordinator: str, processes: int | None, process: int | None, wait: float) -> int:
    """Run this command in a child, show what it says and not what JAX's libraries do, and say why it was ended."""
    leave_to_others()
    read, write = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "precaudit", *sys.argv[1:]],
        env={**os.environ, STATUS: str(write)},
        pass_fds=(write,),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    os.close(write)
    assert child.stdout is not None
    assert child.stderr is not None
    pairs = ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
    threads = [threading.Thread(target=_pass_on, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    try:
        code = child.wait()
    except KeyboardInterrupt:  # the child has it, too
        code = child.wait()
    for thread in threads:
        thread.join()
    said = os.read(read, 64)
    os.close(read)
    if (exit_code := _exit_code(code, said)) is not None:
        return exit_code
    raise UserError(_ended(-code, said.startswith(b"joined"), coordinator, processes, process, wait))


def _exit_code(code: int, said: bytes) -> int | None:
    """Return the exit code of a child that ended with ``code`` after it said this; None where a signal ended it."""
    if said.endswith(b"done"):
        return 0  # JAX may end a process while all shut down
    return code if code >= 0 else 2 if said.endswith(b"left") else None


def _pass_on(source: IO[str], target: IO[str]) -> None:
    shown = True
    for line in source:
        if NOISE.match(line):
            shown = False
        elif OURS.match(line) or shown:
            shown = True
            target.write(line)
            target.flush()


def _ended(by: int, joined: bool, coordinator: str, processes: int | None, process: int | None, wait: float) -> str:
    """Return why a child was ended by a signal."""
    who = f"process {process} of {processes}" if processes is not None else "this process"
    if by != signal.SIGABRT:
        return (
            f"{who} was ended by signal {by} ({signal.Signals(by).name}); what is written is a part: --resume goes on"
        )
    if joined:
        return f"{who} lost another one, which ended or answers no more; what is written is a part: --resume goes on"
    if process and not _listens(coordinator):
        return f"no coordinator answers at {coordinator} within {wait:g} s: process 0 of the same command is it"
    which = "" if processes is None else f"of {processes} processes "
    return f"{which}not all came to {coordinator} within {wait:g} s: start this command with each --process"


def _listens(coordinator: str) -> bool:
    host, _, port = coordinator.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            return True
    except OSError:
        return False
