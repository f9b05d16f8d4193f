"""Disk, memory, terminal and shell of the machine."""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

COMPLETIONS = {
    "bash": ('eval "$(_PRECAUDIT_COMPLETE=bash_source precaudit)"', "~/.bashrc"),
    "zsh": ('eval "$(_PRECAUDIT_COMPLETE=zsh_source precaudit)"', "~/.zshrc"),
    "fish": ("_PRECAUDIT_COMPLETE=fish_source precaudit | source", "~/.config/fish/completions/precaudit.fish"),
}


def free_bytes(path: Path) -> int | None:
    """Return the bytes that are free where a path is, or will be; None where that cannot be asked."""
    there = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    try:
        return shutil.disk_usage(there).free
    except OSError:
        return None


def memory() -> dict[str, int]:
    """Return bytes of memory: ``total``, and ``available`` where the system tells it."""
    found = {}
    with suppress(OSError, ValueError, AttributeError):  # no POSIX system
        found["total"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, IndexError, StopIteration):  # Linux
        lines = Path("/proc/meminfo").read_text().splitlines()
        found["available"] = 1024 * int(next(x for x in lines if x.startswith("MemAvailable:")).split()[1])
    with suppress(OSError, ValueError, KeyError):  # a container's own limit ("max": none)
        found["total"] = min(found["total"], int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return found


def terminal_features() -> dict[str, str]:
    """Return what standard output can show."""
    tty = sys.stdout.isatty()
    width = f"{shutil.get_terminal_size().columns} columns" if tty or os.environ.get("COLUMNS") else "no limit (piped)"
    colour = "off (NO_COLOR)" if os.environ.get("NO_COLOR") else "on" if tty else "off (piped)"
    return {"encoding": (sys.stdout.encoding or "ascii").lower(), "width": width, "colour": colour}


def completion() -> tuple[str, str]:
    """Return the line that completes commands in the user's shell, and the file it goes to."""
    shell = Path(os.environ.get("SHELL", "")).name
    return COMPLETIONS.get(shell, COMPLETIONS["bash"])
